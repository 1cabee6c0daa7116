"""Jobs as processes of this machine, in a session of their own, so that they outlive the head process.

The rendered shell script writes its process id first and its exit code last, each by rename. Its process id is also its
process group's, through which the whole job is signalled.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

from flows.launch import processes
from flows.launch.base import Handle, Job, Plan, Status, export_lines, quote
from hlatctl.run import files
from hlatctl.run.errors import ERROR_FILE_ENV, LaunchError

_POLL_S = 0.05
#: Of what shares training's cores: training waits for its slowest process, so it takes only what that leaves over.
_BESIDE_TRAINING_NICE = 10
_START_TIMEOUT_S = 10.0


class LocalLauncher:
    """Starts jobs on this machine."""

    name = "local"
    weighs_jobs = True

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """This machine."""
        return (platform.node(),)

    def render(self, job: Job) -> Plan:
        """The job as a shell script."""
        script_path = job.launch_dir / f"{job.name}.sh"
        return Plan(job=job, script=_script(job), script_path=script_path)

    def handle(self, plan: Plan) -> Handle:
        """The job's place: its launch folder and name."""
        return Handle(launcher=self.name, name=plan.job.name, launch_dir=os.fspath(plan.job.launch_dir))

    def submit(self, plan: Plan) -> Handle:
        """Start the script in a new session and wait until its process id is on disk."""
        job, handle = plan.job, self.handle(plan)
        for stale in (_pid_file(handle), _exit_file(handle), job.error_file):
            stale.unlink(missing_ok=True)
        files.write_text(plan.script_path, plan.script)
        job.log_dir.mkdir(parents=True, exist_ok=True)
        _spawn_session(plan.script_path, job.log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _pid_file(handle).exists():
            if time.monotonic() > deadline:
                raise LaunchError(f"job {job.name}: its script did not start", hint=f"see {job.log}")
            time.sleep(_POLL_S)
        return handle

    def status(self, handle: Handle) -> Status:
        """From the exit code on disk, or else from whether the script's process is alive."""
        code = _read_int(_exit_file(handle))
        if code is None and not _alive(handle):
            # It may have ended between the two looks.
            code = _read_int(_exit_file(handle))
            if code is None:
                return Status(state="lost")
        if code is None:
            return Status(state="running")
        return Status(state="succeeded" if code == 0 else "failed", exit_code=code)

    def cancel(self, handle: Handle, *, grace_s: float) -> None:
        """SIGTERM to the whole process group, SIGKILL after the grace."""
        pid = self.pid(handle)
        if pid is None:
            return
        _signal_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while _group_alive(pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        while _group_alive(pid):
            _signal_group(pid, signal.SIGKILL)
            time.sleep(_POLL_S)

    def pid(self, handle: Handle) -> int | None:
        """The process of the job's script, and the job's process group; None if it was never started."""
        return _read_int(_pid_file(handle))

    def dump_stacks(self, handle: Handle) -> str:
        """By SIGUSR1 to the processes below the script that catch it."""
        pid = self.pid(handle)
        return processes.ask_for_stacks(processes.descendants(pid) if pid else [])

    def oom_kills(self) -> int | None:
        """From the kernel of this machine."""
        return processes.oom_kills()


def _script(job: Job) -> str:
    env = {**job.env, ERROR_FILE_ENV: os.fspath(job.error_file)}
    pid, code = (quote((os.fspath(job.launch_dir / f"{job.name}.{kind}"),)) for kind in ("pid", "exit_code"))
    return f"""#!/bin/sh
# Job {job.name}, written by hlatctl. May be run by hand to repeat it.
printf '%s\\n' "$$" >{pid}.tmp && mv {pid}.tmp {pid}
# A request to stop goes to the whole process group; this shell waits for the job to answer it.
trap : TERM INT
{_yielding(job)}{export_lines(env, job.unset)}
{quote(_command(job))}
code=$?
printf '%s\\n' "$code" >{code}.tmp && mv {code}.tmp {code}
exit "$code"
"""


def _yielding(job: Job) -> str:
    if not job.beside_training:
        return ""
    return f"""# A kernel with autogroups (sched(7)) weighs sessions: there `nice` alone would change nothing.
{{ echo {_BESIDE_TRAINING_NICE} >/proc/self/autogroup; }} 2>/dev/null || :
"""


def _command(job: Job) -> tuple[str, ...]:
    if not job.processes_per_node:
        return (*(("nice", "-n", str(_BESIDE_TRAINING_NICE)) if job.beside_training else ()), sys.executable, *job.argv)
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.processes_per_node}")
    # Each process's output also goes to a file of its own. "-m trainer" is torchrun's own --module trainer.
    ranks = ("--tee=3", f"--log-dir={job.log_dir / job.name}")
    wrapper = (sys.executable, *job.wrapper) if job.wrapper else ()
    return (*wrapper, sys.executable, *torchrun, *ranks, *job.argv)


def _spawn_session(script: Path, log: Path) -> None:
    """Run a script as the leader of a new session, its output appended to a log."""
    with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
        os.posix_spawn(
            "/bin/sh", ["/bin/sh", os.fspath(script)], os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, nothing.fileno(), 0),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
            ],
            setsid=True,
        )  # fmt: skip


def _pid_file(handle: Handle) -> Path:
    return Path(handle.launch_dir) / f"{handle.name}.pid"


def _exit_file(handle: Handle) -> Path:
    return Path(handle.launch_dir) / f"{handle.name}.exit_code"


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _alive(handle: Handle) -> bool:
    """The script's process lives, and is this script and no later process that got its id."""
    pid = _read_int(_pid_file(handle))
    return pid is not None and f"{handle.launch_dir}/{handle.name}.sh" in _command_line(pid)


def _command_line(pid: int) -> str:
    proc = Path(f"/proc/{pid}/cmdline")
    if proc.parent.parent.joinpath("self").exists():
        try:
            return proc.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    result = subprocess.run(
        ["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return result.stdout


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _group_alive(pid: int) -> bool:
    """Some process of the group is more than a zombie."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _only_zombies(pid)


def _only_zombies(pgid: int) -> bool:
    """Every member of the group has ended and waits for a parent that may be this process, or none."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-pgid, os.WNOHANG)
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return True
    states = [
        _process_state(int(entry.name)) for entry in Path("/proc").glob("[0-9]*") if _pgid(int(entry.name)) == pgid
    ]
    return bool(states) and all(state == "Z" for state in states)


def _pgid(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def _process_state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return "Z"
    return stat.rpartition(")")[2].split()[0]
