"""`hlatctl checkpoint`: what it lists and verifies, how it starts the processes that export and import."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from flows.runtime import programs as asking
from hlatctl.cli.main import main
from hlatctl.run.checkpoint import MANIFEST, write_manifest
from hlatctl.run.errors import CheckpointError, LaunchError
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import MakeRun

#: Of the run with a known past: 306 steps of 8192 tokens, a milestone at 102 and 204 and the end, keep=3.
STEPS = (102, 200, 250, 300, 306)


@pytest.fixture
def run(make_run: MakeRun) -> RunPaths:
    made = make_run()
    for step in STEPS:
        folder = made.checkpoint(step)
        folder.mkdir(parents=True)
        (folder / "shard.safetensors").write_bytes(b"x" * 2048)
        write_manifest(folder, step=step, tokens=step * 8192, world={"world_size": 2, "data_parallel_size": 1})
        os.utime(folder / MANIFEST, (1_700_000_000 + step, 1_700_000_000 + step))
    return made


def damage(run: RunPaths) -> None:
    (run.checkpoint(250) / "shard.safetensors").write_bytes(b"y" * 2048)  # only reading it shows this
    (run.checkpoint(300) / "shard.safetensors").write_bytes(b"x" * 100)
    (run.checkpoint(306) / MANIFEST).unlink()


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]


def test_ls_lists_each_checkpoint_and_why_it_is_kept(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run)
    assert main(["checkpoint", "ls", "latest"]) == 0
    header, *listed = rows(capsys.readouterr().out)
    assert header == ["STEP", "TOKENS", "SIZE", "WRITTEN", "WRITTEN BY", "KEPT AS", "STATE"]
    world = "data_parallel_size 1, world_size 2"
    written = "2023-11-14 22:15:02 UTC"
    assert listed[0] == ["102", "835.6K", "2 KiB", written, world, "milestone 833.3K", "ok"]
    assert [row[0] for row in listed] == [str(step) for step in STEPS]
    assert [row[5] for row in listed[1:4]] == ["-", "newest", "newest"]
    assert listed[2][6] == "ok"  # of the right size; verify reads it
    assert listed[3][6] == "shard.safetensors: 100 bytes, expected 2048"
    assert listed[4][5:] == [
        "milestone 2.51M, newest",
        f"{run.checkpoint(306)}: no manifest.json, so the checkpoint was never completed",
    ]


def test_ls_as_json_holds_the_numbers(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", run.run_id, "--json"]) == 0
    records: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert records[0] == {
        "step": 102,
        "tokens": 102 * 8192,
        "bytes": 2048,
        "written_unix_s": 1_700_000_102.0,
        "world": {"world_size": 2, "data_parallel_size": 1},
        "format": None,
        "milestone_tokens": 833_333,
        "permanent": False,
        "newest": False,
        "problem": None,
        "path": os.fspath(run.checkpoint(102)),
        "trust": None,
    }
    assert [record["step"] for record in records if record["newest"]] == [250, 300, 306]


def test_checkpoints_of_either_engine_are_listed_and_verified(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run.checkpoint(306)
    (folder / MANIFEST).unlink()
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).write_bytes(b"z")
    write_manifest(folder, step=306, tokens=306 * 8192, world={"world_size": 1})
    assert main(["checkpoint", "ls", run.run_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["format"] == "dcp"
    assert main(["checkpoint", "verify", run.run_id, "--step", "306"]) == 0
    assert "step 306: valid (3 files" in capsys.readouterr().out
    (folder / ".metadata").write_bytes(b"y")
    assert main(["checkpoint", "verify", run.run_id, "--step", "306"]) != 0
    assert "step 306: .metadata: checksum differs" in capsys.readouterr().out


def test_listing_a_run_without_checkpoints_is_not_an_error(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("empty", until="created")
    runs_dir = ("--runs-dir", os.fspath(tmp_path / "runs"))
    assert main(["checkpoint", "ls", "empty", *runs_dir]) == 0
    assert capsys.readouterr() == ("", "run empty has no checkpoints\n")
    assert main(["checkpoint", "ls", "empty", "--json", *runs_dir]) == 0
    assert capsys.readouterr().out == "[]\n"
    assert main(["checkpoint", "verify", "empty", *runs_dir]) == 22
    assert "error: run empty: no checkpoint\nhint: steps with a checkpoint: none\n" in capsys.readouterr().err


def test_verify_reads_every_file(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", "latest"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"step {step}: valid (1 files, 2 KiB)" for step in STEPS]
    damage(run)
    assert main(["checkpoint", "verify", "latest"]) == 22
    out, err = capsys.readouterr()
    assert out.splitlines()[2:4] == [
        "step 250: shard.safetensors: checksum differs",
        "step 300: shard.safetensors: 100 bytes, expected 2048",
    ]
    assert "error: run example: 3 of 5 checkpoints are damaged or incomplete\nhint: " in err
    assert main(["checkpoint", "verify", "latest", "--step", "200"]) == 0
    assert main(["checkpoint", "verify", "latest", "--step", "250"]) == 22


def test_a_step_or_a_run_that_is_not_there_is_named(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", "latest", "--step", "7"]) == 22
    assert capsys.readouterr().err == (
        "error: run example: no checkpoint of step 7\nhint: steps with a checkpoint: 102, 200, 250, 300, 306\n"
    )
    for command in (["ls"], ["verify"], ["export", "--to", "x"]):
        assert main(["checkpoint", command[0], "exampel", *command[1:]]) == 13
        assert "hint: did you mean example?" in capsys.readouterr().err


def test_usage_errors_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["ls"], ["export", "latest"], ["export", "latest", "--to", "x", "--dtype", "int8"], ["import", "x"]):
        assert main(["checkpoint", *argv]) == 2
        assert f"hint: `hlatctl checkpoint {argv[0]} --help`" in capsys.readouterr().err


def pretend(monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]) -> list[tuple[str, ...]]:
    """In the place of a process: one that says what it has written; what is asked of it."""
    asked: list[tuple[str, ...]] = []

    def ask(*argv: str) -> str:
        asked.append(argv)
        return f"noise\n{json.dumps(written)}\n"

    monkeypatch.setattr(asking, "ask", ask)
    return asked


def test_import_prints_the_command_that_trains_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "it's a, folder"
    written = {
        "to": os.fspath(target),
        "parameters": 260_032,
        "dtypes": ["float32"],
        "tokenizer": None,
        "backend": "torchtitan",
        "model": {"name": "stories", "hidden_size": 64, "num_heads": 8, "num_kv_heads": 4, "tie_embeddings": True},
    }
    asked = pretend(monkeypatch, written)
    options = ("--to", os.fspath(target), "--backend", "torchtitan", "--config", os.fspath(tmp_path / "config.json"))
    assert main(["checkpoint", "import", os.fspath(tmp_path / "hf"), *options]) == 0
    assert asked == [("trainer.convert.import_model", "--from", os.fspath(tmp_path / "hf"), *options)]
    out, err = capsys.readouterr()
    assert "260K parameters, float32" in err
    assert "the model's folder has no tokenizer; set tokenizer.path=" in err
    hlatctl, train, *overrides = shlex.split(out)
    assert (hlatctl, train) == ("hlatctl", "train")
    composed = compose(overrides)
    assert composed.train.init_from == os.fspath(target)
    assert (composed.model.hidden_size, composed.model.tie_embeddings) == (64, True)
    assert composed.backend.name == "torchtitan"


def test_import_for_an_unknown_backend_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new"
    options = ("--to", os.fspath(target), "--backend", "torchtitn")
    assert main(["checkpoint", "import", os.fspath(tmp_path), *options]) != 0
    assert "backend.name=torchtitn" in capsys.readouterr().err
    assert not target.exists()


def test_export_passes_its_options_on(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = {"step": 200, "to": "/x/hf", "parameters": 3_000_000, "dtype": "bfloat16", "bytes": 6_000_000}
    written["left_out"] = ["layers.0.moe.expert_bias_E"]
    asked = pretend(monkeypatch, written)
    common = ("trainer.convert.export", "--run-dir", os.fspath(run.root), "--to", os.fspath(tmp_path / "hf"))
    target = ("--to", os.fspath(tmp_path / "hf"))
    assert main(["checkpoint", "export", "latest", *target]) == 0
    assert main(["checkpoint", "export", "latest", *target, "--step", "200", "--dtype", "bfloat16"]) == 0
    assert main(["checkpoint", "export", "latest", *target, "--format", "megatron"]) == 0
    assert asked == [common, (*common, "--step", "200", "--dtype", "bfloat16"), (*common, "--format", "megatron")]
    out, err = capsys.readouterr()
    assert out == "/x/hf\n" * 3
    assert "no place for 1 tensors, such as layers.0.moe.expert_bias_E" in err
    assert not list(run.root.glob("launch")), "nothing of it is a job of the run"


def test_merge_passes_checkpoints_and_weights_on_and_refuses_what_makes_no_mean(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = {"run": run.run_id, "step": 200, "tokens": 1_638_400, "manifest_sha256": "", "share": 0.25}
    written = {"to": "/x/hf", "parameters": 3_000_000, "dtype": "float32", "bytes": 12_000_000, "left_out": []}
    asked = pretend(monkeypatch, {**written, "sources": [source]})
    command = ["checkpoint", "merge", f"{run.run_id}@200", "latest", "--to", os.fspath(tmp_path / "hf")]
    assert main([*command, "--weights", "1, 3"]) == 0
    root, target = os.fspath(run.root), os.fspath(tmp_path / "hf")
    sources = ("--source", root, "200", "1", "--source", root, "newest", "3")
    assert asked == [("trainer.convert.merge", *sources, "--to", target)]
    out, err = capsys.readouterr()
    assert out == "/x/hf\n"
    assert f"25 %: step 200 of run {run.run_id}, 1.64M tokens" in err
    for argv, message in (
        ([*command, "--weights", "1"], "--weights=1: must be 2 numbers"),
        ([*command, "--weights", "1,-1"], "--weights=1,-1: must be 2 numbers"),
        (["checkpoint", "merge", "latest", "--to", target], "RUN=latest: merging needs at least 2 checkpoints"),
        (["checkpoint", "merge", "latest@x", "latest", "--to", target], "latest@x: x is not a step"),
    ):
        assert main(argv) != 0
        assert message in capsys.readouterr().err
    assert len(asked) == 1


@pytest.mark.processes
def test_a_helper_process_returns_its_output_or_its_error(tmp_path: Path) -> None:
    assert "usage: trainer.convert.export" in asking.ask("trainer.convert.export", "--help")
    with pytest.raises(CheckpointError, match=r"nowhere: no such folder") as caught:
        asking.ask("trainer.convert.import_model", "--from", "/nowhere", "--to", os.fspath(tmp_path / "x"))
    assert "save_pretrained" in caught.value.hint
    with pytest.raises(LaunchError, match=r"trainer\.nothing: failed \(.*No module named trainer"):
        asking.ask("trainer.nothing")
    with pytest.raises(LaunchError, match=r"trainer\.convert\.export: no answer after 0\.01 s"):
        asking.ask("trainer.convert.export", "--help", timeout_s=0.01)
