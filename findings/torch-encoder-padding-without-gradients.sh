#!/usr/bin/env bash
# torch.no_grad() changes the output of an nn.TransformerEncoder at padded tokens.
#
# Expected: in evaluation mode, without dropout, a model has the same output with and without gradients.
# Real: without gradients, nn.TransformerEncoder takes a fast path that removes padded tokens and fills their places with
#   zeros. With gradients, for example in training, these places have numbers of about size 1. A model that averages over
#   all tokens, padding included, therefore predicts something else than it was trained to. Outputs of words are equal.
#   enable_nested_tensor=False makes the outputs equal.
#
# Python 3.11.7, torch 2.14.1. Seen on 2026-11-28:
#   words: largest difference below 1e-5: True
#   padding with gradients: largest number above 1: True
#   padding without gradients: largest number 0.0
#   mean over all tokens: largest difference above 0.1: True
#   mean over all tokens, enable_nested_tensor=False: largest difference below 1e-5: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 numpy
cd "$work"
"$work/venv/bin/python" - 2>/dev/null <<'PYTHON'
import torch
from torch import nn


def outputs(nested):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x = torch.randn(2, 6, 16)
    with_gradients = encoder(x, src_key_padding_mask=padded).detach()
    with torch.no_grad():
        return with_gradients, encoder(x, src_key_padding_mask=padded)


def difference(a, b):
    return (a - b).abs().max().item()


padded = torch.arange(6) >= torch.tensor([[5], [3]])
usual, fast = outputs(nested=True)
equal = difference(usual[~padded], fast[~padded]) < 1e-5
size, zeros = usual[padded].abs().max().item(), fast[padded].abs().max().item()
mean = difference(usual.mean(1), fast.mean(1))
usual, other = outputs(nested=False)
without = difference(usual.mean(1), other.mean(1)) < 1e-5
print("words: largest difference below 1e-5:", equal)
print("padding with gradients: largest number above 1:", size > 1)
print("padding without gradients: largest number", zeros)
print("mean over all tokens: largest difference above 0.1:", mean > 0.1)
print("mean over all tokens, enable_nested_tensor=False: largest difference below 1e-5:", without)
assert equal and size > 1 and zeros == 0 and mean > 0.1 and without, "this finding is out of date"
PYTHON
