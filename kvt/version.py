"""The version of kvt."""

__version__ = "0.2.0.dev0"
