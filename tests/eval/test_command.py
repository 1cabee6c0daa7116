"""`hlatctl eval` of an external model whose first evaluator was killed during a task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.compose import compose
from flows import evaluate
from flows.stages.evaluate import Asked
from hlatctl.run.journal import read_events
from hlatctl.run.model_folder import fingerprint
from hlatctl.run.paths import RunPaths
from tests.eval.conftest import REPO

pytestmark = pytest.mark.processes

_OVERRIDES = ["eval.tasks=[smoke_crows_pairs,smoke_gsm8k]", "eval.limit=6", "eval.batch_size=1", "tracking=none"]


def test_a_repeated_command_continues_a_killed_evaluation(
    model_folder: Path,
    start_eval: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        nothing = Asked(name="", contracts={})
        patch.setattr("flows.evaluate.ask_contracts", lambda *argv, **keys: nothing)  # the command below asks it
        run, _ = evaluate.create(compose([f"runs_dir={tmp_path / 'runs'}", *_OVERRIDES]), model_folder, argv=[])
    answered = _kill_in_the_middle(run, model_folder, start_eval)
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "HLATCTL_RUNS_DIR": str(tmp_path / "runs"),
    }
    again = subprocess.run(
        [sys.executable, "-P", "-m", "hlatctl", "eval", "latest"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    results = run.eval(0) / "results.json"
    assert again.stdout == f"{results}\n"
    assert "smoke_gsm8k (task 2 of 2)" in again.stderr
    scores = json.loads(results.read_text(encoding="utf-8"))["scores"]
    names = ("smoke_crows_pairs", "smoke_gsm8k", "smoke_gsm8k_bpb")
    assert {name: score["n"] for name, score in scores.items()} == dict.fromkeys(names, 6)
    events = read_events(run)
    assert [event["task"] for event in events if event["kind"] == "eval_task_finished"] == [
        "smoke_crows_pairs",
        "smoke_gsm8k",
    ]
    second = max(number for number, event in enumerate(events) if event["kind"] == "eval_started")
    progress = next(event for event in events[second:] if event["kind"] == "eval_progress")
    assert (progress["task"], progress["done"]) == ("smoke_gsm8k", answered)
    assert [event["outcome"] for event in events if event["kind"] == "run_finished"] == ["finished"]


def _kill_in_the_middle(run: RunPaths, model_folder: Path, start_eval: Callable[..., subprocess.Popen[str]]) -> int:
    """Evaluate as the command's job does, kill it (-9), and return the number of stored answers."""
    weights = fingerprint(model_folder)
    evaluator = start_eval(run, "--from-elsewhere", "--weights", weights, milestone_tokens=0, step=0)
    kept = run.eval(0) / "answers" / "smoke_gsm8k.jsonl"
    while not (kept.exists() and len(kept.read_text().splitlines()) > 3):
        assert evaluator.poll() is None, evaluator.communicate()
        time.sleep(0.005)
    evaluator.send_signal(signal.SIGKILL)
    evaluator.communicate()
    return sum(bool(line) for line in kept.read_text().splitlines())
