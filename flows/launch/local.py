"""Jobs as processes of this machine, each in a session of its own, so that they outlive the driver.

The rendered shell script sets the environment and becomes ``hlatctl.node``, which writes a start record first and an
end record last, as JSON. A job is found through these two files.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from conf.schema import Config
from flows.launch.base import Handle, Job, JobPlan, Launcher, Status, export_lines, quote, writing
from hlatctl import node
from hlatctl.run import files, memory, processes
from hlatctl.run.errors import ERROR_FILE_ENV, LaunchError
from hlatctl.run.files import DAMAGED
from hlatctl.run.following import Following, following_file
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import Identity


@dataclass(frozen=True, kw_only=True)
class Record:
    """A job that was started on this machine.

    Args:
        process: ``hlatctl.node``.
        token: of the job's processes; empty if it was found by its command line before it started any.
        folder: its private folder; empty if it was found by its command line.
    """

    process: Identity
    token: str
    folder: str = ""

    def members(self) -> list[Identity]:
        """Return the job's processes that are alive."""
        started = processes.of_job(self.token) if self.token else ()
        return [process for process in (*started, self.process) if processes.alive(process)]

    def ask_to_stop(self) -> None:
        """Ask ``hlatctl.node`` to stop the job."""
        processes.send(self.process, signal.SIGTERM)

    def ask_to_end(self) -> bool:
        """Ask ``hlatctl.node`` to end the job immediately; return whether it was asked."""
        return processes.send(self.process, signal.SIGQUIT)


def record_paths(handle: Handle) -> tuple[Path, Path]:
    """Return the start and end record files of a job."""
    base = Path(handle.launch_dir) / handle.name
    return node.record(base, "pid"), node.record(base, "exit_code")


def recorded_start(handle: Handle) -> Record | None:
    """Return a job that was started; None: it was not, or its process can't be identified.

    If its record is missing or damaged, a running job is found by the command line of its ``hlatctl.node``.
    """
    record = recorded(handle)
    if record and processes.alive(record.process):
        return record
    return _running(handle) or record


def recorded(handle: Handle) -> Record | None:
    """Return the job of the start record; None: there is no usable record."""
    value = _read(record_paths(handle)[0])
    try:
        process = Identity(pid=int(value["pid"]), started=str(value["started"]), boot_id=str(value["boot_id"]))
        return Record(process=process, token=str(value["token"]), folder=str(value.get("tmp_dir", "")))
    except DAMAGED:
        return None


def recorded_exit_code(handle: Handle) -> int | None:
    """Return the exit code of a job that has ended and left one."""
    value = _read(record_paths(handle)[1])
    try:
        return int(value["code"])
    except DAMAGED:
        return None


def _running(handle: Handle) -> Record | None:
    base = os.fspath(Path(handle.launch_dir) / handle.name)
    for process in processes.with_words("-m", "hlatctl.node", base):
        tokens = (processes.job_of(pid) for pid in processes.descendants(process.pid))
        return Record(process=process, token=next(filter(None, tokens), ""))
    return None


def _read(path: Path) -> Any:
    try:
        return files.read_json(path)
    except (OSError, *DAMAGED):
        return None


_POLL_S = 0.05
#: Niceness of jobs on the cores of training, which waits for its slowest process. They get a third of the weight of one
#: of its processes. With a tenth (10), an evaluation did not begin before training ended.
BESIDE_TRAINING_NICE = 5
_START_TIMEOUT_S = 60.0
#: Time for what a job left to take over the next one, which takes milliseconds; and how often it is looked for.
_TAKE_OVER_S, _LOOK_S = 10.0, 0.01
#: Time for ``hlatctl.node`` to end its processes and write the end record.
_END_TIMEOUT_S = 20.0


class LocalLauncher(Launcher):
    """Starts jobs on this machine."""

    name = "local"
    weighs_jobs = True

    def __init__(self) -> None:
        #: The newest job that stays, if this launcher started it.
        self._stays: tuple[Handle, Job] | None = None

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the launcher of a configuration (``conf.registries.LAUNCHERS``)."""
        return cls()

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """Return this machine."""
        return (platform.node(),)

    def render(self, job: Job) -> JobPlan:
        """Return the job as a shell script."""
        script_path = job.launch_dir / f"{job.name}.sh"
        return JobPlan(job=job, script=_script(job), script_path=script_path)

    def submit(self, plan: JobPlan) -> Handle:
        """Start the script in a new session and wait for its start record."""
        job, handle = plan.job, self.handle(plan)
        with writing(job):
            _prepare(plan, handle)
            if self._stays and job.keeps_nodes and not job.stays:
                self.release(job.run_dir)
            elif self._stays and job.stays:
                if self._hand_over(job, handle, *self._stays):
                    return handle
                _prepare(plan, handle)
        pid = _spawn_session(plan.script_path, job.log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while recorded(handle) is None:
            if processes.identify(pid) is None or time.monotonic() > deadline:
                if recorded(handle):  # written since the check above
                    break
                raise LaunchError(f"job {job.name}: its script did not start", hint=f"see {job.log}")
            time.sleep(_POLL_S)
        self._stays = (handle, job) if _stays(job) else self._stays
        return handle

    def _hand_over(self, job: Job, handle: Handle, ended: Handle, old: Job) -> bool:
        """Have what an ended job left run this one; return whether it does. Otherwise nothing is left of it."""
        record, self._stays = recorded(ended), None
        is_there = record is not None and record.folder and Path(record.folder).is_dir()
        fits = (old.run_dir, old.imported) == (job.run_dir, job.imported)
        if record and is_there and self.has_ended(ended) and fits:
            following = Following(
                base=os.fspath(job.launch_dir / job.name),
                command=list(_command(job)),
                env=_env(job),
                log=os.fspath(job.log),
                stays=job.stays,
            )
            with suppress(OSError):  # it is gone
                files.write_json(following_file(Path(record.folder)), asdict(following))
            deadline = time.monotonic() + _TAKE_OVER_S
            while processes.alive(record.process) and time.monotonic() < deadline:
                if recorded(handle):
                    self._stays = handle, job
                    return True
                time.sleep(_LOOK_S)
        self._end(ended)
        return False

    def release(self, run_dir: Path) -> None:
        """End what an ended job has left for the next one, and remove the run's copies in memory."""
        memory.remove_all(RunPaths(run_dir))
        if self._stays and self._stays[1].run_dir == run_dir and self.has_ended(self._stays[0]):
            self._end(self._stays[0])
            self._stays = None

    def has_ended(self, handle: Handle) -> bool:
        """Return whether the job has left its exit code."""
        return record_paths(handle)[1].exists()

    def status(self, handle: Handle) -> Status:
        """Return the state by the exit code on disk, or else by whether the job's process is alive."""
        code = recorded_exit_code(handle)
        if code is None and self.process(handle) is None:
            # It may have ended between the two checks.
            code = recorded_exit_code(handle)
            if code is None:
                return Status(state="lost")
        if code is None:
            return Status(state="running")
        return Status(state="succeeded" if code == 0 else "failed", exit_code=code)

    def cancel(self, handle: Handle, *, grace_s: float) -> None:
        """Ask ``hlatctl.node`` to stop the job, end it after ``grace_s``, and kill what is left of both."""
        if self._stays and self._stays[0] == handle and self.has_ended(handle):
            return  # all its processes had ended when it wrote its exit code
        record = recorded_start(handle)
        if record and grace_s:
            record.ask_to_stop()
            _wait_for_end(record, grace_s)
        self._end(handle)

    def _end(self, handle: Handle) -> None:
        record = recorded_start(handle)
        if record is None:
            return
        if record.ask_to_end():
            _wait_for_end(record, _END_TIMEOUT_S)
        while left := record.members():
            for process in left:
                processes.send(process, signal.SIGKILL)
            time.sleep(_POLL_S)
        _reap(record)

    def process(self, handle: Handle) -> processes.Identity | None:
        """Return the process of the job's ``hlatctl.node``; None: it has ended, or was never started."""
        record = recorded_start(handle)
        if record is None:
            return None
        _reap(record)
        return record.process if processes.alive(record.process) else None

    def dump_stacks(self, handle: Handle) -> str:
        """Send SIGUSR1 to the job's processes that catch it."""
        process = self.process(handle)
        return processes.ask_for_stacks(processes.descendants(process.pid) if process else [])

    def oom_kills(self) -> int | None:
        """Return the count of this machine's kernel."""
        return processes.oom_kills()


def _prepare(plan: JobPlan, handle: Handle) -> None:
    """Write the job's script, create its log, and remove the records of an earlier job of this name."""
    job = plan.job
    for stale in (*record_paths(handle), job.error_file):
        stale.unlink(missing_ok=True)
    files.write_text(plan.script_path, plan.script)
    job.log_dir.mkdir(parents=True, exist_ok=True)
    job.log.touch()


def _env(job: Job) -> dict[str, str]:
    return {**job.env, ERROR_FILE_ENV: os.fspath(job.error_file)}


def _script(job: Job) -> str:
    base = os.fspath(job.launch_dir / job.name)
    return f"""#!/bin/sh
# Job {job.name}, written by hlatctl. May be run by hand to repeat it.
{_yielding(job)}{export_lines(_env(job), job.unset)}
# Writes {job.name}.pid first and {job.name}.exit_code last; SIGTERM asks the job to stop, SIGQUIT ends it at once.
exec {quote((sys.executable, "-m", "hlatctl.node", base, *(["--stay", job.stays] if _stays(job) else []), "--"))} \\
  {quote(_command(job))}
"""


def _yielding(job: Job) -> str:
    if not job.beside_training:
        return ""
    return f"""# A kernel with autogroups (sched(7)) weighs sessions: there `nice` alone would change nothing.
{{ echo {BESIDE_TRAINING_NICE} >/proc/self/autogroup; }} 2>/dev/null || :
"""


def _stays(job: Job) -> bool:
    return bool(job.stays) and _forks(job)


def _forks(job: Job) -> bool:
    # Apple's libraries don't survive a fork, and only Linux shows the names of ranks.
    return bool(job.shared_modules) and sys.platform == "linux"


def _command(job: Job) -> tuple[str, ...]:
    if not job.processes_per_node:
        return (*(("nice", "-n", str(BESIDE_TRAINING_NICE)) if job.beside_training else ()), sys.executable, *job.argv)
    # hlatctl.node sets how the processes find each other on one machine.
    count = job.processes_per_node
    torchrun = ("-m", "torch.distributed.run", f"--rdzv-id={job.name}", f"--nproc-per-node={count}")
    forking = ("-m", "trainer.launch", str(count), *(f"--import={name}" for name in job.shared_modules))
    launcher = forking if _forks(job) else torchrun
    wrapper = (sys.executable, *job.wrapper) if job.wrapper else ()
    return (*wrapper, sys.executable, *launcher, *job.argv)  # torchrun reads "-m trainer" as --module trainer


def _inheritable() -> list[int]:
    """Return the descriptors, except the standard streams, that a started program would get.

    Python's own are not inheritable, but libraries in C++ open some that are; gloo's listening sockets are.
    """
    found = []
    for descriptor in (int(name) for name in os.listdir("/dev/fd")):
        with suppress(OSError):  # closed in the meantime, like the descriptor that lists this folder
            if descriptor > 2 and os.get_inheritable(descriptor):
                found.append(descriptor)
    return found


def _spawn_session(script: Path, log: Path) -> int:
    """Run a script as the leader of a new session that appends to a log; return its process id."""
    with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
        return os.posix_spawn(
            "/bin/sh",
            ["/bin/sh", os.fspath(script)],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, nothing.fileno(), 0),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
                *((os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in _inheritable()),
            ],
            setsid=True,
        )


def _wait_for_end(record: Record, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while processes.alive(record.process) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _reap(record: Record) -> None:
    """Collect the exit status of a job that this process started, or it would stay a zombie."""
    with suppress(ChildProcessError):
        os.waitpid(record.process.pid, os.WNOHANG)
