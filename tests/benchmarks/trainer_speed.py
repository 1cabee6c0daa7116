"""Tokens/s of the trainer against Hugging Face ``Trainer``, with the same model, batch and threads."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import conf.load
from conf.compose import compose
from conf.schema import Config
from hlatctl.run.journal import read_events
from hlatctl.run.runs import list_runs

_STEPS = 40
_SKIP_STEPS = 5
_GOAL = 1.2


def run() -> None:
    """Print tokens/s of both, and the ratio."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        overrides = [
            f"runs_dir={folder}", f"train.max_steps={_STEPS}", "eval.enabled=false", "tracking=none",
            f"checkpoint.every_steps={_STEPS}", f"cluster.worker_cache_dir={folder}/worker",
        ]  # fmt: skip
        config = compose(overrides)
        rates = {
            "hlatctl, compiled": _ours(overrides, Path(folder)),
            "hlatctl, eager": _ours([*overrides, "backend.compile=false"], Path(folder)),
        }
        threads = config.world_size * config.cluster.threads_per_process
        peers = {
            f"Hugging Face Trainer, 1 process x {threads} threads": _hugging_face(config, Path(folder), 1),
            f"Hugging Face Trainer, {threads} processes x 1 thread": _hugging_face(config, Path(folder), threads),
        }
    for name, rate in {**rates, **peers}.items():
        print(f"{name:50s} {rate:10,.0f} tokens/s")
    best = max(peers.values())
    for name, rate in rates.items():
        print(f"ratio, {name} / the faster Hugging Face: {rate / best:.2f} (goal {_GOAL})")


def _ours(overrides: list[str], runs_dir: Path) -> float:
    subprocess.run(
        [sys.executable, "-m", "hlatctl", "train", *overrides],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    run = list_runs(runs_dir)[-1]
    config = conf.load.load(run.config)
    times: list[float] = [e["step_s"] for e in read_events(run) if e["kind"] == "step" and e["step"] > _SKIP_STEPS]
    return config.tokens_per_step / statistics.median(times)


def _hugging_face(config: Config, folder: Path, processes: int) -> float:
    config_file = folder / "config.yaml"
    config_file.write_text(conf.load.dump(config), encoding="utf-8")
    threads = config.world_size * config.cluster.threads_per_process // processes
    program = ["-m", "tests.benchmarks.hf_trainer", "--config", os.fspath(config_file)]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    result = subprocess.run(
        [sys.executable, *launch, *program, "--steps", str(_STEPS), "--processes", str(processes)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    record = next(line for line in result.stdout.splitlines() if line.startswith('{"step_s"'))
    return config.tokens_per_step / float(json.loads(record)["step_s"])
