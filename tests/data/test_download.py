"""Files that kvt downloads: complete, checked, unpacked, once; or one line that says what to do."""

import gzip
import hashlib
import multiprocessing
import time
from pathlib import Path

import pytest

from kvt.data.files import Remote, download, once
from kvt.tasks.language import SHAKESPEARE
from kvt.tasks.translation import MULTI30K
from tests.data.helpers import files_in, user_error

TEXT = b"Ein Satz,\nnoch einer.\n" * 5000


def published(path: Path, content: bytes) -> Remote:
    """Write what a server at file:// serves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return Remote(path.as_uri(), hashlib.sha256(content).hexdigest())


def test_every_published_file_has_an_https_address_and_a_checksum_of_its_own():
    remotes = [SHAKESPEARE, *MULTI30K.values()]
    assert all(remote.url.startswith("https://") and len(remote.sha256) == 64 for remote in remotes)
    assert len({remote.sha256 for remote in remotes}) == len({remote.url for remote in remotes}) == len(remotes)


@pytest.mark.parametrize(("name", "content"), [("a.txt", TEXT), ("a.txt.gz", gzip.compress(TEXT))])
def test_a_file_is_fetched_once_and_unpacked(tmp_path, name, content):
    remote = published(tmp_path / "server" / name, content)
    for _ in range(2):
        path = download(remote, tmp_path / "data", "folder/a.txt")
        assert path.read_bytes() == TEXT
        (tmp_path / "server" / name).unlink(missing_ok=True)
    assert files_in(tmp_path / "data") == {"folder/a.txt"}


@pytest.mark.parametrize("trouble", ["wrong content", "cut short", "not found", "no server"])
def test_a_failed_download_is_one_line_and_leaves_nothing(tmp_path, trouble):
    server = tmp_path / "server" / "a.txt.gz"
    remote = published(server, gzip.compress(TEXT))
    if trouble == "not found":
        server.unlink()
    elif trouble == "no server":
        remote = Remote("http://127.0.0.1:9/a.txt.gz", remote.sha256)
    else:
        server.write_bytes(server.read_bytes()[:-1] + b"?" * (trouble == "wrong content"))
    message = user_error(lambda: download(remote, tmp_path / "data", "folder/a.txt"))
    assert [word for word in (f"{tmp_path}/data/folder/a.txt", remote.url, "--data_dir") if word not in message] == []
    assert not files_in(tmp_path / "data")


def test_of_two_processes_one_works(tmp_path):
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(2)

    def work() -> None:
        with (tmp_path / "calls").open("a") as calls:
            calls.write("called\n")
        time.sleep(0.1)  # long enough for the other process to arrive
        (tmp_path / "done").touch()

    def call() -> None:
        start.wait()
        once(tmp_path, (tmp_path / "done").exists, work)

    processes = [fork.Process(target=call) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert (tmp_path / "calls").read_text() == "called\n"
