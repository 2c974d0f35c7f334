"""What attentions and metrics are called in reports, and how metrics are written."""

from math import inf, isfinite
from typing import NamedTuple

LABELS = {"qkv": "QKV", "kv": "KV", "q-kv": "Q–K=V", "k": "Q=K=V", "identity": "Identity"}
STAGES = {"train": "training", "val": "validation", "test": "test"}


class Metric(NamedTuple):
    """How a metric is written.

    Attributes:
        label: in words.
        point: what a point is, in the metric's units.
        places: decimals of a value.
        highest: the most it can be.
        more_is_better: or less.
    """

    label: str
    point: float
    places: int
    highest: float
    more_is_better: bool

    def value(self, number: float) -> str:
        """A value of the metric; a dash where there is none."""
        return f"{number:.{self.places}f}" if isfinite(number) else "–"

    def points(self, difference: float) -> str:
        """A difference of two values, in points."""
        if not isfinite(difference):
            return "–"
        text = f"{difference / self.point:+.2f}"
        return text if float(text) else "0.00"


METRICS = {
    "acc": Metric("accuracy", 0.01, 3, 1, True),
    "bleu": Metric("BLEU", 1, 1, 100, True),
    "bleu_paper": Metric("BLEU as the paper counts it", 1, 1, 100, True),
    "loss": Metric("loss (nats)", 0.01, 3, inf, False),
}


def label(attention: str) -> str:
    """As the papers write it.

    >>> label("kv+pos"), label("q-kv, kv_heads 1"), label("MyAttention")
    ('KV+Pos', 'Q–K=V, kv_heads 1', 'MyAttention')
    """
    name, comma, details = attention.partition(",")
    base, plus, pos = name.partition("+")
    return LABELS.get(base, base) + plus + pos.capitalize() + comma + details


def metric_of(name: str) -> Metric:
    """How "val/loss" is written.

    >>> metric_of("val/loss").value(1.23456)
    '1.235'
    """
    return METRICS[name.rpartition("/")[2]]


def in_words(name: str) -> str:
    """A metric of a stage.

    >>> in_words("val/loss")
    'validation loss (nats)'
    """
    return f"{STAGES[name.partition('/')[0]]} {metric_of(name).label}"
