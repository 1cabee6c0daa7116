"""The account of time, compared with a plain one that paints each half second of random journals."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter, defaultdict
from typing import Any

import pytest

from hlatctl.report import goodput
from hlatctl.report.goodput import STEP, Item
from hlatctl.run.fold import fold
from hlatctl.run.journal import Event, train_writer
from tests.hlatctl.report.made_up import Journal

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
