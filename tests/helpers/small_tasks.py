"""One small task of each class, as its data would describe it."""

from typing import Any

import torch
from torch import Tensor

from kvt.tasks import Task
from kvt.tasks.base import known_classes
from kvt.tasks.translation import SPECIALS

TASKS: dict[str, type[Task]] = {name: cls for name, cls in known_classes().items() if issubclass(cls, Task)}
LENGTH = 4
LISTS = {"vocab_size": 10, "length": LENGTH}
OTHERS = {
    **{**LISTS, "feature_dim": 5, "set_size": LENGTH, "vocab": ["a", "b"], "tokenizer": "bytes"},
    **{"channels": 1, "height": 4, "width": 4, "classes": ["a", "b"], "mean": [0.5], "std": [0.5]},
    **{"source": "de", "target": "en", "detok_rules": {}, "max_len": 9},
    **{"source_vocab": [*SPECIALS, "a"], "target_vocab": [*SPECIALS, "a"]},
}


def small_task(name: str, **settings: Any) -> Task:
    cls = TASKS[name]
    return cls(spec=OTHERS, **{"dim": 8, "depth": 1, "heads": 2, **settings})


def small_batch(name: str, rows: int = 3) -> tuple[Tensor, ...]:
    """Return a batch of a task, in which everything is asked."""
    symbols = torch.ones(rows, LENGTH, dtype=torch.long)
    classes = torch.zeros(rows, dtype=torch.long)
    words = len(SPECIALS) * symbols
    batches = {
        "AnomalyTask": (torch.ones(rows, LENGTH, 5), classes),
        "ImageTask": (torch.ones(rows, 1, 4, 4, dtype=torch.uint8), classes),
        "LanguageModelTask": (symbols, symbols, symbols.bool()),
        "RecallTask": (symbols, symbols, symbols),
        "TranslationTask": (words, words, classes),
    }
    return batches.get(name, (symbols, symbols))
