"""Notices that the provider takes a node back: from EC2's instance metadata, and at the end of bought capacity.

``hlatctl.node`` looks for them on each node of training. It adds what it finds to a file of the job that the driver
reads. If the node will be taken back, it also asks its processes to stop: all ranks agree and save a checkpoint.

EC2 announces the interruption of a Spot instance two minutes before, in ``spot/instance-action``. Sometimes it names a
higher risk of one earlier, in ``events/recommendations/rebalance``. Otherwise both are absent, with status 404 (AWS,
"Spot Instance interruption notices", "EC2 instance rebalance recommendations"). The metadata don't contain the end of a
Capacity Block, so a person sets it. Its instances are ended in its last 30 minutes (AWS, "Work with Capacity Blocks").
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue

from hlatctl.run.files import DAMAGED
from hlatctl.run.processes import node_name
from hlatctl.units import utc

#: Environment variables of a job: the address of the metadata service, and the Unix time when the capacity ends.
METADATA_ENV, CAPACITY_ENDS_ENV = "HLATCTL_METADATA_URL", "HLATCTL_CAPACITY_ENDS_UNIX_S"
#: Training stops so long before the end of a Capacity Block: its instances are ended in the last 30 minutes.
BEFORE_END_S = 30 * 60.0 + 300.0
#: EC2 takes a Spot instance back two minutes after its notice. The driver waits no longer for a node to be gone.
_MOST_S = 600.0
#: The driver reads at most so much of a job's notices at once; those of 2,048 nodes are smaller.
_MOST_BYTES = 4 << 20
#: AWS recommends to look every 5 s.
_EVERY_S = 5.0
#: The service answers in milliseconds. On another machine, nothing answers.
_TIMEOUT_S = 1.0
_TOKEN_S = 21_600
_SPOT, _REBALANCE = "spot/instance-action", "events/recommendations/rebalance"


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A notice about a node.

    Args:
        what: ``spot``, ``rebalance`` or ``capacity``.
        host: the node's name.
        message: the notice in one sentence.
        ends_unix_s: when the node is taken back; None: it may never be.
    """

    what: str
    host: str
    message: str
    ends_unix_s: float | None = None


def file_of(base: Path) -> Path:
    """Return the file with the notices about all nodes of a job."""
    return base.with_name(f"{base.name}.notices")


def append(base: Path, notice: Notice) -> None:
    """Add a notice to a job's file, in one write, because other nodes add theirs."""
    line = json.dumps({"v": 1, **asdict(notice)}).encode() + b"\n"
    with file_of(base).open("ab", buffering=0) as file:
        file.write(line)


class Reader:
    """Reads new notices of a job. Each look costs one ``stat`` until there are some."""

    def __init__(self, base: Path) -> None:
        self._path, self._read = file_of(base), 0

    def new(self) -> Iterator[Notice]:
        """Yield the notices that were added since the last call."""
        try:
            if self._path.stat().st_size <= self._read:
                return
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read(_MOST_BYTES)
        except OSError:
            return
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _MOST_BYTES else 0)
        lines, self._read = data[:end].splitlines(), self._read + end
        for line in lines:
            try:
                value = json.loads(line)
                ends = value["ends_unix_s"]
                yield Notice(
                    what=str(value["what"]),
                    host=str(value["host"]),
                    message=str(value["message"]),
                    ends_unix_s=None if ends is None else float(ends),
                )
            except DAMAGED:
                continue


class Metadata:
    """EC2's instance metadata service, version 2: each request needs a token, which a PUT gives."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host, self._port, self._token = parts.hostname or "", parts.port or 80, ""

    def get(self, path: str) -> str | None:
        """Return an item; None if it doesn't exist now, or the service doesn't answer."""
        try:
            if not self._token:
                self._renew()
            status, text = self._ask("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})
            if status == http.client.UNAUTHORIZED:
                self._token = ""  # it has expired; the next request asks for another
        except (OSError, http.client.HTTPException, ValueError):  # a header can't have the token's characters
            self._token = ""
            return None
        return text if status == http.client.OK else None

    def _renew(self) -> None:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        status, text = self._ask("PUT", "/latest/api/token", lifetime)
        self._token = text if status == http.client.OK else ""

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        # Without urllib.request, which would follow the proxy settings of the environment.
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read(65536).decode(errors="replace").strip()
        finally:
            connection.close()


class Watch:
    """Looks for notices about this node in a thread of its own, each kind once."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._url, self._found = env.get(METADATA_ENV, ""), SimpleQueue[Notice]()
        try:
            self._capacity_ends = float(env.get(CAPACITY_ENDS_ENV, ""))
        except ValueError:
            self._capacity_ends = 0.0

    def start(self) -> None:
        """Start to look; without settings, there is nothing to look at."""
        if self._url:
            threading.Thread(target=self._look, daemon=True, name="notices").start()

    def new(self) -> Iterator[Notice]:
        """Yield the notices that were found since the last call."""
        now = time.time()
        if self._capacity_ends - BEFORE_END_S <= now < self._capacity_ends:
            ends, self._capacity_ends = self._capacity_ends, 0.0
            message = f"the capacity of {node_name()} ends at {utc(ends)} (cluster.capacity_ends)"
            yield Notice(what="capacity", host=node_name(), message=message, ends_unix_s=ends)
        while True:
            try:
                yield self._found.get_nowait()
            except Empty:
                return

    def _look(self) -> None:
        service, known = Metadata(self._url), set[str]()
        while _SPOT not in known:
            for path, read in ((_SPOT, _interruption), (_REBALANCE, _risk)):
                if path not in known and (text := service.get(path)) is not None:
                    known.add(path)
                    self._found.put(read(text))
            time.sleep(_EVERY_S)


def _interruption(text: str) -> Notice:
    action, at_unix_s = "takes back", time.time() + 120.0
    try:
        value = json.loads(text)
        action = {"stop": "stops", "hibernate": "hibernates", "terminate": "ends"}.get(str(value["action"]), action)
        at_unix_s = datetime.fromisoformat(str(value["time"]).replace("Z", "+00:00")).astimezone(UTC).timestamp()
    except DAMAGED:
        pass  # what matters is that there is a notice
    at_unix_s = min(at_unix_s, time.time() + _MOST_S)
    message = f"EC2 {action} the Spot instance {node_name()} at {utc(at_unix_s)}"
    return Notice(what="spot", host=node_name(), message=message, ends_unix_s=at_unix_s)


def _risk(_: str) -> Notice:
    message = f"EC2 may soon interrupt the Spot instance {node_name()} (rebalance recommendation)"
    return Notice(what="rebalance", host=node_name(), message=message)


def of_environment() -> Watch | None:
    """Return the watch that this process's environment asks for; None: no notices are expected."""
    return Watch(os.environ) if {METADATA_ENV, CAPACITY_ENDS_ENV}.intersection(os.environ) else None
