"""Evaluation beside training: jobs of their own, in a partition of their own, which training never waits for."""

from __future__ import annotations

from pathlib import Path

from hlatctl.run import files
from tests.e2e.conftest import Cli, wait_for
from tests.slurm.held import held, release
from tests.slurm.lab import Lab

RUN = "beside"
ON_TWO_NODES = ("cluster=slurm", "cluster.processes_per_node=1")
HELD = ("eval.cluster.partition=scavenge", "eval.cluster.extra=[--hold]")
EVALUATED = (
    "train.max_steps=20",
    "eval.enabled=true",
    "eval.every_tokens=6000",
    "eval.limit=4",
    "eval.validation_tokens=2048",
    "eval.tasks=[smoke_mmlu]",
)


def test_evaluations_that_stay_in_the_queue_never_hold_up_training(lab: Lab, tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    run = cli.start_train(RUN, *ON_TWO_NODES, *EVALUATED, *HELD)
    try:
        wait_for(lambda: cli.events(RUN, "attempt_ended") or run.poll() is not None)
        assert [event["cause"] for event in cli.events(RUN, "attempt_ended")] == ["finished"], run.communicate()[0]
        ((partition, nodes, name),) = held(lab)
        assert (partition, nodes, name.split("/")[-1]) == ("scavenge", "1", "export-6000"), "one after another"
        wait_for(lambda: release(lab) or run.poll() is not None)
        output, _ = run.communicate()
    finally:
        run.kill()
    assert run.returncode == 0, output
    waits = output.index("training is finished; waiting for the last evaluation")
    assert waits < output.index("evaluation at 10,240 tokens: started")
    for tokens in (6_000, 10_240):
        scores = files.read_sealed_json(cli.paths(RUN).eval(tokens) / "results.json")["scores"]
        assert scores["validation_loss"]["value"] > 0
        assert scores["smoke_mmlu"]["n"] == 4
    scripts = cli.paths(RUN).launch(0)
    assert "--exclusive" not in (scripts / "eval-6000.sh").read_text()
    assert "--exclusive" in (cli.paths(RUN).launch(1) / "train.sh").read_text()
