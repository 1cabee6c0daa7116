"""What managing a training costs: a step with torchtitan under hlatctl, and with torchtitan started by itself.

Both have the same configuration, model, loader and batches, in the same two processes, in turns. Alone, torchtitan logs
every step with its own processor of metrics and saves nothing. Under hlatctl the journal has every step, and the
processes agree on requests to stop. Checkpoints are left out: ``checkpoint_stall`` measures them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conf.compose import compose
from conf.load import dump, load
from conf.schema import Config
from hlatctl import node
from hlatctl.run import files
from hlatctl.run.files import JOB_FOLDER_ENV
from hlatctl.run.paths import RunPaths

_ROUNDS = int(os.environ.get("HLATCTL_BENCH_ROUNDS", "5"))
_STEPS, _WARM_UP = 40, 5
_GOAL = 0.01
_OVERRIDES = [
    "backend=torchtitan",
    "model.hidden_size=256",
    "model.intermediate_size=688",
    "train.seq_len=256",
    "train.global_batch_size=8",
    f"train.max_steps={_STEPS}",
    "checkpoint.every_steps=1000000",
    "cluster.processes_per_node=2",
    "eval.enabled=false",
]


def run() -> None:
    """Print the step times of both, and their ratio."""
    from trainer.data.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        config = compose([*_OVERRIDES, f"runs_dir={folder}"])
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
            steps = _managed(config, RunPaths(own), process) if kind == "managed" else _alone(config, own, process)
            times_s[kind] += steps[_WARM_UP:]
    if process.rank == 0:
        medians_s = {kind: statistics.median(steps) for kind, steps in times_s.items()}
        for kind, median_s in medians_s.items():
            spread = statistics.quantiles(times_s[kind], n=4)
            print(
                f"  {kind:8s} {median_s * 1e3:.2f} ms a step (quartiles {spread[0] * 1e3:.2f}, {spread[2] * 1e3:.2f})"
            )
        more = medians_s["managed"] / medians_s["alone"] - 1.0
        print(f"  managed takes {more:+.2%} (goal <= {_GOAL:+.0%}), {_ROUNDS} rounds of {_STEPS} steps each, in turns")
    process.close()


def _timed(engine: Any) -> list[float]:
    """Return the list that gets the seconds of each step, from one question whether to continue to the next."""
    steps_s: list[float] = []
    last: list[float] = []
    asked = engine.should_continue_training

    def ask() -> bool:
        now_s = time.perf_counter()
        if last:
            steps_s.append(now_s - last.pop())
        last.append(now_s)
        return bool(asked())

    engine.should_continue_training = ask
    return steps_s


def _managed(config: Config, run: RunPaths, process: Any) -> list[float]:
    from trainer.step.training import train_journal
    from trainer.torchtitan.training import Training

    journal = train_journal(run, process, 1)
    training = Training(config, run, process, journal, attempt=1)
    steps_s = _timed(training.engine)
    training.checkpoints.save = lambda *_, **__: None  # type: ignore[method-assign] # of the last step
    training.run()
    if journal:
        journal.close()
    return steps_s


def _alone(config: Config, folder: Path, process: Any) -> list[float]:
    from torchtitan.trainer import Trainer

    from trainer.step.inputs import open_batches, read_dataset
    from trainer.torchtitan import torch_2_13
    from trainer.torchtitan.configuration import trainer_config
    from trainer.torchtitan.data import Loader, NoTokenizer
    from trainer.torchtitan.training import Rates

    run = RunPaths(folder)

    class Batches:
        document_end_id = None

        def __init__(self) -> None:
            self.next_batch = open_batches(config, run, read_dataset(run, process), process, None)[0].next

    class Alone(Trainer):
        def init_distributed(self) -> Any:
            return process.dims

    titan = trainer_config(config)
    titan.tokenizer, titan.dataloader = NoTokenizer.Config(), Loader.Config(_training=Batches())  # type: ignore[arg-type]
    titan.lr_scheduler = Rates.Config(_of=config)
    engine = Alone(titan)
    if engine.parallel_dims.pp_enabled:
        torch_2_13.take_micro_batches(engine.pp_schedule)
    steps_s = _timed(engine)
    engine.train()
    engine.close()
    return steps_s


if __name__ == "__main__":
    _measure(Path(sys.argv[1]))
