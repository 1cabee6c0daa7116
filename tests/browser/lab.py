"""A folder of runs, the server of the live page, and a browser, for tests and screenshots."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from conf.load import dump
from conf.schema import Config
from hlatctl.run import continuations
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths
from tests.flows.live.conftest import make_sweep
from tests.hlatctl.conftest import Script, example_config
from tests.hlatctl.item_rows import row, write_items
from tests.ports import free_port
from tests.waiting import wait_for

CHROMIUM = shutil.which("chromium")
#: Longest wait for the page, in milliseconds. A busy machine is no failure.
WAIT_MS = 300_000.0
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


def make_run(runs_dir: Path, run_id: str, steps: int = 0, **created: Any) -> RunPaths:
    run = RunPaths(runs_dir / run_id)
    run.root.mkdir(parents=True)
    config = example_config(runs_dir)
    lr = {"plain": 3e-3, "other": 6e-3}.get(run_id, 1e-3)
    write_config(run, replace(config, optimizer=replace(config.optimizer, lr=lr)))
    script = Script(run)
    script.add("flow", "run_created", run_id=run_id, **{"simulated": False, "argv": ["hlatctl", "train"], **created})
    script.add("flow", "attempt_started", attempt=1, handle={"launcher": "local", "name": "train", "launch_dir": "/x"})
    script.add("train-rank00000", "train_started", attempt=1, resumed_from_step=0, tokens=0)
    script.steps(1, 1, steps, config.tokens_per_step)
    return run


def write_config(run: RunPaths, config: Config) -> None:
    run.config.write_text(dump(config), encoding="utf-8")


def evaluated_run(runs_dir: Path, run_id: str, accuracy: float) -> RunPaths:
    """Return a run that has ended, with two evaluated milestones."""
    run = make_run(runs_dir, run_id, 306, argv=["hlatctl", "train", f"optimizer.lr={accuracy}"])
    tokens = 306 * example_config(runs_dir).tokens_per_step
    with JournalWriter(run, "flow", attempt=1) as journal:
        for at, step, value in ((833_333, 102, accuracy - 0.1), (tokens, 306, accuracy)):
            journal.append("milestone", milestone_tokens=at, tokens=at, step=step)
            with JournalWriter(run, f"eval-{at}", attempt=1) as evaluation:
                scores = {
                    "mmlu": {"metric": "acc", "value": value, "stderr": 0.004, "n": 14_042},
                    "validation_loss": {
                        "metric": "loss_nats_per_token",
                        "value": 4 - value,
                        "stderr": 0.02,
                        "n": 65_536,
                    },
                }
                evaluation.append(
                    "eval_finished", milestone_tokens=at, step=step, scores=scores, skipped={}, wall_s=6.0
                )
        journal.append("attempt_ended", cause="finished", exit_code=0, step=306, evidence="", decision="done", why="")
        journal.append("run_finished", outcome="finished", step=306, tokens=tokens, message="")
    return run


def label(run: RunPaths, **fields: Any) -> None:
    with JournalWriter(run, "operator") as journal:
        journal.append("labelled", by="tester", **{"tags": {}, "untag": [], "note": "", **fields})


def grow(run: RunPaths, first: int, last: int, loss: float, attempt: int = 1) -> None:
    """Append steps to a run's journal, as its trainer does."""
    tokens_per_step = example_config(run.root.parent).tokens_per_step
    with JournalWriter(run, "train-rank00000", attempt=attempt) as journal:
        for step in range(first, last + 1):
            journal.append(
                "step", step=step, tokens=step * tokens_per_step, batch=step, loss=loss, grad_norm=0.4, param_norm=95.0,
                lr=1e-3, step_s=0.5, data_wait_s=0.004, tokens_per_s=16_384.0,
            )  # fmt: skip


def make_runs(runs_dir: Path) -> None:
    """Make the runs of the tests: two evaluated ones, one that runs, a sweep, a hostile and a simulated one."""
    for run_id, accuracy in (("plain", 0.35), ("other", 0.45)):
        evaluated_run(runs_dir, run_id, accuracy)
    _add_texts_and_times(RunPaths(runs_dir / "plain"))
    label(RunPaths(runs_dir / "plain"), name="baseline", tags={"model": "tiny"}, note="the first corpus")
    label(make_run(runs_dir, "hostile", 3), name=HOSTILE[:60], tags={"tag": HOSTILE[:60]}, note=HOSTILE)
    make_run(runs_dir, "live", 120)
    make_sweep(runs_dir, "beta2", {0: 3.5, 1: 3.1, 2: None})
    for trial in range(3):
        argv = ["hlatctl", "train", "train.max_steps=300", f"optimizer.lr={(trial + 1) / 1000}"]
        make_run(runs_dir, f"beta2-t000{trial}", 10 + trial, sweep="beta2", trial=trial, argv=argv)
    make_run(runs_dir, "dry", 20, simulated=True)


def _add_texts_and_times(run: RunPaths) -> None:
    """Give a run items, generated texts, a log, and the times of its ranks; the texts are hostile."""
    for tokens, is_right in ((833_333, 0.0), (306 * example_config(run.root.parent).tokens_per_step, 1.0)):
        items = [
            row(str(n), is_right if n < 3 else 0.0, prompt=f"{'x' * 2_000} {HOSTILE}", answer="4") for n in range(12)
        ]
        write_items(run, tokens, "mmlu", items)
    texts = [{"prompt": "Once", "text": f"upon a time {HOSTILE}", "stop": "length"}]
    continuations.write(run, 833_333, {"step": 102}, texts)
    log = run.root / "logs" / "attempt-0001" / "train.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"loading\n{HOSTILE}\n", encoding="utf-8")
    with JournalWriter(run, "train-rank00000", attempt=1) as journal:
        for step in range(20, 301, 20):
            times: dict[str, Any] = {
                "median_s": 0.5,
                "min_s": 0.4,
                "max_s": 0.5 + step / 1000,
                "slowest_rank": step // 20 % 3,
            }
            journal.append("rank_times", step=step, host=f"node-{step % 3}", ratio=1.1, **times)


class Server:
    """`hlatctl ui` for a folder of runs, on a port that stays the same after a restart."""

    def __init__(self, runs_dir: Path, *options: str) -> None:
        self.runs_dir, self.options = runs_dir, options
        self.port = free_port()
        self.link = ""
        self._process: subprocess.Popen[str] | None = None

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = ["ui", "--page-only", "--port", str(self.port), "--runs-dir", os.fspath(self.runs_dir), *self.options]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hlatctl", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.link = self._process.stdout.readline().strip().partition("\t")[2]
        assert self.link.startswith(self.origin), "hlatctl ui printed no link"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@contextmanager
def serving(runs_dir: Path, *options: str) -> Iterator[Server]:
    server = Server(runs_dir, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield Debian's chromium, without access to anything but loopback.

    An event loop runs in this thread meanwhile, so asyncio.run fails there.
    """
    offline = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with sync_playwright() as playwright:
        arguments = [offline, "--disable-background-networking", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, **options: Any) -> Iterator[BrowserContext]:
    """Yield a context of a browser with an empty storage; its pages must not fail."""
    context = browser.new_context(**options)
    context.set_default_timeout(WAIT_MS)
    try:
        yield context
    finally:
        context.close()


def until(page: Page, condition: str) -> None:
    """Wait for a condition in JavaScript. Playwright's own wait needs `eval`, which the page's policy refuses."""
    wait_for(lambda: page.evaluate(condition), timeout_s=WAIT_MS / 1000)
