"""A stand-in for the Hugging Face Hub: one public dataset, `me/tiny`, two shards of JSON lines, over HTTP."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs

COMMIT = "a" * 40
BLOB = "b" * 40
FILES = {
    "README.md": b"---\nlicense: mit\n---\n",
    **{
        f"data/train-{shard}.jsonl": b"".join(
            b'{"text": "row %d of shard %d", "n": 1}\n' % (i, shard) for i in range(300)
        )
        for shard in (0, 1)
    },
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Keeps the test's output clean."""

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if path == "/api/agent-harnesses":
            return self.send(200, b'{"harnesses": []}')
        request = re.fullmatch(r"/(api/)?datasets/([^/]+/[^/]+)/?([^/]*)/?([^/]*)/?(.*)", path)
        if request is None or request[2] != "me/tiny":
            return self.send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        _, is_api, _, action, _, name = request.group(0, 1, 2, 3, 4, 5)
        if is_api:
            return self.describe(action, name, body)
        return self.file(name)

    do_GET = do_HEAD = do_POST = answer  # noqa: N815 (the names http.server looks for)

    def describe(self, action: str, name: str, body: bytes) -> None:
        entries = [{"type": "file", "oid": BLOB, "size": len(FILES[path]), "path": path} for path in FILES]
        if action in ("", "revision"):
            names = [{"rfilename": path} for path in FILES]
            answer = {"id": "me/tiny", "sha": COMMIT, "siblings": names, "private": False, "tags": []}
        elif action == "tree":
            folders = [{"type": "directory", "oid": BLOB, "size": 0, "path": "data"}]
            answer = [entry for entry in entries + folders if entry["path"].rpartition("/")[0] == name]
        else:
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            answer = [entry for entry in entries if entry["path"] in wanted]
        self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def file(self, name: str) -> None:
        if name not in FILES:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        content = FILES[name]
        headers = {"ETag": f'"{BLOB}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
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
def hub_server() -> Iterator[str]:
    """Serves for as long as the context lasts; gives the address for HF_ENDPOINT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
