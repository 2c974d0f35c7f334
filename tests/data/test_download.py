import gzip
import hashlib

import pytest

from kvt.data import download as module
from kvt.data.download import Remote, download
from kvt.data.images import SETS
from kvt.tasks.language import SHAKESPEARE
from kvt.tasks.translation import MULTI30K
from tests.data.helpers import files_in, serving, user_error

TEXT = b"Ein Satz,\nnoch einer.\n" * 5000
PACKED = gzip.compress(TEXT)


def published(url: str, content: bytes) -> Remote:
    return Remote(url, hashlib.sha256(content).hexdigest())


def test_every_published_file_has_an_https_address_and_a_checksum_of_its_own():
    remotes = [SHAKESPEARE, *MULTI30K.values()]
    remotes += [Remote(f"{known.url}/{name}", sha) for known in SETS.values() for name, sha in known.files.items()]
    assert all(remote.url.startswith("https://") and len(remote.sha256) == 64 for remote in remotes)
    assert len({remote.sha256 for remote in remotes}) == len({remote.url for remote in remotes}) == len(remotes)


@pytest.mark.parametrize(("served", "content"), [("a.txt", TEXT), ("a.txt.gz", PACKED)])
def test_a_file_is_fetched_once_and_unpacked(tmp_path, served, content):
    with serving({served: content}) as server:
        for _ in range(2):
            path = download(published(f"{server.url}/{served}", content), tmp_path, "folder/a.txt")
            assert path == tmp_path / "folder/a.txt"
            assert path.read_bytes() == TEXT
    assert server.fetched == [served]
    assert files_in(tmp_path) == {"folder/a.txt"}


@pytest.mark.parametrize("trouble", ["wrong content", "cut short", "not found", "no server", "silence"])
def test_a_failed_download_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, trouble):
    served, content = "a.txt.gz", PACKED
    with serving({served: content}) as server:
        url = f"{server.url}/{served}"
        if trouble == "wrong content":
            server.files[served] = content[:-1] + b"?"
        elif trouble == "cut short":
            server.sent = 0.5
        elif trouble == "not found":
            server.files = {}
        elif trouble == "no server":
            url = f"http://127.0.0.1:9/{served}"
        else:
            monkeypatch.setattr(module, "TIMEOUT", 0.2)
            server.sent, server.stalls = 0.5, True
        message = user_error(lambda: download(published(url, content), tmp_path, "folder/a.txt"))
    assert [word for word in (f"{tmp_path}/folder/a.txt", url, "--data_dir") if word not in message] == []
    assert not files_in(tmp_path)
