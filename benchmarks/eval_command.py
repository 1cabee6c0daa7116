"""Shared parts of the evaluation benchmarks: the data, the model, a run directory, and measured processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import DATA_FOLDER
from conf.compose import compose
from conf.load import dump
from hlatctl.run.paths import RunPaths

DATA = DATA_FOLDER / "eval"
#: A small pre-trained model.
MODEL = DATA_FOLDER / "weights" / "stories260K"
#: Further settings of our evaluation, such as ``eval.share_prefixes=true``.
FURTHER = os.environ.get("HLATCTL_BENCH_SETTINGS", "").split()
SEED, SEQ_LEN, BATCH_SIZE, TOKENS = 1234, 512, 16, 1000


@dataclass(frozen=True)
class Cost:
    wall_s: float
    cpu_s: float
    peak_mib: float


class Process:
    """A process without network that computes with one thread, because waiting threads count as work."""

    def __init__(self, command: list[str]) -> None:
        variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._command, self._start_s = command, time.perf_counter()
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=self._said
        )

    def finish(self) -> Cost:
        """Wait for its end and return its cost; RuntimeError if it failed."""
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._said.seek(0)
        said = self._said.read()
        self._said.close()
        if self._process.returncode:
            raise RuntimeError(f"{' '.join(self._command[:4])} failed:\n{said[-2000:]}")
        return Cost(time.perf_counter() - self._start_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def run_directory(root: Path, tasks: list[str], limit: int) -> RunPaths:
    """Return a new run directory whose configuration evaluates these tasks, without texts and held-out text."""
    settings = {
        "eval.data_dir": DATA,
        "eval.limit": limit,
        "eval.tasks": f"[{','.join(tasks)}]",
        "eval.prompts": "[]",
        "eval.batch_size": BATCH_SIZE,
        "seed": SEED,
        "train.seq_len": SEQ_LEN,
    }
    made = RunPaths(root / "run")
    made.root.mkdir(parents=True)
    config = compose(["eval=hlat", *(f"{name}={value}" for name, value in settings.items()), *FURTHER])
    made.config.write_text(dump(config), encoding="utf-8")
    return made


def evaluate(made: RunPaths, model: Path) -> Process:
    place = ["--run-dir", str(made.root), "--milestone-tokens", str(TOKENS), "--step", "1"]
    return Process([sys.executable, "-m", "eval", *place, "--model", str(model)])
