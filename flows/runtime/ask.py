"""Ask a package that flows must not import: run a module of it as a process and return its output."""

from __future__ import annotations

import os
import signal
import subprocess

import conf.load
from conf.schema import Config
from flows.runtime import spawn
from hlatctl.run import child
from hlatctl.run.errors import ERROR_FILE_ENV, ERROR_TOLD_ENV, LaunchError, load_error
from hlatctl.run.scratch import private_folder


def ask(module: str, *argv: str, timeout_s: float | None = None, show_talk: bool = False, yields: bool = False) -> str:
    """Run ``python -m module argv`` and return what it prints.

    Args:
        module: such as ``trainer.data.check``.
        argv: its arguments.
        timeout_s: limit; None: no limit.
        show_talk: pass its stderr on while it runs.
        yields: run at low priority, in a session of its own; Ctrl-C is passed on, and a second one kills it.

    Raises:
        HlatctlError: the error that it left.
        LaunchError: it failed without leaving an error, or took too long.
    """
    with private_folder("ask") as own:
        error_file = own.path / "error.json"
        shown = {ERROR_TOLD_ENV: "1"} if show_talk else {}
        words = spawn.command(module, *argv)
        process = subprocess.Popen(
            spawn.yielding(words) if yields else words,
            env={**child.environment(), ERROR_FILE_ENV: os.fspath(error_file), **shown},
            stdout=subprocess.PIPE,
            stderr=None if show_talk else subprocess.PIPE,
            text=True,
            start_new_session=yields,
        )
        try:
            output, talk = _answer(process, timeout_s, interrupts=yields)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{module}: no answer after {timeout_s:g} s") from None
        if process.returncode:
            last_line = ((talk or "").strip().splitlines() or ["no output"])[-1]
            raise load_error(error_file) or LaunchError(f"{module}: failed ({last_line})")
    return output


def _answer(process: subprocess.Popen[str], timeout_s: float | None, *, interrupts: bool) -> tuple[str, str | None]:
    """Return stdout and stderr of a process. It has ended afterwards, whatever happens."""
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


def ask_about(
    module: str,
    config: Config,
    *argv: str,
    timeout_s: float | None = None,
    show_talk: bool = False,
    yields: bool = False,
) -> str:
    """Call :func:`ask` with a configuration in a file that ``--config`` names."""
    with private_folder("ask") as own:
        file = own.path / "config.yaml"
        file.write_text(conf.load.dump(config), encoding="utf-8")
        return ask(module, "--config", os.fspath(file), *argv, timeout_s=timeout_s, show_talk=show_talk, yields=yields)
