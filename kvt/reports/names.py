"""Names of attentions and metrics in reports, and the format of metrics."""

from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np

from kvt.attention import ATTENTION

STAGES = {"train": "training", "val": "validation", "test": "test"}


UP = {"acc", "accuracy", "bleu", "chrf", "f1", "r2"}
DOWN = {"bpb", "bpc", "error", "loss", "mae", "mse", "ppl", "rmse"}
"""Words in a metric's name that say whether more or less of it is better."""


class Metric(NamedTuple):
    label: str
    point: float  # the unit of differences
    places: int  # decimals of a value
    highest: float
    more_is_better: bool | None  # None: unknown
    unit: str = ""
    is_ratio: bool = False  # differences are of natural logarithms: a hundredth is one per cent

    def scaled(self, values: Any) -> Any:
        """Return what is subtracted to compare values: themselves, or their logarithms."""
        return np.log(values) if self.is_ratio else values

    @property
    def point_in_words(self) -> str:
        if self.is_ratio:
            return f"one per cent of {self.words} (a hundredth of the difference of logarithms)"
        return f"{self.point:g} of {self.words}" if self.point != 1 else f"1 {self.words}"

    @property
    def words(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def value(self, number: float) -> str:
        return f"{number:.{self.places}f}" if isfinite(number) else "–"

    def points(self, difference: float) -> str:
        """Format a difference of two values, in points; NaN and infinity are a dash."""
        if not isfinite(difference):
            return "–"
        text = f"{difference / self.point:+.2f}"
        return text if float(text) else "0.00"


METRICS = {
    "acc": Metric("accuracy", 0.01, 3, 1, True),
    "bleu": Metric("BLEU", 1, 1, 100, True),
    "bleu_paper": Metric("BLEU as the paper counts it", 1, 1, 100, True),
    "chrf": Metric("chrF", 1, 1, 100, True),
    "loss": Metric("loss", 0.01, 3, inf, False, "nats"),
    "ppl": Metric("perplexity", 0.01, 2, inf, False, is_ratio=True),
    "real_ppl": Metric("perplexity of real tokens", 0.01, 2, inf, False, is_ratio=True),
    "bpb": Metric("bits per byte", 0.01, 3, inf, False),
    "bpc": Metric("bits per character", 0.01, 3, inf, False),
}


def label(attention: str) -> str:
    """Return an attention's label in reports: its name in the papers, or the name of the user's own class.

    >>> label("kv+pos"), label("q-kv, kv_heads 1"), label("my_attention.NearKV, slope 0.5")
    ('KV+Pos', 'Q≠K=V, kv_heads 1', 'NearKV, slope 0.5')
    >>> label("kv+phase, attend_self False, phase 0.5")
    'KV+Phase without self, phase 0.5'
    """
    name, comma, details = attention.partition(",")
    own = ATTENTION[name].label if name in ATTENTION else name.rpartition(".")[2]
    return own + (comma + details).replace(", attend_self False", " without self")


def metric_of(name: str) -> Metric:
    """Return label, unit and direction of a metric; of one of the user's own: hundredths, the direction by its name.

    >>> metric_of("val/loss").more_is_better, metric_of("test/squared_error").more_is_better
    (False, False)
    >>> metric_of("test/odd_ones").label, metric_of("test/odd_ones").more_is_better
    ('odd ones', None)
    """
    bare = name.rpartition("/")[2]
    words = set(bare.split("_"))
    direction = None if words.isdisjoint(UP) == words.isdisjoint(DOWN) else not words.isdisjoint(UP)
    return METRICS.get(bare) or Metric(bare.replace("_", " "), 0.01, 3, inf, direction)


def in_words(name: str, kind: Metric | None = None) -> str:
    """Return a metric's name with its stage, such as "validation loss (nats)"."""
    return f"{STAGES[name.partition('/')[0]]} {(kind or metric_of(name)).words}"
