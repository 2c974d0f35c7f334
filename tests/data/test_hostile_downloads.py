"""Servers that send something else, archives and weights that somebody else made: nothing of it is opened, or left."""

import gc
import gzip
import hashlib
import os
import pickle
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import strategies as st
from torchvision.models import get_model_weights

from kvt.data import download as module
from kvt.data.download import Remote, download
from kvt.data.features import BACKBONES
from kvt.data.images import PUBLISHED, open_images
from kvt.data.texts import MULTI30K, SHAKESPEARE
from tests.data.test_download import everything_in, published
from tests.data.test_images import user_error
from tests.helpers.hostile import fuzz
from tests.helpers.tls import believed

TEXT = b"To be, or not to be.\n" * 50
Answer = Callable[[Callable[[bytes], None]], None]
"""What a server does with a connection, given what sends bytes to it."""


@contextmanager
def answering(answer: Answer, proxy: bool = False) -> Iterator[str]:
    """A server that says whatever it likes to whoever asks, as a proxy only once it is that; its address."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, suppress(OSError):
                    if proxy:
                        connection.recv(2**16)
                        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                    with certificate.wrap_socket(connection, server_side=True) as encrypted:
                        encrypted.recv(2**16)
                        answer(encrypted.sendall)

    with believed() as certificate, socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.getsockname()[1]}/a.txt"
        finally:
            gc.collect()  # a connection lasts as long as the error that ended it, which is in cycles
            server.shutdown(socket.SHUT_RDWR)
            thread.join(30)
            assert not thread.is_alive()


def refused(tmp_path: Path, answer: Answer, ended: threading.Event | None = None) -> str:
    """The line that a hostile answer comes to; with it, the answer has `ended`."""
    with answering(answer) as url:
        line = user_error(lambda: download(published(url, TEXT), tmp_path, "a.txt"))
        if ended:
            ended.set()
    assert line.startswith(f"{tmp_path}/a.txt is missing and cannot be downloaded (")
    assert "--data_dir" in line
    assert len(line) < 1000
    assert not everything_in(tmp_path)
    return line


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "status": (b"HTTP/1.1 200 ", b"x"),
    "header": (OK + b"X: ", b"x"),
    "headers": (OK, b"X: y\r\n"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (b"HTTP/1.0 200 OK\r\n\r\n", b"x"),
    "chunk extension": (CHUNKED + b"5;", b"x"),
    "chunk extensions": (CHUNKED, b"1;x\r\na\r\n"),
    "trailer": (CHUNKED + b"1\r\na\r\n0\r\nX: ", b"x"),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\n", b"X: y\r\n"),
    "redirect body": (b"HTTP/1.1 302 Found\r\nLocation: /b\r\n\r\n", b"x"),
    "error body": (b"HTTP/1.1 404 Not Found\r\n\r\n", b"x"),
    "nothing": (b"", b""),
}
"""How an answer begins, and what it goes on with."""


@pytest.mark.parametrize(("start", "piece"), ENDLESS.values(), ids=ENDLESS)
def test_a_trickle_without_an_end_times_out(tmp_path, monkeypatch, start, piece):
    monkeypatch.setattr(module, "START", 0.3)
    ended = threading.Event()

    def answer(send: Callable[[bytes], None]) -> None:
        send(start)
        for _ in range(500):  # an end after all, should the test fail
            if not ended.wait(0.02):
                send(piece)

    before = time.monotonic()
    assert "404" in (line := refused(tmp_path, answer, ended)) or "timed out" in line
    assert time.monotonic() - before < 5


def test_a_trickle_before_encryption_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SILENCE", 0.3)
    ended = threading.Event()

    def serve() -> None:
        with suppress(OSError), server.accept()[0] as connection:
            connection.sendall(b"\x16\3\3\x40\0\2")  # 16 KiB of a server's greeting
            for _ in range(500):
                if not ended.wait(0.02):
                    connection.sendall(b"\0")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        before = time.monotonic()
        url = f"https://127.0.0.1:{server.getsockname()[1]}/a.txt"
        assert "timed out" in user_error(lambda: download(published(url, TEXT), tmp_path, "a.txt"))
        assert time.monotonic() - before < 5
        ended.set()
        thread.join()


@pytest.mark.parametrize(("start", "piece"), ENDLESS.values(), ids=ENDLESS)
def test_a_flood_without_an_end_is_cut(tmp_path, start, piece):
    """By the bytes that have come: there is time enough."""
    sent = []

    def answer(send: Callable[[bytes], None]) -> None:
        send(start)
        for _ in range(2**11 if piece else 0):  # an end after all, should the test fail
            send(piece * (2**16 // len(piece)))
            sent.append(2**16)

    refused(tmp_path, answer)
    assert sum(sent) < 2**24  # what the buffers of the two ends hold


def test_a_slow_line_gets_there(tmp_path, monkeypatch):
    """In more time than there is to begin with."""
    monkeypatch.setattr(module, "START", 0.2)
    monkeypatch.setattr(module, "SLOWEST", 500)

    def answer(send: Callable[[bytes], None]) -> None:
        send(b"HTTP/1.0 200 OK\r\n\r\n")
        for start in range(0, len(TEXT), 50):
            time.sleep(0.05)
            send(TEXT[start : start + 50])

    before = time.monotonic()
    with answering(answer) as url:
        assert download(published(url, TEXT), tmp_path, "a.txt").read_bytes() == TEXT
    assert time.monotonic() - before > 1


NOWHERE = [
    *("", "//", "///", "?", "\0", "data:,x", "http://127.0.0.1:9/", "ftp://127.0.0.1:9/", "file:///etc/passwd"),
    *("https:///", "https://%", "https://[", "https://[x]/", "https://a b/", "https://é/", "https://\x01/"),
    *("https://127.0.0.1:x/", "https://127.0.0.1:-1/", "https://127.0.0.1:99999999/"),
    *("https://a..b/", f"https://{'a' * 70}.example/", "x" * 60000),
]
"""What a redirect may name that is no other address."""


@pytest.mark.parametrize("place", NOWHERE)
def test_no_redirect_leads_astray(tmp_path, place):
    asked = []

    def answer(send: Callable[[bytes], None]) -> None:
        asked.append(send)
        send(b"HTTP/1.0 302 Found\r\nLocation: " + place.encode() + b"\r\n\r\n")

    refused(tmp_path, answer)
    assert len(asked) < 20


@pytest.mark.parametrize("proxies", [{}, {"http_proxy": "https://127.0.0.1:9", "https_proxy": "https://127.0.0.1:9"}])
def test_nothing_is_asked_without_encryption(tmp_path, monkeypatch, proxies):
    asked = []
    with answering(lambda send: asked.append(send)) as url:
        for name, proxy in proxies.items():
            monkeypatch.setenv(name, proxy)
        plain = published(url.replace("https:", "http:"), TEXT)
        assert "unknown url type: http" in user_error(lambda: download(plain, tmp_path, "a.txt"))
    assert not asked


def test_a_server_is_believed_with_a_certificate_alone(tmp_path, monkeypatch):
    with answering(lambda send: send(OK + b"\r\n" + TEXT)) as url:
        other = url.replace("127.0.0.1", "localhost")  # which the certificate does not name
        assert "CERTIFICATE_VERIFY_FAILED" in user_error(lambda: download(published(other, TEXT), tmp_path, "a.txt"))
        monkeypatch.delenv("SSL_CERT_FILE")
        assert "CERTIFICATE_VERIFY_FAILED" in user_error(lambda: download(published(url, TEXT), tmp_path, "a.txt"))


def test_a_proxy_of_the_environment(tmp_path, monkeypatch):
    with answering(lambda send: send(b"HTTP/1.0 200 OK\r\n\r\n" + TEXT), proxy=True) as url:
        monkeypatch.setenv("https_proxy", url.replace("https:", "http:"))
        path = download(published("https://files.example/a.txt", TEXT), tmp_path, "a.txt")
    assert path.read_bytes() == TEXT


def test_every_published_file_is_asked_for_by_https_and_checked():
    archives = [remote for known in PUBLISHED.values() for remote in known.archives.values()]
    for remote in (SHAKESPEARE, *MULTI30K.values(), *archives):
        assert remote.url.startswith("https://")
        assert len(remote.sha256) == 64
        assert remote.size < 2**28
    for backbone in BACKBONES:
        url = get_model_weights(backbone).DEFAULT.url
        assert url.startswith("https://")
        assert len(url.rpartition("-")[2].removesuffix(".pth")) >= 8  # digits of its checksum


def test_a_gzip_bomb_is_not_unpacked(tmp_path_factory, held):
    """Twenty gigabytes in twenty megabytes; `held` leaves room for six."""
    folder = tmp_path_factory.mktemp("data")
    bomb = gzip.compress(bytes(2**27), 1) * 160

    def answer(send: Callable[[bytes], None]) -> None:
        send(b"HTTP/1.0 200 OK\r\n\r\n" + bomb)

    bombed = Remote("", hashlib.sha256(TEXT).hexdigest(), len(bomb))
    with answering(answer) as url:
        line = held(lambda: download(bombed._replace(url=f"{url}.gz"), folder, "a.txt"), "a.txt")
    assert "not the published file" in line
    assert not everything_in(folder)


heads = st.one_of(
    st.sampled_from([b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 206 Part\r\n", b"HTTP/1.1 204 No\r\n"]),
    st.sampled_from(
        [b"", b"\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/9 999\r\n", b"SSH-2.0-x\r\n", b"\0" * 70000]
    ),
    st.binary(max_size=40).map(lambda text: b"HTTP/1.1 " + text + b"\r\n"),
)
headers = st.lists(
    st.one_of(
        st.integers(-5, 10**20).map(lambda n: b"Content-Length: %d\r\n" % n),
        st.sampled_from(
            [b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: gzip\r\n", b"X: " + b"x" * 10**5 + b"\r\n"]
        ),
        st.sampled_from([b"Location: /a.txt\r\n", b"Location: http://127.0.0.1:9/\r\n", b"Connection: keep-alive\r\n"]),
        st.binary(max_size=30).map(lambda text: text + b": x\r\n"),
    ),
    max_size=3,
)
bodies = st.one_of(
    st.binary(max_size=100),
    st.sampled_from([TEXT[:-1], TEXT + b"x", TEXT[:-1] + b"?", b"ffffffffff\r\n" + TEXT, b"-1\r\n" + TEXT, b"5\r\nab"]),
)


@fuzz(0.03, head=heads, headers=headers, body=bodies)
def test_strange_answers(tmp_path_factory, held, head, headers, body):
    folder = tmp_path_factory.mktemp("data")
    with answering(lambda send: send(head + b"".join(headers) + b"\r\n" + body)) as url:
        assert held(lambda: download(published(url, TEXT), folder, "a.txt"), "a.txt") is not None
    assert not everything_in(folder)


# ---- archives --------------------------------------------------------------------------------------------------------


class Gadget:
    """A pickle of it is a call."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch ran",)


@pytest.fixture
def _offline(monkeypatch):
    def unreachable(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)


def hostile_tar(folder: str) -> bytes:
    file = BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in (f"{folder}/data_batch_1", f"{folder}/train", "../outside", "/tmp/outside"):
            content = pickle.dumps({"data": Gadget()})
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, BytesIO(content))
    return file.getvalue()


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")])
def test_no_archive_is_opened_that_was_not_published(in_tmp_dir, name, folder):
    data = in_tmp_dir / "deep" / "data"
    data.mkdir(parents=True)
    (archive,) = PUBLISHED[name].archives
    (data / archive).write_bytes(hostile_tar(folder))
    line = user_error(open_images(name, data).prepare)
    assert f"{name} is missing or broken in {data} " in line
    assert archive in line
    assert everything_in(in_tmp_dir) == {f"deep/data/{archive}", "deep/data/.cache/data.lock"}


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")])
def test_no_pickle_is_opened_that_was_not_published(in_tmp_dir, name, folder):
    cifar = in_tmp_dir / folder
    cifar.mkdir()
    for file in ("data_batch_1", "data_batch_2", "test_batch", "batches.meta", "train", "test", "meta"):
        (cifar / file).write_bytes(pickle.dumps({"data": Gadget()}))
    assert f"{name} is missing or broken" in user_error(open_images(name, in_tmp_dir).prepare)
    assert not Path("ran").exists()


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("what", ["pipe", "zeros", "folder", "other", "labels"])
def test_what_is_no_mnist_is_not_used(in_tmp_dir, what):
    raw = in_tmp_dir / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 5), ("t10k", 3)):
        side = 32 if what == "other" else 28
        sizes = b"".join(n.to_bytes(4, "big") for n in (count, side, side))
        (raw / f"{split}-images-idx3-ubyte").write_bytes(b"\0\0\x08\3" + sizes + bytes(count * side * side))
        label = b"\x0b" if what == "labels" else b"\1"
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\1" + count.to_bytes(4, "big") + label * count)
    spoiled = raw / "train-images-idx3-ubyte"
    if what in ("pipe", "zeros", "folder"):
        spoiled.unlink()
        {"pipe": os.mkfifo, "zeros": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[what](spoiled)
        archive = raw / "train-images-idx3-ubyte.gz"
        {"pipe": os.mkfifo, "zeros": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[what](archive)
    assert f"mnist is missing or broken in {raw}" in user_error(open_images("mnist", in_tmp_dir).prepare)
