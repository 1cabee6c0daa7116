"""Runs a job to its end, and turns its failure into an error that a person can act on.

``JobWatch`` journals and shows a job's way through a scheduler's queue. ``alone`` makes sure that only one run does
work that several runs need, such as preparing a corpus.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from flows.launch.base import Handle, Job, JobPlan, Launcher, Status
from flows.launch.endings import has_ended, has_started
from flows.recovery import failure_causes
from flows.runtime.context import FlowContext
from hlatctl.run import orders, rank_output
from hlatctl.run.errors import HlatctlError, LaunchError, load_error
from hlatctl.run.lease import Holder, hold, successor
from hlatctl.units import host_names, queued

#: Slurm's reason for a wait that it has not examined yet.
_NO_REASON = ("", "None")


class JobWatch:
    """Journals and shows the changes of a job's state that a scheduler decides.

    Launchers without a queue report neither ``queued`` nor hosts, so nothing is journalled.

    Args:
        title: the job's name in messages.
        started: an earlier driver has journalled that the job started.
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
        """Process a new status of the job."""
        if (status.state == "unknown") != self._away:
            self._away = not self._away
            self._ctx.event("scheduler_away" if self._away else "scheduler_back", job=self._name)
            self._ctx.message(f"{self._title}: the scheduler {'does not answer' if self._away else 'answers again'}")
        if status.state == "queued":
            self._queued(status)
        elif status.state == "running":
            self._running(status)

    def ended(self) -> None:
        """Record that the job has ended or is given up."""
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
        if (self._started and not self.waits) or not status.hosts:  # hosts are known a moment after the allocation
            return
        self._started, self._reason = True, None
        self._ctx.event("job_started", job=self._name, hosts=list(status.hosts))
        self._ctx.message(f"{self._title}: runs on {host_names(status.hosts)}")


#: Time for a cancelled job to end by itself.
CANCEL_GRACE_S = 5.0
_POLL_S = 0.1
#: Bytes read from a log's end: enough for the exceptions of several processes before torchrun's summary.
_LOG_TAIL_BYTES = 128 * 1024
_LOG_TAIL_LINES = 400
#: Maximum number of nodes to blame whose logs are read.
_MOST_NODES = 4


@dataclass
class StayingJob:
    """A job that can wait for more when it has done its work.

    Args:
        given: number of its newest order.
        outlives: it continues when its driver hands over to the next one.
    """

    job: Job
    handle: Handle
    launcher: Launcher
    given: int = 0
    outlives: bool = False

    @property
    def orders(self) -> Path:
        """The folder of its orders (``hlatctl.run.orders``)."""
        return self.job.launch_dir / f"{self.job.name}.then"

    def does(self, job: Job) -> bool:
        """Return whether it could do the work of another job: everything but the name and the arguments is the same."""
        return replace(self.job, name=job.name, argv=job.argv) == job and not self.launcher.status(self.handle).ended


def run_job(
    ctx: FlowContext,
    job: Job,
    *,
    timeout_s: float | None = None,
    timeout_key: str = "",
    reattach: bool = False,
    until: Callable[[], bool] | None = None,
    stays: bool = False,
) -> bool:
    """Submit a job and wait for it. An interrupt or the time-out cancels it.

    Args:
        timeout_s: limit of its running time, without its wait in a queue; None: no limit.
        timeout_key: the configuration key of the limit.
        reattach: if an earlier driver left the same job running, wait for that one; leave it running for the next one.
        until: cancel the job when this returns True.
        stays: its program takes ``--then FOLDER`` and waits for more work. A waiting job of this flow does the work if
            it can; any other waiting job is ended.

    Returns:
        True if the job succeeded, False if ``until`` cancelled it.

    Raises:
        HlatctlError: the error that the job left.
        StoppedError: the run stops.
        LaunchError: it failed without leaving an error, timed out, or was lost; the message names its exception.
        StorageError: its files can't be written.
    """
    ctx.check_stop()
    if stays and (stayed := _stayed(ctx, job)):
        stayed.given += 1
        orders.give(stayed.orders, stayed.given, job.argv)
        done = _watch(ctx, stayed, until=until, stays=True)
        if done is not None:
            return done
        # The job ended before it saw the order.
    launcher = ctx.launcher  # an amendment may replace the context's launcher while the job runs
    own = StayingJob(job, launcher.handle(launcher.render(job)), launcher)
    if stays:
        own.job = replace(job, argv=(*job.argv, "--then", str(own.orders)))
    plan = launcher.render(own.job)
    left_running = not launcher.status(own.handle).ended
    is_same = reattach and _is_submitted(plan)
    if left_running and not is_same:
        launcher.cancel(own.handle, grace_s=CANCEL_GRACE_S)
    if not (left_running and is_same):
        if stays:
            ctx.when_there_is_room(lambda: orders.clear(own.orders))
        ctx.when_there_is_room(lambda: launcher.submit(plan))
    own.outlives = reattach
    return _watch(ctx, own, until=until, stays=stays, timeout_s=timeout_s, timeout_key=timeout_key) is not False


def _stayed(ctx: FlowContext, job: Job) -> StayingJob | None:
    """Take a waiting job that can do the work of this one; end those that can't, because they hold memory."""
    found = None
    for one in tuple(ctx.staying):
        fits = one.launcher is ctx.launcher and one.does(job)
        if fits and found:
            continue
        try:
            ctx.staying.remove(one)
        except ValueError:  # another thread has taken it
            continue
        if fits:
            found = one
        else:
            _end(ctx, one)
    return found


def end_staying(ctx: FlowContext) -> None:
    """End the jobs that wait for more work."""
    while ctx.staying:
        _end(ctx, ctx.staying.pop())


def _end(ctx: FlowContext, stayed: StayingJob) -> None:
    if successor(ctx.run) is None:
        stayed.launcher.cancel(stayed.handle, grace_s=CANCEL_GRACE_S)


def _watch(
    ctx: FlowContext,
    one: StayingJob,
    *,
    until: Callable[[], bool] | None,
    stays: bool,
    timeout_s: float | None = None,
    timeout_key: str = "",
) -> bool | None:
    """Wait until a job has done its newest work; see ``run_job``.

    Returns None if it ended well without an answer to its order.
    """
    job, handle, launcher = one.job, one.handle, one.launcher
    oom_kills = launcher.oom_kills()
    watch, limit_s = JobWatch(ctx, job.name, f"job {job.name}"), timeout_s or float("inf")
    start_s = ctx.clock.monotonic_s()
    keeps = False
    try:
        while not (status := launcher.status(handle)).ended:
            ctx.check_stop()
            if stays and orders.is_done(one.orders, one.given):
                ctx.staying.append(one)
                keeps = True
                return True
            watch.saw(status)
            if watch.waits:
                start_s = ctx.clock.monotonic_s()
            if ctx.clock.monotonic_s() - start_s > limit_s and status.state == "running":
                # A job that has left its error may take long to end.
                raise load_error(job.error_file) or _timed_out(ctx, job, timeout_key, limit_s)
            if until and until():
                return False
            ctx.clock.wait_for_event(_POLL_S, job.name, lambda: launcher.has_ended(handle))
    finally:
        # Cancel it after an interrupt or a time-out, and its leftover processes, unless a successor has re-attached.
        # A job that got another order has another script by now, so the next driver wouldn't find it.
        left = one.outlives and not one.given and ctx.hands_over
        if not (keeps or left) and successor(ctx.run) is None:
            launcher.cancel(handle, grace_s=CANCEL_GRACE_S)
            watch.ended()
    if status.state != "succeeded":
        if status.verdict == "node_failed":
            ctx.hold_against(status.blamed_hosts, "failure", f"node_failed: job {job.name}")
        raise job_error(job, status, more_oom_kills=(launcher.oom_kills() or 0) > (oom_kills or 0))
    return None if one.given and not orders.is_done(one.orders, one.given) else True


def _is_submitted(plan: JobPlan) -> bool:
    """Return whether the newest job of this name has this script."""
    try:
        return plan.script_path.read_text(encoding="utf-8") == plan.script
    except OSError:
        return False


def job_error(job: Job, status: Status, *, more_oom_kills: bool = False) -> HlatctlError:
    """Return the error that a failed job left, or else one that names its exception."""
    error = load_error(job.error_file)
    if error and not status.verdict:
        return error
    status, tail = ending_of(job, status)
    ending = failure_causes.end_without_error(status, tail, more_oom_kills=more_oom_kills)
    how = "was lost" if status.exit_code is None else f"failed with exit code {status.exit_code}"
    is_cancelled = ending.cause == "cancelled"
    hint = f"ask who cancelled it, then `hlatctl resume {job.run_dir.name}`" if is_cancelled else f"see {job.log}"
    return LaunchError(f"job {job.name}: {how} ({ending.evidence})", hint=hint, code=ending.cause)


def _timed_out(ctx: FlowContext, job: Job, key: str, limit_s: float) -> LaunchError:
    return LaunchError(
        f"{key}={limit_s:g}: job {job.name} did not finish in this time",
        hint=f"see {job.log}; `hlatctl resume {ctx.run.run_id} {key}={2 * limit_s:g}` gives it more time",
        code="hang",
    )


def ending_of(job: Job, status: Status) -> tuple[Status, str]:
    """Return the status of an ended job and its last lines: those of the node where it failed, then of the first node.

    Usually the first node to end is to blame, and ranks of the others only saw connections close. But the node of a
    killed process can be slow to end, and clocks of nodes differ. So if the node's log doesn't surely name a cause, the
    others are searched for one that does, and its node is to blame. A node that left no record of its end is to blame
    in any case: it died.
    """
    ranks = [status.hosts.index(host) for host in status.blamed_hosts if host in status.hosts][:_MOST_NODES]
    if not status.verdict and len(status.hosts) > 1:
        base = job.launch_dir / job.name
        silent = [rank for rank in ranks if has_started(base, rank) and not has_ended(base, rank)]
        weights = [failure_causes.weight_of(_of_node(job, rank)) for rank in ranks]
        if not silent and max(weights, default=0) < _SURE:
            found = _where_it_failed(job, len(status.hosts), at_least=max(weights, default=0) + 1)
            if found is not None:
                return replace(status, blamed_hosts=(status.hosts[found],)), _of_node(job, found)
        if weights == [_SURE]:
            return status, _of_node(job, ranks[0])
    logs = [_of_node(job, rank) for rank in ranks if rank]
    return status, "\n".join(filter(None, (*logs, _of_node(job, 0))))


#: What ``weight_of`` returns for a log that names a cause of its own.
_SURE = 2


def _where_it_failed(job: Job, nodes: int, *, at_least: int) -> int | None:
    """Return the first node of those whose logs name a cause most surely; None: none does."""
    weights = {node: failure_causes.weight_of(_of_node(job, node)) for node in range(nodes)}
    best = max(weights, key=lambda node: (weights[node], -node))
    return best if weights[best] >= at_least else None


def _of_node(job: Job, node: int) -> str:
    return _tail(rank_output.node_log(job.log, node))


def where_else(job: Job, hosts: Sequence[str], cause: failure_causes.Cause) -> list[str]:
    """Return the hosts whose logs name the same cause: if several do, it isn't the fault of one."""
    return [host for node, host in enumerate(hosts) if failure_causes.cause_of_log(_of_node(job, node)) == cause]


def _tail(path: Path) -> str:
    """Return the last lines that aren't blank from the end of a log; empty if it can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            tail = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in tail if line.strip()][-_LOG_TAIL_LINES:])


_SHARED_WORK_POLL_S = 0.5


@contextmanager
def alone(ctx: FlowContext, folder: Path, what: str) -> Iterator[None]:
    """Wait until no other run fills a shared folder, and keep other runs from filling it during the block.

    The block must look for the result first, because another run may have made it in the meantime. ``what`` names the
    work in the message.

    Raises:
        StoppedError: the run was asked to stop while it waited.
    """
    told: list[Holder] = []

    def wait(holder: Holder) -> None:
        if holder not in told:
            told.append(holder)
            ctx.message(f"{what}: waiting for {holder}, which does the same for another run")
        ctx.check_stop()
        time.sleep(_SHARED_WORK_POLL_S)  # also in a dry run: its clock stands still while another thread works

    with hold(folder.with_name(f".{folder.name}.lock"), wait):
        yield
