"""The one exception tree, its exit codes, and how an error crosses a process boundary.

Tree (exit code)::

    HlatctlError (1)
    +-- ConfigError (10)        an invalid value
    +-- DataError (11)          corpus, tokenizer or dataset unusable
    +-- RunExistsError (12)     the run id is taken
    +-- RunNotFoundError (13)   no run has that name, or more than one does
    +-- StorageError (14)       read-only, full or unreachable storage
    +-- PreflightError (15)     a worker is not fit to train
    +-- PortInUseError (16)     a server's address is taken
    +-- DependencyError (17)    a package or a system tool is missing
    +-- RunBusyError (18)       another process drives this run
    +-- LaunchError (19)        a job could not be started or was lost
    +-- TrainingError (20)      training stopped and the restart policy gave up
    +-- EvaluationError (21)    a checkpoint could not be evaluated
    +-- CheckpointError (22)    no valid checkpoint where one is needed
    +-- StoppedError (0)        stopped on request; the run can be resumed
    |   +-- CancelledError (23)     its job was cancelled from outside hlatctl
    |   +-- BudgetError (26)        its budget is used up
    |   +-- StoppedAtOnceError (130)  a second interrupt: stopped without a checkpoint
    +-- CompileError (24)       a graph can't be compiled, or is not in the cache
    +-- DamagedFileError (25)   a file is damaged

Exit code 2 is a usage error of the command line, 130 an interrupt before anything was running. An error's text names
the dotted field, its value and the rule; the hint is the command or edit that helps. Texts are for people: programs
decide by an error's type and its ``code``. Hints for system errors and for unknown names are here too. Standard library
only.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import pwd
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hlatctl.run import startup
from hlatctl.units import printable

#: The system's numbers for a disk or a quota without room.
FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM)
#: Failures of a file system that a person can fix.
OF_STORAGE = (*FULL, *_DENIED, errno.EROFS, errno.EIO, errno.EFBIG)


def hint_of(error: Exception) -> str:
    """Return a hint for a failure of a file system; empty for other errors.

    Exceptions of libraries in other languages have the system's text but not its number.
    """
    number = getattr(error, "errno", None) or next((n for n in OF_STORAGE if os.strerror(n) in str(error)), None)
    if number in _DENIED:
        return _of_owner(getattr(error, "filename", None))
    hints: dict[int | None, str] = {
        **dict.fromkeys(FULL, "free space (`df -h`) or quota, then try again"),
        errno.EROFS: "it is mounted read-only; mount it writable, or use another folder",
        errno.EIO: "repair the storage, then try again",
        errno.EFBIG: "`ulimit -f` limits the size of files here; `ulimit -f unlimited` in the shell removes the limit",
    }
    return hints.get(number, "")


def _of_owner(name: object) -> str:
    if not isinstance(name, str):
        return "check the permissions of the folder"
    place = Path(name)
    for folder in (place, *place.parents):
        with suppress(OSError):
            owner = folder.stat().st_uid
            break
    else:
        return f"check the permissions of {place}"
    if owner == os.geteuid():
        return f"{folder} is yours; `chmod u+rwX {folder}` gives you access"
    return f"{folder} belongs to {_name(owner)}; ask its owner for access, or use a folder of your own"


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:  # from another machine
        return f"user {user}"


#: Codes of errors that the restart policy treats specially.
DISK_FULL, STORAGE_AWAY = "disk_full", "storage_away"
NONFINITE, NONFINITE_WEIGHTS = "nonfinite", "nonfinite_weights"

#: Environment variable: the file to which a launched process writes its error, for the process that launched it.
ERROR_FILE_ENV = "HLATCTL_ERROR_FILE"
#: Set if the launching process shares its stderr and prints the error itself.
ERROR_TOLD_ENV = "HLATCTL_ERROR_TOLD"


class HlatctlError(Exception):
    """An error that a person can act on.

    Args:
        message: what is wrong: the field, its value with unit, the rule, the other value.
        hint: the command or the edit that helps; shown on a separate line.
        code: reason for programs: a cause of ``flows.recovery.failure_causes``, or empty.
    """

    exit_code = 1
    #: The word before the error's message.
    word = "error"

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message, self.hint, self.code = message, hint, code

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(HlatctlError):
    """An invalid configuration value."""

    exit_code = 10


class DataError(HlatctlError):
    """A corpus, tokenizer or dataset that can't be used."""

    exit_code = 11


class RunExistsError(HlatctlError):
    """The run id is taken."""

    exit_code = 12


class RunNotFoundError(HlatctlError):
    """No run has the name, or more than one does."""

    exit_code = 13


class StorageError(HlatctlError):
    """Storage that is read-only, full or unreachable."""

    exit_code = 14


class PreflightError(HlatctlError):
    """A worker that is not fit to train."""

    exit_code = 15


class PortInUseError(HlatctlError):
    """A server's address is taken."""

    exit_code = 16


class DependencyError(HlatctlError):
    """A missing package or system tool."""

    exit_code = 17


class RunBusyError(HlatctlError):
    """Another process drives this run."""

    exit_code = 18


class LaunchError(HlatctlError):
    """A job that could not be started, or was lost."""

    exit_code = 19


class TrainingError(HlatctlError):
    """Training stopped and the restart policy gave up."""

    exit_code = 20


class EvaluationError(HlatctlError):
    """A checkpoint that could not be evaluated."""

    exit_code = 21


class CheckpointError(HlatctlError):
    """No valid checkpoint where one is needed."""

    exit_code = 22


class StoppedError(HlatctlError):
    """Stopped on request; the run can be resumed. Printed as ``stopped``, not as an error."""

    exit_code = 0
    word = "stopped"


class CancelledError(StoppedError):
    """The job was cancelled in the scheduler; the run can be resumed."""

    exit_code = 23


class BudgetError(StoppedError):
    """The run's budget is used up; with a larger one it can be resumed."""

    exit_code = 26


class StoppedAtOnceError(StoppedError):
    """Stopped without a checkpoint, because of a second interrupt; the run can be resumed."""

    exit_code = 130


class CompileError(HlatctlError):
    """A graph that can't be compiled, or that is not in the cache where it has to be."""

    exit_code = 24


class DamagedFileError(HlatctlError):
    """A file that is damaged."""

    exit_code = 25


#: Exit codes of a driver that a restart repeats, or that somebody asked for; 2 is a usage error.
NO_RESTART = (2, 10, 11, 13, 15, 17, 20, 21, 22, 23, 24, 25, 26, 130)


def code_of(error: BaseException) -> str:
    """Return the code of a foreign exception: ``disk_full`` or empty.

    Exceptions of libraries in other languages have the system's text but not its number.
    """
    is_full = getattr(error, "errno", None) in FULL or any(os.strerror(number) in str(error) for number in FULL)
    return DISK_FULL if is_full else ""


def cannot_write(place: object, error: OSError, *, hint: str = "") -> StorageError:
    """Return the error of a place that can't be written. Without a hint, it gets one for its cause."""
    text = f"{place}: can't be written ({error.strerror or error})"
    return StorageError(text, hint=hint or hint_of(error) or _way_to_write(str(place), error), code=code_of(error))


def of_system(error: Exception) -> StorageError | None:
    """Return the error of a file system that is full, read-only, broken or not this user's. None for other errors.

    A working directory that was removed, or can't be read, is one of them.
    """
    if not isinstance(error, OSError):
        return None
    if error.filename is None and (reason := _no_working_directory()):
        return StorageError(f"working directory: can't be used ({reason})", hint="`cd` to a folder that exists")
    if error.errno not in OF_STORAGE or error.filename is None:
        return None
    text = f"{error.filename}: can't be used ({error.strerror or error})"
    return StorageError(text, hint=hint_of(error), code=code_of(error))


def _no_working_directory() -> str:
    try:
        os.getcwd()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _way_to_write(place: str, error: OSError) -> str:
    path = place.rpartition("=")[2]
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        return f"a file is where a folder must be, or the reverse: move it (`ls -ld {path}`), or name another place"
    if error.errno == errno.ENOENT:
        return f"create the folder that {path} is to be in, or name another place"
    return "repair the storage, or name another place, then try again"


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn an ``OSError`` of a file system that is full, read-only or broken into a StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno not in OF_STORAGE:
            raise
        raise cannot_write(error.filename or "a file", error) from None


def error_types() -> dict[str, type[HlatctlError]]:
    """Return all error classes by name."""
    direct, stopped = HlatctlError.__subclasses__(), StoppedError.__subclasses__()
    types: list[type[HlatctlError]] = [HlatctlError, *direct, *stopped]
    return {error_type.__name__: error_type for error_type in types}


def run_main(main: Callable[[], int]) -> int:
    """Run a process's main function and return its exit code. Print an ``HlatctlError`` on stderr.

    The error is also written as JSON to the file that ``HLATCTL_ERROR_FILE`` names. The launching process reads it with
    :func:`load_error`.
    """
    startup.begin()
    try:
        return main()
    except HlatctlError as error:
        return tell(error)


def tell(error: HlatctlError) -> int:
    """Print a process's error and leave it for the launching process, as :func:`run_main`; return the exit code."""
    if not os.environ.get(ERROR_TOLD_ENV):
        print(f"{error.word}: {printable(str(error))}", file=sys.stderr)
    leave(error, os.environ.get(ERROR_FILE_ENV))
    return error.exit_code


def leave(error: HlatctlError, path: str | None) -> None:
    """Write an error to the file that the launching process reads, if it named one."""
    if path:
        with suppress(OSError):  # a full disk; the exit code still says it
            dump_error(error, Path(path))


def to_record(error: HlatctlError) -> dict[str, str]:
    """Return an error as JSON values, for :func:`from_record`."""
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint, "code": error.code}


def from_record(record: dict[str, Any]) -> HlatctlError:
    """Return the error of a record.

    Raises:
        KeyError, TypeError: it isn't a record of an error.
    """
    make = error_types()[record["type"]]
    return make(str(record["message"]), hint=str(record["hint"]), code=str(record["code"]))


def dump_error(error: HlatctlError, path: Path) -> None:
    """Write an error as JSON, for :func:`load_error`."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    partial.write_text(json.dumps(to_record(error)), encoding="utf-8")
    partial.replace(path)


def load_error(path: Path) -> HlatctlError | None:
    """Return the error that a launched process wrote. None if it wrote none, or it can't be read."""
    try:
        return from_record(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or the name of its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(name: str, known: Sequence[str], similarity: float = 0.5) -> str | None:
    """Return the most similar of the known names, or None if none has at least this similarity (0 to 1)."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=similarity)), None)


def suggest(name: str, known: Sequence[str], *, prefix: str = "", otherwise: str = "") -> str:
    """Return a hint such as ``did you mean cluster=local? known: local, simulated``.

    Args:
        name: the unknown name.
        known: names that exist.
        prefix: text before the nearest name in the hint, such as ``cluster=``.
        otherwise: hint if no name is similar; if given, the known names are not listed.
    """
    near = nearest(name, known)
    question = f"did you mean {prefix}{near}?" if near else ""
    return question or otherwise if otherwise else f"{question} known: {', '.join(known) or 'none'}".lstrip()


def install(extra: str) -> str:
    """Return how to install an extra from where hlatctl itself was installed: a clone or a wheel.

    Installers note that place (PEP 610, ``direct_url.json``). Without a note it was a bundle: no package index has
    hlatctl, so its name alone must not be installed.
    """
    from importlib import metadata
    from shlex import quote
    from urllib.parse import unquote, urlsplit

    try:
        # A clone's own metadata, which hides that of the installation in a process that starts there, has no note.
        notes = (each.read_text("direct_url.json") for each in metadata.distributions(name="hlatctl"))
        noted = json.loads(next(filter(None, notes), "{}"))
        url = str(noted.get("url", ""))
        editable = "-e " if noted.get("dir_info", {}).get("editable") else ""
        source = noted.get("vcs_info", {}).get("vcs")
    except (OSError, ValueError, AttributeError):
        url, editable, source = "", "", None
    if url.startswith("file:") and not source:
        return f"pip install {editable}{quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    if not url:
        return f"`pip install '.[{extra}]'` in a clone of hlatctl, or `make bundle EXTRAS={extra}` there"
    origin = f"{source}+{url}" if source else url
    return f"pip install {quote(f'hlatctl[{extra}] @ {origin}')}"


def unset(key: str) -> str:
    """Return a hint for a key that should not be set: ``~KEY`` is an error where only the override sets it."""
    return f"leave it out, or use ~{key} if a file sets it"
