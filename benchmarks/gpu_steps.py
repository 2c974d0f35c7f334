"""Parts of benchmarks/gpu.py: time, kernel launches, and waits of the CPU for the GPU of training steps.

A step is a batch from the loader, augmentation, forward, backward, Adam and running means. Compared with `kvt fit`, the
Trainer, gradient clipping and the schedule are left out. Each task is measured in float32 and bfloat16, and two tasks
also compiled. The tables have:

* images or tokens per second;
* *peak*: FLOP/s of the matrix products of a step, divided by the FLOP/s of one large product of the same type;
* kernels launched per step, and waits of the CPU for the GPU (synchronisations and copies);
* peak memory.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import cycle, product
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu_checks import TYPES
from gpu_report import Case, Part, Setting
from torch.profiler import ProfilerActivity, profile

from kvt.attention import ATTENTION, AttentionFactory
from kvt.bench.measure import count_flops, peak_bytes, timed
from kvt.bench.table import number
from kvt.data.augment import random_resized_crop_flip
from kvt.data.loader import Batches, SentenceBatches
from kvt.run.run import compile_model
from kvt.tasks import CharacterTask, ImageTask, ListTask, TranslationTask
from kvt.tasks.base import Task, make_optimizer
from kvt.tasks.translation import SPECIALS

IMAGES = {"channels": 3, "height": 32, "width": 32, "classes": list("abcdefghij"), "mean": [0.5], "std": [0.2]}
SYMBOLS = [*SPECIALS, *(f"word{number}" for number in range(8000))]
SENTENCES = {"source": "de", "target": "en", "source_vocab": SYMBOLS, "target_vocab": SYMBOLS, "detok_rules": []}
PROFILED = 5
"""Number of profiled steps."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "Memcpy HtoD", "Memcpy DtoH")
"""The profiler's names of events in which the CPU waits for the GPU."""
OF_ATTENTION = ("flash", "fmha", "cudnn", "efficient", "scaled_dot_product", "softmax")
"""Parts of the names of attention kernels."""


class Training(NamedTuple):
    """A task, its batches, and the function that its data module applies to a batch on the device."""

    task: Task
    loader: Batches
    prepare: Callable[[Any], Any] = lambda batch: batch


def images(attn: str, rows: int, device: torch.device) -> Training:
    pixels = torch.randint(256, (4 * rows, 3, 32, 32), dtype=torch.uint8)
    loader = Batches(pixels, torch.randint(10, (4 * rows,)), batch_size=rows, shuffle=True, device=device)
    task = ImageTask(IMAGES, attn, dim=256, depth=4, heads=4)
    return Training(task, loader, lambda batch: (random_resized_crop_flip(batch[0]), batch[1]))


def lists(attn: str, rows: int, device: torch.device) -> Training:
    digits = torch.randint(10, (4 * rows, 16))
    loader = Batches(digits, digits.flip(1), batch_size=rows, shuffle=True, device=device)
    return Training(ListTask({"vocab_size": 10, "length": 16}, attn), loader)


def characters(attn: str, rows: int, device: torch.device) -> Training:
    text = torch.randint(65, (4 * rows + 64,))
    windows = text[:-1].unfold(0, 64, 1), text[1:].unfold(0, 64, 1)
    loader = Batches(*windows, batch_size=rows, shuffle=True, device=device)
    return Training(CharacterTask({"vocab": [chr(33 + number) for number in range(65)], "length": 64}, attn), loader)


def translation(attn: str, rows: int, device: torch.device) -> Training:
    sides = torch.randint(len(SPECIALS), len(SYMBOLS), (2, 4 * rows, 16))
    loader = SentenceBatches(*sides, pad=SPECIALS.index("<pad>"), batch_size=rows, shuffle=True, device=device)
    return Training(TranslationTask({**SENTENCES, "max_len": 100}, attn), loader)


TASKS: dict[str, tuple[Callable[[str, int, torch.device], Training], int]] = {
    "CIFAR": (images, 128),
    "lists": (lists, 128),
    "characters": (characters, 64),
    "translation": (translation, 50),
}
"""Functions that build a case, and the paper's batch size, by task."""


def training_step(case: Training, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that does the next training step."""
    task = case.task.to(device).train()
    optimizer = make_optimizer(task)
    epochs: Iterator[Batches] = cycle([case.loader])
    batches = (batch for loader in epochs for batch in loader)

    def step() -> None:
        batch = case.prepare(tuple(part.to(device) for part in next(batches)))
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = task.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds_of(call: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call."""
    return median(timed({"": call}, repeats)[""])


@cache
def peak_flops(device: torch.device, dtype: torch.dtype, repeats: int) -> tuple[int, float]:
    """Return the side and the FLOP/s of a product of two large square matrices."""
    size = 8192 if device.type == "cuda" else 128
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return size, 2 * size**3 / seconds_of(lambda: a @ b, repeats)


def events(step: Callable[[], None], device: torch.device, steps: int = PROFILED) -> tuple[dict[str, float], float]:
    """Return the launches per step by kernel, and the waits of the CPU for the GPU per step."""
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds, acc_events=True) as profiler:  # without acc_events, torch 2.11 warns
        for _ in range(steps):
            step()
    kernels: dict[str, float] = {}
    waits = 0.0
    for event in profiler.events():
        if event.name.startswith(WAITS):
            waits += 1 / steps
        elif not event.is_user_annotation and (not on_gpu or event.device_type == torch.autograd.DeviceType.CUDA):
            kernels[event.name] = kernels.get(event.name, 0.0) + 1 / steps
    return kernels, waits


def attention_kernels(attn: str, device: torch.device) -> str:
    """Return the names of the attention kernels of a layer's forward pass in bfloat16."""
    layer = AttentionFactory(attn, heads=4, max_len=64, pos_dim=10)(256).to(device, torch.bfloat16)
    x = torch.randn(8, 64, 256, device=device, dtype=torch.bfloat16)
    kernels, _ = events(lambda: layer(x), device, steps=1)
    own = {name.split("<")[0].split("(")[0] for name in kernels if any(word in name.lower() for word in OF_ATTENTION)}
    return ", ".join(sorted(own)) or "none"


def measure(
    make: Callable[[], Training], device: torch.device, dtype: torch.dtype, compiled: str, repeats: int
) -> list[str]:
    """Return the numbers of a row of `STEPS`."""
    case = make()
    step = training_step(case, device, dtype)
    flops = count_flops(step)
    if compiled == "yes":
        torch.compiler.reset()  # otherwise torch stops compiling a class after a few models
        compile_model(case.task, device)
        for _ in range(PROFILED):
            step()  # compiles the model
    seconds = seconds_of(step, repeats)
    kernels, waits = events(step, device)
    predictions = int(case.task.num_predictions(next(iter(case.loader))))
    _, peak = peak_flops(device, dtype, repeats)
    return [
        *(number(1000 * seconds), f"{predictions / seconds:,.0f} {case.task.unit}", f"{flops / seconds / peak:.1%}"),
        *(f"{sum(kernels.values()):.0f}", f"{waits:.1f}", number(peak_bytes(step, device.type), 2**20)),
    ]


def training_steps(setting: Setting) -> Iterator[Case]:
    device, repeats, shrink = torch.device(setting.device), *((7, 1) if setting.on_gpu else (1, 16))
    attentions = ("qkv", "kv", "kv+pos") if setting.on_gpu else ("kv+pos",)
    for task, compiled, kind, attn in product(TASKS, ("no", "yes"), TYPES, attentions):
        # compiling takes half a minute for each model, and does not suit batches of many lengths
        worth = setting.on_gpu and task in ("CIFAR", "lists") and (attn, kind) == ("kv+pos", "bfloat16")
        if compiled == "no" or worth:
            make, batch = TASKS[task]
            case = partial(make, attn, batch // shrink, device)
            row = task, attn, kind, compiled
            yield Case(row, partial(measure, case, device, TYPES[kind], compiled, repeats))


STEPS = Part(
    """Training steps: a batch from the loader, augmentation, forward, backward, Adam, running means. *peak*: FLOP/s of
    the matrix products, divided by those of the part "peak". *kernels* and *waits* (of the CPU for the GPU) are per
    step. *MiB* is the peak memory.""",
    ("task", "attention", "type", "compiled", "ms", "a second", "peak", "kernels", "waits", "MiB"),
    training_steps,
    share=12,
)


def products(setting: Setting) -> Iterator[Case]:
    for kind, dtype in TYPES.items():
        yield Case((kind,), partial(_peak, torch.device(setting.device), dtype))


def _peak(device: torch.device, dtype: torch.dtype) -> list[str]:
    size, rate = peak_flops(device, dtype, 15)
    return [str(size), number(rate, 1e12)]


PEAK = Part("""A product of two large square matrices.""", ("type", "side", "TFLOP/s"), products, share=1)


def kernels_of_layers(setting: Setting) -> Iterator[Case]:
    for attn in ATTENTION:
        yield Case((attn,), lambda attn=attn: [attention_kernels(attn, torch.device(setting.device))])  # type: ignore[misc]


KERNELS = Part(
    """The attention kernels of a layer's forward pass in bfloat16.""",
    ("attention", "its kernels"),
    kernels_of_layers,
    share=2,
)
