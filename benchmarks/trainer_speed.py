"""Tokens/s of the trainer against Hugging Face ``Trainer`` and a plain loop, with the same model, batch and threads."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import conf.load
from benchmarks.measured import SKIP_STEPS, Measured
from conf.compose import compose
from conf.schema import Config
from hlatctl.run.journal import read_events
from hlatctl.run.runs import list_runs

_STEPS = 30
#: The quickstart, and a larger model with HLAT's vocabulary.
_SHAPES = {
    "quickstart": [],
    "hidden 256, 6 layers, vocabulary 32,000": [
        "model.hidden_size=256",
        "model.intermediate_size=688",
        "model.num_layers=6",
        "model.num_heads=4",
        "model.num_kv_heads=4",
        "model.vocab_size=32000",
        "train.global_batch_size=8",
    ],
}
#: By the module that trains, its name and the ratio to reach.
_PEERS = {
    "benchmarks.hf_trainer": ("Hugging Face Trainer", 1.3),
    "benchmarks.plain_loop": ("plain nanoGPT-style loop", 1.1),
}


def run() -> None:
    """Print tokens/s of ours and of each peer at its best, and the ratios, for each shape."""
    for name, overrides in _SHAPES.items():
        print(f"{name}:")
        _compare(overrides)


def _compare(shape: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        overrides = [
            *shape,
            f"runs_dir={folder}",
            f"train.max_steps={_STEPS}",
            "eval.enabled=false",
            "tracking=none",
            f"checkpoint.every_steps={_STEPS}",
            f"cluster.worker_cache_dir={folder}/worker",
        ]
        config = compose(overrides)
        threads = config.world_size * config.cluster.threads_per_process
        ours = {
            "compiled": _ours(overrides, Path(folder)),
            "eager": _ours([*overrides, "backend.compile=false"], Path(folder)),
        }
        peers = {
            module: {processes: _peer(module, config, Path(folder), processes) for processes in sorted({1, threads})}
            for module in _PEERS
        }
    for how, rate in ours.items():
        print(f"  {f'hlatctl, {how}':45s} {rate:10,.0f} tokens/s")
    for module, (name, goal) in _PEERS.items():
        for processes, rate in peers[module].items():
            print(f"  {f'{name}, {processes} x {threads // processes} threads':45s} {rate:10,.0f} tokens/s")
        best = max(peers[module].values())
        ratios = ", ".join(f"{how} {rate / best:.2f}" for how, rate in ours.items())
        print(f"  ratio to its faster arrangement: {ratios} (goal {goal})")


def _ours(overrides: list[str], runs_dir: Path) -> float:
    subprocess.run(
        [sys.executable, "-m", "hlatctl", "train", *overrides],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = list_runs(runs_dir)[-1]
    config = conf.load.load(run.config)
    times: list[float] = [e["step_s"] for e in read_events(run) if e["kind"] == "step" and e["step"] > SKIP_STEPS]
    return config.tokens_per_step / statistics.median(times)


def _peer(module: str, config: Config, folder: Path, processes: int) -> float:
    config_file = folder / "config.yaml"
    config_file.write_text(conf.load.dump(config), encoding="utf-8")
    threads = config.world_size * config.cluster.threads_per_process // processes
    program = ["-m", module, "--config", os.fspath(config_file)]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    result = subprocess.run(
        [sys.executable, *launch, *program, "--steps", str(_STEPS), "--processes", str(processes)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=True,
    )
    record = next(line for line in result.stdout.splitlines() if line.startswith('{"steps_s"'))
    return Measured.of(json.loads(record)).tokens_per_s(config)
