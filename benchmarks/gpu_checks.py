"""Parts of benchmarks/gpu.py that check kvt on a GPU: numbers of attentions, exact resuming, and tests."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIGINT, SIGKILL
from tempfile import TemporaryDirectory, TemporaryFile
from time import monotonic
from typing import Any

import lightning as L
import torch
from gpu_report import CHECKOUT, FAILED, SO_FAR, WRONG, Case, Part, Setting
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvt.run.config import RunConfig
from kvt.run.run import train
from kvt.study.workers import context_of_workers
from kvt.system.console import silence_libraries

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed"}


KVTS = "as kvt chooses"
KERNELS = {KVTS: None, "math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
KERNELS |= {"cuDNN": "CUDNN_ATTENTION"}
"""The fused attention kernels of a GPU, by names of torch; `kvt.system.hardware.tune` switches cuDNN's off."""
ERROR = {"float32": 1e-4, "bfloat16": 5e-2}
"""The largest relative error that counts as right."""
ERRORS_OF = ("output", "gradient of the input", "gradients of the weights")


def accuracy(setting: Setting) -> Iterator[Case]:
    from tests.helpers.layers import VARIANTS

    device, lengths = torch.device(setting.device), (63, 64, 65, 192) if setting.on_gpu else (9,)
    # the outer loop is over kernels, so that all attentions are first checked with the kernel that kvt chooses
    for kernel, kind, (attn, positions) in product(KERNELS if setting.on_gpu else [KVTS], TYPES, VARIANTS):
        if kind == "bfloat16" or kernel not in ("flash", "cuDNN"):  # these kernels have no float32
            yield Case((attn, positions, kind, kernel), partial(errors, attn, positions, device, kind, kernel, lengths))


def errors(
    attn: str, positions: str, device: torch.device, kind: str, kernel: str, lengths: Iterable[int]
) -> list[str]:
    """Return the largest errors of a layer over all masks and lengths that a kernel supports, and the verdict."""
    from tests.helpers.layers import MASKS

    found, wrong = [], []
    for length, mask in product(lengths, MASKS):
        exact = _exact(attn, positions, length, mask)
        layer, x, masks = _on(attn, positions, length, mask, device, torch.float32)
        backend = KERNELS[kernel]
        with sdpa_kernel(getattr(SDPBackend, backend)) if backend else nullcontext():
            try:
                with torch.autocast(device.type, TYPES[kind], enabled=kind != "float32"):
                    ours = _passes(layer, x, masks)
            except RuntimeError as no:
                if "No available kernel" not in str(no):
                    raise
                continue
        found.append([error(one, other) for one, other in zip(ours, exact, strict=True)])
        if not all(number <= ERROR[kind] for number in found[-1]):  # NaN counts as wrong
            wrong.append(f"{mask} {length}")
    if not found:
        return ["", "", "", "takes none of them"]
    worst = torch.tensor(found).amax(0).tolist()  # NaN if any error is NaN
    return [*(f"{number:.1e}" for number in worst), f"{WRONG}{', '.join(wrong)}" if wrong else "right"]


@cache
def _exact(attn: str, positions: str, length: int, kind_of_mask: str) -> tuple[Tensor, Tensor, Tensor]:
    return _passes(*_on(attn, positions, length, kind_of_mask, torch.device("cpu"), torch.float64))


def _on(
    attn: str, positions: str, length: int, kind_of_mask: str, device: torch.device, dtype: torch.dtype
) -> tuple[torch.nn.Module, Tensor, dict[str, Any]]:
    """Return a layer, an input and the arguments of a mask, on a device."""
    from tests.helpers.layers import Case as Sizes

    sizes = Sizes(heads=4, group=2, head_dim=64, batch=4, length=length, seed=0)
    layer = sizes.layer(attn, positions=positions, pos_dim=10, max_len=length).to(device, dtype)
    masks = sizes.mask(kind_of_mask)
    masks |= {name: value.to(device) for name, value in masks.items() if isinstance(value, Tensor)}
    return layer, sizes.input().to(device, dtype), masks


def _passes(layer: torch.nn.Module, x: Tensor, mask: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the gradient of the input, and the gradients of all weights as one vector."""
    from tests.helpers.layers import gradients

    weights = [*layer.parameters()]
    with x.device:
        output = layer(x.requires_grad_(), **mask)
        of_x, *of_weights = gradients(output, x, *weights)
    return output.detach(), of_x, torch.cat([gradient.flatten() for gradient in of_weights])


def error(found: Tensor, exact: Tensor) -> float:
    """Return max |found − exact| / max |exact|."""
    return float((found.double().cpu() - exact).abs().max() / exact.abs().max())


ACCURACY = Part(
    """Output and gradients of every attention on the GPU, compared with float64 on the CPU. The error is the largest
    difference divided by the largest exact number, over all masks and lengths of 63, 64, 65 and 192 tokens. Each
    attention is checked with the kernel that kvt chooses and with each kernel by name. bfloat16 is autocast, as in
    training. Attention maps are far from uniform. An error above 1e-4 (float32) or 5e-2 (bfloat16) is wrong.""",
    ("attention", "positions", "type", "kernel", *ERRORS_OF, "verdict"),
    accuracy,
    share=12,
)


class Kill(Callback):
    """A callback that kills its process after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), SIGKILL)


def resume(setting: Setting) -> Iterator[Case]:
    every = [*product(("kv", "kv+pos"), PRECISIONS, ("yes",)), ("kv", "float32", "no")]
    for row in every if setting.on_gpu else [("kv+pos", "float32", "yes")]:
        yield Case(row, partial(resumed, *row, setting))


def resumed(attn: str, kind: str, deterministic: str, setting: Setting) -> list[str]:
    """Return whether two uninterrupted runs are equal bit for bit, and whether a killed and resumed run equals them.

    The answer "no" counts as wrong if `deterministic` is "yes".
    """
    sizes = {"train_size": 3200, "val_size": 100, "test_size": 100, "length": 16, "val_check_interval": 0.25}
    config = RunConfig.from_name("reverse").changed(attn=attn, batch_size=64, max_epochs=2, **sizes)
    trainer = {"accelerator": setting.device, "devices": 1, "precision": PRECISIONS[kind]}
    trainer |= {"enable_progress_bar": False, "deterministic": deterministic == "yes"}
    config = config.merged({"trainer": trainer})
    with TemporaryDirectory() as folder:
        whole, again, killed = (Path(folder) / name for name in ("whole", "again", "killed"))
        runs = [(whole, ()), (again, ()), (killed, [Kill(71)])]  # the last checkpoint before step 71 is at 62 of 100
        begun = [_begin(config, run, callbacks=callbacks) for run, callbacks in runs]
        for process, code in zip(begun, (0, 0, -SIGKILL), strict=True):
            _await(process, code)
        _await(_begin(config, killed, resume=True), 0)
        same = [_same(again, whole), _same(killed, whole)]
        return [f"{WRONG}{answer}" if (answer, deterministic) == ("no", "yes") else answer for answer in same]


def _begin(config: RunConfig, folder: Path, **settings: Any) -> BaseProcess:
    """Call `train` in a new process that has all modules imported."""
    process = context_of_workers().Process(target=_train, args=(config, folder), kwargs=settings)
    process.start()
    return process


def _train(config: RunConfig, folder: Path, **settings: Any) -> None:
    silence_libraries()
    train(config, folder, **settings)


def _await(process: BaseProcess, code: int) -> None:
    process.join()
    if process.exitcode != code:
        raise RuntimeError(f"a run ended with exit code {process.exitcode}, not {code}")


def _same(run: Path, whole: Path) -> str:
    from tests.run.test_killed_runs import require_same

    try:
        require_same(run, whole)
    except AssertionError:
        return "no"
    return "yes"


RESUME = Part(
    """Lists of digits, with dropout: whether results, curves, weights and moments are equal bit for bit in two
    uninterrupted runs, and in a run that is killed within an epoch and resumed. With `--deterministic true` they must
    be equal. Without the flag, a GPU does not guarantee it.""",
    ("attention", "type", "deterministic", "two whole runs", "killed and resumed"),
    resume,
    share=8,
)

FOLDERS = ("data", "tasks")
"""The folders of tests/ with tests that need a GPU."""
PATIENCE = 15
"""Time in seconds for interrupted tests to end."""


def tests(setting: Setting) -> Iterator[Case]:
    for folder in FOLDERS if setting.on_gpu else FOLDERS[:1]:
        yield Case((folder,), partial(passed, folder, setting))


def passed(folder: str, setting: Setting) -> list[str]:
    """Run the tests of a folder that need a GPU; return pytest's summary of the tests that ran in time."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "-p", "no:warnings"]
    command.append(f"tests/{folder}")
    with TemporaryFile("w+", errors="replace") as file:
        with subprocess.Popen(command, cwd=CHECKOUT, stdout=file, stderr=file) as process:
            ended = end_by(process, setting.ends - PATIENCE)
        file.seek(0)
        text = file.read()
    found = re.findall(
        r"^.*\b(?:passed|failed|skipped|error|errors|no tests ran)\b.* in [\d.:]+.*$", text, re.MULTILINE
    )
    summary = found[-1].strip("= ") if found else "no summary"
    if process.returncode == 0:
        return [summary]
    print(text)
    return [f"{FAILED if ended or not found else SO_FAR}{summary}"]


def end_by(process: "subprocess.Popen[Any]", ends: float) -> bool:
    """Wait for a process until `ends`, then interrupt it; return whether it ended by itself."""
    try:
        process.wait(max(0, ends - monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(SIGINT)
        return False
    return True


TESTS = Part(
    """The tests that need a GPU, for each folder; log.txt has the failures.""",
    ("tests", "summary"),
    tests,
    share=4,
)
