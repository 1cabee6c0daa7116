"""Goodput, cost and checkpoint intervals of made-up journals: every second of wall time belongs to one category."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conf.load
from conf.compose import compose
from conf.schema import Config
from hlatctl.plan.budget import least_time_between_failures_s
from hlatctl.report import goodput
from hlatctl.report.figures.figure import MAX_POINTS, Series
from hlatctl.report.goodput import STEP, Goodput, Item, facts, label, prices, sequence, time_table
from hlatctl.report.record import read_record
from hlatctl.report.run_view import read_without_steps
from hlatctl.run.fold import fold
from hlatctl.run.journal import Event, JournalWriter, read_events, train_writer
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import MakeRun
from tests.hlatctl.report.made_up import Journal, goodput_of, interrupted, journal  # noqa: F401


def test_a_run_is_compared_with_its_plan_and_its_baseline(make_run: MakeRun) -> None:
    run = make_run()
    time = replace(read_record(run, conf.load.load(run.config)).time, cost_usd=600_000.0)
    own, plan, baseline = prices(compose(["experiment=hlat_7b"]), time, 1_800_000_000_000)
    assert own.usd == pytest.approx(600_000 * 4e6 / 1.8e12)
    assert own.of_baseline_fraction == pytest.approx(own.usd / baseline.usd)
    assert plan.usd < own.usd < baseline.usd


def test_without_a_price_there_is_none(make_run: MakeRun) -> None:
    run = make_run()
    record = read_record(run, conf.load.load(run.config))
    assert prices(record.config, record.time, 100) == []


def test_uptime_and_ettr_and_cost(journal: Journal) -> None:
    interrupted(journal)
    goodput = goodput_of(journal.events)
    assert (goodput.wall_s, goodput.training_s, goodput.up_s) == (100.0, 90.0, 66.0)
    assert goodput.uptime_fraction == pytest.approx(66 / 90)
    assert goodput.ettr_fraction == pytest.approx(40 / 90)
    assert goodput.process_hours == pytest.approx(8 * 90 / 3600)  # the first attempt starts after 10 s
    assert goodput.cost_usd == pytest.approx(2 * 36.0 * 90 / 3600)
    header, rows = time_table(goodput)
    assert header == ["category", "time", "share", "USD"]
    assert rows[0] == ["productive steps", "40 s", "40.0 %", "0.80"]
    assert rows[-1] == ["wall time", "1 min 40 s", "100.0 %", "1.80"]
    assert dict(facts(goodput))["accelerator-hours"] == "0.20"


def test_without_a_price_there_is_no_cost_and_cpus_are_not_accelerators(journal: Journal) -> None:
    interrupted(journal)
    goodput = goodput_of(journal.events, Config())
    assert goodput.cost_usd is None
    assert time_table(goodput)[0] == ["category", "time", "share"]
    assert {"cost", "accelerator-hours"}.isdisjoint(dict(facts(goodput)))


def test_the_best_interval_follows_from_saves_and_failures(journal: Journal) -> None:
    interrupted(journal)
    checkpointing = goodput_of(journal.events).checkpointing
    assert checkpointing.failures == {"killed": 1}
    assert (checkpointing.save_s, checkpointing.mean_time_between_failures_s) == (1.0, 66.0)
    assert checkpointing.young_s == pytest.approx((2 * 66.0) ** 0.5)
    assert checkpointing.every_s == 20.0
    assert checkpointing.daly_steps == 1
    texts = dict(facts(goodput_of(journal.events)))
    assert texts["failures"] == "1 killed, in 1 min 6 s of training: one in 1 min 6 s"
    assert texts["best interval (Daly)"] == "every 11 s, 1 step"


def test_without_a_failure_there_is_a_bound_and_no_best_interval(journal: Journal) -> None:
    journal.start(10)
    journal.step(30, 1)
    journal.saved(31, 1, wall_s=1.0)
    goodput = goodput_of(journal.events)
    assert goodput.checkpointing.young_s is None
    assert goodput.checkpointing.least_time_between_failures_s == least_time_between_failures_s(goodput.up_s)
    texts = dict(facts(goodput))
    assert texts["failures"] == "none in 11 s of training: with 95 % confidence less than one in 3.7 s"
    assert not any("Daly" in name or "Young" in name for name in texts)


@pytest.mark.parametrize(("reason", "cause"), [("stop", "preempted"), ("amend", "amended")])
def test_attempts_that_saved_or_were_asked_to_stop_are_not_failures(journal: Journal, reason: str, cause: str) -> None:
    journal.start(10)
    journal.step(30, 1)
    journal.train(31, "train_stopped", step=1, reason=reason)  # no request to stop, nothing lost
    journal.end(32, cause, "restart")
    journal.start(40, attempt=2, resumed_from_step=1)
    journal.step(60, 2, attempt=2)
    journal.add(61, "stop_requested", writer="operator")
    journal.end(62, "killed", "stop", attempt=2)
    assert goodput_of(journal.events).checkpointing.failures == {}


def test_an_empty_journal_has_no_time() -> None:
    goodput = goodput_of([])
    assert (goodput.wall_s, goodput.seconds, goodput.uptime_fraction, goodput.cost_usd) == (0.0, {}, None, 0.0)
    assert time_table(goodput)[1] == [["wall time", "0.0 s", "0.0 %", "0.00"]]


def test_labels_of_categories() -> None:
    assert [label(name) for name in ("lost", "restart:out_of_memory", "warm_cache", "a_new_stage")] == [
        "lost steps (redone)",
        "restart: out_of_memory",
        "cache warm-up",
        "a new stage",
    ]


_KINDS = (
    "head_started",
    "stage_started",
    "stage_finished",
    "stage_failed",
    "attempt_started",
    "attempt_ended",
    "train_started",
    "step",
    "step",
    "step",
    "compile_cache",
    "checkpoint_written",
    "train_stopped",
    "milestone",
    "eval_started",
    "eval_finished",
    "eval_failed",
    "stop_requested",
    "run_finished",
    "nonfinite",
    "of tomorrow",
)
_NUMBER: st.SearchStrategy[Any] = st.one_of(
    st.floats(-5, 50), st.sampled_from(["nan", None, "text", float("nan"), float("inf"), -1, [], {}])
)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "step": st.one_of(st.integers(0, 6), _NUMBER),
    "step_s": _NUMBER,
    "data_wait_s": _NUMBER,
    "wall_s": _NUMBER,
    "stall_s": _NUMBER,
    "resumed_from_step": st.integers(0, 6),
    "misses": st.integers(0, 2),
    "tokens": _NUMBER,
    "milestone_tokens": st.integers(0, 2),
    "stage": st.sampled_from(["compile", "data", "", None]),
    "cause": st.sampled_from(["finished", "killed", "stopped", "amended", "", None]),
    "decision": st.sampled_from(["restart", "stop", "done", None]),
    "reason": st.sampled_from(["finished", "stop", "rollback", "amend"]),
}


#: Seconds since the previous event, kind, attempt, writer, fields.
_EVENTS = st.tuples(
    st.sampled_from([0.0, 1e-6, 0.3, 7.0, 3600.0, -2.0]),
    st.sampled_from(_KINDS),
    st.integers(0, 3),
    st.sampled_from(["flow", "train-rank00000"]),
    st.fixed_dictionaries({}, optional=_FIELDS),
)


def check(goodput: Goodput) -> None:
    assert all(seconds > 0 for seconds in goodput.seconds.values())
    microseconds = sum(round(seconds * 1e6) for seconds in goodput.seconds.values())
    assert microseconds == round(goodput.wall_s * 1e6)
    for fraction in (goodput.ettr_fraction, goodput.uptime_fraction):
        assert fraction is None or 0 <= fraction <= 1 + 1e-9
    assert goodput.training_s <= goodput.wall_s


@settings(deadline=None)
@given(st.lists(_EVENTS, max_size=25))
def test_categories_of_any_journal_add_up_to_its_wall_time(
    rows: list[tuple[float, str, int, str, dict[str, Any]]],
) -> None:
    made, time_s = Journal(), 0.0
    for after_s, kind, attempt, writer, fields in rows:
        time_s += after_s
        made.add(time_s, kind, writer=writer, attempt=attempt, **fields)
    check(goodput_of(made.events))


def test_the_time_of_longer_prefixes_of_a_journal_grows(journal: Journal) -> None:
    interrupted(journal)
    prefixes = [goodput_of(journal.events[:length]) for length in range(len(journal.events) + 1)]
    for one in prefixes:
        check(one)
    assert [one.wall_s for one in prefixes] == sorted(one.wall_s for one in prefixes)


def write(run: RunPaths, steps: int, clock: Callable[[], float]) -> None:
    """Write a journal of two attempts with events of four writers, some at the same time."""
    writers = [JournalWriter(run, name, now_unix_s=clock) for name in ("flow", train_writer(0), train_writer(1), "z")]
    flow, train, other, last = writers
    at = 0
    for attempt in (1, 2):
        flow.attempt = train.attempt = other.attempt = attempt
        flow.append("attempt_started", handle={})
        train.append("train_started", resumed_from_step=max(0, at - 3))
        at = max(0, at - 3)
        for _ in range(steps):
            at += 1
            train.append("step", step=at, tokens=at, step_s=0.5, data_wait_s=0.1, loss=1.0)
            if at % 5 == 0:
                train.append("checkpoint_written", step=at, stall_s=0.25)
                other.append("rank_times", step=at, times_s=[0.1] * 9)
                flow.append("checkpoint_verified", step=at)
                last.append("a kind of tomorrow", step=at)
        flow.append("attempt_ended", cause="killed", decision="restart")
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("times_s", [[0.5], [0.0], [0.5, -0.2, 3.0], [1e-7, 1e-6]])
def test_events_and_steps_are_in_the_order_of_the_journal(tmp_path: Path, times_s: list[float]) -> None:
    run, after_s, now_s = RunPaths(tmp_path), itertools.cycle(times_s), [1e9]

    def clock() -> float:
        now_s[0] += next(after_s)
        return now_s[0]

    write(run, 12, clock)
    state, events = read_without_steps(run)
    items, _ = sequence(events, state.steps)
    steps = [item.kind == STEP for item in items]
    found = [
        kind
        for item, many in zip(items, steps, strict=True)
        for kind in [item.kind] * (item.stop - item.first if many else 1)
    ]
    assert found == [event["kind"] for event in read_events(run)]
    assert [item.start_us for item in items] == sorted(item.start_us for item in items)


def test_a_spike_stays_visible_in_a_figure_of_more_steps_than_points() -> None:
    many, at = 4 * MAX_POINTS, 777
    head = {"v": 1, "time_unix_s": 1.0, "attempt": 1, "kind": "step"}
    losses = [50.0 if step == at else math.nan if step == 9 else 2.0 for step in range(1, many + 1)]
    state = fold(
        {**head, "seq": step, "step": step, "tokens": step, "loss": loss} for step, loss in enumerate(losses, 1)
    )
    series = Series.of(state)
    low, high = series.ranges["loss"]
    assert len(low) == len(high) == len(series.tokens) == MAX_POINTS
    assert (max(high), min(low), max(low)) == (50.0, 2.0, 2.0)
    assert max(series.values["loss"]) == 14.0


def test_an_undisturbed_run_is_split_by_category(journal: Journal) -> None:
    journal.add(1, "stage_started", stage="compile")
    journal.add(41, "stage_finished", stage="compile", wall_s=40)
    journal.add(41, "stage_started", stage="warm_cache")
    journal.add(43, "stage_finished", stage="warm_cache", wall_s=2)
    journal.start(44)
    journal.step(60, 1)
    journal.step(70, 2, data_wait_s=3.0)
    journal.saved(74, 2, wall_s=4.0)
    journal.step(84, 3)
    journal.train(85, "train_stopped", step=3, reason="finished")
    journal.add(85.5, "milestone", milestone_tokens=3, step=3)
    journal.end(86, "finished")
    journal.add(87, "eval_started", writer="eval-3", milestone_tokens=3, step=3)
    journal.add(97, "eval_finished", writer="eval-3", milestone_tokens=3, step=3)
    journal.add(98, "run_finished", outcome="finished")
    assert journal.seconds == {
        "productive": 27.0,
        "data_wait": 3.0,
        "checkpoint_stall": 4.0,
        "between_steps": 1.0,
        "compile": 40.0,
        "warm_cache": 2.0,
        "start": 6.0,
        "end": 0.5,
        "evaluation_wait": 11.5,
        "head": 3.0,
    }


@pytest.mark.parametrize("cause", ["killed", "hang", "a future cause"])
def test_the_time_of_a_restart_is_named_after_its_cause(journal: Journal, cause: str) -> None:
    interrupted(journal, cause)
    assert journal.seconds == {
        "productive": 40.0,
        "checkpoint_stall": 1.0,
        "between_steps": 5.0,
        "lost": 20.0,
        "start": 5.0,
        f"restart:{cause}": 19.0,
        "head": 10.0,
    }


def test_steps_are_lost_only_once_they_are_redone(journal: Journal) -> None:
    interrupted(journal)
    before = journal.events[: [event["kind"] for event in journal.events].index("attempt_ended")]
    assert "lost" not in goodput_of(before).seconds


def test_an_attempt_without_steps_adds_its_own_cause(journal: Journal) -> None:
    interrupted(journal)
    journal.end(103, "crashed", "restart", attempt=2)
    journal.start(110, attempt=3, resumed_from_step=2)
    journal.end(120, "out_of_memory", "restart", attempt=3)
    journal.start(130, attempt=4, resumed_from_step=2)
    journal.step(150, 3, attempt=4)
    seconds = journal.seconds
    assert seconds["restart:crashed"] == 15.0
    assert seconds["restart:out_of_memory"] == 25.0


def test_time_without_a_driver_is_idle_unless_training_continues(journal: Journal) -> None:
    journal.start(10)
    journal.step(30, 1)
    journal.step(40, 2)
    # The driver dies and restarts at 55 while training continues. Then all processes die, until 500.
    journal.step(50, 3)
    journal.add(55, "head_started", pid=2)
    journal.step(60, 4)
    journal.add(500, "head_started", pid=3)
    journal.end(502, "lost", "restart")
    journal.start(503, attempt=2, resumed_from_step=0)
    journal.step(518, 1, attempt=2)
    seconds = journal.seconds
    assert seconds["idle"] == 440.0
    assert seconds["lost"] == 40.0
    assert seconds["restart:lost"] == 8.0
    assert "between_steps" not in seconds


@pytest.mark.parametrize("outcome", ["failed", "stopped", ""])
def test_notes_and_amendments_after_the_end_are_no_time_of_the_run(journal: Journal, outcome: str) -> None:
    journal.start(10)
    journal.step(30, 1)
    if outcome:  # otherwise the driver is dead
        journal.end(34, outcome, "stop")
        journal.add(35, "run_finished", outcome=outcome)
    before = goodput_of(journal.events)
    journal.add(900_000, "labelled", writer="operator", note="look at this")
    journal.add(900_001, "config_amended", writer="operator", number=1, changes={})
    assert goodput_of(journal.events) == before


def test_a_run_that_was_stopped_overnight_is_idle(journal: Journal) -> None:
    journal.start(10)
    journal.step(30, 1)
    journal.add(31, "stop_requested", writer="operator")
    journal.saved(33, 1, wall_s=2.0)
    journal.train(33, "train_stopped", step=1, reason="stop")
    journal.end(34, "stopped", "stop")
    journal.add(35, "run_finished", outcome="stopped")
    journal.add(35, "stage_started", stage="report")
    journal.add(36, "stage_finished", stage="report")
    journal.add(36036, "head_started", pid=2)
    journal.add(36037, "stage_started", stage="preflight")
    journal.add(36040, "stage_finished", stage="preflight")
    journal.start(36040, attempt=2, resumed_from_step=1)
    journal.step(36055, 2, attempt=2)
    assert journal.seconds == {
        "productive": 20.0,
        "checkpoint_stall": 2.0,
        "between_steps": 1.0,
        "start": 10.0,
        "restart:stopped": 6.0,
        "report": 1.0,
        "preflight": 3.0,
        "head": 12.0,
        "idle": 36000.0,
    }
    goodput = goodput_of(journal.events)
    assert goodput.checkpointing.failures == {}
    assert goodput.ettr_fraction == pytest.approx(20 / 36045)
    assert goodput.cost_usd == pytest.approx(2 * 36.0 * (34 - 10 + 36055 - 36037) / 3600)


def test_a_later_evaluation_of_a_finished_run_adds_no_time(journal: Journal) -> None:
    journal.start(10)
    journal.step(30, 1)
    journal.end(34, "finished", "done")
    journal.add(35, "run_finished", outcome="finished")
    before = goodput_of(journal.events)
    journal.add(90_000, "eval_started", writer="eval-10")
    assert goodput_of(journal.events) == before
    journal.add(90_035, "head_started", pid=2)
    assert goodput_of(journal.events).wall_s == 90_035.0, "a new driver adds time"


def test_an_asynchronous_save_counts_only_its_stall_after_its_step(journal: Journal) -> None:
    journal.start(10)
    for step, time_s in ((1, 30.0), (2, 40.0), (3, 51.0), (4, 61.0)):
        journal.step(time_s, step)
        if step == 3:
            journal.saved(58, 2, wall_s=18.0, stall_s=0.75)  # written during step 4
    seconds = journal.seconds
    assert (seconds["productive"], seconds["checkpoint_stall"]) == (40.0, 0.75)
    assert seconds["between_steps"] == 0.25
    assert goodput_of(journal.events).checkpointing.save_s == 0.75


@pytest.mark.parametrize(("misses", "category"), [(0, "start"), (4, "compile")])
def test_the_excess_time_of_a_first_step_is_not_training(journal: Journal, misses: int, category: str) -> None:
    journal.start(10)
    journal.step(60, 1, step_s=45.0)
    journal.train(60, "compile_cache", hits=4 - misses, misses=misses, wall_s=45.0)
    journal.step(70, 2)
    journal.step(80, 3)
    seconds = journal.seconds
    assert seconds["productive"] == 30.0
    assert seconds[category] == (40.0 if category == "start" else 35.0)


def test_time_in_a_queue_has_its_own_category_and_costs_nothing(journal: Journal) -> None:
    journal.add(0, "stage_started", stage="preflight")
    journal.add(0, "job_queued", job="preflight", reason="Resources")
    journal.add(3600, "job_started", job="preflight", hosts=["n1"])
    journal.add(3610, "stage_finished", stage="preflight", wall_s=3610)
    journal.add(3610, "attempt_started", attempt=1, handle={})
    journal.add(3610, "job_queued", attempt=1, job="train", reason="Priority")
    journal.add(7210, "job_queued", attempt=1, job="train", reason="Resources")
    journal.add(10810, "job_started", attempt=1, job="train", hosts=["n1"])
    journal.train(10815, "train_started", resumed_from_step=0)
    journal.add(10815, "job_queued", attempt=1, job="eval-3", reason="Resources")
    journal.step(10830, 1)
    journal.end(10831, "cancelled", "stop")
    assert journal.seconds == {
        "productive": 10.0,
        "preflight": 10.0,
        "start": 10.0,
        "queued": 10800.0,
        "restart:cancelled": 1.0,
    }
    goodput = goodput_of(journal.events)
    assert goodput.cost_usd == pytest.approx(2 * 36.0 * 31 / 3600)
    assert goodput.process_hours == pytest.approx(8 * 31 / 3600)


def test_an_attempt_that_is_cancelled_in_the_queue_was_queued(journal: Journal) -> None:
    journal.add(0, "attempt_started", attempt=1, handle={})
    journal.add(0, "job_queued", attempt=1, job="train", reason="Priority")
    journal.add(50, "job_left_queue", attempt=1, job="train")
    journal.end(50, "cancelled", "stop")
    assert journal.seconds == {"queued": 50.0}


_TICK_US = 500_000


def random_journal(seed: int) -> list[Event]:
    """Return a journal with restarts, late events of replaced attempts, queues, evaluations and checkpoints."""
    dice, journal, now_s, at = random.Random(seed), Journal(), 0, 0

    def wait() -> int:
        nonlocal now_s
        now_s += dice.choice((0, 1, 1, 2, 5))
        return now_s

    journal.add(0, "run_created", run_id="random")
    journal.add(0, "head_started", pid=1)
    for attempt in range(1, dice.randint(2, 5)):
        if dice.random() < 0.4:
            journal.add(wait(), "job_queued", job="train")
        journal.add(wait(), "attempt_started", attempt=attempt, handle={})
        journal.add(wait(), "job_started", job="train")
        at = max(0, at - dice.randint(0, 3))
        journal.train(wait(), "train_started", attempt, resumed_from_step=at)
        journal.train(now_s, "compile_cache", attempt, misses=dice.randint(0, 1))
        for _ in range(dice.randint(0, 8)):
            at += 1
            journal.step(wait(), at, attempt, step_s=dice.randint(0, 4), data_wait_s=dice.randint(0, 2))
            if dice.random() < 0.3:
                journal.saved(wait(), at, attempt, stall_s=dice.randint(0, 3))
            if dice.random() < 0.2:
                journal.add(wait(), "milestone", milestone_tokens=at, step=at)
                journal.add(wait(), "eval_started", writer="eval-1", milestone_tokens=at, step=at)
            if dice.random() < 0.2:
                journal.add(wait(), "head_started", pid=2)
            if dice.random() < 0.3 and attempt > 1:
                journal.step(wait(), at + 1, attempt - 1, step_s=1)
        journal.end(wait(), dice.choice(("killed", "hang")), "restart", attempt)
        journal.add(wait(), "eval_finished", writer="eval-1", milestone_tokens=at, step=at)
    journal.add(wait(), "run_finished", outcome=dice.choice(("finished", "failed")))
    return sorted(journal.events, key=lambda event: (event["time_unix_s"], event["writer"], event["seq"]))


def painted(events: list[Event]) -> dict[str, float]:
    """Return seconds by category, from events that are read one by one."""
    items = goodput._without_afterlife(_plain_items(events))
    attempts = goodput._attempts(items)
    colours: dict[int, str] = {}
    phase = goodput._Phase(attempts)
    for index, (item, after) in enumerate(itertools.pairwise(items)):
        phase.apply(item)
        driverless = after.kind == "head_started" and not phase.alive(index)
        _paint(colours, item.end_us, after.start_us, goodput.IDLE if driverless else phase.name(index))
    counting = {event["seq"] for event in fold(events).steps.values()}
    stalls: dict[Any, float] = defaultdict(float)
    for item in items:
        if item.kind == "checkpoint_written":
            stalls[item.attempt, item.event["step"]] += item.event["stall_s"] * 1e6
    steps = [
        item
        for index, item in enumerate(items)
        if item.kind == STEP and attempts[item.attempt].started < index <= attempts[item.attempt].last
    ]
    newest_us: float = items[0].start_us
    for place, item in enumerate(steps):
        mine = [step for step in steps if step.attempt == item.attempt]
        attempt, end_us, length_us = attempts[item.attempt], item.end_us, item.event["step_s"] * 1e6
        own_us = length_us
        if item is mine[0] and len(mine) > 1:
            own_us = min(own_us, statistics.median(step.event["step_s"] * 1e6 for step in mine[1:]))
        earliest_us = max(newest_us, items[attempt.started].start_us)
        start_us = max(earliest_us, end_us - own_us)
        waited_us = min(end_us, start_us + item.event["data_wait_s"] * 1e6)
        if attempt.compiled and own_us < length_us:
            _paint(colours, max(earliest_us, end_us - length_us), start_us, "compile")
        if item.event["seq"] in counting:
            _paint(colours, start_us, waited_us, "data_wait")
            _paint(colours, waited_us, end_us, "productive")
        else:
            _paint(colours, start_us, end_us, "lost")
        free_us = items[attempt.last].end_us
        if place + 1 < len(steps):
            after = steps[place + 1]
            same = after.attempt == item.attempt
            free_us = min(free_us, after.end_us - (after.event["step_s"] * 1e6 if same else 0))
        newest_us = max(end_us, min(end_us + stalls[item.attempt, item.event["step"]], free_us))
        _paint(colours, end_us, newest_us, "checkpoint_stall")
    return {category: ticks * _TICK_US / 1e6 for category, ticks in Counter(colours.values()).items()}


def _plain_items(events: list[Event]) -> list[Item]:
    """Return an item for each event. The late steps of replaced attempts are dropped."""
    items, newest = [], 0
    for event in events:
        newest = max(newest, event["attempt"] if event["kind"] == "attempt_started" else 0)
        if event["kind"] != STEP or event["attempt"] == newest:
            time_us = round(event["time_unix_s"] * 1e6)
            is_train = event["writer"] == train_writer(0)
            items.append(Item(event["kind"], event["attempt"], is_train, event, time_us, time_us, 0, 0))
    return items


def _paint(colours: dict[int, str], start_us: float, end_us: float, category: str) -> None:
    for tick in range(round(start_us / _TICK_US), round(end_us / _TICK_US)):
        colours[tick] = category


@pytest.mark.parametrize("block_rows", [1, 3, 1000])
def test_the_account_equals_a_plain_one(monkeypatch: pytest.MonkeyPatch, block_rows: int) -> None:
    monkeypatch.setattr(goodput, "BLOCK_ROWS", block_rows)
    for seed in range(100):
        events = random_journal(seed)
        account = goodput.account(events, fold(events).steps)
        assert account.seconds == painted(events), seed
