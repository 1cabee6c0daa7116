"""The fence of attempts: who may write, and what a full or absent disk changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hlatctl.run import fence
from hlatctl.run.errors import RunBusyError
from hlatctl.run.fence import Fence
from hlatctl.run.journal import JournalWriter, read_events
from hlatctl.run.paths import RunPaths


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "r")


def test_an_attempt_may_write_until_it_or_a_later_one_is_over(run: RunPaths) -> None:
    first, second, none = Fence(run, 1), Fence(run, 2), Fence(run, 0)
    first.check(now=True)
    fence.close(run, 1)
    with pytest.raises(RunBusyError, match="attempt 1 is over, so this process writes nothing more"):
        first.check(now=True)
    second.check(now=True)
    fence.close(run, 3)
    assert second.is_closed(now=True)
    none.check(now=True)


def test_an_older_end_does_not_open_the_fence_again(run: RunPaths) -> None:
    fence.close(run, 12)
    fence.close(run, 2)
    assert Fence(run, 12).is_closed()


def test_a_damaged_file_is_replaced_as_a_whole(run: RunPaths) -> None:
    run.fence.parent.mkdir(parents=True)
    run.fence.write_bytes(b"000000000001\n000000000002\n")
    fence.close(run, 2)
    assert Fence(run, 2).is_closed(now=True)


@pytest.mark.parametrize("number", [b"999999999999\n", b"5\n", b"9" * 40, b"-3\n", b"1\n"])
def test_a_new_attempt_may_write_whatever_number_the_file_has(run: RunPaths, number: bytes) -> None:
    run.fence.parent.mkdir(parents=True)
    run.fence.write_bytes(number)
    fence.begin(run, 5)
    Fence(run, 5).check(now=True)
    assert Fence(run, 4).is_closed(now=True)


def test_looks_are_saved_but_not_before_a_commit(run: RunPaths) -> None:
    own = Fence(run, 1)
    own.check()
    fence.close(run, 1)
    assert not own.is_closed(), "a look a moment ago counts"
    assert own.is_closed(now=True)


def test_a_new_number_needs_no_new_room_on_the_disk(run: RunPaths) -> None:
    fence.close(run, 1)
    before = run.fence.stat()
    fence.close(run, 1_000_000)
    assert (run.fence.stat().st_ino, run.fence.stat().st_size) == (before.st_ino, before.st_size)
    assert Fence(run, 1_000_000).is_closed()


def test_the_place_of_a_jobs_records_names_its_attempt(run: RunPaths) -> None:
    own = fence.of_job(run.launch(7) / "train")
    assert own
    fence.close(run, 6)
    assert not own.is_closed(now=True)
    fence.close(run, 7)
    assert own.is_closed(now=True)
    assert fence.of_job(run.launch(0) / "eval-1000") is None
    assert fence.of_job(run.root / "elsewhere" / "job") is None


def test_a_journal_takes_no_event_of_an_attempt_that_is_over(run: RunPaths) -> None:
    own = Fence(run, 1)
    with JournalWriter(run, "train-rank00000", 1, check=lambda: own.check(now=True)) as journal:
        journal.append("step", step=1)
        fence.close(run, 1)
        with pytest.raises(RunBusyError, match="attempt 1 is over"):
            journal.append("step", step=2)
    assert [event["step"] for event in read_events(run)] == [1]
