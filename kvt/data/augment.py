"""Random crop, resize and flip of a whole batch at once, on the batch's own device."""

import math

import torch
from torch import Tensor

Range = tuple[float, float]


def random_resized_crop_flip(
    images: Tensor, scale: Range = (0.8, 1.0), ratio: Range = (0.9, 1.1), flip: float = 0.5
) -> Tensor:
    """Every image's own `RandomResizedCrop(scale, ratio)` and `RandomHorizontalFlip(flip)`.

    `images` is (B, C, H, W), uint8 or float; the result is float32 of the same shape and range of values.
    All draws come from torch's default generator of the images' device.
    """
    b, _, height, width = images.shape
    boxes = crop_boxes(b, height, width, scale, ratio, images.device)
    return crop_resize(images, boxes, torch.rand(b, device=images.device) < flip)


def crop_boxes(n: int, height: int, width: int, scale: Range, ratio: Range, device: torch.device) -> Tensor:
    """`n` independent boxes, int64 (n, 4) of (top, left, height, width), as torchvision draws them.

    The box's share of the area is uniform in `scale`, its width / height log-uniform in `ratio`; of ten tries
    the first that fits is placed uniformly. If none fits: the largest centred box of an allowed ratio.
    This is the distribution of `torchvision.transforms.RandomResizedCrop.get_params`.
    """
    area = torch.empty(n, 10, device=device).uniform_(*scale) * (height * width)
    aspect = torch.empty(n, 10, device=device).uniform_(math.log(ratio[0]), math.log(ratio[1])).exp()
    tries = torch.stack([(area / aspect).sqrt().round(), (area * aspect).sqrt().round()])  # (2, n, 10)

    limit = torch.tensor([height, width], device=device).view(2, 1, 1)
    fits = ((tries > 0) & (tries <= limit)).all(0)  # (n, 10)
    first = fits.int().argmax(1)
    sizes = tries.gather(2, first.expand(2, n).unsqueeze(2)).squeeze(2)  # (2, n)
    spare = limit.squeeze(2) - sizes
    corner = (torch.rand(2, n, device=device) * (spare + 1)).floor()

    h = min(height, round(width / ratio[0]))
    w = min(width, round(height * ratio[1]))
    centred = torch.tensor([(height - h) // 2, (width - w) // 2, h, w], device=device)
    return torch.where(fits.any(1, keepdim=True), torch.cat([corner, sizes]).T.long(), centred)


def crop_resize(images: Tensor, boxes: Tensor, flip: Tensor) -> Tensor:
    """Image i cut to box i, resized back to its old size and mirrored where `flip[i]`: Rᵢ · imageᵢ · Cᵢᵀ.

    Rᵢ (H, H) and Cᵢ (W, W) hold the weights of PIL's antialiased bilinear filter, so that the result equals
    `PIL.Image.crop(...).resize(..., BILINEAR)` to within PIL's rounding to whole grey levels.

    `images` is (B, C, H, W), uint8 or float; `boxes` is (B, 4) of whole (top, left, height, width) inside the
    image; `flip` is bool (B,). Returns float32 (B, C, H, W).
    """
    channels, height, width = images.shape[1:]
    top, left, h, w = boxes.unbind(1)
    rows = _bilinear(top, h, height)  # (B, H, H)
    columns = _bilinear(left, w, width)  # (B, W, W)
    columns = torch.where(flip.view(-1, 1, 1), columns.flip(1), columns)
    # Columns first, all channels in one product per image: twice as fast as one einsum over both.
    narrow = images.float().flatten(1, 2) @ columns.mT  # (B, C·H, W)
    return rows.unsqueeze(1) @ narrow.unflatten(1, (channels, height))


def _bilinear(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Weights (B, out, in) that stretch the pixels start .. start + length to all of `size` pixels.

    The triangle filter around the centre of each output pixel; it widens when the crop shrinks, and sees only
    pixels of the crop. `start` and `length` are (B,).
    """
    start, length = start.view(-1, 1, 1), length.view(-1, 1, 1)
    step = length / size
    pixel = torch.arange(size, device=start.device)
    centre = start + (pixel.view(-1, 1) + 0.5) * step  # (B, out, 1)
    weight = (1 - (pixel + 0.5 - centre).abs() / step.clamp(min=1)).clamp(min=0)  # (B, out, in)
    weight = weight * ((pixel >= start) & (pixel < start + length))
    return weight / weight.sum(2, keepdim=True)
