"""The cost of the driver and its commands as a run grows: each figure at several lengths, and its exponent.

The journal of a long run is written with the real writer: ten restarts, a checkpoint every 1,000 steps, times of ranks
every 20. Each figure is measured in a process of its own, as processor time, because machines are shared. An exponent
of 1 means that a cost grows with the run.
``HLATCTL_BENCH_STEPS`` sets the lengths, such as ``20000,100000``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.compose import compose
from flows import pretrain
from flows.launch.local import LocalLauncher
from flows.runtime.context import FlowContext
from flows.tracking.mirrors import sync
from hlatctl.cli.progress import describe
from hlatctl.report.build import build
from hlatctl.run import files
from hlatctl.run.fold import read_state
from hlatctl.run.journal import FLOW_WRITER, JournalWriter, train_writer
from hlatctl.run.paths import RunPaths

_STEPS = os.environ.get("HLATCTL_BENCH_STEPS", "20000,100000,430000,2000000")
_ATTEMPTS, _REDONE, _SAVE_EVERY, _TIMES_EVERY, _STEP_S = 11, 120, 1000, 20, 4.0
_POLLS = 200
_RUNS = (500, 5000)
#: Name, unit of the time, its factor, and the goals at 2 M steps: time and MiB.
_FIGURES = {
    "append": ("us", 1e6, 30.0, None),
    "first_fold": ("s", 1.0, None, 300.0),
    "fold": ("s", 1.0, 3.0, 300.0),
    "status": ("s", 1.0, 0.3, 300.0),
    "resume": ("s", 1.0, 3.0, 300.0),
    "open_writer": ("s", 1.0, None, 300.0),
    "poll": ("ms", 1e3, 2.0, 300.0),
    "goodput": ("s", 1.0, 10.0, 300.0),
    "report": ("s", 1.0, 10.0, 300.0),
    "mlflow": ("s", 1.0, None, 200.0),
}


def run() -> None:
    """Print each figure at each length, with its memory, exponent and goal."""
    lengths = [int(text) for text in _STEPS.split(",")]
    chosen = os.environ.get("HLATCTL_BENCH_FIGURES", ",".join([*_FIGURES, "runs"])).split(",")
    names = [name for name in chosen if name in _FIGURES]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        for steps in lengths:
            made, append_s = make_run(Path(folder), steps)
            print(f"{steps:,} steps: {_size_bytes(made.journal) / 2**20:,.0f} MiB of journal", flush=True)
            for name in names:
                cost = (append_s, math.nan) if name == "append" else _measured(name, made)
                found[name].append(cost)
                print(f"  {name:<12} {_text(name, cost)}", flush=True)
            shutil.rmtree(made.root)
        if "runs" in chosen:
            _runs(Path(folder))
    for name in names if len(lengths) > 1 else []:
        _, _, goal, most_mib = _FIGURES[name]
        seconds, mib = ([cost[part] for cost in found[name]] for part in (0, 1))
        print(
            f"{name:<12} exponent {_exponent(lengths, seconds):5.2f}, of memory {_exponent(lengths, mib):5.2f}; "
            f"at {lengths[-1]:,} steps {_text(name, found[name][-1])} (goal {goal}, {most_mib} MiB)"
        )


def make_run(runs_dir: Path, steps: int) -> tuple[RunPaths, float]:
    """Make the run directory of a finished run. Return it, and the mean time of appending an event."""
    config = compose([f"runs_dir={runs_dir}", f"train.max_steps={steps}", "train.tokens=100T", "eval.enabled=false"])
    made = pretrain.create(config, argv=["hlatctl", "train"], run_id=f"scale-{steps}")
    created = made.journal / f"{FLOW_WRITER}.jsonl"
    created.unlink()  # written again with a time of long ago: a writer's events are never before its earlier ones
    now_s, events, began_s = [time.time() - (steps + 1e5) * _STEP_S], 0, time.process_time()

    def clock() -> float:
        now_s[0] += 1e-3
        return now_s[0]

    with (
        JournalWriter(made, FLOW_WRITER, now_unix_s=clock) as flow,
        JournalWriter(made, train_writer(0), now_unix_s=clock) as train,
    ):
        flow.append("run_created", run_id=made.run_id, argv=["hlatctl", "train"], simulated=False)
        flow.append("head_started", pid=1, host="node-0")
        at = 0
        for number in range(1, _ATTEMPTS + 1):
            flow.attempt = train.attempt = number
            first, at = max(0, at - _REDONE), steps * number // _ATTEMPTS
            flow.append("attempt_started", handle={"launcher": "local", "name": "train", "launch_dir": "/x"})
            train.append("train_started", resumed_from_step=first, tokens=first * config.tokens_per_step)
            for step in range(first + 1, at + 1):
                now_s[0] += _STEP_S
                events += _step(train, step, config.tokens_per_step)
            ended = number == _ATTEMPTS
            if ended:
                train.append("train_stopped", step=at, tokens=at * config.tokens_per_step, reason="finished")
            cause, decision = ("finished", "done") if ended else ("killed", "restart")
            flow.append("attempt_ended", step=at, cause=cause, evidence="exit code", decision=decision, why="")
        flow.append("run_finished", outcome="finished", step=at, tokens=at * config.tokens_per_step, message="")
    return made, (time.process_time() - began_s) / events


def _runs(folder: Path) -> None:
    """Print what `hlatctl runs` takes for many runs, the first time and again."""
    for count in _RUNS:
        first, _ = make_run(folder / str(count), 100)
        for number in range(1, count):
            shutil.copytree(first.root, first.root.with_name(f"run-{number}"))
        argv = [sys.executable, "-m", "hlatctl", "runs", f"--runs-dir={first.root.parent}"]
        costs = [_cost(argv, own=False) for _ in range(2)]
        shutil.rmtree(first.root.parent)
        print(f"runs         {count:,}: first {costs[0][0]:.2f} s, again {costs[1][0]:.2f} s, {costs[1][1]:.0f} MiB")


def _step(train: JournalWriter, step: int, tokens_per_step: int) -> int:
    """Append the events of one step. Return how many."""
    noise = math.sin(step * 1.7) / 10
    train.append(
        "step",
        step=step,
        tokens=step * tokens_per_step,
        batch=step,
        loss=2.0 + 5 * math.exp(-step / 1e4) + noise,
        grad_norm=0.4 + noise / 3,
        param_norm=95.0 + math.log(step),
        lr=3e-4 * (0.1 + 0.9 * math.cos(step / 4e6)),
        step_s=_STEP_S - 0.01 + noise / 10,
        data_wait_s=0.004,
        tokens_per_s=tokens_per_step / _STEP_S,
    )
    events = 1
    if step % _TIMES_EVERY == 0:
        train.append("rank_times", step=step, hosts=["node-0", "node-1"], times_s=[0.1, 0.2], ratio=1.1)
        events += 1
    if step % _SAVE_EVERY == 0:
        train.append("checkpoint_written", step=step, tokens=0, bytes=1, wall_s=20.0, stall_s=0.5, reason="interval")
        train.append("checkpoint_committed", step=step, manifest_sha256="0" * 64)
        train.append("checkpoint_verified", step=step, path=f"checkpoints/{step}")
        train.append("checkpoint_deleted", step=step - 2 * _SAVE_EVERY)
        events += 4
    return events


def _measured(name: str, made: RunPaths) -> tuple[float, float]:
    """Return the seconds and MiB of one figure, from a process of its own."""
    if name in ("first_fold", "open_writer"):
        shutil.rmtree(made.journal / ".fold", ignore_errors=True)
    commands = ("status", "goodput")
    module = ["hlatctl", name, made.run_id, f"--runs-dir={made.root.parent}"] if name in commands else []
    argv = [sys.executable, "-m", *(module or ["benchmarks.scale_driver", name, str(made.root)])]
    return _cost(argv, own=not module)


def _cost(argv: list[str], *, own: bool) -> tuple[float, float]:
    """Return the processor time and MiB of a process; with ``own``, the time that it prints."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(argv, stdout=output)
        _, code, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
        output.seek(0)
        seconds = used.ru_utime + used.ru_stime if not own else float(json.loads(output.read() or b"NaN"))
    return (seconds if process.returncode == 0 else math.nan), used.ru_maxrss / 1024


def _poll(made: RunPaths) -> float:
    """Return the time of one poll of a driver while training writes a step each time."""
    config = compose([f"runs_dir={made.root.parent}"])
    ctx = FlowContext(made, config, LocalLauncher())
    at, spent_s = ctx.state.step, 0.0
    with JournalWriter(made, train_writer(0), ctx.state.attempts[-1].number) as train:
        for step in range(at + 1, at + 1 + _POLLS):
            _step(train, step, config.tokens_per_step)
            began_s = time.process_time()
            state = ctx.refresh()
            describe(state, config)
            spent_s += time.process_time() - began_s
    ctx.close()
    return spent_s / _POLLS


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def _fold(made: RunPaths) -> float:
    return _seconds(lambda: read_state(made).tokens)


def _resume(made: RunPaths) -> float:
    config = compose([f"runs_dir={made.root.parent}"])
    return _seconds(lambda: FlowContext(made, config, LocalLauncher()).close())


def _report(made: RunPaths) -> float:
    return _seconds(lambda: build(made))


def _mlflow(made: RunPaths) -> float:
    """Return the time of the first copy to MLflow. Print its rate by the clock."""
    began_s = time.monotonic()
    used_s = _seconds(lambda: sync.sync(made, "mlflow"))
    wall_s = time.monotonic() - began_s
    steps = files.read_json(made.mirror_cursor("mlflow"))["last_step"]
    print(f"    {wall_s:.0f} s by the clock, {steps / wall_s:,.0f} steps/s", file=sys.stderr)
    return used_s


def _open_writer(made: RunPaths) -> float:
    return _seconds(lambda: JournalWriter(made, train_writer(0)).close())


def _exponent(lengths: Sequence[int], costs: Sequence[float]) -> float:
    """Return the exponent of growth between the last two lengths."""
    if not (costs[-1] > 0 and costs[-2] > 0):
        return math.nan
    return math.log(costs[-1] / costs[-2]) / math.log(lengths[-1] / lengths[-2])


def _text(name: str, cost: tuple[float, float]) -> str:
    unit, factor, _, _ = _FIGURES[name]
    return f"{cost[0] * factor:8.3f} {unit}" + ("" if math.isnan(cost[1]) else f"  {cost[1]:6.0f} MiB")


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


if __name__ == "__main__":
    work = {"first_fold": _fold, "fold": _fold, "resume": _resume, "open_writer": _open_writer, "poll": _poll}
    work |= {"report": _report, "mlflow": _mlflow}
    print(json.dumps(work[sys.argv[1]](RunPaths(Path(sys.argv[2])))))
