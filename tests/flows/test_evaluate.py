"""Evaluations on the simulated cluster: which milestones are evaluated, and what runs alongside a run's driver."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import Config
from flows import evaluate, pretrain
from flows.runtime.context import FlowContext
from flows.simulation.cluster import Script
from flows.simulation.jobs import SCRIPTS, write_checkpoint
from flows.tracking import follower
from hlatctl.run.errors import CheckpointError, ConfigError, EvaluationError, RunBusyError
from hlatctl.run.fold import fold
from hlatctl.run.journal import EVALUATE_WRITER, read_events
from hlatctl.run.lease import hold, hold_driver
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState
from tests.flows.conftest import Recorder

pytestmark = pytest.mark.processes


@pytest.fixture
def unevaluated(simulated_config: Config) -> RunPaths:
    """A run whose training is finished, without evaluations."""
    run = pretrain.create(replace(simulated_config, eval=replace(simulated_config.eval, enabled=False)), argv=[])
    pretrain.drive(run)
    for step in simulated_config.milestones:  # a run without evaluations keeps no checkpoints of them
        if not run.checkpoint(step).is_dir():
            write_checkpoint(run, simulated_config, step)
    return run


def _fails() -> Script:
    yield 1.0
    return 1


def _state(run: RunPaths) -> RunState:
    return fold(read_events(run))


def _drive(
    run: RunPaths, config: Config, recorder: Recorder | None = None, *, at: int | None = None, step: int | None = None
) -> list[Path]:
    return evaluate.drive(evaluate.of_run(run, config, _state(run), at=at, step=step), recorder)


def test_every_pending_milestone_is_evaluated_and_the_run_stays_finished(
    unevaluated: RunPaths, simulated_config: Config, recorder: Recorder
) -> None:
    tokens = sorted(simulated_config.milestones.values())
    folders = _drive(unevaluated, simulated_config)
    assert folders == [unevaluated.eval(at) for at in tokens]
    assert json.loads((folders[0] / "results.json").read_text(encoding="utf-8"))["contract"] == "simulated"
    state = _state(unevaluated)
    assert [state.milestones[at].status for at in tokens] == ["evaluated"] * 3
    assert state.status == "finished"
    assert {e["writer"] for e in read_events(unevaluated) if e["kind"] == "milestone"} == {EVALUATE_WRITER}
    before = len(read_events(unevaluated))
    assert _drive(unevaluated, simulated_config, recorder) == folders
    assert f"evaluation at {tokens[0]:,} tokens: done before" in recorder.messages
    kinds = [event["kind"] for event in read_events(unevaluated)[before:]]
    assert [kind for kind in kinds if kind.startswith("eval")] == []


def test_one_milestone_or_one_checkpoint_may_be_chosen(unevaluated: RunPaths, simulated_config: Config) -> None:
    tokens = sorted(simulated_config.milestones.values())
    assert _drive(unevaluated, simulated_config, at=tokens[1]) == [unevaluated.eval(tokens[1])]
    assert sorted(_state(unevaluated).milestones) == [tokens[1]]
    own = 50 * simulated_config.tokens_per_step
    write_checkpoint(unevaluated, simulated_config, 50)
    assert _drive(unevaluated, simulated_config, step=50) == [unevaluated.eval(own)]
    with pytest.raises(
        ConfigError, match=r"--at=5: .* has no milestone of 5 tokens\nhint: nearest: 409\.6K \(409600\), 833"
    ):
        _drive(unevaluated, simulated_config, at=5)


def test_a_milestone_without_a_checkpoint_is_reported(
    simulated_config: Config, unevaluated: RunPaths, recorder: Recorder, tmp_path: Path
) -> None:
    fresh = pretrain.create(simulated_config, argv=[])
    with pytest.raises(EvaluationError, match=r"no checkpoint of a milestone yet; the first is at 833\.3K tokens"):
        _drive(fresh, simulated_config)
    with pytest.raises(CheckpointError, match=r"--at=833.3K: .* has no checkpoint of step 102"):
        _drive(fresh, simulated_config, at=833_333)
    unevaluated.checkpoint(102).rename(tmp_path / "gone")
    assert 833_333 in simulated_config.milestones.values()
    assert len(_drive(unevaluated, simulated_config, recorder)) == 2
    with pytest.raises(CheckpointError, match="has no checkpoint of step 102"):
        _drive(unevaluated, simulated_config, at=833_333)


def test_a_final_failure_is_reported_and_the_next_call_continues(
    unevaluated: RunPaths, simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(SCRIPTS, "eval", lambda cluster, job: _fails())
        with pytest.raises(EvaluationError, match=r"3 of 3 evaluations failed, the last: job eval-.* exit code 1"):
            _drive(unevaluated, simulated_config)
    assert [e["final"] for e in read_events(unevaluated) if e["kind"] == "eval_failed"] == [False, True] * 3
    assert len(_drive(unevaluated, simulated_config)) == 3


def test_the_runs_driver_copies_the_scores_to_mlflow(
    unevaluated: RunPaths, simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[RunState] = []

    def start(ctx: FlowContext) -> list[follower.Follower]:
        copied.append(_state(ctx.run))
        return []

    monkeypatch.setattr(follower, "start", start)
    first, second, _ = sorted(simulated_config.milestones.values())
    _drive(unevaluated, simulated_config, at=first)
    assert [state.milestones[first].status for state in copied] == ["evaluated"]
    with hold_driver(unevaluated):
        _drive(unevaluated, simulated_config, at=second)
    assert len(copied) == 1, "the run's driver copies them"


def test_two_processes_do_not_evaluate_one_run_at_once(unevaluated: RunPaths, simulated_config: Config) -> None:
    def refuse(holder: object) -> None:
        raise AssertionError

    with (
        hold(unevaluated.evaluator_lock, refuse),
        pytest.raises(RunBusyError, match=r"run .*: process \d+ on .* is evaluating it"),
    ):
        _drive(unevaluated, simulated_config)


def test_an_external_model_gets_a_run_that_contains_only_its_evaluation(
    simulated_config: Config, tmp_path: Path
) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 77}', encoding="utf-8")
    run, _ = evaluate.create(simulated_config, folder, argv=["hlatctl", "eval"])
    assert run.run_id.startswith("eval-my-model-")
    assert _drive(run, replace(simulated_config, train=replace(simulated_config.train, seq_len=77))) == [run.eval(0)]
    state = _state(run)
    assert (state.status, state.evaluates, state.milestones[0].status) == ("finished", str(folder), "evaluated")
    assert "seq_len: 77" in run.config.read_text(encoding="utf-8")
    assert (run.report / "summary.md").is_file()


def test_an_external_model_whose_files_have_changed_is_evaluated_again(
    simulated_config: Config, tmp_path: Path, recorder: Recorder
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 77}', encoding="utf-8")
    run, _ = evaluate.create(simulated_config, folder, argv=["hlatctl", "eval"])
    config = replace(simulated_config, train=replace(simulated_config.train, seq_len=77))
    _drive(run, config)
    (folder / "model.safetensors").write_bytes(b"other weights")
    _drive(run, config, recorder)
    said = "evaluation: the model's files have changed; earlier results are replaced"
    assert said in recorder.messages
    assert sum(event["kind"] == "eval_finished" for event in read_events(run)) == 2
