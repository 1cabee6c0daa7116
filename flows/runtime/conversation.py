"""A conversation with a process of a package that flows must not import: lines of JSON in both directions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from flows.runtime import spawn
from hlatctl.run import child
from hlatctl.run.errors import ERROR_FILE_ENV, LaunchError, load_error
from hlatctl.units import one_line


class Conversation:
    """The lines of a running process.

    Args:
        process: with pipes as stdin and stdout.
        module: its name, for errors.
        folder: has its error and its stderr.
    """

    def __init__(self, process: subprocess.Popen[str], module: str, folder: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._module, self._folder = process, module, folder
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout

    def say(self, **fields: Any) -> None:
        """Send a line. If the process has ended, :meth:`hear` says why."""
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
        """Whether the process has not ended."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Send SIGINT to the process."""
        self._process.send_signal(signal.SIGINT)


@contextmanager
def conversation(module: str, *argv: str, folder: Path, yields: bool) -> Iterator[Conversation]:
    """Start ``python -m module argv`` in a session of its own, and end it at the end of the block.

    Args:
        module: such as ``eval.generate``.
        argv: its arguments.
        folder: private; for its error and its stderr.
        yields: run it at low priority.
    """
    words = spawn.command(module, *argv)
    with (folder / "stderr").open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            spawn.yielding(words) if yields else words,
            env={**child.environment(), ERROR_FILE_ENV: os.fspath(folder / "error.json")},
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
