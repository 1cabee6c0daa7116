"""The priority of an evaluation during training, with real jobs on this machine."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from flows import pretrain
from flows.runtime.context import FlowContext, open_context
from flows.runtime.jobs import end_staying, run_job
from flows.stages import evaluate as evaluate_stage
from flows.stages.evaluate import _run_beside_training, due_milestones, evaluate_milestone
from hlatctl.run import files
from hlatctl.run.checkpoint import read_manifest, write_manifest
from hlatctl.run.errors import EvaluationError
from hlatctl.run.model_folder import write_link
from tests.flows.conftest import Recorder
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.processes

#: Writes its priority; at a low one it runs until it is ended.
_JOB = """
import os, sys, time
group = "/proc/self/autogroup"
weights = [os.nice(0), int(open(group).read().split()[-1]) if os.path.exists(group) else os.nice(0)]
with open(sys.argv[1], "a") as notes:
    print(weights, file=notes, flush=True)
while weights[0] > int(sys.argv[2]):
    time.sleep(0.05)
"""


@pytest.fixture
def ctx(tmp_path: Path, recorder: Recorder) -> Iterator[FlowContext]:
    """A flow on this machine; by its journal, the run is training."""
    config = compose(["cluster=local", "tracking=none", f"runs_dir={tmp_path / 'runs'}", "train.tokens=1M"])
    context = open_context(pretrain.create(config, argv=[]), recorder)
    context.event("attempt_started", attempt=1, handle={})
    yield context
    context.cancelled.set()
    context.close()


@pytest.fixture
def evaluate(ctx: FlowContext, tmp_path: Path) -> Callable[[int], threading.Thread]:
    """Return a function that starts the evaluation of a step's checkpoint in a thread."""
    argv = ("-c", _JOB, os.fspath(tmp_path / "notes"), str(os.nice(0)))

    def begin(step: int) -> threading.Thread:
        thread = threading.Thread(
            target=_run_beside_training, args=(ctx, step, "eval-1", *argv), kwargs={"reattach": True}, daemon=True
        )
        thread.start()
        return thread

    return begin


def _notes(folder: Path, count: int) -> list[Any]:
    """Wait for this many jobs, and return their notes."""
    wait_for(lambda: (folder / "notes").exists() and (folder / "notes").read_text().count("\n") >= count)
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


def test_a_milestone_is_due_until_the_run_s_suite_is_evaluated(ctx: FlowContext) -> None:
    at = {"milestone_tokens": (tokens := max(ctx.config.milestones.values())), "step": ctx.config.total_steps}
    ctx.event("milestone", tokens=tokens, **at)
    ctx.event("eval_finished", scores={}, chosen=True, **at)
    assert due_milestones(ctx) == [tokens]
    ctx.event("eval_finished", scores={}, chosen=False, **at)
    assert due_milestones(ctx) == []


def test_an_evaluation_that_outlasts_training_is_restarted_at_normal_priority(
    ctx: FlowContext, recorder: Recorder, tmp_path: Path, evaluate: Callable[[int], threading.Thread]
) -> None:
    thread = evaluate(1)
    ((nice, group),) = _notes(tmp_path, 1)
    ctx.event("attempt_ended", attempt=1, cause="killed", decision="restart")
    ctx.event("attempt_started", attempt=2, handle={})
    assert not any("restarted" in message for message in recorder.messages), "training continues"
    ctx.event("attempt_ended", attempt=2, cause="finished", decision="done")
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert _notes(tmp_path, 2) == [[nice, group], [nice - 5, group - 5]]
    assert recorder.messages == ["eval-1: restarted at normal priority, because training has ended"]


def test_the_last_checkpoint_is_evaluated_at_normal_priority_from_the_start(
    ctx: FlowContext, tmp_path: Path, evaluate: Callable[[int], threading.Thread]
) -> None:
    evaluate(ctx.config.total_steps).join(WAIT_S)
    ((nice, _),) = _notes(tmp_path, 1)
    assert nice == os.nice(0)


def test_a_later_driver_does_not_wait_for_an_evaluation_at_low_priority_after_training(
    ctx: FlowContext, tmp_path: Path, evaluate: Callable[[int], threading.Thread]
) -> None:
    """An evaluation that a dead driver left running continues, unless training has ended and its priority is low."""
    job = replace(ctx.job("eval-1", "-c", _JOB, os.fspath(tmp_path / "notes"), str(os.nice(0))), beside_training=True)
    ctx.launcher.submit(ctx.launcher.render(job))
    first = _notes(tmp_path, 1)
    assert not run_job(ctx, job, reattach=True, until=lambda: True)
    assert len(_notes(tmp_path, 1)) == 1, "it waited for the same job"
    ctx.launcher.submit(ctx.launcher.render(job))
    _notes(tmp_path, 2)
    ctx.event("attempt_ended", attempt=1, cause="finished", decision="done")
    evaluate(1).join(WAIT_S)
    assert [nice for nice, _ in _notes(tmp_path, 3)] == [first[0][0], first[0][0], first[0][0] - 5]


#: Does its work at once and writes its process id; stays for as many orders as its second argument says.
_STAYS = """
import os, sys
from pathlib import Path
from hlatctl.run import orders
notes, stays, folder = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[-1])
def work(number):
    with notes.open("a") as file:
        print(os.getpid(), file=file, flush=True)
    orders.done(folder, number)
work(0)
orders.STAYS_S = 60.0 * stays
for number, argv in orders.coming(folder):
    assert argv[2:] == sys.argv[1:3], argv
    work(number)
"""


def test_a_job_that_stays_does_the_next_work_and_ends_for_one_of_another_priority(
    ctx: FlowContext, tmp_path: Path
) -> None:
    argv = ("-c", _STAYS, os.fspath(tmp_path / "notes"), "1")
    for name in ("eval-1", "eval-2", "eval-3"):
        assert run_job(ctx, replace(ctx.job(name, *argv), beside_training=True), stays=True)
    first, second, third = _notes(tmp_path, 3)
    assert first == second == third
    (stayed,) = ctx.staying
    assert run_job(ctx, ctx.job("eval-4", *argv), stays=True)
    assert stayed.launcher.status(stayed.handle).ended
    assert _notes(tmp_path, 4)[3] != first
    (stayed,) = ctx.staying
    end_staying(ctx)
    assert (ctx.staying, stayed.launcher.status(stayed.handle).ended) == ([], True)


def test_the_work_that_a_job_did_not_stay_for_is_given_to_another(ctx: FlowContext, tmp_path: Path) -> None:
    argv = ("-c", _STAYS, os.fspath(tmp_path / "notes"), "0")
    for name in ("eval-1", "eval-2"):
        assert run_job(ctx, ctx.job(name, *argv), stays=True)
    first, second = _notes(tmp_path, 2)
    assert first != second


@pytest.fixture
def jobs(ctx: FlowContext, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """Record jobs instead of running them; the evaluation fails after it has stored answers, so the model stays."""
    asked: list[tuple[str, tuple[str, ...]]] = []

    def run(_: FlowContext, step: int, name: str, *argv: str, reattach: bool = False, devices: int = 0) -> None:
        asked.append((name, (*argv, f"devices={devices}")))
        if name.startswith("eval"):
            answers = ctx.run.eval(100) / "answers"
            answers.mkdir(exist_ok=True)
            (answers / f"{len(asked)}.jsonl").touch()
            raise EvaluationError("out of memory")
        folder = Path(argv[argv.index("--to") + 1])
        assert not folder.exists()
        files.write_json(folder / "config.json", {})
        if argv[argv.index("--link") + 1] == "also":
            (folder / "model.safetensors").touch()
        manifest = read_manifest(ctx.run.checkpoint(step))
        write_link(folder, run_dir=ctx.run.root, step=step, manifest_sha256=manifest.sha256)

    monkeypatch.setattr(evaluate_stage, "_run_beside_training", run)
    ctx.event("milestone", milestone_tokens=100, tokens=100, step=7)
    _write_checkpoint(ctx, tokens=100)
    return asked


def _write_checkpoint(ctx: FlowContext, *, tokens: int) -> None:
    folder = ctx.run.checkpoint(7)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_manifest(folder, step=7, tokens=tokens, world={})


def _set(ctx: FlowContext, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
    monkeypatch.setattr(ctx, "config", replace(ctx.config, eval=replace(ctx.config.eval, **keys)))


def test_a_runner_that_can_read_checkpoints_gets_a_link_and_later_tries_use_it(
    ctx: FlowContext, jobs: list[tuple[str, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(ctx, monkeypatch, max_retries=1)
    ctx.refresh()
    assert evaluate_milestone(ctx, 100) == "failed"
    assert [name for name, _ in jobs] == ["export-100", "eval-100", "eval-100"]
    assert "only" in jobs[0][1]


@pytest.mark.parametrize(
    ("device", "settings", "devices"),
    [
        ("cuda", {}, 1),
        ("cuda", {"replicas": 2, "tensor_parallel_size": 4}, 8),
        ("cuda", {"device": "cpu"}, 0),
        ("cpu", {"device": "cuda"}, 1),
        ("cpu", {}, 0),
        ("cuda", {"runner": "vllm", "tensor_parallel_size": 2}, 2),
    ],
)
def test_an_evaluation_asks_for_its_devices_and_an_export_for_none(
    ctx: FlowContext,
    jobs: list[tuple[str, tuple[str, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    device: Any,
    settings: dict[str, Any],
    devices: int,
) -> None:
    monkeypatch.setattr(ctx, "config", replace(ctx.config, backend=replace(ctx.config.backend, device=device)))
    _set(ctx, monkeypatch, max_retries=0, **settings)
    ctx.refresh()
    evaluate_milestone(ctx, 100)
    assert [(name, argv[-1]) for name, argv in jobs] == [
        ("export-100", "devices=0"),
        ("eval-100", f"devices={devices}"),
    ]


def test_a_model_that_the_runner_can_not_read_is_written_anew(
    ctx: FlowContext, jobs: list[tuple[str, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(ctx, monkeypatch, max_retries=0)
    ctx.refresh()
    for runner, tokens, expected in (
        ("hf", 100, ["only"]),
        ("hf", 101, ["only"]),  # the checkpoint was written anew
        ("vllm", 101, ["also"]),
        ("hf", 101, []),  # reads the copy that is there
        ("hf", 102, ["only"]),  # but not that of other weights
    ):
        _write_checkpoint(ctx, tokens=tokens)
        _set(ctx, monkeypatch, runner=runner)
        jobs.clear()
        assert evaluate_milestone(ctx, 100) == "failed"
        exports = [argv for name, argv in jobs if name.startswith("export")]
        assert [argv[argv.index("--link") + 1] for argv in exports] == expected


def test_tasks_that_were_skipped_are_named_on_the_terminal(
    ctx: FlowContext, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: FlowContext, step: int, name: str, *argv: str, reattach: bool = False, devices: int = 0) -> None:
        if name.startswith("eval"):
            skipped = dict.fromkeys(("humaneval", "mbpp"), "bubblewrap is not installed")
            ctx.event("eval_finished", milestone_tokens=100, step=7, scores={}, skipped=skipped, contract="1")

    monkeypatch.setattr(evaluate_stage, "_run_beside_training", run)
    ctx.event("milestone", milestone_tokens=100, tokens=100, step=7)
    _write_checkpoint(ctx, tokens=100)
    assert evaluate_milestone(ctx, 100) == "evaluated"
    said = "evaluation at 100 tokens: humaneval, mbpp: skipped, bubblewrap is not installed"
    assert recorder.messages.count(said) == 1
