"""Goodput of made-up journals: every second belongs to one category."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import BackendConfig, CheckpointConfig, ClusterConfig, Config
from hlatctl.plan.checkpoint_interval import least_time_between_failures_s
from hlatctl.report.goodput import Goodput, facts, label, measure_goodput, time_table
from hlatctl.run.journal import Event

CONFIG = Config(
    cluster=ClusterConfig(nodes=2, processes_per_node=4, price_usd_per_node_hour=36.0),
    checkpoint=CheckpointConfig(every_steps=2),
    backend=BackendConfig(device="cuda"),
)


class Journal:
    """Events at times chosen by the test."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, time_s: float, kind: str, *, writer: str = "flow", attempt: int = 0, **fields: Any) -> None:
        head = {"v": 1, "seq": len(self.events) + 1, "time_unix_s": 1e9 + time_s, "attempt": attempt, "kind": kind}
        self.events.append({**head, "writer": writer, **fields})

    def train(self, time_s: float, kind: str, attempt: int = 1, **fields: Any) -> None:
        self.add(time_s, kind, writer="train-rank00000", attempt=attempt, **fields)

    def step(self, time_s: float, step: int, attempt: int = 1, step_s: float = 10.0, data_wait_s: float = 0.0) -> None:
        self.train(time_s, "step", attempt, step=step, tokens=step, step_s=step_s, data_wait_s=data_wait_s)

    def start(self, time_s: float, attempt: int = 1, resumed_from_step: int = 0) -> None:
        self.add(time_s, "attempt_started", attempt=attempt, handle={})
        self.train(time_s + 5, "train_started", attempt, resumed_from_step=resumed_from_step)

    def end(self, time_s: float, cause: str, decision: str = "", attempt: int = 1) -> None:
        self.add(time_s, "attempt_ended", attempt=attempt, cause=cause, decision=decision)

    def saved(self, time_s: float, step: int, attempt: int = 1, **fields: float) -> None:
        self.train(time_s, "checkpoint_written", attempt, step=step, **fields)

    @property
    def seconds(self) -> dict[str, float]:
        return measure_goodput(self.events, CONFIG).seconds


@pytest.fixture
def journal() -> Journal:
    """Return the journal of a run whose driver started at 0."""
    made = Journal()
    made.add(0, "run_created", run_id="made-up")
    made.add(0, "head_started", pid=1)
    return made


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


def interrupted(journal: Journal, cause: str = "killed", decision: str = "restart") -> None:
    """Steps 1 to 4 in attempt 1, a checkpoint after 2; attempt 2 continues from there to step 5."""
    journal.start(10)
    for step in (1, 2):
        journal.step(10 + 10 * step, step, step_s=5.0)
    journal.saved(31, 2, wall_s=1.0)
    for step in (3, 4):
        journal.step(11 + 10 * step, step)
    journal.end(53, cause, decision)
    journal.start(60, attempt=2, resumed_from_step=2)
    for step in (3, 4, 5):
        journal.step(50 + 10 * step, step, attempt=2)


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
    assert "lost" not in measure_goodput(before, CONFIG).seconds


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
    goodput = measure_goodput(journal.events, CONFIG)
    assert goodput.checkpointing.failures == {}
    assert goodput.ettr_fraction == pytest.approx(20 / 36045)


def test_a_later_evaluation_of_a_finished_run_adds_no_time(journal: Journal) -> None:
    journal.start(10)
    journal.step(30, 1)
    journal.end(34, "finished", "done")
    journal.add(35, "run_finished", outcome="finished")
    before = measure_goodput(journal.events, CONFIG)
    journal.add(90_000, "eval_started", writer="eval-10")
    assert measure_goodput(journal.events, CONFIG) == before
    journal.add(90_035, "head_started", pid=2)
    assert measure_goodput(journal.events, CONFIG).wall_s == 90_035.0, "a new driver adds time"


def test_an_asynchronous_save_counts_only_its_stall_after_its_step(journal: Journal) -> None:
    journal.start(10)
    for step, time_s in ((1, 30.0), (2, 40.0), (3, 51.0), (4, 61.0)):
        journal.step(time_s, step)
        if step == 3:
            journal.saved(58, 2, wall_s=18.0, stall_s=0.75)  # written during step 4
    seconds = journal.seconds
    assert (seconds["productive"], seconds["checkpoint_stall"]) == (40.0, 0.75)
    assert seconds["between_steps"] == 0.25
    assert measure_goodput(journal.events, CONFIG).checkpointing.save_s == 0.75


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


def test_uptime_and_ettr_and_cost(journal: Journal) -> None:
    interrupted(journal)
    goodput = measure_goodput(journal.events, CONFIG)
    assert (goodput.wall_s, goodput.training_s, goodput.up_s) == (100.0, 90.0, 66.0)
    assert goodput.uptime_fraction == pytest.approx(66 / 90)
    assert goodput.ettr_fraction == pytest.approx(40 / 90)
    assert goodput.process_hours == pytest.approx(8 * 100 / 3600)
    assert goodput.cost_usd == pytest.approx(2 * 36.0 * 100 / 3600)
    header, rows = time_table(goodput)
    assert header == ["category", "time", "share", "USD"]
    assert rows[0] == ["productive steps", "40 s", "40.0 %", "0.80"]
    assert rows[-1] == ["wall time", "1 min 40 s", "100.0 %", "2.00"]
    assert dict(facts(goodput))["accelerator-hours"] == "0.22"


def test_without_a_price_there_is_no_cost_and_cpus_are_not_accelerators(journal: Journal) -> None:
    interrupted(journal)
    goodput = measure_goodput(journal.events, Config())
    assert goodput.cost_usd is None
    assert time_table(goodput)[0] == ["category", "time", "share"]
    assert {"cost", "accelerator-hours"}.isdisjoint(dict(facts(goodput)))


def test_the_best_interval_follows_from_saves_and_failures(journal: Journal) -> None:
    interrupted(journal)
    checkpointing = measure_goodput(journal.events, CONFIG).checkpointing
    assert checkpointing.failures == {"killed": 1}
    assert (checkpointing.save_s, checkpointing.mean_time_between_failures_s) == (1.0, 66.0)
    assert checkpointing.young_s == pytest.approx((2 * 66.0) ** 0.5)
    assert checkpointing.every_s == 20.0
    assert checkpointing.daly_steps == 1
    texts = dict(facts(measure_goodput(journal.events, CONFIG)))
    assert texts["failures"] == "1 killed, in 1 min 6 s of training: one in 1 min 6 s"
    assert texts["best interval (Daly)"] == "every 11 s, 1 step"


def test_without_a_failure_there_is_a_bound_and_no_best_interval(journal: Journal) -> None:
    journal.start(10)
    journal.step(30, 1)
    journal.saved(31, 1, wall_s=1.0)
    goodput = measure_goodput(journal.events, CONFIG)
    assert goodput.checkpointing.young_s is None
    assert goodput.checkpointing.least_time_between_failures_s == least_time_between_failures_s(goodput.up_s)
    texts = dict(facts(goodput))
    assert texts["failures"] == "none in 11 s of training: with 95 % confidence less than one in 3.7 s"
    assert not any("Daly" in name or "Young" in name for name in texts)


def test_attempts_that_saved_or_were_asked_to_stop_are_not_failures(journal: Journal) -> None:
    journal.start(10)
    journal.step(30, 1)
    journal.train(31, "train_stopped", step=1, reason="stop")  # preempted: no request to stop, nothing lost
    journal.end(32, "preempted", "restart")
    journal.start(40, attempt=2, resumed_from_step=1)
    journal.step(60, 2, attempt=2)
    journal.add(61, "stop_requested", writer="operator")
    journal.end(62, "killed", "stop", attempt=2)
    assert measure_goodput(journal.events, CONFIG).checkpointing.failures == {}


def test_an_empty_journal_has_no_time() -> None:
    goodput = measure_goodput([], CONFIG)
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
    "cause": st.sampled_from(["finished", "killed", "stopped", "", None]),
    "decision": st.sampled_from(["restart", "stop", "done", None]),
    "reason": st.sampled_from(["finished", "stop", "rollback"]),
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
    """Check that every second belongs to one category."""
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
    check(measure_goodput(made.events, CONFIG))


def test_the_time_of_longer_prefixes_of_a_journal_grows(journal: Journal) -> None:
    interrupted(journal)
    prefixes = [measure_goodput(journal.events[:length], CONFIG) for length in range(len(journal.events) + 1)]
    for one in prefixes:
        check(one)
    assert [one.wall_s for one in prefixes] == sorted(one.wall_s for one in prefixes)
