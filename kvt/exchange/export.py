"""Exports a trained model: safetensors, JSON and a model card in the layout of the Hugging Face hub; ONNX.

`kvt.load` and every command with --ckpt_path take the folder like a checkpoint.
"""

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from kvt.data.tokens import tokens_of
from kvt.run.checkpoint_files import DIGEST, HPARAMS, MODEL, SETTINGS, TIED
from kvt.run.load_checkpoint import Checkpoint
from kvt.run.results import is_result_of
from kvt.run.same import load_data
from kvt.system.console import table
from kvt.system.errors import UserError
from kvt.system.files import atomically, read_json, require_folder, write_atomically
from kvt.system.quoting import Markdown, printable, shell_word
from kvt.tasks import Task
from kvt.tasks.language import LanguageTask
from kvt.version import __version__

CARD, GRAPH, GRAPH_WEIGHTS = "README.md", "model.onnx", "model.onnx.data"
"""File names of an export. GRAPH_WEIGHTS has the weights of an ONNX graph if the graph is larger than 1.5 GB."""
KEPT = (*HPARAMS.values(), "model_class", "data_class", "epoch", "global_step", "trainer", "metrics")
"""The keys of a checkpoint that config.json keeps. Content that only resuming needs is left out."""

PAGE = Markdown("""\
---
library_name: kvt
tags: [{tags}]
---

# {title}

`{task}` with `--attn {attn}`, trained by kvt {version} on {data}.

```python
import kvt

model = kvt.load({folder}{own})
```

{needs}kvt is a Python package with the tasks of the paper [Key-Value Transformer](https://arxiv.org/abs/2305.19129).
Install its wheel, `pip install kvt-*.whl`, or in a clone of its source `pip install .`.

{results}

```
{numbers}
```

| setting | |
|---|---|
{settings}
""")
RESULTS = Markdown("Its results:")
UNMEASURED = Markdown(
    "These weights have not been measured: `kvt validate --ckpt_path {}` measures them, given the data."
)
WITHOUT = Markdown("""
## Without kvt

`model.onnx` takes {inputs}, and returns `logits`. It runs with `pip install onnxruntime`, here on ones:

```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(logits,) = session.run(None, {arrays})
print(logits.shape)
```
""")
SHOWN = 300  # number of characters of a setting that a card shows; longer values are truncated
NEEDS = Markdown(
    "It uses {}, not part of kvt: whoever loads it needs the file of that class, and names it as above.\n\n"
)


def export(checkpoint: Checkpoint, run: Path | None, out: Path) -> list[Path]:
    """Write weights, settings and card of a trained model into a folder; return the paths of the files.

    The settings contain the SHA-256 of the weights. A process that loads the folder therefore detects files of
    different exports, for example after a killed export.

    Args:
        checkpoint: a checkpoint of any task. The function does not import the classes that the checkpoint names.
        run: folder of the checkpoint's run, from which the card gets the result; None if the folder is unknown.
        out: folder of the export. Files of an earlier export are replaced. All other files are kept.

    Raises:
        UserError: the folder has files with the names of an export that `kvt export` did not write.
    """
    require_folder(out, "--out")
    _require_replaceable(out)
    content = checkpoint.saved
    whole = {name: weight.contiguous().clone() for name, weight in content["state_dict"].items()}
    same = tied(whole)
    weights = {name: weight for name, weight in whole.items() if name not in same}
    settings = {"library": "kvt", "version": __version__, **{key: content[key] for key in KEPT if key in content}}
    result = (read_json(run / "result.json") if run else None) or {}
    measured = result if run and is_result_of(run, checkpoint) else content.get("metrics", {})
    settings["metrics"] = {name: value for name, value in measured.items() if "/" in name}
    model = save(weights, {"format": "pt"})
    settings |= {DIGEST: hashlib.sha256(model).hexdigest(), TIED: same}
    page = card({**content, **settings}, result, out.resolve().name, _count(checkpoint, result, weights))
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / MODEL, model)  # the largest file first, because writing it is most likely to fill the disk
    for name in (CARD, GRAPH, GRAPH_WEIGHTS):  # deletes files of the previous export
        (out / name).unlink(missing_ok=True)
    write_atomically(out / SETTINGS, json.dumps(settings, indent=2) + "\n")
    write_atomically(out / CARD, page)
    return [out / name for name in (MODEL, SETTINGS, CARD)]


def _count(checkpoint: Checkpoint, result: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
    """Return the number of a task's parameters. If its class cannot be loaded, count the numbers in `weights` once."""
    if "parameters" in result:
        return int(result["parameters"])
    with suppress(UserError):
        return checkpoint.load_task(Task).num_parameters  # type: ignore[type-abstract]
    return sum(weight.numel() for weight in weights.values())


def tied(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return {name: name of an earlier weight} for each weight that equals an earlier weight bit for bit.

    The model ties such weights, even if the checkpoint stores them twice. A weight whose numbers are all the same is
    left out, because two biases that are not tied may both be zero.
    """
    first: dict[Any, str] = {}
    same = {}
    for name, weight in weights.items():
        numbers = weight.flatten()
        if len(numbers) > 1 and not (numbers == numbers[0]).all():
            digest = hashlib.sha256(numbers.view(torch.uint8).numpy().data).digest()
            if (earlier := first.setdefault((weight.shape, weight.dtype, digest), name)) != name:
                same[name] = earlier
    return same


def _require_replaceable(out: Path) -> None:
    there = [out / name for name in (MODEL, SETTINGS, CARD, GRAPH, GRAPH_WEIGHTS) if os.path.lexists(out / name)]
    are_files = all(path.is_file() for path in there)
    if there and not (are_files and (read_json(out / SETTINGS) or {}).get("library") == "kvt"):
        raise UserError(f"--out {out}: its {there[0].name} was not written by kvt export: choose another folder")


def card(content: Mapping[str, Any], result: Mapping[str, Any], folder: str, parameters: int) -> str:
    """Return the model card: Markdown with the YAML header that the Hugging Face hub reads."""
    model, data = (dict(content[key]) for key in HPARAMS.values())
    attn = str(model.get("attn", "–"))
    classes = {"attn": attn, "model": content.get("model_class"), "data": content.get("data_class")}
    own = {name: str(path) for name, path in classes.items() if "." in str(path)}  # users' classes have a dot
    named = "".join(f", {name}={path!r}" for name, path in own.items() if name != "data")
    metrics = content.get("metrics", {})
    spec = model.get("spec") or {}
    shown = {name: value for name, value in {**data, **model}.items() if name not in ("spec", "content")}
    shown |= {name: spec[name] for name in ("mean", "std", "classes") if name in spec}  # computed from the data
    shown |= {"vocab_size": len(tokens_of(spec["tokenizer"]).pieces)} if "tokenizer" in spec else {}
    texts = {name: str(value) for name, value in shown.items() if value is not None}
    long = {name: f"{text:.60}… ({len(text):,} characters)" for name, text in texts.items() if len(text) > SHOWN}
    long |= {"classes": texts["classes"]} if "classes" in texts else {}
    rows = [Markdown("| `{}` | {} |").format(name, text) for name, text in (texts | long).items()]
    task = result.get("task", content.get("data_class"))
    tag = json.dumps(printable(attn), ensure_ascii=False)  # quoted for YAML
    return PAGE.format(
        **{"tags": Markdown(f"kvt, {tag}"), "title": f"{task}, {attn}", "task": classes["model"], "attn": attn},
        **{"data": classes["data"], "version": __version__, "folder": Markdown(repr(folder)), "own": Markdown(named)},
        needs=NEEDS.format(Markdown(" and ").join(map(Markdown("`{}`").format, own.values()))) if own else "",
        results=RESULTS if metrics else UNMEASURED.format(Markdown(shell_word(folder))),
        numbers=Markdown(table({**metrics, "parameters": parameters})),
        settings=Markdown("\n").join(rows),
    )


def export_onnx(checkpoint: Checkpoint, out: Path) -> list[Path]:
    """Write a model as an ONNX graph from a batch of inputs to its logits; return the paths of its files.

    The graph accepts batches of any size, and texts up to the maximum length of the model. Except for language models,
    exporting needs the data of the run. Raises UserError if the data are missing.
    """
    import_module("onnxscript")  # torch.onnx needs this package, which the extra kvt[onnx] installs
    task = checkpoint.load_task(Task).float()  # type: ignore[type-abstract]
    if isinstance(task, LanguageTask):
        inputs: tuple[Tensor, ...] = (torch.zeros(1, task.hparams["spec"]["length"], dtype=torch.long),)
    else:
        inputs = task.inputs(next(iter(load_data(checkpoint).val_dataloader())))
    inputs = tuple(tensor.repeat_interleave(2, 0) for tensor in inputs)  # a batch size of 1 would become constant
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter prints warnings about code of torch
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        batch, length = {0: torch.export.Dim("batch")}, {1: torch.export.Dim.AUTO}
        is_text = [tensor.ndim == 2 and not tensor.is_floating_point() for tensor in inputs]
        names = [*signature(type(task.model).forward).parameters][1 : len(inputs) + 1]
        settings: dict[str, Any] = {"dynamo": True, "verbose": False, "input_names": names, "output_names": ["logits"]}
        settings["dynamic_shapes"] = (tuple(batch | (length if text else {}) for text in is_text),)
        program = torch.onnx.export(_Forward(task).eval(), inputs, **settings)
    assert program is not None  # torch.onnx.export returns a program if dynamo=True
    _name_lengths(program.model.graph, [name for name, text in zip(names, is_text, strict=True) if text])
    with atomically(out / GRAPH) as part, TemporaryDirectory(dir=out) as folder:
        program.save(Path(folder, GRAPH))  # writes the weights of a large graph to GRAPH_WEIGHTS
        weights = [path.rename(out / path.name) for path in Path(folder).glob(GRAPH_WEIGHTS)]
        Path(folder, GRAPH).rename(part)
    axes = [
        ["batch", "length"] if text else ["batch", *tensor.shape[1:]]
        for tensor, text in zip(inputs, is_text, strict=True)
    ]
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in inputs]
    described = zip(names, kinds, axes, strict=True)
    about = [f"`{name}`, {kind} ({', '.join(map(str, shape))})" for name, kind, shape in described]
    ones = zip(names, kinds, inputs, strict=True)
    arrays = [f'"{name}": np.ones({(1, *tensor.shape[1:])}, "{kind}")' for name, kind, tensor in ones]
    without = WITHOUT.format(inputs=Markdown(" and ".join(about)), arrays=Markdown(f"{{{', '.join(arrays)}}}"))
    page = (out / CARD).read_text(encoding="utf-8")
    write_atomically(out / CARD, f"{page}{without}")
    return [out / GRAPH, *weights]


def _name_lengths(graph: Any, texts: Sequence[str]) -> None:
    """Rename the length axis of a text, which the exporter numbers, to "length", or "source_length" if several."""
    inputs = {value.name: value for value in graph.inputs}
    called = {
        str(inputs[name].shape[1]): "length" if len(texts) == 1 else f"{name}_length"
        for name in texts
        if not isinstance(inputs[name].shape[1], int)
    }
    for value in (*graph.inputs, *(output for node in graph.all_nodes() for output in node.outputs)):
        for axis, size in enumerate(value.shape or ()):
            if (name := called.get(str(size))) is not None:
                value.shape[axis] = name


def push(paths: Sequence[Path], repository: str) -> str:
    """Upload an exported model to the Hugging Face hub and return the repository's URL. New repositories are private.

    Raises:
        UserError: the upload fails.
    """
    from huggingface_hub import CommitOperationAdd, HfApi  # the extra kvt[hub] installs this package

    hub = HfApi()
    try:
        url = hub.create_repo(repository, private=True, exist_ok=True)
        files = [CommitOperationAdd(path.name, path) for path in paths]
        hub.create_commit(repository, files, commit_message=f"kvt {__version__}")
    except Exception as error:  # failures of the network or the hub and invalid names raise exceptions of many types
        reason = " ".join(str(error).split())
        remedy = "check the name and the network, and log in with: hf auth login"
        raise UserError(f"--push {repository}: {reason.rstrip('.'):.300}: {remedy}") from error
    return str(url)


class _Forward(nn.Module):
    """A module whose `forward` passes positional inputs to a task."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, *inputs: Tensor) -> Tensor:
        logits: Tensor = self.task(*inputs)
        return logits
