"""A request to end is kept even if its exception is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from flows.runtime.signals import Signals


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
