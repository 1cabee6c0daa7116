"""Evaluations alongside training, which never waits for them, and between two of its attempts, on its nodes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from hlatctl.run import files
from hlatctl.run.fold import read_state
from hlatctl.run.journal import read_events
from tests.e2e.conftest import LIMIT, Cli
from tests.slurm.lab import Lab, held, release
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

RUN, STEPS, MILESTONE, LAST = "beside", 20, 5_120, 10_240
SMALL = (f"train.max_steps={STEPS}", "eval.enabled=true", "eval.limit=4", "eval.validation_tokens=2048")
TASKS = "eval.tasks=[validation,smoke_mmlu]"
#: The engine that shards the weights over nodes, where it is installed.
ENGINE = ("backend=torchtitan", "parallel=fsdp") if find_spec("torchtitan") else ()


def check_preflight(cli: Cli) -> None:
    run = cli.paths(RUN)
    workers = files.read_json(run.preflight)["workers"]
    assert [worker["host"] for worker in workers] == read_state(run).attempts[-1].hosts
    assert len({tuple(worker["versions"].items()) for worker in workers}) == 1
    assert {"hlatctl", "torch", "python"} == set(workers[0]["versions"]) - {"torchtitan"}  # where it is installed
    assert list(run.preflight_nodes.iterdir()) == [], "the tokens are removed"


def test_two_nodes_train_and_evaluate_beside_it_with_the_losses_of_one_machine(lab: Lab, tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    lab.wait_until_idle()
    cluster = ("cluster=slurm", "cluster.nodes=2", "cluster.processes_per_node=1", LIMIT)
    beside = ("eval.cluster.partition=scavenge", "eval.cluster.extra=['--hold']", f"eval.every_tokens={MILESTONE}")
    run = cli.start_train(RUN, *SMALL, *ENGINE, TASKS, *cluster, *beside)

    try:
        wait_for(lambda: cli.events(RUN, "attempt_ended") or run.poll() is not None)
        assert [event["cause"] for event in cli.events(RUN, "attempt_ended")] == ["finished"], run.communicate()[0]
        (waits,) = held(lab)  # one after another
        assert (waits.partition, waits.nodes, waits.name.split("/")[-1]) == ("scavenge", "1", f"export-{MILESTONE}")
        # beside the other's evaluations
        local = cli.start_train("local", *SMALL, *ENGINE, "eval.enabled=false")
        try:
            wait_for(lambda: release(lab) or run.poll() is not None)
            output, _ = run.communicate()
            local_output, _ = local.communicate()
        finally:
            local.kill()
    finally:
        run.kill()
    assert run.returncode == 0, output
    assert output.index("training is finished; waiting") < output.index(f"job eval-{MILESTONE}: runs on n")
    assert "--exclusive" not in (cli.paths(RUN).launch(0) / f"eval-{MILESTONE}.sh").read_text()
    assert "--exclusive" in (cli.paths(RUN).launch(1) / "train.sh").read_text()
    check_preflight(cli)

    assert local.returncode == 0, local_output
    assert list(cli.losses(RUN)) == list(range(1, STEPS + 1))
    assert cli.losses("local") == cli.losses(RUN)
    scores = files.read_sealed_json(cli.paths(RUN).eval(LAST) / "results.json")["scores"]
    assert scores["smoke_mmlu"]["n"] == 4
    assert len(scores) > 1, "and the validation loss"


STORY = ["attempt_started", "attempt_ended", "eval_taken", "eval_finished"]
PAUSED = ("eval.enabled=true", "eval.tasks=[validation]", "eval.validation_tokens=2048", "train.max_steps=8")


def test_the_nodes_of_training_evaluate_between_two_attempts(lab: Lab, tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    lab.wait_until_idle()
    cluster = ("cluster=slurm", "cluster.nodes=1", "cluster.processes_per_node=1", LIMIT)
    result = cli.train("one", *PAUSED, *cluster, "eval.placement=between", "eval.every_tokens=2048")
    assert result.returncode == 0, result.stderr
    ends = cli.events("one", "attempt_ended")
    assert [(end["cause"], end["step"]) for end in ends] == [("evaluation", 4), ("finished", 8)]
    run = cli.paths("one")
    assert [event["kind"] for event in read_events(run) if event["kind"] in STORY] == [*STORY, *STORY]
    rounds = [files.read_json(path)["allocation"] for path in sorted(run.launch(0).glob("e*.round"))]
    assert rounds == ["allocation-0001"] * 4, "exports and evaluations of both milestones"
    assert files.read_json(run.launch(2) / "train.round")["allocation"] == "allocation-0001"
