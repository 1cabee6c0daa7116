"""A webhook on loopback that records its messages, and a run to report on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from conf import load
from conf.schema import Config, NotifyConfig
from hlatctl.run import runs
from hlatctl.run.journal import FLOW_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths

#: Marks the secret in every URL of these tests.
TOKEN = "Secret4711Token"
ENTRY = "env:HOOK_URL"


@dataclass
class Hook:
    """A webhook.

    Args:
        status: what it answers.
        hangs: it answers only when the test ends.
        messages: the bodies that it got and accepted.
    """

    url: str = ""
    status: int = 200
    hangs: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def titles(self) -> list[str]:
        return [message["title"] for message in self.messages]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            while hook.hangs and not hook.ended.wait(0.01):
                try:
                    self.wfile.write(b"H")  # byte by byte, so that no time-out of a socket ends it
                except OSError:
                    return
                time.sleep(0.05)
            if hook.status == 200:
                hook.messages.append(json.loads(content))
            self.send_response(hook.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hook.url = f"json://user:{TOKEN}@127.0.0.1:{server.server_address[1]}/{TOKEN}"
    monkeypatch.setenv("HOOK_URL", hook.url)
    yield hook
    hook.ended.set()
    server.shutdown()
    server.server_close()
    thread.join()


MakeRun = Callable[..., RunPaths]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(run_id: str = "one", **notify: Any) -> RunPaths:
        config = Config(runs_dir=str(tmp_path), notify=NotifyConfig(**{"urls": [ENTRY], **notify}))
        run = runs.create_run(tmp_path, run_id, load.dump(config))
        journal(run, "run_created", run_id=run_id, simulated=False)
        journal(run, "head_started", pid=1, host="here")
        return run

    return make


def journal(run: RunPaths, kind: str, **fields: Any) -> None:
    """Journal an event as the flow."""
    with JournalWriter(run, FLOW_WRITER) as writer:
        writer.append(kind, **fields)


def fail(run: RunPaths) -> None:
    journal(run, "run_finished", outcome="failed", step=7, tokens=70, message="no node", hint="repair a node")
