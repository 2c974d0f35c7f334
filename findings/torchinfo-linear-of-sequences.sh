#!/usr/bin/env bash
# torchinfo counts the multiply-adds of a linear layer for one token of a sequence only.
#
# Expected: a layer that is applied to 100 tokens needs 100 times as many multiply-adds as for one token.
# Real: torchinfo multiplies the weights by the first dimension of the input alone. For inputs (batch, tokens, width), the
#   total of a transformer is too small by about the number of tokens. With (tokens, batch, width) it is too small by
#   the size of the batch. Convolutions are counted correctly.
#
# Python 3.11.7, torchinfo 1.8.0, torch 2.14.1. Seen on 2026-11-28:
#   (8, 16): 2048, really 2048
#   (8, 100, 16): 2048, really 204800
#   (100, 8, 16): 25600, really 204800
#   a 1x1 convolution of (8, 16, 100): 204800, really 204800
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torchinfo==1.8.0 torch==2.14.1 numpy
cd "$work"
"$work/venv/bin/python" - 2>/dev/null <<'PYTHON'
from math import prod

import torchinfo
from torch import nn

WIDTH = 16
linear, convolution = nn.Linear(WIDTH, WIDTH, bias=False), nn.Conv1d(WIDTH, WIDTH, 1, bias=False)
cases = {str(shape): (linear, shape) for shape in ((8, WIDTH), (8, 100, WIDTH), (100, 8, WIDTH))}
cases[f"a 1x1 convolution of (8, {WIDTH}, 100)"] = convolution, (8, WIDTH, 100)
found = []
for name, (layer, shape) in cases.items():
    counted = torchinfo.summary(layer, input_size=shape, verbose=0).total_mult_adds
    print(f"{name}: {counted}, really {prod(shape) * WIDTH}")
    found.append(counted)
assert found == [2048, 2048, 25600, 204800], "this finding is out of date"
PYTHON
