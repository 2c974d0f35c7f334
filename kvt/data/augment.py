"""Crop, resize and flip the images of a batch at random, on any device."""

import math

import torch
from torch import Tensor

Range = tuple[float, float]


def random_resized_crop_flip(
    images: Tensor, scale: Range = (0.8, 1.0), ratio: Range = (0.9, 1.1), flip: float = 0.5
) -> Tensor:
    """Augment images as torchvision's `RandomResizedCrop((H, W), scale, ratio)` and `RandomHorizontalFlip(flip)` do.

    `images` are (B, C, H, W), uint8 or float. The result is float32, with the shape and range of values of `images`.
    The random numbers differ between images, and come from torch's default generator of the device of `images`.
    """
    b, _, height, width = images.shape
    boxes = crop_boxes(b, height, width, scale, ratio, images.device)
    return crop_resize(images, boxes, torch.rand(b, device=images.device) < flip)


def crop_boxes(n: int, height: int, width: int, scale: Range, ratio: Range, device: torch.device) -> Tensor:
    """Draw `n` boxes (top, left, height, width) in pixels, int64 (n, 4), as `RandomResizedCrop.get_params` does.

    For each box, ten sizes are drawn: the area as a fraction of the image's area is uniform in `scale`, and width /
    height is log-uniform in `ratio`. The first size that fits into the image is used, at a uniform position. If none
    fits, the box is the largest centred box of an allowed ratio.
    """
    area = torch.empty(n, 10, device=device).uniform_(*scale) * (height * width)
    aspect = torch.empty(n, 10, device=device).uniform_(math.log(ratio[0]), math.log(ratio[1])).exp()
    heights, widths = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()

    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)  # (n, 10)
    found, first = fits.any(1), fits.int().argmax(1, keepdim=True)
    h, w = heights.gather(1, first).squeeze(1), widths.gather(1, first).squeeze(1)
    down, right = torch.rand(2, n, device=device)
    drawn = ((down * (height - h + 1)).floor(), (right * (width - w + 1)).floor(), h, w)

    most_h = min(height, round(width / ratio[0]))
    most_w = min(width, round(height * ratio[1]))
    centred = ((height - most_h) // 2, (width - most_w) // 2, most_h, most_w)
    # `centred` has plain numbers, because copying a tensor to a GPU would make the CPU wait
    return torch.stack([torch.where(found, *pair) for pair in zip(drawn, centred, strict=True)], dim=1).long()


def crop_resize(images: Tensor, boxes: Tensor, flip: Tensor) -> Tensor:
    """Crop image i to box i, resize the crop to the size of the image, and mirror the result if `flip[i]`.

    Image i of the result, float32 (B, C, H, W), is Rᵢ · imageᵢ · Cᵢᵀ in each channel. Rᵢ, (H, H), and Cᵢ, (W, W), are
    weights of PIL's antialiased bilinear filter. Without a flip, the result for uint8 images differs by at most 1 from
    PIL's `crop(...).resize(..., BILINEAR)`, which rounds to integers.

    `images` are (B, C, H, W), uint8 or float. `boxes`, (B, 4), are (top, left, height, width) in whole pixels, inside
    the image. `flip` is bool (B,).
    """
    channels, height, width = images.shape[1:]
    top, left, h, w = boxes.unbind(1)
    pixel = torch.arange(width, device=images.device)
    rows = _bilinear(top, h, torch.arange(height, device=images.device), height)  # (B, H, H)
    columns = _bilinear(left, w, torch.where(flip[:, None], width - 1 - pixel, pixel), width)  # (B, W, W)
    # columns first, with all channels of an image in one product: twice as fast as an einsum over rows and columns
    narrow = images.float().flatten(1, 2) @ columns.mT  # (B, C·H, W)
    return rows.unsqueeze(1) @ narrow.unflatten(1, (channels, height))


def _bilinear(start: Tensor, length: Tensor, out: Tensor, size: int) -> Tensor:
    """Return weights (B, K, `size`) that resize the pixels start … start + length − 1 of a line to `size` pixels.

    `start` and `length` are (B,). `out`, (K,) or (B, K), has the indices of the output pixels. The weights of an output
    pixel form a triangle around its centre. The triangle is wider if `length` exceeds `size`.
    """
    start, length = start.view(-1, 1, 1), length.view(-1, 1, 1)
    step = length / size
    pixel = torch.arange(size, device=start.device)
    centre = start + (out.unsqueeze(-1) + 0.5) * step  # (B, K, 1)
    # computed in place: on a CPU, allocating memory takes longer than the arithmetic
    weight = (pixel + 0.5 - centre).abs_().div_(step.clamp(min=1)).neg_().add_(1).clamp_(min=0)  # (B, K, size)
    weight.mul_((pixel >= start) & (pixel < start + length))
    return weight.div_(weight.sum(2, keepdim=True))
