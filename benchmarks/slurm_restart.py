"""The time from a fault to the next attempt's first step, on a real Slurm on this machine (``tests.slurm.lab``).

Training runs on two nodes. ``HLATCTL_BENCH_KILLS`` times (default 30) a training process of the second one is killed.
Then its power is cut ``HLATCTL_BENCH_CUTS`` times (default 8), and each time there is a spare node. The
node ledger is cleared after each fault: otherwise it soon excludes healthy nodes. Prints the median and the 95th
percentile, in total and by phase. At the end, each step must have had the same loss whenever it was made, and in a run
without faults, and no attempt may have logged a step twice. Needs root and Slurm.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hlatctl.run.events import RECOVERY_PHASES
from hlatctl.run.fold import read_state
from hlatctl.run.journal import Event
from hlatctl.run.paths import nodes_file
from tests.e2e.conftest import LIMIT, Paced
from tests.e2e.driver import Driver
from tests.slurm.lab import Lab, why_not

_KILLS, _CUTS = (int(os.environ.get(f"HLATCTL_BENCH_{name}", count)) for name, count in (("KILLS", 30), ("CUTS", 8)))
_NODES = 2
#: Training goes on longer than any number of faults.
_ENDLESS = ("train.tokens=50M", "train.max_steps=90000", "checkpoint.every_steps=10")
#: The policy takes a second failure before a new checkpoint for a fault that repeats itself.
_STEPS_BETWEEN = 12


def run() -> None:
    """Inject the faults and print the times."""
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    folder = Path(tempfile.mkdtemp(prefix="hlatctl-bench-"))
    folder.chmod(0o711)  # munge's daemon runs as another user
    (folder / "slurm").mkdir()
    lab = Lab(folder / "slurm", _NODES + max(1, _CUTS))
    before = dict(os.environ)
    os.environ.update(lab.env)
    try:
        lab.start()
        _measure(lab, folder)
    finally:
        lab.stop()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


def _measure(lab: Lab, folder: Path) -> None:
    (folder / "work").mkdir()
    cli = Paced(folder / "work")
    cli.overrides += ["cluster=slurm", f"cluster.nodes={_NODES}", "cluster.processes_per_node=1", LIMIT, *_ENDLESS]
    driver = Driver(cli, "faults")
    try:
        driver.train(f"cluster.spare_nodes={len(lab.nodes) - _NODES}")
        driver.steps(1)
        _show("killed process", [_recovery(driver, lambda _: _kill(driver)) for _ in range(_KILLS)])
        _show("cut node", [_recovery(driver, lambda host: lab.cut(host)) for _ in range(_CUTS)])
        last = read_state(driver.run).step
        cli.run("stop", driver.run.run_id)
        driver.end()
        for host in lab.dark():
            lab.boot(host)
        lab.wait_until_idle()
        _compare(cli, driver, last)
    finally:
        driver.kill()


def _kill(driver: Driver) -> None:
    os.kill(driver.cli.trainer_pids(driver.run.run_id)[1], signal.SIGKILL)


def _recovery(driver: Driver, inject: Callable[[str], None]) -> tuple[float, Event]:
    """Inject a fault into the second node; return the seconds to the first step after it, and the recovery's event."""
    step = read_state(driver.run).step
    driver.until(lambda: read_state(driver.run).step > step + _STEPS_BETWEEN)
    seen, host = len(driver.events("recovered")), read_state(driver.run).attempts[-1].hosts[1]
    began_unix_s = time.time()
    inject(host)
    driver.until(lambda: len(driver.events("recovered")) > seen)
    recovered = driver.events("recovered")[-1]
    first = next(event for event in driver.events("step") if event["attempt"] == recovered["attempt"])
    nodes_file(driver.cli.runs_dir).unlink(missing_ok=True)
    total_s = first["time_unix_s"] - began_unix_s
    print(f"    {total_s:6.2f} s, {'warm' if recovered['warm'] else 'cold'}, load {os.getloadavg()[0]:.0f}", flush=True)
    return total_s, recovered


def _show(fault: str, found: list[tuple[float, Event]]) -> None:
    if not found:
        return
    print(f"  {fault}, {len(found)} times: seconds to the first step, median and 95th percentile")
    columns = {"total": [total_s for total_s, _ in found]}
    columns |= {name: [float(event[name]) for _, event in found] for name in RECOVERY_PHASES}
    for name, values in columns.items():
        ordered = sorted(values)
        print(
            f"  {name:>13} {statistics.median(ordered):7.2f} {ordered[math.ceil(0.95 * len(ordered)) - 1]:7.2f}",
            flush=True,
        )


def _compare(cli: Paced, driver: Driver, last: int) -> None:
    """Compare the losses with those of a run on the same nodes that nothing happens to."""
    logged = Counter((event["attempt"], event["step"]) for event in driver.events("step"))
    losses = cli.losses(driver.run.run_id)
    twin = Driver(cli, "undisturbed")
    twin.train("optimizer.name=adamw")
    twin.until(lambda: read_state(twin.run).step >= last)
    cli.run("stop", twin.run.run_id)
    twin.end()
    undisturbed = cli.losses(twin.run.run_id)
    different = [step for step in range(1, last + 1) if losses.get(step) != undisturbed[step]]
    twice = [place for place, times in logged.items() if times > 1]
    print(f"  {last} steps: {len(different)} with a loss unlike the undisturbed run's, {len(twice)} logged twice")
    assert not different
    assert not twice
