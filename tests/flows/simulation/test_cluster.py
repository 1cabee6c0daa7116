"""The simulated cluster: turns on its clock, what a lost driver ends, and how often failures are drawn."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from itertools import islice

import pytest

from conf.schema import FailureRatesConfig, PastFailure
from conf.schema.simulation import OF_CLUSTER
from flows.simulation.cluster import DriverLostError, VirtualClock, drawn, replayed

NONE = FailureRatesConfig(**dict.fromkeys((f.name for f in dataclasses.fields(FailureRatesConfig)), 0.0))


def test_actions_run_in_order_while_a_thread_waits() -> None:
    clock, seen = VirtualClock(100.0), list[tuple[str, float]]()
    for name, at in (("late", 130.0), ("early", 110.0), ("too late", 500.0)):
        clock.at(at, lambda name=name: seen.append((name, clock.now_unix_s())))  # type: ignore[misc]
    clock.sleep(60.0)
    assert seen == [("early", 110.0), ("late", 130.0)]
    assert clock.now_unix_s() == clock.monotonic_s() == 160.0


def test_a_wait_ends_at_the_notification_plus_half_a_poll_and_never_before_a_poll() -> None:
    clock = VirtualClock(0.0)
    clock.at(0.1, lambda: clock.notify("train"))
    clock.wait_for_event(1.0, "train")
    assert clock.now_unix_s() == 1.0
    clock.at(50.0, lambda: clock.notify("eval-1"))
    clock.at(80.0, lambda: clock.notify("train"))
    clock.wait_for_event(1.0, "train")
    assert clock.now_unix_s() == 80.5, "a notification of the evaluator doesn't wake a wait for training"


def test_work_beside_takes_turns_with_the_flow_and_queues() -> None:
    clock, seen = VirtualClock(0.0), list[str]()

    def work(name: str) -> float:
        seen.append(f"{name} begins")
        clock.sleep(10.0)
        return clock.now_unix_s()

    first, second = clock.beside(lambda: work("first")), clock.beside(lambda: work("second"))
    assert seen == [], "only the thread with the turn runs"
    clock.sleep(15.0)
    assert seen == ["first begins", "second begins"]
    assert first.result(0) == 10.0
    clock.sleep(10.0)
    assert second.result(0) == 20.0


def test_several_threads_beside_work_at_once() -> None:
    clock = VirtualClock(0.0)

    def work() -> float:
        clock.sleep(10.0)
        return clock.now_unix_s()

    results = [clock.beside(work, most=2) for _ in range(3)]
    clock.sleep(25.0)
    assert [result.result(0) for result in results] == [10.0, 10.0, 20.0]


def test_a_lost_driver_ends_all_waiting_threads_and_the_next_one_works() -> None:
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


def test_a_wait_that_can_never_end_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        VirtualClock(0.0).wait_for_event(1.0)


def test_threads_for_queued_work_are_added_and_ended_in_virtual_time() -> None:
    clock = VirtualClock(0.0)

    def work() -> float:
        clock.sleep(10.0)
        return clock.now_unix_s()

    results = [clock.beside(work) for _ in range(5)]
    clock.sleep(5.0)
    clock.let_work(2)
    clock.sleep(13.0)
    clock.let_work(1)
    clock.sleep(100.0)
    assert [result.result(0) for result in results] == [10.0, 15.0, 20.0, 25.0, 35.0]


def test_failures_are_drawn_at_their_rates() -> None:
    hosts = tuple(f"simulated-{number}" for number in range(50))
    rates = dataclasses.replace(NONE, hang=2.0, head_crash=10.0)
    failures = list(islice(drawn(rates, hosts, random.Random(1)), 2000))
    hours = sum(failure.after_s for failure in failures) / 3600
    kinds = Counter(failure.kind for failure in failures)
    assert kinds["hang"] / hours == pytest.approx(0.1, rel=0.1)
    assert kinds["head_crash"] / hours == pytest.approx(0.01, rel=0.2), "the cluster has one driver"
    assert list(drawn(NONE, hosts, random.Random(1))) == []


def test_failures_of_a_history_come_at_their_times_and_places() -> None:
    history = [PastFailure(after_s=90.0, kind="hang", node=1), PastFailure(after_s=30.0, kind="process", node=2)]
    failures = list(replayed(history))
    assert [(failure.kind, failure.place, failure.after_s) for failure in failures] == [
        ("process", 2, 30.0),
        ("hang", 1, 60.0),
    ]


@pytest.mark.parametrize("kind", OF_CLUSTER)
def test_what_fails_once_per_cluster_does_not_fail_more_often_on_more_nodes(kind: str) -> None:
    def first_s(nodes: int) -> float:
        hosts = tuple(f"simulated-{number}" for number in range(nodes))
        return next(drawn(dataclasses.replace(NONE, **{kind: 10.0}), hosts, random.Random(1))).after_s

    assert first_s(2048) == first_s(64)
