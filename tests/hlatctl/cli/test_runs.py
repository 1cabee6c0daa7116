"""`hlatctl rm` and `hlatctl archive`: what they remove, keep and refuse."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.of_run import of_run
from flows import tidy
from hlatctl.cli.main import main
from hlatctl.report.numbers import numbers
from hlatctl.run.checkpoint import write_manifest
from hlatctl.run.errors import RunBusyError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import FLOW_WRITER, JournalWriter
from hlatctl.run.lease import hold_driver, hold_evaluator
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import MakeRun


@pytest.fixture
def run(make_run: MakeRun) -> RunPaths:
    """A finished run with two checkpoints, and a file outside that one of them links to."""
    run = make_run("example")
    (run.root.parent / "elsewhere").write_bytes(bytes(50))
    for step in (100, 306):
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "manifest.json").write_text("{}", encoding="utf-8")
        (run.checkpoint(step) / "shard.safetensors").write_bytes(bytes(2048))
    (run.checkpoint(100) / "link").symlink_to(run.root.parent)
    return run


def test_nobody_is_asked_without_a_terminal_and_nothing_is_removed(run: RunPaths) -> None:
    assert main(["rm", "example"]) == 10
    assert main(["archive", "example"]) == 10
    assert run.checkpoint(100).is_dir()


def test_a_removed_run_is_gone_and_what_it_links_to_stays(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "example", "--yes"]) == 0
    assert "with 2 checkpoints" in capsys.readouterr().err
    assert sorted(os.listdir(run.root.parent)) == ["elsewhere"]


def test_a_half_removed_run_is_no_run_and_the_next_removal_ends_it(
    run: RunPaths, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("other")
    run.root.rename(run.root.with_name(".removed-example-1234"))
    assert main(["runs"]) == 0
    assert "example" not in capsys.readouterr().out
    assert main(["rm", "other", "--yes"]) == 0
    assert os.listdir(run.root.parent) == ["elsewhere"]


@pytest.mark.parametrize("command", ["rm", "archive"])
def test_a_link_to_a_run_elsewhere_is_refused(run: RunPaths, command: str, tmp_path: Path) -> None:
    elsewhere = run.root.rename(tmp_path / "elsewhere")
    run.root.symlink_to(elsewhere)
    assert main([command, "example", "--yes"]) == 14
    assert (elsewhere / "checkpoints" / "step-00000306").is_dir()


@pytest.mark.parametrize("command", ["rm", "archive"])
def test_a_run_with_a_driver_is_refused(run: RunPaths, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with hold_driver(run):
        assert main([command, "example", "--yes"]) == 18
    assert "drives it" in capsys.readouterr().err
    assert run.checkpoint(306).is_dir()


def test_an_archived_run_keeps_its_newest_checkpoint_and_all_of_its_numbers(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    before = numbers(read_state(run), of_run(run))
    assert main(["archive", "example", "--yes"]) == 0
    assert not run.checkpoint(100).exists()
    assert run.checkpoint(306).is_dir()
    assert numbers(read_state(run), of_run(run)) == before
    assert main(["resume", "example"]) == 22
    assert "is archived" in capsys.readouterr().err
    assert main(["archive", "example", "--all-checkpoints", "--yes"]) == 0
    assert os.listdir(run.checkpoints) == []


def test_status_names_an_archived_run(run: RunPaths, cli_text: Callable[..., str]) -> None:
    main(["archive", "example", "--yes"])
    assert "archived" in cli_text("status", "example")
    assert "archived" in cli_text("runs", "--status", "archived")


@pytest.fixture
def cli_text(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    return call


def test_a_name_that_no_other_run_has_finds_a_run(
    run: RunPaths, make_run: MakeRun, cli_text: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("other")
    assert main(["note", "example", "a first look", "--name", "baseline", "--tag", "model=small"]) == 0
    assert cli_text("status", "baseline").startswith("run              example")
    assert "a first look" in cli_text("note", "baseline")
    assert cli_text("runs", "--tag", "model=small").splitlines()[1].startswith("example")
    assert main(["note", "other", "--name", "baseline"]) == 0
    assert main(["status", "baseline"]) == 13
    assert "is the name of 2 runs" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["rm", "archive"])
def test_an_evaluation_that_has_no_lease_of_a_milestone_yet_is_seen(
    run: RunPaths, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold_evaluator(run):
        assert main([command, "example", "--yes"]) == 18
    assert f"process {os.getpid()} on " in (error := capsys.readouterr().err)
    assert "evaluates it" in error
    assert run.checkpoint(306).is_dir()


def test_an_evaluation_that_starts_after_the_check_is_seen_too(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidy, "check_idle", lambda run: None)
    with hold_evaluator(run):
        with pytest.raises(RunBusyError, match="is evaluating it"):
            tidy.archive(run, keeps=306, by="me")
        with pytest.raises(RunBusyError, match="is evaluating it"):
            tidy.remove(run)
    assert run.checkpoint(100).is_dir()


@pytest.mark.parametrize("command", ["rm", "archive"])
def test_the_latest_run_is_not_removed_without_a_question(
    run: RunPaths, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "latest", "--yes"]) == 10
    assert "hint: name the run; the newest one is example\n" in capsys.readouterr().err
    assert run.checkpoint(100).is_dir()


def test_the_checkpoint_of_a_stop_is_verified_and_kept(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("checkpoint_verified", step=100)
    assert read_state(run).trust[100] == "verified"
    for step in (302, 303):
        folder = run.checkpoint(step)
        folder.mkdir()
        (folder / "shard.safetensors").write_bytes(bytes(10))
        write_manifest(folder, step=step, tokens=step, world={"world_size": 1})
    (run.checkpoint(303) / "shard.safetensors").write_bytes(bytes(9))
    assert main(["archive", "example", "--yes"]) == 0
    assert "example: verifying the checkpoint of step 303\n" in (text := capsys.readouterr().err)
    assert "that of step 302 stays" in text
    assert [step for step in (100, 302, 303, 306) if run.checkpoint(step).exists()] == [302]


def test_an_archived_run_is_neither_stopped_nor_amended(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["archive", "example", "--yes"]) == 0
    before = (run.journal / "operator.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["stop", "example"]) == 0
    assert capsys.readouterr().err == "example: is already archived\n"
    assert main(["amend", "example", "train.max_steps=400"]) == 22
    assert "is archived" in capsys.readouterr().err
    assert (run.journal / "operator.jsonl").read_bytes() == before
