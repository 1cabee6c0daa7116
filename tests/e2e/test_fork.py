"""`hlatctl fork` and `hlatctl verify-resume` on a real tiny run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hlatctl.run import files
from hlatctl.run.checkpoint import MANIFEST, read_manifest, write_manifest
from tests.e2e.conftest import Call, Cli
from trainer.checkpoint.shards import read_index, read_tensors

pytestmark = pytest.mark.processes

ONE_PROCESS = ("cluster.processes_per_node=1", "train.max_steps=12", "checkpoint.every_steps=4")


@pytest.fixture(scope="module")
def parent(cli: Cli) -> str:
    done = cli.train("parent", *ONE_PROCESS)
    assert done.returncode == 0, done.stderr
    return "parent"


@pytest.fixture(scope="module")
def child(cli: Cli, parent: str) -> str:
    done = cli.run("fork", parent, "--at", "8", "--run-id", "child")
    assert (done.returncode, done.stdout) == (0, "child\n"), done.stderr
    assert f"forked from {parent} at step 8, 4,096 tokens" in done.stderr
    return "child"


def test_a_fork_without_changes_has_exactly_the_losses_of_its_parent(
    cli: Cli, call: Call, parent: str, child: str
) -> None:
    losses = cli.losses(child)
    assert losses == {step: cli.losses(parent)[step] for step in (9, 10, 11, 12)}
    assert [event["tokens"] for event in cli.events(child, "step")] == [4608, 5120, 5632, 6144]
    record = files.read_json(cli.paths(child).provenance)["fork"]
    assert (record["run"], record["step"], record["tokens"]) == (parent, 8, 4096)
    assert record["manifest_sha256"] == read_manifest(cli.paths(parent).checkpoint(8)).sha256
    assert f"forked from  {parent} at step 8" in call("status", child).stdout


def test_a_fork_with_longer_sequences_counts_its_tokens_from_the_checkpoint(cli: Cli, call: Call, parent: str) -> None:
    changes = ("train.seq_len=256", "train.max_steps=null", "train.tokens=6100", "data.validation_fraction=0.05")
    done = call("fork", parent, "--at", "4.1K", "--run-id", "longer", *changes)
    assert done.returncode == 22, "no checkpoint has 4,100 tokens"
    done = cli.run("fork", parent, "--at", "8", "--run-id", "longer", *changes)
    assert done.returncode == 0, done.stderr
    assert "train.seq_len: 128 -> 256" in done.stderr
    assert "data: from the beginning of the corpus" in done.stderr, "another split has other documents"
    steps = cli.events("longer", "step")
    assert [(e["step"], e["tokens"], e["batch"]) for e in steps] == [(9, 5120, 1), (10, 6144, 2)]


def test_a_run_whose_fork_has_lost_its_checkpoint_does_not_begin_anew(cli: Cli, call: Call, parent: str) -> None:
    assert cli.run("fork", parent, "--at", "4", "--run-id", "orphan", "--detach").returncode == 0
    assert call("stop", "orphan").returncode == 0
    for step in cli.paths("orphan").checkpoints.iterdir():
        (step / "manifest.json").unlink()
    resumed = call("resume", "orphan")
    assert (resumed.returncode, "does not start over" in resumed.stderr) == (22, True), resumed.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("--at", "7"), 22, "has no checkpoint of step 7"),
        (("--at", "12"), 10, "there is nothing left to train"),
        (("--at", "soon"), 10, "is not a token count"),
        (("--at", "8", "model.hidden_size=64"), 10, "weights are of another shape (32)"),
        (("--at", "8", "train.global_batch_size=8"), 10, "--restart-data"),
        (("--at", "8", "precision.name=bf16_sr"), 10, "train.init_from="),
        (("--at", "8", "fork.step=3"), 10, "--at names the checkpoint"),
        (("--at", "8", "--decay", "10%"), 10, "--decay: continues from the peak of the learning rate; at step 8"),
        (("--at", "8", "--decay", "100%"), 10, "--decay=100%: must be a share"),
        (("--at", "8", "--driver", "slurm"), 10, "--driver=slurm: with cluster.launcher=local"),
    ],
)
def test_what_a_checkpoint_can_not_continue_is_refused_before_a_run_exists(
    cli: Cli, call: Call, parent: str, arguments: tuple[str, ...], code: int, expected: str
) -> None:
    refused = call("fork", parent, "--run-id", "never", *arguments)
    assert (refused.returncode, expected in refused.stderr) == (code, True), refused.stderr
    assert not cli.paths("never").root.exists()


def test_a_checkpoint_is_proven_to_continue_as_the_run_did(cli: Cli, parent: str, child: str) -> None:
    before = sorted(path for path in cli.paths(parent).root.rglob("*") if ".fold" not in path.parts)
    proof = cli.run("verify-resume", parent, "--steps", "4", "--json")
    assert proof.returncode == 0, proof.stderr
    found = json.loads(proof.stdout)
    assert (found["from_step"], found["steps"], found["equal"], found["must_equal"]) == (8, 4, 4, True)
    assert (found["tensors_at"], found["equal_tensors"], found["first_tensor"]) == (12, found["tensors"], None)
    assert sorted(path for path in cli.paths(parent).root.rglob("*") if ".fold" not in path.parts) == before


def test_a_run_that_does_not_continue_as_it_did_is_told(cli: Cli, child: str) -> None:
    """A different learning rate represents any change since the original run."""
    run = cli.paths(child)
    text, _ = files.unseal_lines(run.config.read_text(encoding="utf-8"))
    run.config.write_text(files.seal_lines(text.replace("max_grad_norm: 1.0", "max_grad_norm: 0.01")), encoding="utf-8")
    proof = cli.run("verify-resume", child, "--steps", "3")
    assert (proof.returncode, "step 10 differs" in proof.stderr) == (20, True), proof.stderr
    assert "1 of 3 steps are equal" in proof.stdout, "the update of step 9 is the first that differs"


def _flip_the_lowest_bit_of_an_unused_moment(checkpoint: Path) -> str:
    """Return the name of the tensor. The manifest is written anew, so the checkpoint is valid."""
    (stored,) = read_index(checkpoint).tensors(lambda name: "exp_avg." in name and "embed" in name)
    ((file, chunk),) = stored.chunks
    values = read_tensors(checkpoint, lambda name: name == stored.name)[stored.name]
    row = next(number for number, row in enumerate(values) if not row.any())
    manifest = read_manifest(checkpoint)
    (checkpoint / MANIFEST).unlink()
    with (checkpoint / file).open("r+b") as shard:
        shard.seek(chunk.begin + row * values[0].nbytes)
        shard.write(b"\x01")  # the least number that isn't 0
    write_manifest(checkpoint, step=manifest.step, tokens=manifest.tokens, world=manifest.world)
    return stored.name


def test_a_bit_of_a_moment_that_no_loss_depends_on_is_found(cli: Cli, parent: str) -> None:
    name = _flip_the_lowest_bit_of_an_unused_moment(cli.paths(parent).checkpoint(8))
    proof = cli.run("verify-resume", parent, "--steps", "4")
    assert proof.returncode == 20, proof.stderr
    assert f"tensor {name} differs; must be equal to the last bit" in proof.stderr
    assert "4 of 4 steps are equal, to the last bit, after step 8" in proof.stdout
    assert f"the first that differs is {name}" in proof.stdout
