"""Run by torchrun: train small runs in one group of processes, one after another; not a test by itself.

The argument is a JSON file: a list of {"run": folder, "attempt": number, "flex": true for FlexAttention}, in
order. The processes are reused, because importing PyTorch and creating its process group would take most of the time.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.load import load
from conf.schema import Config
from hlatctl.run.errors import run_main
from hlatctl.run.paths import RunPaths
from tests.trainer.flex_on_cpu import cpu_like_an_accelerator

if TYPE_CHECKING:
    from trainer.backends.base import Backend


def main() -> int:
    from trainer.backends.torch_native import TorchNative
    from trainer.parallel import layout

    layout.BUCKET_ENTRIES = 5_000  # several buckets of a small model
    backend = None
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run = RunPaths(Path(job["run"]))
        config = load(run.config)
        assert config.world_size == int(os.environ.get("WORLD_SIZE", "1"))
        with cpu_like_an_accelerator() if job.get("flex") else nullcontext():
            backend = TorchNative(config)
            _train(config, run, backend, job)
    if backend is not None:
        backend.close()
    return 0


def _train(config: Config, run: RunPaths, backend: Backend, job: dict[str, Any]) -> None:
    from trainer.data.loader import Loader
    from trainer.step import loop

    journal = loop.train_journal(run, backend, job["attempt"])
    training = loop.Training(config, run, backend, journal)
    readers = sum(backend.gather(isinstance(training.batches, Loader)))
    assert readers == config.data_parallel_size, "one process of each replica reads"
    assert training.model.uses_flex_attention == job.get("flex", False)
    assert training.run() == 0
    if journal:
        journal.close()


if __name__ == "__main__":
    sys.exit(run_main(main))
