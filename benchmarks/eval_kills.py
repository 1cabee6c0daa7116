"""Kill an evaluation at random moments (kill -9) and repeat it until it is done; its items must be the same bytes.

The task ranks choices (``HLATCTL_BENCH_TASK``, default hellaswag). An undisturbed evaluation comes first. Each try is a
copy of this process, because most of an evaluation of so few items is the import of its packages. Prints how many
batches each kill left in the file of answers.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks.eval_command import DATA, MODEL, TOKENS, run_directory
from hlatctl.run.paths import RunPaths

_TASK = os.environ.get("HLATCTL_BENCH_TASK", "hellaswag")
_LIMIT = int(os.environ.get("HLATCTL_BENCH_LIMIT", "300"))
_KILLS = int(os.environ.get("HLATCTL_BENCH_KILLS", "12"))
_POLL_S = 0.002


def run() -> None:
    """Print what each kill left, and whether the items are the same bytes."""
    if not (DATA / _TASK).is_dir():
        print("skipped: the datasets are not here")
        return
    moments = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        _import_all(Path(folder))
        whole, killed = (run_directory(Path(folder) / name, [_TASK], _LIMIT) for name in ("whole", "killed"))
        _finish(_start(whole))
        left = 0
        for _ in range(_KILLS):
            left = _kill(killed, batches=left + moments.randint(1, 5), later_s=moments.uniform(0, 0.1))
        _finish(_start(killed))
        name = f"items-{_TASK}.parquet"
        if _bytes(whole, name) != _bytes(killed, name):
            raise SystemExit(f"error: {name} has not the bytes of an undisturbed evaluation")
        print(f"{_KILLS} kills of {_TASK}, {_LIMIT} items: {name} has the bytes of an undisturbed evaluation")


def _import_all(scratch: Path) -> None:
    """Import what an evaluation imports, with one thread: only one thread lives on in a copy of a process."""
    from eval.serving import model

    model.settle_environment(scratch, offline=True)
    import lm_eval.evaluator  # noqa: F401
    import torch

    import eval.serving.hugging_face  # noqa: F401

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)


def _start(made: RunPaths) -> int:
    from eval import milestone
    from eval.task_runner import Subject

    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        milestone.evaluate(Subject(run=made, milestone_tokens=TOKENS, step=1, model_folder=MODEL))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _finish(pid: int) -> None:
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("error: an evaluation failed")


def _kill(made: RunPaths, *, batches: int, later_s: float) -> int:
    """Evaluate until the file has this many batches, and for the given time; kill, and return how many it has."""
    answers = made.eval(TOKENS) / "answers" / f"{_TASK}.jsonl"
    before = _batches(answers)
    pid = _start(made)
    while _is_alive(pid) and _batches(answers) < batches:
        time.sleep(_POLL_S)
    time.sleep(later_s)
    if not _is_alive(pid):
        _finish(pid)
        raise SystemExit("error: the evaluation ended before its kill\nhint: raise HLATCTL_BENCH_LIMIT")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    kept = _batches(answers)
    print(
        f"killed with {kept} batches, {before} of them by earlier tries; {answers.stat().st_size:,} bytes", flush=True
    )
    return kept


def _is_alive(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _batches(answers: Path) -> int:
    return answers.read_bytes().count(b"\n") if answers.is_file() else 0


def _bytes(made: RunPaths, name: str) -> bytes:
    return (made.eval(TOKENS) / name).read_bytes()
