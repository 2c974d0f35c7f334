"""An exported model is uploaded: to a stand-in that answers the four requests that this takes."""

import json
from base64 import b64decode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from kvt.cli.main import main

constants = pytest.importorskip("huggingface_hub.constants")


def test_a_repository_without_a_name_is_a_mistake(mistake, trained, monkeypatch):
    monkeypatch.setattr("sys.argv", ["kvt", "export", str(trained("reverse")), "--out", "house", "--push", ""])
    assert "--push: expected the repository, OWNER/NAME" in mistake(main)


class StandIn(BaseHTTPRequestHandler):
    """Creates repositories, and takes commits of small files."""

    created: dict[str, bool]  # whether each is private
    files: dict[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer secret":
            return self.answer(401, {"error": "Invalid credentials"})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.created[name] = asked.get("private", asked.get("visibility") == "private")
            return self.answer(200, {"url": self.url(f"/{name}"), "name": name})
        if self.path == "/api/validate-yaml":
            header = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            errors = [] if header["library_name"] == "kvt" else [{"message": "no library"}]
            return self.answer(200, {"errors": errors, "warnings": []})
        if self.path.endswith("/preupload/main"):
            modes = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return self.answer(200, {"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = b64decode(line["value"]["content"])
        commit = self.url(self.path.removeprefix("/api/models").replace("/main", f"/{'0' * 40}"))
        return self.answer(200, {"success": True, "commitUrl": commit, "commitOid": "0" * 40})

    def url(self, path: str) -> str:
        return f"http://{self.headers['Host']}{path}"

    def answer(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def stand_in(monkeypatch) -> Iterator[type[StandIn]]:
    handler = type("Handler", (StandIn,), {"created": {}, "files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "secret")
    yield handler
    server.shutdown()
    server.server_close()


def test_what_was_exported_is_uploaded_to_a_private_repository(trained, says, stand_in):
    lines = says("export", trained("reverse"), "--out", "house", "--push", "me/reverse-kv")
    assert lines[-1].endswith("/me/reverse-kv")
    assert stand_in.created == {"me/reverse-kv": True}
    assert stand_in.files == {path.name: path.read_bytes() for path in Path("house").iterdir()}


MISTAKES = [("wrong", "me/model", "hf auth login"), ("secret", "a/b/c", "a/b/c")]


@pytest.mark.parametrize(("token", "name", "told"), MISTAKES)
def test_mistakes(trained, stand_in, monkeypatch, in_tmp_dir, capsys, token, name, told):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("sys.argv", ["kvt", "export", str(trained("reverse")), "--out", "house", "--push", name])
    with pytest.raises(SystemExit) as ended:
        main()
    line = capsys.readouterr().err
    assert ended.value.code == 2
    assert line.count("\n") == 1
    assert f"--push {name}" in line
    assert told in line
    assert not stand_in.files
