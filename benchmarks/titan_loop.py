"""torchtitan's loop in processes that are already connected: under hlatctl, and by itself with equal settings.

Both have the same configuration, model, loader and batches. By itself, torchtitan logs every step with its own
processor of metrics and saves nothing. Under hlatctl the journal has every step, and the processes agree on requests to
stop. ``python -m benchmarks.titan_loop RUN [--alone]`` trains a prepared run in one process, and prints what it took as
JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import peers, titan_02
from conf.environment import check_torchtitan
from conf.load import load
from conf.schema import Config
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths


@dataclass
class Trained:
    """What a training took: seconds of each step, the parameters of this process's part, and the last logged loss."""

    steps_s: list[float]
    parameters: int
    loss: float


def managed(config: Config, run: RunPaths, process: Any) -> Trained:
    """Train with torchtitan under hlatctl, without checkpoints."""
    from trainer.step.training import train_journal
    from trainer.torchtitan.training import Training

    journal = train_journal(run, process, 1)
    training = Training(config, run, process, journal, attempt=1)
    steps_s = _timed(training.engine)
    training.checkpoints.save = lambda *_, **__: None  # type: ignore[method-assign] # of the last step
    training.run()
    if journal:
        journal.close()
    losses = [event["loss"] for event in read_events(run) if event["kind"] == "step"]
    return Trained(steps_s, _parameters(training.engine), losses[-1] if losses else math.nan)


def alone(config: Config, run: RunPaths, process: Any) -> Trained:
    """Train with torchtitan by itself."""
    from torchtitan.trainer import Trainer

    from trainer.step.inputs import open_batches, read_dataset
    from trainer.torchtitan import torch_2_13
    from trainer.torchtitan.configuration import trainer_config
    from trainer.torchtitan.data import Loader, NoTokenizer
    from trainer.torchtitan.training import Rates

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
    return _trained(engine)


def _trained(engine: Any) -> Trained:
    """Train with an engine that logs each step."""
    from torchtitan.components.metrics import MetricsProcessor

    steps_s, losses = _timed(engine), list[float]()
    log: Callable[..., None] = MetricsProcessor.log

    def note(step: int, loss: float, *others: Any, **more: Any) -> None:
        losses.append(loss)
        log(engine.metrics_processor, step, loss, *others, **more)

    engine.metrics_processor.log = note
    engine.train()
    engine.close()
    return Trained(steps_s, _parameters(engine), losses[-1] if losses else math.nan)


def _parameters(engine: Any) -> int:
    return sum(parameter.numel() for part in engine.model_parts for parameter in part.parameters())


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


def main() -> None:
    """Train, and print a line of JSON that ``measured.Measured`` reads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--alone", action="store_true")
    arguments = parser.parse_args()
    peers.add_packages()
    from trainer.step.training import memory_bytes

    run = RunPaths(arguments.run)
    config = load(run.config)
    if arguments.alone and version("torchtitan").startswith("0.2."):
        trained = _trained(titan_02.engine_of(config, run.root.parent / "tokens.npy"))
    else:
        check_torchtitan(config)
        from trainer.torchtitan.process import Process

        trained = (alone if arguments.alone else managed)(config, run, Process(config))
    printed = {**vars(trained), "peak_bytes": memory_bytes(torch.device(config.backend.device))[1]}
    dist.destroy_process_group()
    print(json.dumps(printed))


if __name__ == "__main__":
    main()
