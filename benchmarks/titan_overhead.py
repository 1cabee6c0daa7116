"""What managing a training costs: a step with torchtitan under hlatctl, and with torchtitan started by itself.

Both run in the same two processes, in turns (``titan_loop``), once with steps of a small model, and once with as short
ones as torchtitan makes on a CPU: there the time that managing adds is not lost in the noise of long steps. Checkpoints
are left out: ``checkpoint_stall`` measures them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.titan_loop import alone, managed
from conf.compose import compose
from conf.load import dump, load
from hlatctl import node
from hlatctl.run import files
from hlatctl.run.files import JOB_FOLDER_ENV
from hlatctl.run.paths import RunPaths

_ROUNDS = int(os.environ.get("HLATCTL_BENCH_ROUNDS", "5"))
_WARM_UP = 5
_GOAL = 0.01
_OVERRIDES = [
    "backend=torchtitan",
    "checkpoint.every_steps=1000000",
    "cluster.processes_per_node=2",
    "eval.enabled=false",
]
_SIZES = {
    "short steps": [
        "model.hidden_size=64",
        "model.intermediate_size=128",
        "model.num_layers=1",
        "train.seq_len=128",
        "train.global_batch_size=2",
        "train.max_steps=150",
    ],
    "long steps": [
        "model.hidden_size=256",
        "model.intermediate_size=688",
        "train.seq_len=256",
        "train.global_batch_size=8",
        "train.max_steps=40",
    ],
}


def run() -> None:
    """Print the step times of both, and what managing adds."""
    for name, overrides in _SIZES.items():
        print(f"  {name}", flush=True)
        _compare([*_OVERRIDES, *overrides])


def _compare(overrides: list[str]) -> None:
    from trainer.data.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        config = compose([*overrides, f"runs_dir={folder}"])
        prepare(config, Path(folder) / "data")
        root = RunPaths(Path(folder) / "run")
        files.write_text(root.config, files.seal_lines(dump(config)))
        files.write_text(root.dataset, (Path(folder) / "data" / "dataset.json").read_text(encoding="utf-8"))
        job = Path(folder) / "job"
        job.mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        env = {**os.environ, **node.one_machine(job), JOB_FOLDER_ENV: os.fspath(job), "OMP_NUM_THREADS": "1"}
        subprocess.run([*torchrun, "-m", "benchmarks.titan_overhead", os.fspath(root.root)], env=env, check=True)


def _measure(root: Path) -> None:
    from trainer.torchtitan.process import Process

    config = load(RunPaths(root).config)
    process = Process(config)
    times_s: dict[str, list[float]] = {"alone": [], "managed": []}
    for number in range(_ROUNDS):
        order = ("alone", "managed") if number % 2 else ("managed", "alone")
        for kind in order:
            own = root.with_name(f"{kind}-{number}")
            if process.rank == 0:
                files.write_text(own / "config.yaml", RunPaths(root).config.read_text(encoding="utf-8"))
                files.write_text(own / "dataset.json", RunPaths(root).dataset.read_text(encoding="utf-8"))
            process.gather(None)
            train = managed if kind == "managed" else alone
            times_s[kind] += train(config, RunPaths(own), process).steps_s[_WARM_UP:]
    if process.rank == 0:
        medians_s = {kind: statistics.median(steps) for kind, steps in times_s.items()}
        for kind, median_s in medians_s.items():
            spread = statistics.quantiles(times_s[kind], n=4)
            print(
                f"  {kind:8s} {median_s * 1e3:.2f} ms a step (quartiles {spread[0] * 1e3:.2f}, {spread[2] * 1e3:.2f})"
            )
        more_s = medians_s["managed"] - medians_s["alone"]
        print(
            f"  managed takes {more_s * 1e3:+.2f} ms, {more_s / medians_s['alone']:+.2%} (goal <= {_GOAL:+.0%} of long "
            f"steps), {_ROUNDS} rounds of {config.total_steps} steps each, in turns"
        )
    process.close()


if __name__ == "__main__":
    _measure(Path(sys.argv[1]))
