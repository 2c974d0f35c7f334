"""Servers with a certificate that this process believes, as it does those of its system."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from ssl import PROTOCOL_TLS_SERVER, SSLContext

import pytest
import trustme

HOSTS = ("127.0.0.1", "files.example")


@cache
def _certified() -> tuple[trustme.CA, SSLContext]:
    authority, context = trustme.CA(), SSLContext(PROTOCOL_TLS_SERVER)
    authority.issue_cert(*HOSTS).configure_cert(context)
    return authority, context


@contextmanager
def believed() -> Iterator[SSLContext]:
    """What makes a socket that of a server of one of `HOSTS`; no proxy stands before it."""
    authority, context = _certified()
    with authority.cert_pem.tempfile() as file, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", file)
        for name in ("http", "https", "no"):
            patch.delenv(f"{name}_proxy", raising=False)
            patch.delenv(f"{name}_proxy".upper(), raising=False)
        yield context
