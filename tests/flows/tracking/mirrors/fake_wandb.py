"""A W&B server on loopback with as much of its interface as wandb's client uses for a run: GraphQL and file streams.

It keeps rows, configuration and the like, and answers a resumed run with what it has.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Kept:
    rows: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    notes: str = ""
    tags: list[str] = field(default_factory=list)
    group: str = ""
    exit_code: int | None = None
    rewinds: list[int] = field(default_factory=list)

    def curve(self, key: str, axis: str = "_step") -> list[tuple[int, float]]:
        """Return a metric by one of its axes."""
        return [(int(row[axis]), row[key]) for row in self.rows if key in row]


class FakeWandb:
    def __init__(self, port: int = 0) -> None:
        self.runs: dict[str, Kept] = {}
        #: It can remove rows.
        self.rewinds = True
        #: It answers every request with 503.
        self.away = False
        #: Everything that it was sent.
        self.received = b""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                return

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake.received += body
                if fake.away:
                    self._answer({}, 503)
                elif self.path == "/graphql":
                    self._answer(fake.graphql(json.loads(body)))
                elif self.path.endswith("/file_stream"):
                    fake.stream(self.path.split("/")[-2], json.loads(body))
                    self._answer({})
                else:
                    self._answer({})

            def do_PUT(self) -> None:
                fake.received += self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._answer({})

            def do_GET(self) -> None:
                self._answer({})

            def _answer(self, value: dict[str, Any], status: int = 200) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A client that ends closes its connections."""

        self.server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        found = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
        answer = getattr(self, f"_{found[1]}", None) if found else None
        return answer(request["variables"]) if answer else {"data": {}}

    def stream(self, run_id: str, body: dict[str, Any]) -> None:
        """Take rows at their offset, and the summary."""
        kept, files = self.runs[run_id], body.get("files") or {}
        if history := files.get("wandb-history.jsonl"):
            kept.rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
        if summary := files.get("wandb-summary.json"):
            kept.summary = json.loads(summary["content"][-1])
        if body.get("complete"):
            kept.exit_code = body["exitcode"]

    def _ServerFeaturesQuery(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"data": {"serverInfo": {"features": []}}}

    def _RunResumeStatus(self, variables: dict[str, Any]) -> dict[str, Any]:
        kept = self.runs.get(variables["name"])
        bucket = kept and {
            **self._bucket(variables["name"], kept),
            "summaryMetrics": json.dumps(kept.summary),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in kept.rows[-1:]]),
            "eventsTail": "[]",
            "tags": kept.tags,
            "notes": kept.notes,
            "wandbConfig": json.dumps({"t": {}}),
        }
        return {"data": {"model": {**self._project(), "bucket": bucket}}}

    def _UpsertBucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        inserted = variables["name"] not in self.runs
        kept = self.runs.setdefault(variables["name"], Kept())
        kept.config.update(json.loads(variables.get("config") or "{}"))
        kept.name = variables.get("displayName") or kept.name
        kept.group = variables.get("groupName") or kept.group
        if variables.get("notes") is not None:
            kept.notes = variables["notes"]
        if variables.get("tags") is not None:
            kept.tags = variables["tags"]
        return {"data": {"upsertBucket": {"bucket": self._bucket(variables["name"], kept), "inserted": inserted}}}

    def _RewindRun(self, variables: dict[str, Any]) -> dict[str, Any]:
        kept = self.runs.get(variables["runName"])
        if not self.rewinds or kept is None:
            return {"data": {"rewindRun": None}, "errors": [{"message": "rewinding is not available"}]}
        step = int(variables["metricValue"])
        kept.rows = [row for row in kept.rows if row["_step"] <= step]
        kept.rewinds.append(step)
        return {"data": {"rewindRun": {"rewoundRun": self._bucket(variables["runName"], kept)}}}

    def _CreateRunFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in variables["files"]]
        return {"data": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}}

    def _bucket(self, run_id: str, kept: Kept) -> dict[str, Any]:
        return {
            "id": "x",
            "name": run_id,
            "displayName": kept.name,
            "description": "",
            "config": json.dumps(kept.config),
            "sweepName": None,
            "historyLineCount": len(kept.rows),
            "project": self._project(),
        }

    def _project(self) -> dict[str, Any]:
        return {"id": "p", "name": "hlatctl", "entity": {"id": "e", "name": "team"}}


@contextmanager
def serving(port: int = 0) -> Iterator[FakeWandb]:
    fake = FakeWandb(port)
    thread = threading.Thread(target=fake.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.server.shutdown()
        fake.server.server_close()
        thread.join()
