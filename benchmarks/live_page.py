"""The cost of `hlatctl ui`: a folder of many runs, a very long run, and the delay until the page shows a step.

The real command serves the page; requests and the stream are real. ``HLATCTL_BENCH_RUNS`` and ``HLATCTL_BENCH_STEPS``
set the sizes; by default 5,000 runs and 2,000,000 steps.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scale_driver import _step, make_run
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.paths import RunPaths

_RUNS = int(os.environ.get("HLATCTL_BENCH_RUNS", "5000"))
_STEPS = int(os.environ.get("HLATCTL_BENCH_STEPS", "2000000").split(",")[-1])
_CURVES = "keys=loss,grad_norm,tokens_per_s,lr&points=1500"
_WRITES = 30


@dataclass
class Page:
    process: subprocess.Popen[str]
    address: str
    token: str
    link_s: float

    def open(self, path: str) -> Any:
        request = urllib.request.Request(self.address + path, headers={"Authorization": f"Bearer {self.token}"})
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600)

    def get(self, path: str) -> Any:
        with self.open(path) as response:
            return json.loads(response.read())

    def used_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run() -> None:
    """Print all figures with their goals."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        _many(Path(folder) / "many")
        _long(Path(folder) / "long")


def _many(runs_dir: Path) -> None:
    first, _ = make_run(runs_dir, 100)
    for number in range(1, _RUNS):
        shutil.copytree(first.root, first.root.with_name(f"run-{number}"))
    with served(runs_dir) as page:
        print(f"link after {page.link_s:.2f} s (goal 3 s)")
        began_s = time.monotonic()
        known = len(page.get("/api/runs")["rows"])
        print(f"{_RUNS:,} runs: first answer after {time.monotonic() - began_s:.2f} s with {known:,} rows")
        while not page.get("/api/runs")["complete"]:
            time.sleep(0.5)
        print(f"  all read after {time.monotonic() - began_s:.1f} s, {page.memory_mib():.0f} MiB")
    with served(runs_dir) as page:
        began_s = time.monotonic()
        while not page.get("/api/runs")["complete"]:
            time.sleep(0.05)
        print(f"  from the index: all rows after {time.monotonic() - began_s:.2f} s (goal 3 s)")
        print(f"  answer {_milliseconds(lambda: page.get('/api/runs')):.0f} ms, {page.memory_mib():.0f} MiB")
        before_s, stream = page.used_s(), page.open("/api/events")
        time.sleep(30)
        print(f"  {(page.used_s() - before_s) / 30:.1%} of a core while a page is open (goal 10 %)")
        stream.close()


def _long(runs_dir: Path) -> None:
    made, _ = make_run(runs_dir, _STEPS)
    with served(runs_dir) as page:
        path = f"/api/runs/{made.run_id}"
        print(f"a run of {_STEPS:,} steps:")
        for name, what in (("curves", f"{path}/curves?{_CURVES}"), ("details", path), ("ranks", f"{path}/ranks")):
            first_ms = _milliseconds(lambda what=what: page.get(what))  # type: ignore[misc]
            again_ms = statistics.median(_milliseconds(lambda what=what: page.get(what)) for _ in range(5))  # type: ignore[misc]
            print(f"  {name:<8} first {first_ms:,.0f} ms, again {again_ms:,.0f} ms, {page.memory_mib():.0f} MiB")
        print(f"  {'step':<8} {_delays(page, made)} (goal 3 s)")
        print(f"  {'curves':<8} after these {_milliseconds(lambda: page.get(f'{path}/curves?{_CURVES}')):,.0f} ms")


def _delays(page: Page, made: RunPaths) -> str:
    """Return the time from writing a step to the event of the stream."""
    found = []
    with page.open(f"/api/events?run={made.run_id}") as stream, JournalWriter(made, train_writer(0), 12) as train:
        next(_events(stream), None)
        for number in range(_WRITES):
            time.sleep(0.37)
            began_s = time.monotonic()
            _step(train, _STEPS + 1 + number, 8192)
            next(event for event in _events(stream) if event == "run")
            found.append(time.monotonic() - began_s)
    return f"to the page: median {statistics.median(found):.2f} s, worst {max(found):.2f} s of {_WRITES}"


def _events(stream: Any) -> Iterator[str]:
    """Yield the names of events; an empty one for another line."""
    for line in stream:
        yield line.decode().removeprefix("event: ").strip() if line.startswith(b"event: ") else ""


@contextmanager
def served(runs_dir: Path) -> Iterator[Page]:
    argv = [sys.executable, "-m", "hlatctl", "ui", "--page-only", "--port=0", f"--runs-dir={runs_dir}"]
    began_s = time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout
        address, _, token = process.stdout.readline().split("\t")[1].strip().partition("/?token=")
        yield Page(process, address, token, time.monotonic() - began_s)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _milliseconds(work: Callable[[], object]) -> float:
    began_s = time.monotonic()
    work()
    return (time.monotonic() - began_s) * 1e3
