"""A driver's clock works on no more than it may, its log never fails, and requests to end it are never lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.runtime import driver
from flows.runtime.driver import DriverLog, RealClock, Signals
from hlatctl.run.errors import StoppedError
from tests.waiting import WAIT_S, wait_for


def test_the_real_clock_runs_work_beside() -> None:
    assert RealClock().beside(lambda: 7).result(timeout=WAIT_S) == 7


@pytest.mark.parametrize("most", [1, 2])
def test_the_real_clock_works_on_no_more_than_it_may_at_once(most: int) -> None:
    clock, go, begun, lock = RealClock(), threading.Event(), list[int](), threading.Lock()

    def work() -> int:
        with lock:
            begun.append(1)
            at_once = len(begun)
        go.wait(WAIT_S)
        return at_once

    results = [clock.beside(work, most=most) for _ in range(3)]
    wait_for(lambda: len(begun) >= most)
    assert len(begun) == most, "the others wait for a free thread"
    go.set()
    assert sorted(result.result(timeout=WAIT_S) for result in results) == [1, 2, 3]
    failed = clock.beside(lambda: 1 // 0)
    assert isinstance(failed.exception(timeout=WAIT_S), ZeroDivisionError)


def test_the_real_clock_starts_more_threads_for_queued_work_and_later_ends_them() -> None:
    clock, permits, begun, lock = RealClock(), threading.Semaphore(0), list[int](), threading.Lock()

    def work() -> None:
        with lock:
            begun.append(1)
        permits.acquire(timeout=WAIT_S)

    results = [clock.beside(work) for _ in range(5)]
    wait_for(lambda: len(begun) == 1)
    clock.let_work(3)
    wait_for(lambda: len(begun) == 3)
    clock.let_work(1)
    permits.release()
    permits.release()
    wait_for(lambda: sum(result.done() for result in results) == 2)
    permits.release()
    wait_for(lambda: len(begun) == 4)
    assert sum(result.done() for result in results) == 3, "one at a time again"
    permits.release(2)
    assert [result.result(timeout=WAIT_S) for result in results] == [None] * 5


def test_a_wait_of_the_real_clock_ends_when_its_check_raises() -> None:
    def check() -> None:
        raise StoppedError("now")

    with pytest.raises(StoppedError):
        RealClock().wait(3600.0, check)


def test_lines_have_times_and_no_control_characters(tmp_path: Path) -> None:
    log = DriverLog(tmp_path / "logs" / "driver.log", lambda: 0.0)
    log.write("data: done")
    log.write("evil \x1b[31m\nname")
    assert (tmp_path / "logs" / "driver.log").read_text(encoding="utf-8").splitlines() == [
        "1970-01-01 00:00:00 UTC  data: done",
        "1970-01-01 00:00:00 UTC  evil \\x1b[31m name",
    ]


def test_a_full_log_begins_anew_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    path.write_bytes(bytes(driver._MOST_BYTES))
    log = DriverLog(path, lambda: 0.0)
    log.write("last")
    log.write("first")
    assert path.read_text(encoding="utf-8").endswith("first\n")
    assert path.with_suffix(".log.1").stat().st_size > driver._MOST_BYTES


def test_a_log_that_can_not_be_written_is_no_failure_and_waits_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("", encoding="utf-8")
    (tmp_path / "link.log").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "fifo.log")
    for name in ("link.log", "fifo.log"):
        DriverLog(tmp_path / name, lambda: 0.0).write("x")
    assert (tmp_path / "elsewhere").read_text(encoding="utf-8") == ""


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _own(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


class _Swallows:
    """Signals this process in its destructor, which lets no exception out."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def __del__(self) -> None:
        _own(self._number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_request_whose_exception_was_swallowed_is_raised_by_the_next_check(
    number: signal.Signals, raised: type[BaseException]
) -> None:
    signals = Signals()
    with signals.kept():
        swallows = _Swallows(number)
        del swallows
        with pytest.raises(raised):
            signals.check()
        signals.check()  # it was handled


def test_a_request_raises_at_once_and_is_handled_by_taking_it() -> None:
    signals = Signals()
    with signals.kept():
        with pytest.raises(KeyboardInterrupt):
            _own(signal.SIGINT)
        assert signals.take() == signal.SIGINT
        signals.check()


def test_only_the_main_thread_raises() -> None:
    signals = Signals()
    with signals.kept(), pytest.raises(KeyboardInterrupt):
        _own(signal.SIGINT)
    thread = threading.Thread(target=signals.check)
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        signals.check()


@pytest.fixture
def handlers() -> Callable[[], list[object]]:
    return lambda: [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_handlers_are_restored(handlers: Callable[[], list[object]]) -> None:
    before = handlers()
    with Signals().kept():
        assert handlers() != before
    assert handlers() == before
