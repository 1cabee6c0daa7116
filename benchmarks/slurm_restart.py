"""The time from a fault to the next attempt's first step, on a real Slurm on this machine (``tests.slurm.lab``).

Training runs on two nodes. ``HLATCTL_BENCH_KILLS`` times (default 30) a training process of the second one is killed.
Then its power is cut ``HLATCTL_BENCH_CUTS`` times (default 30), and each time there is a spare node. The
node ledger is cleared after each fault: otherwise it soon excludes healthy nodes. Needs root and Slurm.

The faults are made in parts of ``HLATCTL_BENCH_PART`` (default 10), each with its own cluster and run. At the end
of a part, each step must have had the same loss whenever it was made, and in a run without faults, and no attempt may
have logged a step twice. Then the median and the 95th percentile of all parts are printed, in total and by phase.
``HLATCTL_BENCH_FOLDER`` names a folder that keeps the times: another call makes only the faults that are missing there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hlatctl.run.events import RECOVERY_PHASES
from hlatctl.run.fold import read_state
from hlatctl.run.paths import nodes_file
from tests.e2e.conftest import LIMIT, Paced
from tests.e2e.driver import Driver
from tests.slurm.lab import Lab, running, why_not

_KILL, _CUT = "killed process", "cut node"
_WANTED = {
    _KILL: int(os.environ.get("HLATCTL_BENCH_KILLS", "30")),
    _CUT: int(os.environ.get("HLATCTL_BENCH_CUTS", "30")),
}
_PART = int(os.environ.get("HLATCTL_BENCH_PART", "10"))
_FOLDER = os.environ.get("HLATCTL_BENCH_FOLDER")
_NODES = 2
#: Training goes on longer than any number of faults.
_ENDLESS = ("train.tokens=50M", "train.max_steps=90000", "checkpoint.every_steps=10")
#: The policy takes a second failure before a new checkpoint for a fault that repeats itself.
_STEPS_BETWEEN = 12


def run() -> None:
    """Inject the faults part by part, and print the times after each part."""
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    with _folder() as folder:
        kept = folder / "slurm_restart.jsonl"
        for fault, wanted in _WANTED.items():
            while (missing := wanted - len(_kept(kept, fault))) > 0:
                found = _part(fault, min(_PART, missing))
                with kept.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(each) + "\n" for each in found)
                _show(fault, _kept(kept, fault))
        for fault in _WANTED:
            _show(fault, _kept(kept, fault))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(_FOLDER or tempfile.mkdtemp(prefix="hlatctl-bench-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if not _FOLDER:
            shutil.rmtree(folder, ignore_errors=True)


def _kept(path: Path, fault: str) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [each for each in map(json.loads, lines) if each["fault"] == fault]


def _part(fault: str, count: int) -> list[dict[str, Any]]:
    """Inject a fault so many times into a run, compare it with an undisturbed one, and return the times."""
    nodes = _NODES + (count if fault == _CUT else 1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, running(nodes) as lab:
        cli = Paced(Path(folder))
        cli.overrides += ["cluster=slurm", f"cluster.nodes={_NODES}", "cluster.processes_per_node=1", LIMIT, *_ENDLESS]
        driver = Driver(cli, "faults")
        try:
            driver.train(f"cluster.spare_nodes={len(lab.nodes) - _NODES}")
            driver.steps(1)
            found = [_recovery(driver, lab, fault) for _ in range(count)]
            last = read_state(driver.run).step
            cli.run("stop", driver.run.run_id)
            driver.end()
            for host in lab.dark():
                lab.boot(host)
            lab.wait_until_idle()
            _compare(cli, driver, last)
        finally:
            driver.kill()
    return found


def _recovery(driver: Driver, lab: Lab, fault: str) -> dict[str, Any]:
    """Inject a fault into the second node; return the seconds to the first step after it, and by phase."""
    step = read_state(driver.run).step
    driver.until(lambda: read_state(driver.run).step > step + _STEPS_BETWEEN)
    seen, host = len(driver.events("recovered")), read_state(driver.run).attempts[-1].hosts[1]
    began_unix_s = time.time()
    if fault == _CUT:
        lab.cut(host)
    else:
        os.kill(driver.cli.trainer_pids(driver.run.run_id)[1], signal.SIGKILL)
    driver.until(lambda: len(driver.events("recovered")) > seen)
    recovered = driver.events("recovered")[-1]
    first = next(event for event in driver.events("step") if event["attempt"] == recovered["attempt"])
    nodes_file(driver.cli.runs_dir).unlink(missing_ok=True)
    found = {"fault": fault, "total": first["time_unix_s"] - began_unix_s, "load": os.getloadavg()[0]}
    print(
        f"    {found['total']:6.2f} s, {'warm' if recovered['warm'] else 'cold'}, load {found['load']:.0f}", flush=True
    )
    return found | {name: float(recovered[name]) for name in RECOVERY_PHASES}


def _show(fault: str, found: list[dict[str, Any]]) -> None:
    if not found:
        return
    loads = [each["load"] for each in found]
    print(f"  {fault}, {len(found)} times, load {min(loads):.0f} to {max(loads):.0f}: seconds to the first step")
    print("                 median    95 %")
    for name in ("total", *RECOVERY_PHASES):
        ordered = sorted(each[name] for each in found)
        percentile = ordered[math.ceil(0.95 * len(ordered)) - 1]
        print(f"  {name:>13} {statistics.median(ordered):7.2f} {percentile:7.2f}", flush=True)


def _compare(cli: Paced, driver: Driver, last: int) -> None:
    """Compare the losses with those of a run on the same nodes that nothing happens to."""
    logged = Counter((event["attempt"], event["step"]) for event in driver.events("step"))
    losses = cli.losses(driver.run.run_id)
    twin = Driver(cli, "undisturbed")
    twin.train("optimizer.name=adamw")
    try:
        twin.until(lambda: read_state(twin.run).step >= last)
        cli.run("stop", twin.run.run_id)
        twin.end()
    finally:
        twin.kill()
    undisturbed = cli.losses(twin.run.run_id)
    different = [step for step in range(1, last + 1) if losses.get(step) != undisturbed[step]]
    twice = [place for place, times in logged.items() if times > 1]
    print(f"  {last} steps: {len(different)} with a loss unlike the undisturbed run's, {len(twice)} logged twice")
    assert not different
    assert not twice
