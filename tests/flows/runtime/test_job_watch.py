"""What is journalled and shown of a job in a scheduler's queue."""

from __future__ import annotations

from typing import Any

import pytest

from flows.launch.base import Status
from flows.runtime.job_watch import JobWatch
from hlatctl.run.fold import fold
from hlatctl.run.state import RunState


class Context:
    """The part of a flow's context that is used, with the events in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"kind": "attempt_started", "attempt": 1, "seq": 0, "time_unix_s": 0.0, "handle": {}}
        ]
        self.messages: list[str] = []

    @property
    def state(self) -> RunState:
        return fold(self.events)

    def event(self, kind: str, **fields: Any) -> None:
        number = len(self.events)
        self.events.append({"kind": kind, "attempt": 1, "seq": number, "time_unix_s": float(number), **fields})

    def message(self, text: str) -> None:
        self.messages.append(text)


def watch(ctx: Context, *, started: bool = False) -> JobWatch:
    return JobWatch(ctx, "train", "attempt 1", started=started)  # type: ignore[arg-type]


@pytest.fixture
def ctx() -> Context:
    return Context()


def test_a_wait_is_told_once_for_each_reason_and_the_hosts_at_the_start(ctx: Context) -> None:
    job = watch(ctx)
    for reason in ("None", "Priority", "Priority", "Resources", "None"):
        job.saw(Status(state="queued", reason=reason, expected_start_unix_s=60.0))
    assert job.waits
    assert ctx.state.queued["train"].reason == "Resources"
    for _ in range(2):
        job.saw(Status(state="running", hosts=("n1", "n2")))
    assert not job.waits
    assert ctx.state.queued == {}
    assert ctx.state.attempts[0].hosts == ["n1", "n2"]
    assert ctx.messages == [
        "attempt 1: queued (Priority), expected to start at 1970-01-01 00:01:00 UTC",
        "attempt 1: queued (Resources), expected to start at 1970-01-01 00:01:00 UTC",
        "attempt 1: runs on n1, n2",
    ]


def test_the_next_driver_knows_that_the_job_waits(ctx: Context) -> None:
    watch(ctx).saw(Status(state="queued", reason="Priority"))
    ctx.event("head_started", pid=1, host="login")
    job = watch(ctx)
    assert job.waits
    job.saw(Status(state="queued", reason="Priority"))
    assert [event["kind"] for event in ctx.events].count("job_queued") == 1
    job.ended()
    assert ctx.state.queued == {}


def test_a_suspended_job_waits_until_it_runs_again(ctx: Context) -> None:
    job = watch(ctx, started=True)
    job.saw(Status(state="queued", reason="suspended"))
    assert ctx.state.queued["train"].reason == "suspended"
    for _ in range(2):
        job.saw(Status(state="running", hosts=("n1",)))
    assert ctx.state.queued == {}
    assert ctx.messages == ["attempt 1: queued (suspended)", "attempt 1: runs on n1"]


def test_a_silent_scheduler_is_told_once_and_changes_nothing(ctx: Context) -> None:
    job = watch(ctx, started=True)
    for state in ("running", "unknown", "unknown", "running"):
        job.saw(Status(state=state, hosts=("n1",) if state == "running" else ()))
    assert ctx.messages == ["attempt 1: the scheduler does not answer", "attempt 1: the scheduler answers again"]


def test_a_launcher_without_a_queue_adds_no_events(ctx: Context) -> None:
    job = watch(ctx)
    job.saw(Status(state="running"))
    job.ended()
    assert len(ctx.events) == 1
    assert ctx.messages == []
