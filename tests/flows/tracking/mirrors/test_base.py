"""Which steps mirrors get, which of them count, and what mirrors get of steps and scores."""

from __future__ import annotations

import math

import pytest

from flows.tracking.mirrors import base
from flows.tracking.mirrors.base import Attempts, Shown


@pytest.mark.parametrize(("total", "every"), [(306, 1), (100_000, 1), (100_001, 2), (430_000, 8), (2_000_000, 32)])
def test_a_long_run_has_its_first_steps_and_at_most_100_000_others(total: int, every: int) -> None:
    shown = Shown(total)
    assert shown.every == every
    assert [step for step in (1, 999, 1000, 1001, total) if shown.step(step)][-1] == total
    assert shown.step(999)
    assert shown.step(1001) == (every == 1)
    assert total // every <= 100_000


def test_lines_of_other_steps_need_not_be_read() -> None:
    shown = Shown(430_000)
    assert shown.line(b'{"kind":"step","step":2000,"loss":1.0}\n')
    assert not shown.line(b'{"kind":"step","step":2001,"loss":1.0}\n')
    assert shown.line(b'{"kind":"checkpoint_committed","step":2001}\n')


def test_a_step_counts_unless_a_later_attempt_repeats_it() -> None:
    attempts = Attempts({})
    for attempt, resumed in ((1, 0), (2, 60), (3, 40)):
        attempts.add({"attempt": attempt, "resumed_from_step": resumed}, tokens_per_step=10)
    steps = [(attempt, step) for attempt in (1, 2, 3) for step in (40, 41, 60, 61)]
    assert [pair for pair in steps if attempts.counts({"attempt": pair[0], "step": pair[1]})] == [
        (1, 40), (2, 40), (3, 40), (3, 41), (3, 60), (3, 61),
    ]  # fmt: skip
    assert (attempts.newest, attempts.common()) == (3, [40, 400])
    attempts.add({"attempt": 4, "resumed_from_step": 2, "tokens": 7}, tokens_per_step=10)
    assert not attempts.counts({"attempt": 3, "step": 3})
    assert attempts.common() == [2, 7]


def test_a_run_without_a_restart_has_no_repeated_steps() -> None:
    attempts = Attempts({"1": [0, 0]})
    assert attempts.common() is None
    assert attempts.counts({"attempt": 1, "step": 10**6})


def test_a_step_has_the_fields_that_are_known() -> None:
    event = {"step": 3, "tokens": 300, "time_unix_s": 10.0, "loss": "nan", "mfu": None, "batch": 7, "lr": 1}
    point = base.point(event, shift_s=5.0)
    assert (point.step, point.tokens, point.time_unix_s) == (3, 300, 15.0)
    assert list(point.values) == ["loss", "lr"]
    assert math.isnan(point.values["loss"])


def test_scores_under_another_contract_are_apart() -> None:
    event = {
        "step": 3,
        "milestone_tokens": 300,
        "time_unix_s": 1.0,
        "contract": "abcdefghij",
        "scores": {"mmlu:all": {"value": 0.5}, "broken": {"value": None}},
    }
    own, other = base.scores(event, "abcdefghij", 0.0), base.scores(event, "0123456789", 0.0)
    assert (own.group, own.values) == ("eval", {"mmlu_all": 0.5})
    assert other.group == "eval_contract_abcdefgh"
    assert base.scores(event, "", 0.0).group == "eval", "the run's contract is not known"
    assert own.key not in (other.key, base.scores({**event, "time_unix_s": 2.0}, "abcdefghij", 0.0).key)
