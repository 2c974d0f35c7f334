"""The published sizes of the data sets that kvt knows by name."""

from collections.abc import Mapping

UNPUBLISHED = "not_published"  # key, within "notes" in result.json, of the phrase that `other_counts` returns
PHOTOS, DIGITS = {"train": 50_000, "test": 10_000}, {"train": 60_000, "test": 10_000}
COUNTS: Mapping[str, Mapping[str, int]] = {  # number of examples in each split; for a text, number of characters
    **{"mnist": DIGITS, "fashion_mnist": DIGITS, "cifar10": PHOTOS, "cifar100": PHOTOS},
    "multi30k": {"train": 29_000, "val": 1_014, "test": 1_000},
    "tinyshakespeare": {"text": 1_115_394},
}


def other_counts(name: str, counts: Mapping[str, int]) -> str | None:
    """Return a phrase about sizes that differ from the published sizes; None if none differs, or none is published.

    >>> other_counts("cifar10", {"train": 50_000, "test": 1_000})
    'cifar10 has 1,000 in test instead of 10,000'
    """
    known = COUNTS.get(name, counts)
    others = [part for part in known if counts[part] != known[part]]
    parts = [f"{counts[part]:,} in {part} instead of {known[part]:,}" for part in others]
    return f"{name} has {', '.join(parts)}" if parts else None
