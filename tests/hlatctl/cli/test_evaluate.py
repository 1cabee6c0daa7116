"""`hlatctl eval`: its targets and progress; what `hlatctl eval data` prints, and what it asks the evaluator."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config
from hlatctl.cli.eval_progress import PlainEvaluationObserver
from hlatctl.cli.main import main
from hlatctl.cli.summary import evaluation_line
from hlatctl.run.state import EvaluationProgress, MilestoneState, RunState


def _record(dataset: str, config: str | None, split: str, task: str, **facts: Any) -> dict[str, Any]:
    place = "/".join(filter(None, [dataset.split("/")[1], config, f"{split}.jsonl"]))
    return {
        "dataset": dataset,
        "config": config,
        "split": split,
        "expected": place,
        "tasks": [task],
        "required": True,
        "file": None,
        **facts,
    }


_THERE = {"file": "/data/mmlu/anatomy/test.jsonl", "rows": 1350, "bytes": 2048, "sha256": "ab" * 32}
_FOUND: dict[str, Any] = {
    "suite": "hlat",
    "data_dir": "/data",
    "datasets": [
        _record("cais/mmlu", "anatomy", "test", "mmlu_anatomy", **_THERE),
        _record("cais/mmlu", "virology", "test", "mmlu_virology"),
        _record("google/nq_open", None, "train", "nq_open", required=False),
        _record("baber/piqa", None, "validation", "piqa", **_THERE),
    ],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the evaluator's process is asked, which answers with a status in which something is missing."""
    calls: list[tuple[str, ...]] = []

    def ask_about(module: str, config: Config, *argv: str, show_talk: bool) -> str:
        assert show_talk
        calls.append((module, config.eval.suite, str(config.eval.data_dir), *argv))
        return json.dumps(_FOUND)

    monkeypatch.setattr("flows.runtime.ask.ask_about", ask_about)
    return calls


def test_the_status_is_a_table_of_datasets_and_names_what_is_missing(
    asked: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "data", "status", "eval=hlat", "eval.data_dir=/data"]) == 0
    captured = capsys.readouterr()
    lines = [line.split() for line in captured.out.splitlines()]
    assert lines == [
        ["DATASET", "SPLIT", "FILES", "ROWS", "SIZE", "SHA256", "TASKS"],
        ["cais/mmlu", "test", "1", "of", "2", "1,350", "2", "KiB", "abababababab", "mmlu_anatomy,", "mmlu_virology"],
        ["google/nq_open", "train", "0", "of", "1", "(optional)", "–", "–", "–", "nq_open"],
        ["baber/piqa", "validation", "1", "1,350", "2", "KiB", "abababababab", "piqa"],
    ]
    assert captured.err == (
        "missing: /data/mmlu/virology/test.jsonl, for mmlu_virology\n"
        "hint: on a machine with a network, run `hlatctl eval data mirror --to /data eval=hlat`\n"
    )
    assert asked == [("eval.data", "hlat", "/data", "status")]


def test_the_status_as_json_is_every_file(asked: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "data", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == _FOUND
    assert asked == [("eval.data", "hlat", "None", "status")], "the whole table if no suite is named"


def test_the_mirror_is_asked_for_the_suite_that_is_named(
    asked: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "data", "mirror", "--to", "here", "eval=hlat_core"]) == 0
    assert asked == [("eval.data", "hlat_core", "None", "mirror", "--to", os.fspath(tmp_path / "here"))]


@pytest.mark.processes
def test_an_error_of_the_process_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    """The real process, whose stderr is ours."""
    assert main(["eval", "data", "status", "eval=smoke", "eval.tasks=[smoke_mmul]"]) == 10
    assert capfd.readouterr() == (
        "",
        "error: eval.tasks: smoke_mmul is no task or group of suite smoke, nor of lm-evaluation-harness\n"
        "hint: did you mean smoke_mmlu?\n",
    )


@pytest.mark.processes
def test_the_built_in_suite_needs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "data", "status", "eval=smoke"]) == 0
    assert capfd.readouterr() == ("", "suite smoke needs no datasets: its items are built in\n")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["nothing"], 13, "nothing: there is no run in "),
        (["./nothing"], 13, "TARGET=./nothing: no such folder\nhint: TARGET is a run, a checkpoint's folder"),
        (["--at", "200X", "."], 10, "--at='200X': is not a token count"),
        (["."], 21, "TARGET=.: is neither a run (it has no config.yaml), nor a checkpoint"),
    ],
)
def test_an_invalid_target_is_refused_before_anything_is_created(
    argv: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *argv, "--runs-dir", str(tmp_path / "runs")]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {words}")
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_not_evaluated_by_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    argv = ["eval", str(tmp_path / "model"), "experiment=hlat_7b", "--runs-dir", str(tmp_path / "runs")]
    assert main(argv) == 10
    message = capsys.readouterr().err
    assert message.startswith(
        "error: cluster.launcher=mock: simulates jobs and starts none, so nothing would be evaluated"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("argv", [["eval"], ["eval", "--help"], ["eval", "target", "--help"]])
def test_the_help_is_about_the_target_and_names_the_other_command(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "TARGET" in shown.splitlines()[0]
    assert "--at TOKENS" in shown
    assert "hlatctl eval data --help" in shown


def _milestone(**progress: Any) -> MilestoneState:
    return MilestoneState(10, 1, progress=EvaluationProgress(["piqa", "gsm8k"], **progress))


def test_progress_names_task_requests_and_the_time_that_is_left() -> None:
    assert evaluation_line(_milestone()) == "starting"
    assert evaluation_line(_milestone(task="piqa")) == "piqa (task 1 of 2)"
    known = {"task": "gsm8k", "done": 40, "total": 100, "done_before": 20, "task_started_unix_s": 5.0}
    line = evaluation_line(_milestone(**known, counted=[(95.0, 20), (105.0, 40)]))
    assert line == "gsm8k (task 2 of 2) · 40 of 100 requests · 30 s left for this task"


def test_plain_progress_is_a_line_a_task() -> None:
    stream, state = io.StringIO(), RunState()
    observer = PlainEvaluationObserver(stream)
    observer.update(state, Config())
    for task, done in (("piqa", 1), ("piqa", 2), ("gsm8k", 0)):
        state.milestones[10] = _milestone(task=task, done=done, total=5)
        observer.update(state, Config())
    assert stream.getvalue().splitlines() == [
        "piqa (task 1 of 2) · 1 of 5 requests",
        "gsm8k (task 2 of 2) · 0 of 5 requests",
    ]


def test_plain_progress_says_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, state, clock_s = io.StringIO(), RunState(), iter((0.0, 60.0, 120.0))
    monkeypatch.setattr("hlatctl.cli.eval_progress.time.monotonic", lambda: next(clock_s))
    observer = PlainEvaluationObserver(stream)
    for done in (1, 1, 2):
        state.milestones[10] = _milestone(task="piqa", done=done, total=5)
        observer.update(state, Config())
    assert len(stream.getvalue().splitlines()) == 2
