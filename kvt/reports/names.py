"""Names of attentions and metrics in reports."""

from collections.abc import Iterable
from itertools import chain

from kvt.attention import ATTENTION
from kvt.tasks import Task
from kvt.tasks.base import known_classes
from kvt.tasks.metrics import Metric

STAGES = {"train": "training", "val": "validation", "test": "test"}


def label(attention: str) -> str:
    """Return an attention's label in reports: the name in the papers, or the class name of a user's attention.

    >>> label("kv+pos"), label("q-kv, kv_heads 1"), label("my_attention.NearKV, slope 0.5")
    ('KV+Pos', 'Q≠K=V, kv_heads 1', 'NearKV, slope 0.5')
    >>> label("kv+phase, attend_self False, phase 0.5")
    'KV+Phase without self, phase 0.5'
    """
    name, comma, details = attention.partition(",")
    own = ATTENTION[name].label if name in ATTENTION else name.rpartition(".")[2]
    return own + (comma + details).replace(", attend_self False", " without self")


def declared(tasks: Iterable[type[Task]] = ()) -> list[Metric]:
    """Return the metrics that the classes `tasks` declare, followed by the metrics that kvt's tasks declare."""
    ours = (cls for cls in known_classes().values() if issubclass(cls, Task))
    return [*dict.fromkeys(chain.from_iterable(task.metrics for task in (*tasks, *ours)))]


def metric_of(name: str, tasks: Iterable[type[Task]] = ()) -> Metric:
    """Return the `Metric` of a name such as "val/loss". Declarations of `tasks` take precedence over those of kvt.

    >>> metric_of("val/loss").words, metric_of("val/loss").better, metric_of("test/acc_4_back").label
    ('loss (nats)', 'less', 'accuracy 4 places back')
    >>> metric_of("test/odd_ones").label, metric_of("test/odd_ones").better
    ('odd ones', None)
    """
    bare = name.rpartition("/")[2]
    return next((found for metric in declared(tasks) if (found := metric.called(bare))), Metric(bare))


def in_words(name: str, kind: Metric | None = None) -> str:
    """Return the split and the name of a metric in words, such as "validation loss (nats)"."""
    return f"{STAGES[name.partition('/')[0]]} {(kind or metric_of(name)).words}"
