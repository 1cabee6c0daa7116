"""Run by torchrun with folders of runs: print how often a step's micro-batches exchange weights and gradients."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conf.load import load
from hlatctl.run.paths import RunPaths
from trainer.backends.torch_native import TorchNative


class Exchanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of process groups by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[function._schema.name.removeprefix("c10d::")] += 1
        return function(*args, **(kwargs or {}))


def main() -> None:
    backend = None
    for folder in sys.argv[1:]:
        config = load(RunPaths(Path(folder)).config)
        backend = TorchNative(config)
        model = backend.build_model(document_end_id=None)
        optimizer = backend.optimizer(model)
        optimizer.zero_grad()
        share = config.train.global_batch_size // backend.data_parallel_size
        tokens = torch.randint(config.model.vocab_size, (share, config.train.seq_len))
        with Exchanges() as exchanges:
            backend.forward_backward(model, tokens, tokens)
        if backend.rank == 0:
            print("exchanges", json.dumps({"run": Path(folder).name, **exchanges.counts}))
    assert backend is not None
    backend.close()


if __name__ == "__main__":
    main()
