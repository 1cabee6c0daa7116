"""Runs in the states that the page has something to say about, for accessibility tests and screenshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths
from tests.browser import lab
from tests.hlatctl.conftest import Script, example_config


def make_states(runs_dir: Path) -> None:
    """Make the runs of the tests, a failed run with a long history, and two damaged ones."""
    lab.make_runs(runs_dir)
    make_failed(runs_dir)
    lab.make_run(runs_dir, "no-config", 5).config.write_text("model: [", encoding="utf-8")
    damage(lab.make_run(runs_dir, "damaged-journal", 60), line=40)
    RunPaths(runs_dir / "empty").root.mkdir()
    new = lab.make_run(runs_dir, "new")
    lab.label(new, note="nothing is trained yet")


def damage(run: RunPaths, line: int) -> None:
    """Replace a line of a run's steps with garbage."""
    path = run.journal / "train-rank00000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = b"\x00garbage\xff" + lines[line - 1][9:]
    path.write_bytes(b"".join(lines))


def make_failed(runs_dir: Path) -> RunPaths:
    """Make a run that has failed after a restart on other nodes, an amendment, notes and warnings."""
    run = RunPaths(runs_dir / "failed")
    run.root.mkdir()
    config = example_config(runs_dir)
    lab.write_config(run, config)
    script = Script(run)
    script.add("flow", "run_created", run_id="failed", simulated=False, argv=["hlatctl", "train", "optimizer.lr=0.003"])
    script.add("flow", "head_started", pid=1, host="node-0")
    for stage, wall_s in (("validate", 0.02), ("preflight", 3.1), ("data", 7.9), ("compile", 41.0)):
        script.stage(stage, wall_s)
    script.add("flow", "stage_skipped", stage="warm_cache", fingerprint="0" * 16, why="no graphs were compiled")
    handle = {"launcher": "local", "name": "train", "launch_dir": "/x"}
    nodes = [f"node-{number}" for number in range(6)]
    script.add("flow", "attempt_started", attempt=1, handle=handle)
    script.add("flow", "job_started", attempt=1, job="train", hosts=nodes)
    script.add("train-rank00000", "train_started", attempt=1, after_s=4, resumed_from_step=0, tokens=0)
    script.steps(1, 1, 190, config.tokens_per_step)
    script.add("train-rank00000", "checkpoint_committed", attempt=1, after_s=0, step=150)
    script.add(
        "flow", "attempt_ended", attempt=1, cause="killed", exit_code=137, step=190,
        evidence="the job died of signal 9", decision="restart_without", why="step 150 is a valid checkpoint",
        hosts=nodes, blamed_hosts=["node-3"],
    )  # fmt: skip
    script.add("flow", "attempt_started", attempt=2, after_s=2, handle=handle, left_out_hosts=["node-3"])
    script.add("flow", "job_started", attempt=2, job="train", hosts=["node-7", *nodes[:3]])
    tokens = 150 * config.tokens_per_step
    script.add("train-rank00000", "train_started", attempt=2, after_s=4, resumed_from_step=150, tokens=tokens)
    script.steps(2, 151, 151, config.tokens_per_step)
    times = {"detect_s": 1.5, "decide_s": 0.2, "place_s": 3.0, "start_s": 8.0, "groups_s": 2.0, "load_s": 4.0}
    script.add("flow", "recovered", attempt=2, cause="killed", step=151, first_step_s=1.2, **times)
    script.steps(2, 152, 240, config.tokens_per_step)
    slow: dict[str, Any] = {"rank": 2, "host": "node-1", "device": "0", "ratio": 1.4}
    message = "rank 2 on node-1 is 1.4 times slower than the others"
    script.add("train-rank00000", "straggler", attempt=2, step=230, message=message, **slow)
    script.add("flow", "warning", attempt=2, message="the disk of node-1 is 91 % full")
    script.add(
        "flow", "attempt_ended", attempt=2, cause="bug", exit_code=1, step=240, decision="stop",
        evidence="ValueError: the batch has 15 sequences, expected 16", why="a restart would fail again",
        hosts=["node-7", *nodes[:3]],
    )  # fmt: skip
    says = "training ended with an error that a restart can't fix: ValueError: the batch has 15 sequences, expected 16"
    script.add("flow", "run_finished", outcome="failed", step=240, tokens=240 * config.tokens_per_step, message=says)
    with JournalWriter(run, "operator") as journal:
        changes = {"optimizer.lr": [0.003, 0.002]}
        journal.append("config_amended", number=1, changes=changes, by="tester", why="too noisy", at_step=None)
        journal.append("labelled", by="tester", tags={"team": "data"}, untag=[], note="ask the data team")
    return run
