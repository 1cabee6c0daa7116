"""``python -m hlatctl.driver_job FILE WORDS``: runs `hlatctl WORDS` in a Slurm job, and has the next job follow.

WORDS drive a run, `resume RUN`, or evaluate one, `eval RUN`.

A driver's job first submits its successor, which Slurm starts when this job has ended, for whatever reason: a time
limit, a lost node, ``scancel``, a pre-emption. The successor re-attaches to training, which continues meanwhile. Before
the time limit Slurm sends SIGUSR1, and the driver ends as it does on SIGTERM. When the run has ended, or has failed in
a way that a restart repeats, the successor is cancelled. SIGINT stops the command as Ctrl-C does, and ends the chain.

FILE, ``driver-job.json`` or ``evaluator-job.json`` in the run directory, names the one chain of jobs that may do that.
Whoever removes the file or writes another one ends the chain: a job with another token does nothing. Next to it is the
script of the jobs. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from hlatctl.allocation import TOKEN_ENV
from hlatctl.run import files
from hlatctl.run.errors import NO_RESTART
from hlatctl.run.files import DAMAGED

#: Variable of the driver's process: the token of its chain of jobs.
CHAIN_ENV = "HLATCTL_DRIVER_JOB"
#: Variable of the driver's process, and of the drivers of a sweep's trials: the file of the chain.
PLACE_ENV = "HLATCTL_DRIVER_JOB_FILE"
#: Slurm sends this signal before the job's time limit.
RENEW = signal.SIGUSR1
#: Pause between two starts of a driver that failed, and how many such starts in succession end the chain.
_AGAIN_S, _MOST_FAILURES = 30.0, 10
#: A driver that has run for so long did not fail at its start.
_LONG_S = 600.0
#: Slurm itself sends SIGTERM to all processes of a job that it ends; a second one would disturb the driver's end.
_PATIENCE_S = 3.0
_POLL_S = 0.2


def outside_of_jobs() -> dict[str, str]:
    """Return this process's environment without what describes a Slurm job in which it runs.

    sbatch passes its environment on, and srun takes these variables for its options: a training job that a small job
    submits would get the memory of the small one.
    """
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
    return {k: v for k, v in os.environ.items() if k in kept or not k.startswith(("SLURM_", "SLURMD_", "SRUN_"))}


@dataclass(frozen=True, kw_only=True)
class DriverJob:
    """The chain of jobs that drives or evaluates a run.

    Args:
        launcher: row of ``conf.registries.LAUNCHERS`` that submits them.
        token: identifies the chain.
    """

    launcher: str
    token: str

    def write(self, place: Path) -> None:
        """Make it the one chain of a file: ``RunPaths.driver_job`` or ``evaluator_job``."""
        files.write_json(place, {"v": 1, **asdict(self)})


def driver_job(place: Path) -> DriverJob | None:
    """Return the chain of a file; None if there is none, or it has ended."""
    try:
        value = files.read_json(place)
        return DriverJob(launcher=str(value["launcher"]), token=str(value["token"]))
    except (OSError, *DAMAGED):
        return None


def script_of(place: Path) -> Path:
    """Return the script of a chain's jobs."""
    return place.with_suffix(".sh")


def submission(script: Path, token: str) -> tuple[str, ...]:
    """Return the command that submits a job of a chain, which starts after the chain's earlier jobs."""
    options = ("--parsable", f"--comment={token}", f"--export=ALL,{TOKEN_ENV}={token}")
    return ("sbatch", "--dependency=singleton", *options, os.fspath(script))


class _Chain:
    """One job of a chain."""

    def __init__(self, place: Path, words: list[str], token: str) -> None:
        self._place, self._words, self._token = place, words, token
        self._asked: signal.Signals | None = None
        self._next = ""
        for number in (RENEW, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._asked = self._asked or signal.Signals(number)

    def _is_interrupted(self) -> bool:
        return self._asked == signal.SIGINT

    @property
    def _valid(self) -> bool:
        chain = driver_job(self._place)
        return chain is not None and chain.token == self._token

    def drive(self) -> int:
        """Run the command until it has done its work, or until the job must end; return the exit code of the job."""
        if not self._valid:
            print("this job does nothing: the run was stopped, or another driver has taken it over")
            return 0
        self._submit_next()
        failures = 0
        while True:
            began_s = time.monotonic()
            code = self._driver()
            if code in (0, *NO_RESTART) or self._is_interrupted():
                return self._end(code)
            if not self._asked:
                failures = 1 if time.monotonic() - began_s > _LONG_S else failures + 1
                if failures >= _MOST_FAILURES:
                    print(f"the driver has failed {failures} times in succession, so this job gives the run up")
                    return self._end(code)
                self._pause()
            if self._is_interrupted():
                return self._end(code)
            if self._asked:
                if not self._next:
                    self._submit_next()
                print(f"this job ends ({self._asked.name}); job {self._next or 'none'} follows it", flush=True)
                return 0
            if not self._valid:
                return code

    def _driver(self) -> int:
        """Run the command; return its exit code, or 128 + the signal that ended it."""
        command = (sys.executable, "-P", "-m", "hlatctl", *self._words)
        own = {CHAIN_ENV: self._token, PLACE_ENV: os.fspath(self._place)}
        driver = subprocess.Popen(command, env={**outside_of_jobs(), **own})
        while not self._asked:
            if driver.poll() is not None:
                break
            time.sleep(_POLL_S)
        if self._asked == signal.SIGTERM:
            deadline_s = time.monotonic() + _PATIENCE_S
            while driver.poll() is None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        if driver.poll() is None:
            driver.send_signal(signal.SIGINT if self._is_interrupted() else signal.SIGTERM)
        code = driver.wait()
        return code if code >= 0 else 128 - code

    def _pause(self) -> None:
        """Wait before the next start of the driver."""
        deadline_s = time.monotonic() + _AGAIN_S
        while time.monotonic() < deadline_s and self._valid and not self._asked:
            time.sleep(_POLL_S)

    def _submit_next(self) -> None:
        words = submission(script_of(self._place), self._token)
        try:
            done = subprocess.run(
                words, env=outside_of_jobs(), capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
            )
            self._next = done.stdout.strip().partition(";")[0]
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or str(error)
            print(f"warning: no job follows this one ({' '.join(why.split())})", flush=True)

    def _end(self, code: int) -> int:
        if self._valid:
            self._place.unlink(missing_ok=True)
        if self._next:
            subprocess.run(("scancel", self._next), capture_output=True, check=False, stdin=subprocess.DEVNULL)
        return code


def main(argv: list[str] | None = None) -> int:
    """Run the command of the command line."""
    place, *words = sys.argv[1:] if argv is None else argv
    return _Chain(Path(place), words, os.environ.pop(TOKEN_ENV, "")).drive()


if __name__ == "__main__":
    sys.exit(main())
