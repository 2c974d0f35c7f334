#!/usr/bin/env bash
# PEFT's LoRA adapter of the output projection of nn.MultiheadAttention is never used.
#
# Expected: target_modules=["out_proj"] adapts the output projection of attention. out_proj is an nn.Linear by its class.
# Real: PEFT inserts the adapter and counts its parameters as trainable. nn.MultiheadAttention reads out_proj.weight and
#   never calls out_proj as a module, so the adapter changes no output and has no gradient. Nothing warns. An adapter of
#   the whole attention, target_modules=["self_attn"], works.
#
# Python 3.11.7, peft 0.21.2, torch 2.14.1, transformers 5.24.0. Seen on 2026-11-28:
#   out_proj, linear1: gradients of linear1 only
#   out_proj, linear1: a random adapter of out_proj changes the output by 0.0
#   self_attn: gradients of self_attn, self_attn.base_layer.out_proj
#   self_attn: a random adapter of out_proj changes the output: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet peft==0.21.2 torch==2.14.1 transformers==5.24.0 numpy
cd "$work"
"$work/venv/bin/python" - 2>/dev/null <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
found = {}
for targets in (["out_proj", "linear1"], ["self_attn"]):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
    )
    model = get_peft_model(encoder, LoraConfig(target_modules=targets)).train()
    before = model(x)
    before[..., 0].sum().backward()
    learned = set()
    outputs = []
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            if parameter.grad is not None:
                learned.add(name.split("layers.0.")[1].split(".lora_B")[0])
            if "out_proj" in name:
                outputs.append(parameter)
    with torch.no_grad():
        for parameter in outputs:
            nn.init.normal_(parameter)
        change = (model(x) - before).abs().max().item()
    name = ", ".join(targets)
    found[name] = learned, change
    print(f"{name}: gradients of {', '.join(sorted(learned))}{' only' * (len(learned) == 1)}")
    print(f"{name}: a random adapter of out_proj changes the output" + (f" by {change}" if not change else ": True"))
assert found["out_proj, linear1"] == ({"linear1"}, 0.0), "this finding is out of date"
assert found["self_attn"][1] > 0.01
PYTHON
