import gzip
import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvt.data import download as module
from kvt.data.download import Remote, download
from tests.data.test_images import fork, run_twice_at_once, user_error
from tests.helpers.tls import believed

TEXT = b"Ein Satz,\nnoch einer.\n" * 5000
PACKED = gzip.compress(TEXT)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def published(url: str, content: bytes) -> Remote:
    """What is known of a file of that content."""
    return Remote(url, sha256(content), len(content))


class Server(ThreadingHTTPServer):
    """Serves `files` by path, and notes in `fetched` which ones it sent."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.fetched: list[str] = []
        self.url = f"https://127.0.0.1:{self.server_port}"
        self.sent = 1.0  # the part of a file after which a connection ends, or stalls
        self.stalls = False
        self.end = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        name = self.path.removeprefix("/")
        self.send_response(200 if name in self.server.files else 404)
        self.send_header("Content-Length", str(len(self.server.files.get(name, b""))))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        name = self.path.removeprefix("/")
        self.server.fetched.append(name)
        content = self.server.files.get(name, b"")
        self.wfile.write(content[: int(self.server.sent * len(content))])
        self.wfile.flush()
        if self.server.stalls:
            self.server.end.wait(30)

    def log_message(self, *_) -> None:
        pass


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Server]:
    """A web server in this process."""
    with believed() as certificate, Server(files) as server:
        server.socket = certificate.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.end.set()
            server.shutdown()
            thread.join()


def everything_in(folder: Path) -> set[str]:
    """The files below, but for the lock."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".cache/data.lock"}


@pytest.mark.parametrize(("served", "content"), [("a.txt", TEXT), ("a.txt.gz", PACKED)])
def test_a_file_is_fetched_once_and_unpacked(tmp_path, served, content):
    with serving({served: content}) as server:
        for _ in range(2):
            path = download(published(f"{server.url}/{served}", content), tmp_path, "folder/a.txt")
            assert path == tmp_path / "folder/a.txt"
            assert path.read_bytes() == TEXT
    assert server.fetched == [served]
    assert everything_in(tmp_path) == {"folder/a.txt"}


def test_a_file_that_is_there_stays_whatever_its_checksum(tmp_path):
    (tmp_path / "a.txt").write_text("my own")
    with serving({"a.txt": TEXT}) as server:
        assert download(published(f"{server.url}/a.txt", TEXT), tmp_path, "a.txt").read_text() == "my own"
    assert not server.fetched
    assert not (tmp_path / ".cache").exists()  # no lock either: the folder may be read-only


@pytest.mark.parametrize("trouble", ["wrong content", "cut short", "not found", "no server"])
@pytest.mark.parametrize(("served", "content"), [("a.txt", TEXT), ("a.txt.gz", PACKED)])
def test_a_failed_download_is_one_line_and_leaves_nothing(tmp_path, trouble, served, content):
    with serving({served: content}) as server:
        url, reason = f"{server.url}/{served}", "corrupted"
        if trouble == "wrong content":
            server.files[served] = content[:-1] + b"?"
        elif trouble == "cut short":
            server.sent = 0.5
        elif trouble == "not found":
            server.files, reason = {}, "404"
        if trouble != "no server":
            message = user_error(lambda: download(published(url, content), tmp_path, "folder/a.txt"))
    if trouble == "no server":  # the port is closed by now
        reason = "refused"
        message = user_error(lambda: download(published(url, content), tmp_path, "folder/a.txt"))
    assert message.startswith(f"{tmp_path}/folder/a.txt is missing and cannot be downloaded (")
    assert reason in message
    assert f"put {'the content of ' if served.endswith('.gz') else ''}{url} there" in message
    assert "--data_dir" in message
    assert not everything_in(tmp_path)


def test_a_server_that_falls_silent_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SILENCE", 0.2)
    with serving({"a.txt": TEXT}) as server:
        server.sent, server.stalls = 0.5, True
        assert "timed out" in user_error(lambda: download(published(f"{server.url}/a.txt", TEXT), tmp_path, "a.txt"))
    assert not everything_in(tmp_path)


def test_one_of_two_processes_fetches(tmp_path):
    start = fork.Barrier(2)

    def work():
        start.wait()
        path = download(published(f"{server.url}/a.txt.gz", PACKED), tmp_path, "a.txt")
        assert path.read_bytes() == TEXT

    with serving({"a.txt.gz": PACKED}) as server:
        answer = Handler.do_GET
        Handler.do_GET = lambda self: (time.sleep(0.2), answer(self))  # long enough for the other to arrive
        try:
            run_twice_at_once(work)
        finally:
            Handler.do_GET = answer
    assert server.fetched == ["a.txt.gz"]
    assert everything_in(tmp_path) == {"a.txt"}


def begun(work, folder):
    """A process at work on a download, part of which has come."""
    process = fork.Process(target=work)
    process.start()
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in folder.glob("a.txt.*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_a_killed_download_leaves_nothing_in_the_way(tmp_path):
    with serving({"a.txt": TEXT}) as server:

        def work():
            download(published(f"{server.url}/a.txt", TEXT), tmp_path, "a.txt")

        server.sent, server.stalls = 0.5, True
        process = begun(work, tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
        assert len(everything_in(tmp_path)) == 1
        assert not (tmp_path / "a.txt").exists()

        server.sent, server.stalls = 1.0, False
        work()
    assert (tmp_path / "a.txt").read_bytes() == TEXT
    assert everything_in(tmp_path) == {"a.txt"}


def test_ctrl_c_ends_a_download_and_leaves_nothing(tmp_path):
    def work():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever runs the tests may have ignored
        with pytest.raises(KeyboardInterrupt):
            download(published(f"{server.url}/a.txt", TEXT), tmp_path, "a.txt")

    with serving({"a.txt": TEXT}) as server:
        server.sent, server.stalls = 0.5, True
        process = begun(work, tmp_path)
        os.kill(process.pid, signal.SIGINT)
        process.join(5)  # long before the server goes on
        assert process.exitcode == 0
    assert not everything_in(tmp_path)


@pytest.mark.parametrize("blocked", ["", "folder"])
def test_a_folder_that_cannot_be_written(tmp_path, blocked):
    data_dir = tmp_path / "data"
    if blocked:
        data_dir.mkdir()
    (data_dir / blocked).write_text("a file where the folder should be")
    message = user_error(lambda: download(published("https://127.0.0.1:9/a.txt", TEXT), data_dir, "folder/a.txt"))
    assert message.startswith(f"cannot write in {data_dir}/")
    assert "--data_dir" in message
