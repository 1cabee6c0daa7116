"""Exporting to Hugging Face's format, importing again, and training from the imported weights."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from tests.e2e.conftest import WORDS, Call, Cli

pytestmark = pytest.mark.processes


def test_an_exported_model_is_imported_again_and_trained_further(
    cli: Cli, call: Call, undisturbed: str, tmp_path: Path
) -> None:
    before = sorted(path.name for path in (cli.paths(undisturbed).root).rglob("*"))
    exported = cli.run("checkpoint", "export", undisturbed, "--step", "40", "--to", os.fspath(tmp_path / "hf"))
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout == f"{tmp_path / 'hf'}\n"
    assert sorted(path.name for path in (cli.paths(undisturbed).root).rglob("*")) == before

    imported = cli.run("checkpoint", "import", os.fspath(tmp_path / "hf"), "--to", os.fspath(tmp_path / "ours"))
    assert imported.returncode == 0, imported.stderr
    printed = shlex.split(imported.stdout)
    assert printed[:2] == ["hlatctl", "train"]

    overrides = [override for override in printed[2:] if override != "data.path=CORPUS"]
    went_on = cli.train("went-on", *overrides, "train.max_steps=4", "cluster.processes_per_node=1")
    assert went_on.returncode == 0, went_on.stderr
    losses = cli.losses(undisturbed)
    assert cli.losses("went-on")[1] == pytest.approx(losses[40], abs=0.3)
    assert cli.losses("went-on")[1] < losses[1] - 1.0
    shown = call("show", "went-on", "--json").stdout
    assert '"manifest_sha256"' in shown

    again = call("checkpoint", "export", undisturbed, "--to", os.fspath(tmp_path / "hf"))
    assert again.returncode == 14
    assert "exists and is not an empty folder\nhint: " in again.stderr


def test_a_checkpoint_continues_a_text_and_no_file_is_left(cli: Cli, undisturbed: str) -> None:
    before = sorted(path.name for path in cli.paths(undisturbed).root.rglob("*"))
    prompt = "the model reads a page and then"
    options = ["--prompt", prompt, "--step", "30", "--temperature", "0", "--max-new-tokens", "12"]
    result = cli.run("generate", undisturbed, *options, "--json")
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["run_id"], record["step"], record["tokens"]) == (undisturbed, 30, 30 * 512)
    (text,) = record["texts"]
    assert 1 <= len(text["token_ids"]) <= 12
    assert set(text["text"].split()[:-1]) <= set(WORDS), "it has seen no other words"
    assert sorted(path.name for path in cli.paths(undisturbed).root.rglob("*")) == before


def test_initial_weights_of_another_model_are_refused_before_anything_is_created(
    cli: Cli, call: Call, undisturbed: str
) -> None:
    weights = cli.paths(undisturbed).checkpoint(40)
    train = ("train", "--run-id", "refused", *cli.overrides)
    result = call(*train, f"train.init_from={weights}", "model.num_layers=3")
    assert result.returncode == 10, result.stderr
    assert "model.num_layers=3 (the weights: 2)\nhint: model.num_layers=2" in result.stderr
    assert not cli.paths("refused").root.exists()
    result = call(*train, "train.init_from=/nowhere")
    assert result.returncode == 10
    assert "train.init_from=/nowhere: no such folder\nhint: " in result.stderr


def test_a_finished_run_verifies_and_lists_its_checkpoints(call: Call, undisturbed: str) -> None:
    verified = call("checkpoint", "verify", undisturbed)
    assert verified.returncode == 0, verified.stderr
    assert [line.split(":")[0] for line in verified.stdout.splitlines()] == ["step 20", "step 30", "step 40"]
    listed = call("checkpoint", "ls", undisturbed).stdout
    assert listed.count("newest") == 3
    assert {line.split()[-1] for line in listed.splitlines()[1:]} <= {"verified", "survived"}
