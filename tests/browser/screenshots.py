"""``python -m tests.browser.screenshots FOLDER``: pictures of the live page for its documentation, from small runs.

With ``--states``, pictures of every view and state, to be looked at after a change: light, dark, and on a phone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from benchmarks.scale_driver import make_run
from hlatctl.run.journal import JournalWriter
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from tests.browser import lab, states
from tests.e2e.conftest import Cli
from tests.waiting import wait_for

WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
#: File, view, and how the browser shows it.
PICTURES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("live-runs", "/runs?sim=1&open=beta2", {"viewport": WIDE}),
    ("live-run", "/run/hlat-7b?smooth=0.6", {"viewport": {"width": 1440, "height": 1400}}),
    ("live-run-dark", "/run/long-run", {"viewport": WIDE, "color_scheme": "dark"}),
    ("live-history", "/run/hlat-7b?tab=history", {"viewport": {"width": 1440, "height": 1200}}),
    ("live-compare", "/compare?runs=baseline,higher-rate&smooth=0.7", {"viewport": {"width": 1440, "height": 1000}}),
    ("live-phone", "/runs?sim=1", {"viewport": PHONE, "is_mobile": True, "has_touch": True}),
)
#: File, runs folder and view of each state.
STATES = (
    ("runs", "states", "/runs?sim=1&open=*"),
    ("runs-empty", "empty", "/runs"),
    ("runs-none", "states", "/runs?q=nothing"),
    ("runs-1000", "many", "/runs"),
    *((f"run-{run_id}", "states", f"/run/{run_id}") for run_id in ("live", "failed", "dead", "dry", "new", "plain")),
    *((f"run-{run_id}", "states", f"/run/{run_id}") for run_id in ("no-config", "damaged-journal", "nothing")),
    ("run-long", "long", "/run/scale-430000"),
    ("run-long-zoomed", "long", "/run/scale-430000?zoom=200000:200400&smooth=0.6"),
    ("run-long-time", "long", "/run/scale-430000?x=time&logy=1"),
    *(
        (f"history-{run_id}", folder, f"/run/{run_id}?tab=history")
        for folder, run_id in (("states", "failed"), ("states", "live"), ("states", "new"), ("long", "scale-430000"))
    ),
    ("evaluation", "states", "/run/plain?tab=evaluation&task=mmlu&show=all"),
    *((f"{tab}", "states", f"/run/plain?tab={tab}") for tab in ("samples", "logs", "settings")),
    *((f"{tab}-new", "states", f"/run/new?tab={tab}") for tab in ("evaluation", "samples", "logs")),
    ("settings-amended", "states", "/run/failed?tab=settings"),
    ("compare", "states", "/compare?runs=plain,other,failed&keys=loss,grad_norm&baselines=hlat"),
    ("compare-many", "many", "/compare?runs=" + ",".join(f"run-{number}" for number in range(1, 21))),
    ("compare-empty", "states", "/compare"),
    ("sweep", "states", "/sweep/beta2"),
    ("unknown", "states", "/rums"),
)
LOOKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("light", {"viewport": {"width": 1440, "height": 1500}}),
    ("dark", {"viewport": {"width": 1440, "height": 1500}, "color_scheme": "dark"}),
    ("phone", {"viewport": {"width": 390, "height": 1500}, "is_mobile": True, "has_touch": True}),
)
#: Evaluation of the two small runs, with texts that they generate.
_EVALUATED = ("eval.enabled=true", "eval.every_tokens=50000", "eval.limit=4", "eval.validation_tokens=2048")
_PROMPTS = 'eval.prompts=["the model reads", "it says"]'


class Lab(Cli):
    """A runs folder whose sizes are in its own configuration, so that runs show only what differs between them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        shared = [
            o for o in self.overrides if not o.startswith(("cluster.processes", "checkpoint.every", "train.max_s"))
        ]
        shared += ["cluster.processes_per_node=1", "checkpoint.every_steps=100"]
        (folder / "conf").mkdir()
        (folder / "conf" / "hlatctl.yaml").write_text(f"overrides: {json.dumps(shared)}\n", encoding="utf-8")

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, "HLATCTL_CONFIG_DIR": os.fspath(self.folder / "conf")}


def make_runs(cli: Cli, simulator: Cli) -> None:
    """Train two small models, and simulate a large one and a sweep."""
    large = ("--dry-run", "experiment=hlat_7b")
    _run(simulator, "train", *large, "--run-id", "hlat-7b")
    _run(simulator, "sweep", *large, "optimizer.beta2=0.95,0.99", "train.max_steps=2000", "--sweep-id", "beta2")
    for run_id, lr, note in (("baseline", "8e-3", "the first corpus"), ("higher-rate", "2e-2", "is it noisier?")):
        labels = ("--tag", "model=tiny", "--note", note)
        _run(
            cli,
            "train",
            "--run-id",
            run_id,
            *labels,
            f"optimizer.lr={lr}",
            "train.max_steps=300",
            *_EVALUATED,
            _PROMPTS,
        )


def _run(cli: Cli, *arguments: str) -> None:
    result = cli.run(*arguments)
    if result.returncode:
        sys.exit(f"hlatctl {' '.join(arguments)}: exit code {result.returncode}\n{result.stderr}")


def shoot(browser: Browser, server: lab.Server, folder: Path) -> None:
    """Write the pictures to a folder."""
    for name, view, options in PICTURES:
        with lab.opened(browser, **options) as context:
            page = context.new_page()
            page.goto(f"{server.link}#{view}")
            _settle(page)
            page.screenshot(path=folder / f"{name}.png")
            print(f"{folder / name}.png")


def _settle(page: Page) -> None:
    """Wait until the rows, or the charts in view, are drawn."""
    page.wait_for_selector("tr[data-run], .plot[data-drawn], main ol.timeline")
    page.wait_for_timeout(1000)  # curves are drawn before what a view reads besides
    _wait_for_charts(page)


def _wait_for_charts(page: Page) -> None:
    lab.until(
        page,
        "[...document.querySelectorAll('.plot')].every((plot) => plot.dataset.drawn !== undefined || "
        "plot.getBoundingClientRect().top > innerHeight || plot.closest('[hidden]'))",
    )


def make_states(runs_dir: Path) -> None:
    """Make a runs folder for each size: small runs in many states, no runs, 1,000 runs, and a run of 430,000 steps."""
    states.make_states(runs_dir / "states")
    dead = lab.make_run(runs_dir / "states", "dead", 200)
    with JournalWriter(dead, "flow") as journal:
        journal.append("head_started", pid=1, host="node-0")
    (runs_dir / "empty").mkdir()
    make_run(runs_dir / "long", 430_000)
    first, _ = make_run(runs_dir / "many", 300)
    for number in range(1, 1000):
        shutil.copytree(first.root, first.root.with_name(f"run-{number}"))


def shoot_states(browser: Browser, runs_dir: Path, folder: Path) -> None:
    """Write the pictures of all states to a folder, and print where the page is wider than the screen."""
    for runs in ("states", "empty", "many", "long"):
        with lab.serving(runs_dir / runs, "--allow-control") as server:
            for look, options in LOOKS:
                with lab.opened(browser, **options) as context:
                    page = context.new_page()
                    page.goto(server.link)
                    page.locator(".summary", has_not_text=re.compile("oading|reading")).wait_for()
                    for name in (name for name in STATES if name[1] == runs):
                        page.goto(f"{server.origin}/#{name[2]}")
                        _shoot(page, folder / f"{name[0]}-{look}.png")


def _shoot(page: Page, path: Path) -> None:
    lab.until(page, "!/Loading|Reading/.test(document.querySelector('main').innerText)")
    page.wait_for_timeout(1000)  # what a view reads besides, such as the times of the ranks
    _wait_for_charts(page)
    page.evaluate("document.activeElement.blur()")
    page.screenshot(path=path)
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    print(path, f"is {wide} px wider than the screen" if wide > 0 else "")


def main(folder: Path) -> None:
    """Make the runs, and the pictures of them while one is running."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        cli, simulator = Lab(Path(name)), Cli(Path(other))
        simulator.runs_dir = cli.runs_dir
        make_runs(cli, simulator)
        running = cli.start("train", "--run-id", "long-run", "train.max_steps=100000", "train.tokens=1B")
        try:
            wait_for(lambda: cli.paths("long-run").journal.is_dir() and len(cli.events("long-run", "step")) > 200)
            with lab.chromium() as browser, lab.serving(cli.runs_dir, "--allow-control") as server:
                shoot(browser, server, folder)
        finally:
            cli.run("stop", "long-run")
            running.communicate()


def main_states(folder: Path) -> None:
    """Make the runs, and the pictures of all states."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        make_states(runs_dir := Path(name))
        with lab.chromium() as browser, hold_driver(RunPaths(runs_dir / "states" / "live")):
            shoot_states(browser, runs_dir, folder)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["--states"]) or lab.CHROMIUM is None:
        sys.exit(f"usage: python -m {__spec__.name} FOLDER [--states] (needs chromium: apt-get install chromium)")
    (main_states if sys.argv[2:] else main)(Path(sys.argv[1]))
