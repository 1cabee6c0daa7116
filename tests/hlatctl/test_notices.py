"""Notices that a node is taken back, with a stand-in for EC2's metadata service, and what the node's program does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hlatctl import notices
from hlatctl.notices import Metadata, Notice, Reader, Watch, append
from tests.waiting import WAIT_S

SPOT, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
#: Saves its checkpoint when it is asked to stop.
TRAINER = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\ntime.sleep(600)"


class Service(ThreadingHTTPServer):
    """The instance metadata service: version 2 only, and items exist only while they are set."""

    def __init__(self) -> None:
        self.items: dict[str, str] = {}
        self.tokens: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.server.tokens.append(f"token-{len(self.server.tokens)}")
        self._answer(200 if known else 400, self.server.tokens[-1])

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] not in self.server.tokens[-1:]:
            return self._answer(401, "")
        found = self.server.items.get(self.path)
        return self._answer(404 if found is None else 200, found or "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_metadata_are_read_with_a_token_that_is_renewed_when_it_has_expired(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # never asked
    metadata = Metadata(service.url)
    assert metadata.get("spot/instance-action") is None
    service.items[SPOT] = '{"action": "terminate"}'
    assert metadata.get("spot/instance-action") == '{"action": "terminate"}'
    assert len(service.tokens) == 1
    service.tokens.append("another")
    assert metadata.get("spot/instance-action") is None
    assert metadata.get("spot/instance-action") == '{"action": "terminate"}'


def test_no_answer_of_another_service_ends_the_watch_or_makes_the_driver_wait_for_long(service: Service) -> None:
    service.tokens.append("first")
    metadata = Metadata(service.url)
    metadata._token = "two\nlines"
    assert metadata.get("spot/instance-action") is None
    service.items[SPOT] = '{"action": "stop", "time": "9999-12-31T00:00:00Z"}'
    text = metadata.get("spot/instance-action")
    assert text
    ends_unix_s = notices._interruption(text).ends_unix_s
    assert ends_unix_s is not None
    assert ends_unix_s < time.time() + 601


def test_a_machine_without_metadata_has_no_notices() -> None:
    assert Metadata("http://127.0.0.1:9").get("spot/instance-action") is None


@pytest.mark.processes
def test_the_notice_of_an_interruption_stops_the_ranks_and_is_left_for_the_driver(
    service: Service, tmp_path: Path
) -> None:
    service.items |= {REBALANCE: '{"noticeTime": "2020-11-26T08:20:00Z"}'}
    service.items |= {SPOT: '{"action": "terminate", "time": "2020-11-26T08:22:00Z"}'}
    base = tmp_path / "train"
    command = [sys.executable, "-m", "hlatctl.node", os.fspath(base), "--", sys.executable, "-c", TRAINER]
    env = {**os.environ, notices.METADATA_ENV: service.url}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as node:
        assert node.wait(WAIT_S) in (0, 143)  # the trainer may not have begun to handle the signal
        output = node.stderr.read() if node.stderr else ""
    assert "at 2020-11-26 08:22:00 UTC" in output
    found = {notice.what: notice.ends_unix_s for notice in Reader(base).new()}
    assert found == {"spot": 1606378920.0, "rebalance": None} or found == {"spot": 1606378920.0}
    assert json.loads((tmp_path / "train.exit_code").read_text())["asked_to_stop"] is True


def test_bought_capacity_gives_its_notice_once_before_it_ends_and_never_after() -> None:
    def found(ends_unix_s: float) -> list[str]:
        watch = Watch({notices.CAPACITY_ENDS_ENV: str(ends_unix_s)})
        return [notice.what for _ in range(2) for notice in watch.new()]

    now = time.time()
    assert found(now + 1800) == ["capacity"]
    assert found(now + 7200) == found(now - 10) == []


def test_the_driver_reads_each_notice_once_and_no_half_lines(tmp_path: Path) -> None:
    base = tmp_path / "train"
    reader = Reader(base)
    assert list(reader.new()) == []
    notice = Notice(what="spot", host="n1", message="it ends", ends_unix_s=5.0)
    append(base, notice)
    with notices.file_of(base).open("ab") as file:
        file.write(b'damaged\n{"what": "sp')
    assert list(reader.new()) == [notice]
    assert list(reader.new()) == []
    with notices.file_of(base).open("ab") as file:
        file.write(b'ot", "host": "n2", "message": "it ends", "ends_unix_s": null}\n')
    assert [one.host for one in reader.new()] == ["n2"]
