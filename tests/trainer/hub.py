"""A Hub of Hugging Face in this process: the answers of its API that listing and reading a dataset need."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Hub:
    """A server with one dataset, ``org/texts``; each call of :meth:`commit` makes a new commit the newest."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.ranges: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def commit(self, files: dict[str, bytes]) -> str:
        name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[name] = files
        return name

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, wanted: list[str]) -> Any:
        """Return the JSON of a request to the API, or the content of a file; None: there is no such thing."""
        parts = path.strip("/").split("/")
        if parts[:4] == ["datasets", "org", "texts", "resolve"]:
            return self._files(parts[4]).get("/".join(parts[5:]))
        if parts[:4] != ["api", "datasets", "org", "texts"]:
            return None
        revision = parts[5] if len(parts) > 5 else "main"
        files = self._files(revision)
        if not files:
            return None
        newest = revision if revision in self.commits else list(self.commits)[-1]
        if len(parts) <= 4 or parts[4] == "revision":
            return {"id": "org/texts", "sha": newest, "private": False, "tags": [], "siblings": []}
        if parts[4] == "paths-info":
            return [_entry(name, files[name]) for name in wanted if name in files]
        folder = "".join(f"{part}/" for part in parts[6:])
        return [_entry(name, content) for name, content in files.items() if name.startswith(folder)] or None

    def _files(self, revision: str) -> dict[str, bytes]:
        if revision == "main":
            return list(self.commits.values())[-1]
        return self.commits.get(revision, {})


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._respond([])

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            given = json.loads(body) if body.startswith("{") else parse_qs(body)
            self._respond(list(given.get("paths", [])))

        def _respond(self, wanted: list[str]) -> None:
            found = hub.answer(unquote(urlsplit(self.path).path), wanted)
            extent = self.headers.get("Range")
            answer = {"error": "not found"} if found is None else found
            content = found if isinstance(found, bytes) else json.dumps(answer).encode()
            if extent and isinstance(found, bytes):
                hub.ranges.append(extent)
                first, _, last = extent.removeprefix("bytes=").partition("-")
                content = content[int(first) : int(last) + 1 if last else None]
            self.send_response(404 if found is None else 206 if extent else 200)
            if found is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
