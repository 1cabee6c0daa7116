"""Follow a job through a scheduler's queue: journal and show its wait, its start, and a silent scheduler."""

from __future__ import annotations

from flows.launch.base import Status
from flows.runtime.context import FlowContext
from hlatctl.run.host import host_names
from hlatctl.units import queued

#: Slurm's word for a wait that it has not looked into yet.
_NO_REASON = ("", "None")


class JobWatch:
    """Journals and shows the changes of a job's state that a scheduler decides.

    Launchers without a queue report neither ``queued`` nor hosts: then there is nothing to journal.

    Args:
        ctx: of the flow.
        name: of the job.
        title: the job's name in messages.
        started: an earlier driver has journalled that it started.
    """

    def __init__(self, ctx: FlowContext, name: str, title: str, *, started: bool = False) -> None:
        queued = ctx.state.queued.get(name)
        self._ctx, self._name, self._title = ctx, name, title
        self._reason = queued.reason if queued else None
        self._started, self._away = started, False

    @property
    def waits(self) -> bool:
        """Whether the job was still in the queue when the scheduler last answered."""
        return self._reason is not None

    def saw(self, status: Status) -> None:
        """Take a new status of the job."""
        if (status.state == "unknown") != self._away:
            self._away = not self._away
            self._ctx.event("scheduler_away" if self._away else "scheduler_back", job=self._name)
            self._ctx.message(f"{self._title}: the scheduler {'does not answer' if self._away else 'answers again'}")
        if status.state == "queued":
            self._queued(status)
        elif status.state == "running":
            self._running(status)

    def ended(self) -> None:
        """The job has ended, or is given up."""
        if self.waits:
            self._ctx.event("job_left_queue", job=self._name)
            self._reason = None

    def _queued(self, status: Status) -> None:
        reason = "" if status.reason in _NO_REASON else status.reason
        if reason == self._reason or (self.waits and not reason):
            return
        self._reason = reason
        start_unix_s = status.expected_start_unix_s
        self._ctx.event("job_queued", job=self._name, reason=reason, expected_start_unix_s=start_unix_s)
        if reason:
            self._ctx.message(f"{self._title}: {queued(reason, start_unix_s)}")

    def _running(self, status: Status) -> None:
        if (self._started and not self.waits) or not status.hosts:  # they are known a moment after the nodes are there
            return
        self._started, self._reason = True, None
        self._ctx.event("job_started", job=self._name, hosts=list(status.hosts))
        self._ctx.message(f"{self._title}: runs on {host_names(status.hosts)}")
