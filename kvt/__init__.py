"""kvt: do transformers need queries? Attention variants, models and tasks of the Key-Value Transformer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvt.version import __version__ as __version__

if TYPE_CHECKING:
    from kvt.attention import MultiheadAttention, make_attention, record_maps
    from kvt.run.config import RunConfig
    from kvt.run.fit import train
    from kvt.run.load_checkpoint import load
    from kvt.view.maps import draw_maps

__all__ = ["MultiheadAttention", "RunConfig", "draw_maps", "load", "make_attention", "record_maps", "train"]

_MODULES = {
    **dict.fromkeys(("MultiheadAttention", "make_attention", "record_maps"), "kvt.attention"),
    **{
        "RunConfig": "kvt.run.config",
        "draw_maps": "kvt.view.maps",
        "load": "kvt.run.load_checkpoint",
        "train": "kvt.run.fit",
    },
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: importing torch takes seconds, and `kvt --help` does not need it."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'kvt' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names, including public names that are not imported yet."""
    return sorted({*globals(), *__all__})
