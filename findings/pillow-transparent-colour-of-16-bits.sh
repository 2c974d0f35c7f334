#!/usr/bin/env bash
# Pillow makes the wrong pixels transparent in a 48-bit PNG with a transparent colour.
#
# Expected: the PNG chunk tRNS names one colour by three numbers of 16 bits. Exactly the pixels of this colour are transparent.
# Real: Pillow reads the upper bytes of 48-bit pixels, but keeps 16 bits of the colour. convert("RGBA") compares upper bytes of pixels with
#   lower bytes of the colour. With the colour 0x1234, 0x5678, 0x9abc, the pixel of that colour stays opaque, and a pixel 0x34.., 0x78..,
#   0xbc.. vanishes. Images that are drawn on white before training then have holes in the wrong places.
#
# Python 3.11.7, pillow 12.3.0, numpy 2.4.6. Seen on 2026-11-27:
#   mode RGB, transparency (4660, 22136, 39612)
#   the transparent colour itself: alpha 255; a pixel whose upper bytes are its lower bytes: alpha 0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet pillow==12.3.0 numpy==2.4.6
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import io
import struct
import zlib

import numpy as np
from PIL import Image


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


hidden, other = (0x1234, 0x5678, 0x9ABC), (0x3400, 0x7800, 0xBC00)
row = np.array([hidden, other]).astype(">u2").tobytes()
header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)  # two pixels, 16 bits a channel, RGB
parts = (b"IHDR", header), (b"tRNS", struct.pack(">HHH", *hidden)), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")
png = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in parts)

image = Image.open(io.BytesIO(png))
print(f"mode {image.mode}, transparency {image.info['transparency']}")
first, second = np.asarray(image.convert("RGBA"))[0, :, 3].tolist()
print(f"the transparent colour itself: alpha {first}; a pixel whose upper bytes are its lower bytes: alpha {second}")

assert (first, second) == (255, 0), "this finding is out of date"
PYTHON
