"""The process alongside a driver sends events, and reports that the driver died."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.tracking.notify import follower
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from tests.flows.tracking.notify.conftest import TOKEN, Hook, MakeRun, fail, journal
from tests.waiting import WAIT_S, wait_for


@contextmanager
def started(run: RunPaths) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-P", "-m", "flows.tracking.notify.follower", os.fspath(run.root)]
    env = {**os.environ, "PYTHONPATH": os.fspath(Path(follower.__file__).parents[3])}
    log = run.root / "notify.log"
    with log.open("ab") as output, subprocess.Popen(words, env=env, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.processes
def test_a_run_that_fails_and_is_resumed_is_told_once_and_no_file_has_the_url(hook: Hook, make_run: MakeRun) -> None:
    run, hook.status = make_run(), 500
    with hold_driver(run), started(run) as process:
        journal(run, "alarm", step=1, what="weight_drift", message="drift")
        wait_for(lambda: (run.journal / "notify.jsonl").exists())  # the service is away
        process.kill()
    hook.status = 200
    with hold_driver(run):
        journal(run, "head_started", pid=2, host="here")
        with started(run) as process:
            wait_for(lambda: hook.titles)
            fail(run)
            assert process.wait(WAIT_S) == 0
    assert hook.titles == ["one: alarm weight drift at step 1", "one: failed at step 7"]
    for path in run.root.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path


def test_the_death_of_a_driver_is_told_after_a_while(hook: Hook, make_run: MakeRun) -> None:
    run, held = make_run(), threading.Event()

    def drive() -> None:
        with hold_driver(run):
            held.set()
            wait_for(run.notify.exists)

    driver = threading.Thread(target=drive)
    driver.start()
    held.wait()
    follower.follow(run, grace_s=0.1, poll_s=0.01)
    driver.join()
    assert hook.titles == ["one: its driver died"]
    assert "Command: hlatctl resume one" in hook.messages[0]["message"]


def test_a_lease_without_a_name_is_that_of_the_same_driver_which_ends(
    hook: Hook, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    seen = iter((7, 7, 0))  # a driver removes its name before it releases its lease
    monkeypatch.setattr(follower, "driver_pid", lambda _: next(seen, None))
    follower.follow(run, grace_s=0.0, poll_s=0.0)
    assert hook.titles == ["one: its driver died"]


def test_a_run_without_a_driver_is_told_of_what_is_new_and_not_followed(hook: Hook, make_run: MakeRun) -> None:
    run = make_run()
    journal(run, "eval_finished", milestone_tokens=100, step=1, scores={"x": {"value": 0.5}}, skipped={})
    follower.follow(run)
    assert hook.titles == ["one: scores at 100 tokens"]
