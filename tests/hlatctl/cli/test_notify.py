"""`hlatctl notify` sends a test message and what is unsent, and prints messages without a service."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hlatctl.cli.main import main
from tests.flows.tracking.notify.conftest import TOKEN, Hook, MakeRun, fail, hook, make_run

__all__ = ["hook", "make_run"]


@pytest.fixture(autouse=True)
def in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HLATCTL_RUNS_DIR", os.fspath(tmp_path))


def test_a_test_message_reaches_the_service(hook: Hook, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make_run()
    assert main(["notify", "one", "--test"]) == 0
    assert hook.titles == ["one: test message"]
    hook.status = 500
    assert main(["notify", "one", "--test"]) == 1
    err = capsys.readouterr().err
    assert "env:HOOK_URL: failed" in err
    assert "hint: " in err
    assert TOKEN not in err


def test_what_is_unsent_is_sent_once(hook: Hook, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    fail(make_run())
    assert main(["notify", "one"]) == 0
    assert main(["notify", "one"]) == 0
    assert hook.titles == ["one: failed at step 7"]
    assert capsys.readouterr().err.splitlines() == ["1 message sent, 0 unsent", "0 messages sent, 0 unsent"]


def test_messages_are_printed_without_a_service(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(urls=[])
    fail(run)
    assert main(["notify", "one", "--print"]) == 0
    assert "one: failed at step 7\nWhat happened: no node\n" in capsys.readouterr().out
    assert main(["notify", "one"]) == 10
    assert "notify.urls=[]" in capsys.readouterr().err
    assert not run.notify.exists()
