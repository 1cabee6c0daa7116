"""The cost of `hlatctl ui`: many runs, a very long run, the delay until the page shows a step, and zooms in a browser.

The real command serves the page; requests and the stream are real. ``HLATCTL_BENCH_RUNS`` and ``HLATCTL_BENCH_STEPS``
set the sizes; by default 5,000 runs and 2,000,000 steps. ``HLATCTL_BENCH_FIGURES`` chooses, such as ``zoom``: chromium
opens a run of 430,000 steps that no process has read, and zooms.
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
_ZOOM_STEPS, _ZOOMS = 430_000, 40
#: Zooms in or out. Returns the milliseconds of the browser's main thread until the frame is drawn, and those until the
#: finer steps that the server sends are drawn.
_ZOOM_JS = """() => new Promise((done) => {
  const charts = [...document.querySelectorAll('.plot')].map((plot) => plot.chart).filter((chart) => chart.paint);
  const [chart] = charts, [low, high] = chart.scales.x.ends, isWhole = !location.hash.includes('zoom=');
  let first = 0, last = 0;
  for (const each of charts) {
    each.paint = () => {
      Object.getPrototypeOf(each).paint.call(each);
      last = performance.now();
    };
  }
  const began = performance.now();
  chart.onZoom({ x: isWhole ? [low + 0.3 * (high - low), low + 0.7 * (high - low)] : null });
  const asked = performance.now();
  requestAnimationFrame((frame) => {
    const drawn = new MessageChannel();
    drawn.port1.onmessage = () => { first = asked - began + performance.now() - Math.max(asked, frame); };
    drawn.port2.postMessage(null);
  });
  setTimeout(() => {
    for (const each of charts) delete each.paint;
    done([first, last - began]);
  }, 500);
})"""


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
    figures = {"many": _many, "long": _long, "zoom": _zoom}
    chosen = os.environ.get("HLATCTL_BENCH_FIGURES", ",".join(figures)).split(",")
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        for name in chosen:
            figures[name](Path(folder) / name)


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


def _zoom(runs_dir: Path) -> None:
    """Open a run that nobody has read in a browser, and zoom in and out of its charts."""
    from playwright.sync_api import sync_playwright

    made, _ = make_run(runs_dir, _ZOOM_STEPS)
    with served(runs_dir) as server, sync_playwright() as playwright:
        server.get("/api/compare?runs=")  # when it answers, the server has imported all that it needs
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        page.set_default_timeout(600_000)
        page.goto(f"{server.address}/?token={server.token}#/compare")
        print(f"a run of {_ZOOM_STEPS:,} steps in a browser:")
        for what in ("that nobody has read", "again"):
            page.goto(f"{server.address}/#/compare")
            page.wait_for_selector("main h1:has-text('Compare')")
            began_s = time.monotonic()
            page.goto(f"{server.address}/#/run/{made.run_id}")
            page.wait_for_selector(".plot.tall[data-drawn]")
            print(f"  first loss chart of a run {what}: {time.monotonic() - began_s:.2f} s (goal 1 s)")
            while "first time" in page.inner_text("main") or not page.locator(".tiles").count():
                time.sleep(0.5)
            print(f"    and all of it: {time.monotonic() - began_s:.1f} s")
        costs = [page.evaluate(_ZOOM_JS) for _ in range(_ZOOMS)]
        browser.close()
    for name, goal, found in (("zoom", ", goals 16 and 50 ms", 0), ("  with finer steps after", "", 1)):
        cost = sorted(each[found] for each in costs)
        print(f"  {name} {statistics.median(cost):.0f} ms, p95 {cost[int(0.95 * len(cost))]:.0f} ms of {_ZOOMS}{goal}")


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
