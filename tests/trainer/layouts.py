"""Run by torchrun: train small runs in one group of processes, one after another; not a test by itself.

The argument is a JSON file: a list of {"run": folder, "attempt": number}, in order. The processes are reused, because
importing PyTorch and creating its process group would take most of the time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from conf.load import load
from hlatctl.run.errors import run_main
from hlatctl.run.paths import RunPaths


def main() -> int:
    """Train every run of the list."""
    from trainer import loop, reduction
    from trainer.backends.torch_native import TorchNative
    from trainer.data.loader import Loader

    reduction.BUCKET_ENTRIES = 5_000  # several buckets of a small model
    backend = None
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run = RunPaths(Path(job["run"]))
        config = load(run.config)
        assert config.world_size == int(os.environ.get("WORLD_SIZE", "1"))
        backend = TorchNative(config)
        journal = loop.train_journal(run, backend, job["attempt"])
        training = loop.Training(config, run, backend, journal)
        readers = sum(backend.gather(isinstance(training.batches, Loader)))
        assert readers == config.data_parallel_size, "one process of each replica reads"
        assert training.run() == 0
        if journal:
            journal.close()
    if backend is not None:
        backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
