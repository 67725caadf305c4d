"""A stand-in for the Hugging Face Hub, over HTTP: one public dataset, `me/tiny`, and the models that are given.

Each revision of a repository is a commit.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import ClassVar
from urllib.parse import parse_qs, unquote

import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _http

MAIN = "main"
FILES = {
    "README.md": b"---\nlicense: mit\n---\n",
    **{
        f"data/train-{shard}.jsonl": b"".join(
            b'{"text": "row %d of shard %d", "n": 1}\n' % (i, shard) for i in range(300)
        )
        for shard in (0, 1)
    },
}


def blob(content: bytes) -> str:
    """The hash of a file, which the client takes for its name."""
    return hashlib.sha1(content).hexdigest()


def names_of(repository: str) -> tuple[str, str]:
    """The revision of `OWNER/NAME@REVISION`, and its commit."""
    revision = repository.partition("@")[2] or MAIN
    return revision, hashlib.sha1(revision.encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: ClassVar[dict[str, dict[str, bytes]]] = {"datasets/me/tiny": FILES}
    """the files of each, by `datasets/OWNER/NAME` or `models/OWNER/NAME`, and @REVISION for others than the main one"""

    def log_message(self, *_: object) -> None:
        """Keeps the test's output clean."""

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if path == "/api/agent-harnesses":
            return self.send(200, b'{"harnesses": []}')
        if not path.startswith(("/api/", "/datasets/")):
            path = f"/models{path}"
        request = re.fullmatch(r"/(api/)?((?:datasets|models)/[^/]+/[^/]+)/?([^/]*)/?([^/]*)/?(.*)", path)
        if request is None or request[2] not in self.repositories:
            return self.send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        is_api, repository, action, name = request.group(1, 2, 3, 5)
        asked = unquote(request[4]) if action in ("resolve", "revision", "tree") else MAIN
        found = [each for each in self.repositories if each.partition("@")[0] == repository and asked in names_of(each)]
        if not found:
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        self.commit, self.files = names_of(found[0])[1], self.repositories[found[0]]
        if is_api:
            return self.describe(repository.partition("/")[2], action, name, body)
        return self.file(name)

    do_GET = do_HEAD = do_POST = answer  # noqa: N815 (the names http.server looks for)

    def describe(self, repository: str, action: str, name: str, body: bytes) -> None:
        sizes = {path: len(content) for path, content in self.files.items()}
        entries = [{"type": "file", "oid": blob(self.files[path]), "size": sizes[path], "path": path} for path in sizes]
        if action in ("", "revision"):
            names = [{"rfilename": path} for path in self.files]
            answer = {"id": repository, "sha": self.commit, "siblings": names, "private": False, "tags": []}
        elif action == "tree":
            parents = {path.rpartition("/")[0] for path in self.files} - {""}
            folders = [
                {"type": "directory", "oid": blob(path.encode()), "size": 0, "path": path} for path in sorted(parents)
            ]
            everything = "recursive=true" in self.path.lower()
            answer = [e for e in entries + folders if everything or e["path"].rpartition("/")[0] == name]
        else:
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            answer = [entry for entry in entries if entry["path"] in wanted]
        self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def file(self, name: str) -> None:
        if name not in self.files:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit})
        content = self.files[name]
        headers = {"ETag": f'"{blob(content)}"', "X-Repo-Commit": self.commit, "Accept-Ranges": "bytes"}
        if "Range" not in self.headers:
            return self.send(200, content, headers)
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.send(206, content[first : last + 1], headers)

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub_server(models: dict[str, dict[str, bytes]] | None = None) -> Iterator[str]:
    """Serves for as long as the context lasts; gives the address for HF_ENDPOINT.

    `models`: the files of each model, by OWNER/NAME; those of another revision by OWNER/NAME@REVISION.
    """
    given = {f"models/{name}": files for name, files in (models or {}).items()}
    handler = type("Handler", (Handler,), {"repositories": Handler.repositories | given})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(300)


def ask_here(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Makes the Hub's client in this process ask `address`, and keep files in `cache`."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    # Made when the client was imported; diffusers asks it.
    monkeypatch.setattr(hf_api.api, "endpoint", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # Where nobody answers it asks five times again, and waits 23 s in between.
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))
