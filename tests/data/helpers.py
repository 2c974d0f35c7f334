"""User errors, processes that race or are killed, and a web server."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from kvt.system.errors import UserError
from kvt.tasks import TaskData

fork = multiprocessing.get_context("fork")  # children start in milliseconds and inherit monkeypatches


def user_error(action: Callable[[], object]) -> str:
    """The message of the UserError that `action` raises, which must be one line."""
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def files_in(folder: Path) -> set[str]:
    """All files below a folder except the lock."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".cache/data.lock"}


def run_twice_at_once(work: Callable[[], None]) -> None:
    processes = [fork.Process(target=work) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]


class Server(ThreadingHTTPServer):
    """Serves `files` by path and records in `fetched` which ones were asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.fetched: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.sent = 1.0  # the part of each file after which the connection stalls or ends
        self.stalls = False
        self.end = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        self.server.fetched.append(name)
        content = self.server.files.get(name, b"")
        self.send_response(200 if name in self.server.files else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: int(self.server.sent * len(content))])
        self.wfile.flush()
        if self.server.stalls:
            self.server.end.wait(30)

    def log_message(self, *_) -> None:
        pass


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Server]:
    """A web server in this process."""
    with pytest.MonkeyPatch.context() as patch, Server(files) as server:
        patch.setenv("no_proxy", "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.end.set()
            server.shutdown()
            thread.join()


def all_rows(data: TaskData, split: str) -> tuple[torch.Tensor, ...]:
    """Return what a split serves, as one batch."""
    return next(iter(data.make_batches(*data.splits[split], batch_size=10**6)))
