"""The virtual clock: who has the turn, in which order things happen, and what a lost head takes with it."""

from __future__ import annotations

import pytest

from flows.runtime.clock import DriverLostError, RealClock, VirtualClock


def test_what_is_on_the_agenda_happens_in_its_order_while_somebody_waits() -> None:
    clock, seen = VirtualClock(100.0), list[tuple[str, float]]()
    for name, at in (("late", 130.0), ("early", 110.0), ("too late", 500.0)):
        clock.at(at, lambda name=name: seen.append((name, clock.now_unix_s())))  # type: ignore[misc]
    clock.sleep(60.0)
    assert seen == [("early", 110.0), ("late", 130.0)]
    assert clock.now_unix_s() == clock.monotonic_s() == 160.0


def test_a_look_is_as_late_as_the_news_and_never_sooner_than_its_poll() -> None:
    clock = VirtualClock(0.0)
    clock.at(0.1, lambda: clock.notify("train"))
    clock.wait_for_event(1.0, "train")
    assert clock.now_unix_s() == 1.0
    clock.at(50.0, lambda: clock.notify("eval-1"))
    clock.at(80.0, lambda: clock.notify("train"))
    clock.wait_for_event(1.0, "train")
    assert clock.now_unix_s() == 80.5, "the evaluator's news are none for training"


def test_work_beside_takes_turns_with_the_flow_and_queues() -> None:
    clock, seen = VirtualClock(0.0), list[str]()

    def work(name: str) -> float:
        seen.append(f"{name} begins")
        clock.sleep(10.0)
        return clock.now_unix_s()

    first, second = clock.beside(lambda: work("first")), clock.beside(lambda: work("second"))
    assert seen == [], "nothing runs beside whoever has the turn"
    clock.sleep(15.0)
    assert seen == ["first begins", "second begins"]
    assert first.result(0) == 10.0
    clock.sleep(10.0)
    assert second.result(0) == 20.0


def test_a_head_that_is_lost_takes_all_that_waits_with_it_and_the_next_one_goes_on() -> None:
    clock = VirtualClock(0.0)
    beside, queued = clock.beside(lambda: clock.sleep(100.0)), clock.beside(lambda: None)
    clock.at(5.0, clock.lose_driver)
    with pytest.raises(DriverLostError):
        clock.wait_for_event(1.0)
    assert queued.cancelled()
    clock.sleep(1.0)
    assert isinstance(beside.exception(0), DriverLostError)
    assert clock.now_unix_s() == 6.0
    again = clock.beside(lambda: "works")
    clock.sleep(1.0)
    assert again.result(0) == "works"


def test_waiting_for_what_never_comes_is_told() -> None:
    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        VirtualClock(0.0).wait_for_event(1.0)


def test_the_real_clock_works_beside() -> None:
    assert RealClock().beside(lambda: 7).result(timeout=5) == 7
