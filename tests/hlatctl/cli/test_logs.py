"""Logs: the newest attempt's, one rank's, and following over a restart until the run has ended."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import typer

from hlatctl.cli import logs as logs_command
from hlatctl.cli.main import main
from hlatctl.run.lease import hold_head
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import MakeRun


@pytest.fixture
def run(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    run = make_run(until="killed")
    monkeypatch.setenv("HLATCTL_RUNS_DIR", os.fspath(run.root.parent))
    monkeypatch.setattr(logs_command, "_POLL_S", 0.01)
    return run


def write(run: RunPaths, attempt: int, name: str, text: str) -> Path:
    path = run.logs(attempt) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
    return path


def test_the_newest_attempts_log_is_printed(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, 1, "train.log", "old\n")
    write(run, 2, "train.log", "new ü\nwithout an end")
    assert main(["logs", "example"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "new ü\nwithout an end"
    assert captured.err == "==> attempt-0002/train.log <==\n"


def test_a_run_without_logs_says_so(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "example"]) == 1
    assert capsys.readouterr().err.startswith("error: run example: no logs yet in ")


def test_one_rank_is_found_by_folder_and_by_name(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, 1, "ranks/attempt_0/0/stdout.log", "rank zero\n")
    write(run, 1, "ranks/attempt_0/1/stdout.log", "rank one\n")
    write(run, 1, "node0-1.log", "rank one too\n")
    assert main(["logs", "example", "--rank", "1"]) == 0
    assert capsys.readouterr().out == "rank one too\nrank one\n"
    assert main(["logs", "example", "--rank", "7"]) == 1
    assert "no log of rank 7 yet" in capsys.readouterr().err


def test_following_goes_on_over_a_restart_and_ends_with_the_run(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, 1, "train.log", "first\n")
    codes: list[int] = []
    shown = threading.Event()
    echo = typer.echo

    def noting_echo(message: str, **how: Any) -> None:
        echo(message, **how)
        shown.set()

    with pytest.MonkeyPatch.context() as patch, hold_head(run):
        patch.setattr(typer, "echo", noting_echo)
        follower = threading.Thread(target=lambda: codes.append(main(["logs", "example", "-f"])))
        follower.start()
        assert shown.wait(30)
        write(run, 1, "train.log", "second\n")
        write(run, 2, "train.log", "third\n")
        assert follower.is_alive()
    follower.join(30)
    assert codes == [0]
    out = capsys.readouterr().out
    assert out.startswith("first\n")
    assert out.endswith("third\n")


def test_a_character_that_is_written_in_two_parts_is_shown_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes("one\ntwo ü".encode()[:-1])
    printer = logs_command._Printer(None)
    assert "".join(printer._read_new(path)) == "one\ntwo "
    path.write_bytes("one\ntwo ü\n".encode())
    assert "".join(printer._read_new(path)) == "ü\n"
