#!/usr/bin/env bash
# An ONNX graph of torch's attention returns the mean of all values for a query that may attend to no key; torch returns 0.
#
# Expected: torch.onnx.export keeps the outputs of a model. scaled_dot_product_attention returns zeros for a query whose
#   row of the boolean mask is False, such as a row of padding.
# Real: in the graph of the default operator set, 18, masked logits have the lowest finite number. A row of equal logits is
#   a uniform softmax, so the query reads all values, also those of padding and of later tokens. Other queries are right.
#   The graph of operator set 23 has an operator of its own for attention, and returns zeros. Nothing warns.
#
# Python 3.11.7, torch 2.14.1, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0. Seen on 2026-11-28:
#   torch: zeros
#   operator set 18: the mean of all values; largest difference of other queries below 1e-6: True
#   operator set 23: zeros; largest difference of other queries below 1e-6: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 numpy
cd "$work"
"$work/venv/bin/python" - 2>/dev/null <<'PYTHON'
import onnxruntime
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
tokens = torch.randn(1, 1, 4, 8)
mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
mask[..., 2, :] = False  # this query may attend to no key


class Attention(nn.Module):
    def forward(self, tokens, mask):
        return scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=mask)


def named(row):
    if not row.any():
        return "zeros"
    return "the mean of all values" if torch.allclose(row, tokens.mean((0, 1, 2)), atol=1e-6) else str(row)


expected = Attention()(tokens, mask)[0, 0]
print("torch:", named(expected[2]))
found = {}
for version in (18, 23):
    torch.onnx.export(Attention().eval(), (tokens, mask), "graph.onnx", dynamo=True, opset_version=version, verbose=False)
    session = onnxruntime.InferenceSession("graph.onnx")
    names = [one.name for one in session.get_inputs()]
    (outputs,) = session.run(None, dict(zip(names, (tokens.numpy(), mask.numpy()))))
    outputs = torch.as_tensor(outputs)[0, 0]
    same = bool((outputs - expected)[[0, 1, 3]].abs().max() < 1e-6)
    found[version] = named(outputs[2]), same
    print(f"operator set {version}: {found[version][0]}; largest difference of other queries below 1e-6: {same}")
assert named(expected[2]) == "zeros"
assert found == {18: ("the mean of all values", True), 23: ("zeros", True)}, "this finding is out of date"
PYTHON
