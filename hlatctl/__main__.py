"""``hlatctl`` and ``python -m hlatctl``: prepare the standard streams, check the packages, then run the command line.

A stream may be closed, full, or have lost its reader. Failing to write results is an error, because the reader would
take partial output for all of it. Messages that can't be written are dropped: a run must not end because nobody reads
its messages.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from pathlib import Path
from typing import Any

#: Packages of this project whose names other distributions can also use.
_PACKAGES = ("conf", "flows", "trainer", "eval")
_OWNER = b'OWNER = "hlatctl"'
_DEPENDENCY_ERROR, _INTERRUPTED = 17, 130
#: A shell's exit code of a program that writes to a reader that has ended (`hlatctl runs | head -1`): 128 + SIGPIPE.
READER_ENDED = 141


def main() -> int:
    """Run the command line and return its exit code."""
    prepare_streams()
    problem = _foreign_package()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return _DEPENDENCY_ERROR
    try:
        from hlatctl.run import startup

        startup.begin()
        from hlatctl.cli.main import main as run
    except KeyboardInterrupt:  # the imports take most of a second
        return _INTERRUPTED
    return run()


def _foreign_package() -> str:
    """Return an error if another package shadows one of this project's; empty if not. Imports none of them."""
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec else None
        if origin and _OWNER in Path(origin).read_bytes():
            continue
        where = f"Python finds {origin}, which is not hlatctl's" if origin else "Python does not find it"
        alone = f"in a virtual environment of its own, with no other package named {name} on PYTHONPATH"
        return f"package {name}: {where}\nhint: install hlatctl {alone}"
    return ""


def prepare_streams() -> None:
    """Make the standard streams of this process usable, whatever they are connected to.

    Closed streams are connected to /dev/null first. Otherwise the next opened file would get such a stream's number,
    and every child process that prints would write to it.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):  # writing to stdout fails as if closed
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)  # a new file takes the lowest free number, this one
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _text(_Results(1, "w", closefd=False), sys.stdout, errors="strict")
    sys.stderr = _text(_Messages(2, "w", closefd=False), sys.stderr, errors="backslashreplace")


def _text(raw: io.FileIO, before: Any, *, errors: str) -> io.TextIOWrapper:
    """Return a stream like Python's standard streams, which are None if they were closed."""
    encoding, errors = (before.encoding, before.errors) if before else ("utf-8", errors)
    is_message = raw.fileno() == 2
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=is_message or raw.isatty()
    )


class _Results(io.FileIO):
    """Stdout. After its first error it drops everything, so that the last flush doesn't fail again."""

    _failed = False

    def write(self, data: Any) -> int:
        if self._failed:
            return len(data)
        try:
            return super().write(data)
        except BrokenPipeError:
            self._failed = True
            raise SystemExit(READER_ENDED) from None
        except OSError as error:
            from hlatctl.run.errors import cannot_write, hint_of

            self._failed = True
            hint = hint_of(error) or "redirect stdout to a file, a pipe or a terminal"
            raise cannot_write("stdout", error, hint=hint) from None


class _Messages(io.FileIO):
    """Stderr."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


if __name__ == "__main__":
    sys.exit(main())
