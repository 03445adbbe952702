"""A hub on loopback: it speaks enough of the hub's protocol for the real client libraries."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34
_API = re.compile(r"/api/(?P<repo>(?:models|datasets)/[^/]+/[^/]+)(?P<rest>/.*)?")
_FILE = re.compile(r"/(?P<data>datasets/)?(?P<id>[^/]+/[^/]+)/resolve/[^/]+/(?P<name>.+)")


class Mirror(ThreadingHTTPServer):
    """Serves ``repos``: "models/org/name" or "datasets/org/name" to the content of each file."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.asked: list[str] = []
        self.broken: set[str] = set()
        """Names of files that are refused."""
        self.gated: set[str] = set()
        """Repositories that answer 403."""

    @property
    def url(self) -> str:
        """Address for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(repos: dict[str, dict[str, bytes]]) -> Iterator[Mirror]:
    """A mirror that runs for the length of a with block."""
    server = Mirror(repos)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.server.asked.append(path)
        if match := _API.fullmatch(path):
            self._api(match["repo"], match["rest"] or "")
        elif match := _FILE.fullmatch(path):
            self._file(f"{match['data'] or 'models/'}{match['id']}", match["name"])
        else:
            self._send(404, b"")

    def _api(self, repo: str, rest: str) -> None:
        if repo in self.server.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        files = self.server.repos.get(repo)
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if rest.startswith("/tree/"):
            return self._send(200, _json(_tree(files, rest.removeprefix("/tree/").split("/")[1:])))
        siblings = [{"rfilename": name} for name in files]
        name = repo.split("/", 1)[1]
        return self._send(200, _json({"id": name, "sha": COMMIT, "siblings": siblings}))

    def _file(self, repo: str, name: str) -> None:
        content = self.server.repos.get(repo, {}).get(name)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if name in self.server.broken:
            return self._send(403, b"")
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(content)}"'}
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, total = int(part[1]), len(content)
            stop = min(total, int(part[2]) + 1) if part[2] else total
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
            return self._send(206, content[start:stop], headers)
        return self._send(200, content, headers)

    def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in ((headers or {}) | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Keep the test output quiet."""


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _tree(files: dict[str, bytes], folder: list[str]) -> list[dict[str, Any]]:
    """Files below a folder, and the folders that they are in."""
    prefix = "".join(f"{part}/" for part in folder)
    found: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        if not name.startswith(prefix):
            continue
        for parent in [name[:i] for i, letter in enumerate(name) if letter == "/"]:
            if parent.startswith(prefix):
                found[parent] = {"type": "directory", "path": parent, "oid": COMMIT, "size": 0}
        oid = _oid(content)
        found[name] = {"type": "file", "path": name, "oid": oid, "size": len(content)}
    return list(found.values())
