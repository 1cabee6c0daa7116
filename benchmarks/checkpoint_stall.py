"""Time that training waits for a checkpoint that is written during training, or while training waits.

Saves of the two kinds alternate in one process, between real steps of a real model, under the same conditions.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from conf.compose import compose
from conf.schema import Config
from conf.sizes import checkpoint_bytes
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths

_SAVES = 5
_GOAL = 0.10
#: Weights and moments of about 200 MB: as with larger models, writing takes longer than starting to write.
_OVERRIDES = [
    "model.hidden_size=256",
    "model.intermediate_size=688",
    "model.num_layers=8",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.vocab_size=16000",
    "tokenizer.train_vocab_size=8192",
    "train.global_batch_size=4",
    "cluster.processes_per_node=1",
    "backend.compile=false",
    "eval.enabled=false",
]


def run() -> None:
    """Print the stall of each kind, their ratio, and the share of a step."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        config = compose([*_OVERRIDES, f"runs_dir={folder}"])
        stalls_s, steps_s = measure(config, Path(folder), saves=_SAVES)
    medians_s = {mode: statistics.median(seconds) for mode, seconds in stalls_s.items()}
    step_s = statistics.median(steps_s)
    print(f"{checkpoint_bytes(config) / 1e6:.0f} MB of weights and moments, {_SAVES} saves each, a step {step_s:.2f} s")
    for mode, median_s in medians_s.items():
        spread = f"{min(stalls_s[mode]):.4f} to {max(stalls_s[mode]):.4f}"
        print(f"  {mode:5s} {median_s:.4f} s a save ({spread}), {median_s / step_s:.1%} of a step")
    print(f"  ratio {medians_s['async'] / medians_s['sync']:.1%} (goal <= {_GOAL:.0%})")


def measure(config: Config, folder: Path, *, saves: int) -> tuple[dict[str, list[float]], list[float]]:
    """Return the seconds of each save, by kind, and of each step. The first save of a kind also allocates its copies.

    Args:
        folder: is removed afterwards.
    """
    import torch

    from trainer.backends.torch_native import TorchNative
    from trainer.checkpoint.manager import CheckpointManager, rng_state

    backend = TorchNative(config)
    model = backend.build_model(document_end_id=None)
    optimizer = backend.optimizer(model)
    tokens = torch.randint(config.model.vocab_size, (config.micro_batch_size, config.train.seq_len))
    stalls_s: dict[str, list[float]] = {"sync": [], "async": []}
    steps_s = []
    managers = {}
    modes: tuple[Literal["sync", "async"], ...] = ("sync", "async")
    for mode in modes:
        run = RunPaths(folder / mode)
        own = replace(config, checkpoint=replace(config.checkpoint, mode=mode, keep=1))
        managers[mode] = CheckpointManager(own, run, backend, JournalWriter(run, "train-rank00000"))
        managers[mode].restore(optimizer.tensors(), managers[mode].choose())
    device = torch.get_device_module(backend.device)
    for step in range(1, saves + 1):
        for mode, checkpoints in managers.items():
            started = time.perf_counter()
            optimizer.zero_grad()
            backend.forward_backward(model, tokens, tokens)
            optimizer.step(lr=1e-4, number=step)
            device.synchronize()  # the save is timed, not the step
            steps_s.append(time.perf_counter() - started)
            started = time.perf_counter()
            state = {"loader": [], "rng": rng_state()}
            checkpoints.save(optimizer.tensors(), step=step, tokens=step, reason="interval", shared={}, own=state)
            stalls_s[mode].append(time.perf_counter() - started)
            checkpoints.wait()
    backend.close()
    shutil.rmtree(folder, ignore_errors=True)
    return stalls_s, steps_s


if __name__ == "__main__":
    run()
