"""Random crops and flips: PIL's pixels, torchvision's distribution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from kvt.data.augment import crop_boxes, crop_resize, random_resized_crop_flip

CPU = torch.device("cpu")
TASK = ((0.8, 1.0), (0.9, 1.1))


def random_images(n: int, channels: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=generator)


@st.composite
def images_and_boxes(draw):
    n, height, width = draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.integers(1, 12))
    boxes = []
    for _ in range(n):
        h, w = draw(st.integers(1, height)), draw(st.integers(1, width))
        boxes.append((draw(st.integers(0, height - h)), draw(st.integers(0, width - w)), h, w))
    images = random_images(n, draw(st.sampled_from([1, 3])), height, width, draw(st.integers(0, 1000)))
    return images, torch.tensor(boxes), torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))


def by_pil(image: torch.Tensor, box: list[int], flip: bool) -> torch.Tensor:
    top, left, h, w = box
    picture = to_pil_image(image)
    cut = picture.crop((left, top, left + w, top + h)).resize(picture.size, Image.Resampling.BILINEAR)
    return pil_to_tensor(cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else cut)


@given(images_and_boxes())
@settings(max_examples=50)
def test_crop_resize_is_pil_within_one_grey_level(case):
    images, boxes, flip = case
    got = crop_resize(images, boxes, flip)
    assert got.dtype == torch.float32
    assert got.shape == images.shape
    for i, image in enumerate(images):
        # PIL rounds to whole levels after each of its two passes: half a level each.
        assert (got[i] - by_pil(image, boxes[i].tolist(), bool(flip[i]))).abs().max() <= 1.001


@pytest.mark.parametrize(
    ("height", "width", "scale", "ratio"),
    [
        (32, 32, *TASK),
        (8, 32, (0.9, 1.0), (0.5, 1.0)),  # no try fits: a full-height box of ratio 1
        (12, 12, (1.0, 1.0), (0.5, 2.0)),  # many first tries do not fit
    ],
)
def test_boxes_are_distributed_as_torchvisions(height, width, scale, ratio):
    torch.manual_seed(0)
    blank = torch.empty(1, height, width)
    draws = [RandomResizedCrop.get_params(blank, list(scale), list(ratio)) for _ in range(3000)]
    theirs = torch.tensor(draws)
    ours = crop_boxes(30_000, height, width, scale, ratio, CPU)
    top, left, h, w = ours.unbind(1)
    assert ((top >= 0) & (left >= 0) & (h > 0) & (w > 0)).all()
    assert ((top + h <= height) & (left + w <= width)).all()
    for k in range(4):
        # Largest distance of the two cumulative distributions: below 0.043 in 9,999 of 10,000 equal pairs.
        levels = torch.arange(max(height, width) + 1).view(-1, 1)
        distance = (ours[:, k] <= levels).float().mean(1) - (theirs[:, k] <= levels).float().mean(1)
        assert distance.abs().max() < 0.043
    correlations = [boxes.float().T.corrcoef() for boxes in (ours, theirs)]
    torch.testing.assert_close(*correlations, rtol=0, atol=0.1, equal_nan=True)


def test_equal_images_get_unequal_draws():
    torch.manual_seed(0)
    out = random_resized_crop_flip(random_images(1, 3, 32, 32).expand(64, -1, -1, -1))
    assert len(out.flatten(1).unique(dim=0)) > 40  # some boxes coincide: they are whole pixels


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_flips_the_given_share(share):
    torch.manual_seed(0)
    ramp = torch.arange(16.0).expand(4000, 1, 4, 16)
    out = random_resized_crop_flip(ramp, *TASK, flip=share)
    flipped = (out[:, 0, 0, 0] > out[:, 0, 0, -1]).float().mean()
    assert flipped.item() == pytest.approx(share, abs=0.04 if 0 < share < 1 else 0)


@pytest.mark.gpu
def test_a_gpu_is_never_waited_for():
    images = random_images(8, 3, 16, 16).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = random_resized_crop_flip(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.is_cuda
