"""Evaluation beside training: jobs of their own that training never waits for, with the scores of one machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import conf.load
from flows import evaluate
from hlatctl.run import files
from hlatctl.run.fold import read_state
from tests.e2e.conftest import Cli
from tests.slurm.held import held, release
from tests.slurm.lab import Lab
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

RUN, MILESTONE = "beside", 5_120
SMALL = (
    "cluster.processes_per_node=1",
    "train.max_steps=20",
    f"eval.every_tokens={MILESTONE}",
    "eval.enabled=true",
    "eval.limit=4",
    "eval.tasks=[validation,smoke_mmlu]",
    "eval.validation_tokens=2048",
)


def scores(cli: Cli) -> Any:
    return files.read_sealed_json(cli.paths(RUN).eval(MILESTONE) / "results.json")["scores"]


def test_evaluations_are_jobs_beside_training_which_does_not_wait_and_score_as_on_one_machine(
    lab: Lab, tmp_path: Path
) -> None:
    cli = Cli(tmp_path)
    cluster = ("cluster=slurm", "cluster.nodes=1", "eval.cluster.partition=scavenge", "eval.cluster.extra=['--hold']")
    run = cli.start_train(RUN, *SMALL, *cluster)

    try:
        wait_for(lambda: cli.events(RUN, "attempt_ended") or run.poll() is not None)
        assert [event["cause"] for event in cli.events(RUN, "attempt_ended")] == ["finished"], run.communicate()[0]
        (waits,) = held(lab)  # one after another
        assert (waits.partition, waits.nodes, waits.name.split("/")[-1]) == ("scavenge", "1", f"export-{MILESTONE}")
        wait_for(lambda: release(lab) or run.poll() is not None)
        output, _ = run.communicate()
    finally:
        run.kill()
    assert run.returncode == 0, output
    assert output.index("training is finished; waiting") < output.index(f"job eval-{MILESTONE}: runs on n")
    assert "--exclusive" not in (cli.paths(RUN).launch(0) / f"eval-{MILESTONE}.sh").read_text()
    assert "--exclusive" in (cli.paths(RUN).launch(1) / "train.sh").read_text()

    on_slurm = scores(cli)
    assert on_slurm["smoke_mmlu"]["n"] == 4
    assert len(on_slurm) > 1, "and the validation loss"
    (cli.paths(RUN).eval(MILESTONE) / "results.json").unlink()
    config = conf.load.load(cli.paths(RUN).config)
    config = replace(config, cluster=replace(config.cluster, launcher="local"))
    evaluate.drive(evaluate.of_run(cli.paths(RUN), config, read_state(cli.paths(RUN)), at=MILESTONE))
    assert scores(cli) == on_slurm
