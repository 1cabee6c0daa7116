"""Starts programs that are not jobs, with the packages of this process.

``start`` starts each of them. ``ask`` runs a module of a package that flows must not import and returns its output;
``conversation`` exchanges lines of JSON with one. ``start_driver`` starts a driver that outlives the process that
starts it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import conf.load
from conf.schema import Config
from flows.launch.local import BESIDE_TRAINING_NICE
from hlatctl.run import processes
from hlatctl.run.errors import ERROR_FILE_ENV, ERROR_TOLD_ENV, LaunchError, load_error
from hlatctl.run.files import private_folder
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths
from hlatctl.units import one_line


def python_command(module: str, *argv: str) -> list[str]:
    """Return the words of ``python -m module argv``, which imports nothing from the working directory."""
    return [sys.executable, "-P", "-m", module, *argv]


def yielding_command(words: Sequence[str]) -> list[str]:
    """Return the words that run a command at low priority, so that it doesn't slow training on the same machine.

    The command must be started in a session of its own. A kernel with autogroups (sched(7)) weighs sessions, so
    ``nice`` alone would change nothing there.
    """
    level = BESIDE_TRAINING_NICE
    script = f'{{ echo {level} >/proc/self/autogroup; }} 2>/dev/null; exec nice -n {level} "$@"'
    return ["sh", "-c", script, "sh", *words]


def start(
    words: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    error_file: Path | None = None,
    yields: bool = False,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start a program that can import the packages of this process; every program outside of jobs starts here.

    Args:
        env: the whole environment; by default this process's.
        error_file: where the program leaves an error that a person can act on.
        yields: run it at low priority; it must get a session of its own.
        options: of ``subprocess.Popen``.
    """
    variables = processes.child_environment(env)
    if error_file:
        variables[ERROR_FILE_ENV] = os.fspath(error_file)
    return subprocess.Popen(yielding_command(words) if yields else words, env=variables, **options)


def start_alongside(
    words: Sequence[str], output: Any, *, stdin: int = subprocess.DEVNULL, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a program (:func:`start`) that writes to an open file, in a session that Ctrl-C doesn't reach."""
    return start(words, stdin=stdin, stdout=output, stderr=output, start_new_session=True, **options)


def ask(module: str, *argv: str, timeout_s: float | None = None, show_talk: bool = False, yields: bool = False) -> str:
    """Run ``python -m module argv`` and return what it prints.

    Args:
        timeout_s: time limit; None: no limit.
        show_talk: pass its stderr on while it runs.
        yields: run at low priority, in a session of its own; Ctrl-C is passed on, and a second one kills it.

    Raises:
        HlatctlError: the error that the process left.
        LaunchError: the process failed without leaving an error, or took too long.
    """
    with private_folder("ask") as own:
        error_file = own.path / "error.json"
        process = start(
            python_command(module, *argv),
            env={**os.environ, ERROR_TOLD_ENV: "1"} if show_talk else None,
            error_file=error_file,
            yields=yields,
            stdout=subprocess.PIPE,
            stderr=None if show_talk else subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=yields,
        )
        try:
            output, talk = _answer(process, timeout_s, interrupts=yields)
        except subprocess.TimeoutExpired:
            hint = "this machine is busy or its disk is slow; repeat the command when it is idle"
            raise LaunchError(f"{module}: no answer after {timeout_s:g} s", hint=hint) from None
        if process.returncode:
            last_line = ((talk or "").strip().splitlines() or ["no output"])[-1]
            raise load_error(error_file) or LaunchError(f"{module}: failed ({last_line})")
    return output


def _answer(process: subprocess.Popen[str], timeout_s: float | None, *, interrupts: bool) -> tuple[str, str | None]:
    """Return stdout and stderr of a process, which has ended afterwards in any case."""
    with process:
        try:
            return process.communicate(timeout=timeout_s)
        except KeyboardInterrupt:
            if interrupts and process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                process.communicate()
            raise
        finally:
            process.kill()
            process.wait()


def ask_about(module: str, config: Config, *argv: str, **options: Any) -> str:
    """Call :func:`ask` with a configuration in a file that ``--config`` names."""
    with private_folder("ask") as own:
        file = own.path / "config.yaml"
        file.write_text(conf.load.dump(config), encoding="utf-8")
        return ask(module, "--config", os.fspath(file), *argv, **options)


class Conversation:
    """A conversation in lines with a running process, whose error and stderr are in ``folder``."""

    def __init__(self, process: subprocess.Popen[str], module: str, folder: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._module, self._folder = process, module, folder
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout

    def say(self, **fields: Any) -> None:
        """Send a line. If the process has ended, :meth:`hear` reports why."""
        with suppress(BrokenPipeError):
            self._stdin.write(json.dumps(fields) + "\n")
            self._stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return the next line.

        Raises:
            HlatctlError: the process ended with this error.
            LaunchError: it ended without an answer.
        """
        line = self._stdout.readline()
        if line.endswith("\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._process.wait()
        words = (self._folder / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why = one_line(words[-1]) if words else f"exit code {code}, no output"
        hint = "memory probably ran out; use a smaller model or a larger machine" if code == -signal.SIGKILL else ""
        raise load_error(self._folder / "error.json") or LaunchError(f"{self._module}: ended ({why})", hint=hint)

    @property
    def is_running(self) -> bool:
        """Whether the process is still running."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Send SIGINT to the process."""
        self._process.send_signal(signal.SIGINT)


@contextmanager
def conversation(module: str, *argv: str, folder: Path, yields: bool) -> Iterator[Conversation]:
    """Start ``python -m module argv`` in a session of its own, and end it after the block.

    Args:
        folder: private folder for its error and its stderr.
        yields: run it at low priority.
    """
    with (folder / "stderr").open("w", encoding="utf-8") as stderr:
        process = start(
            python_command(module, *argv),
            error_file=folder / "error.json",
            yields=yields,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            encoding="utf-8",
            start_new_session=True,
        )
    try:
        yield Conversation(process, module, folder)
    finally:
        process.kill()
        with suppress(BrokenPipeError):
            process.communicate()


_START_TIMEOUT_S = 60.0
_POLL_S = 0.1
#: Seconds from SIGTERM to SIGKILL.
_END_S = 5.0


def start_driver(
    run: RunPaths, *, inside: Sequence[str] = (), env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ``hlatctl resume`` in a session of its own, and wait until it drives the run or has succeeded.

    Args:
        inside: command that runs the words after it, such as bubblewrap.
        env: variables to add to this process's environment.

    Raises:
        HlatctlError: the error with which the driver ended, such as RunBusyError if another process was faster.
        LaunchError: the driver ended without an error, or did not start to drive the run in time.
    """
    log = run.head_log
    log.parent.mkdir(parents=True, exist_ok=True)
    with private_folder("driver") as own, log.open("ab") as output:
        error_file = own.path / "error.json"
        resume = python_command("hlatctl", "resume", run.run_id, "--yes", "--runs-dir", os.fspath(run.root.parent))
        driver = start_alongside([*inside, *resume], output, env={**os.environ, **(env or {})}, error_file=error_file)
        try:
            _wait_until_driving(run, driver, log, error_file)
        except BaseException:  # also an interrupt: nobody would know about a process that begins to drive later
            _end(driver)
            raise
    return driver


def _wait_until_driving(run: RunPaths, driver: subprocess.Popen[bytes], log: Path, error_file: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while driver_pid(run) not in (driver.pid, *processes.descendants(driver.pid)):
        if driver.poll() == 0:
            return  # it had nothing left to do
        if driver.returncode is not None:
            why = f"driver ended with exit code {driver.returncode}"
            raise load_error(error_file) or LaunchError(f"run {run.run_id}: {why}", hint=f"see {log}")
        if time.monotonic() > deadline:
            raise LaunchError(f"run {run.run_id}: no driver after {_START_TIMEOUT_S:g} s", hint=f"see {log}")
        time.sleep(_POLL_S)


def _end(driver: subprocess.Popen[bytes]) -> None:
    """End a driver and the command that runs it, which lead a process group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, number)
        with suppress(subprocess.TimeoutExpired):
            driver.wait(_END_S)
            return
