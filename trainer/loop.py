"""The training loop, to be read from top to bottom. It knows no device, no storage format and no launcher."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import DataError, TrainingError
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.paths import RunPaths
from trainer import model as llama
from trainer.backends.base import Backend
from trainer.checkpoint import Checkpointer, Restored, rng_state, set_rng_state
from trainer.data.loader import Loader
from trainer.monitor import SpikeMonitor
from trainer.optim import clip_scale
from trainer.schedule import learning_rate

#: Exit code of a process that was asked to stop and has written a checkpoint.
EXIT_STOPPED = 75
#: What is summed over processes with the gradients: the loss, and whether somebody asked to stop.
_LOSS, _STOP = 0, 1


def train(config: Config, run: RunPaths, backend: Backend, journal: JournalWriter | None) -> int:
    """Train from the newest valid checkpoint, or the initial model, to the last step or a request to stop.

    Returns:
        0 when the last step is done, 75 when stopped by SIGTERM.

    Raises:
        TrainingError: the loss or the gradients are not finite.
        HlatctlError: data, checkpoint or storage can't be used.
    """
    stop = StopRequest()
    model = llama.build(config.model, seq_len=config.train.seq_len, seed=config.seed)
    backend.parallelize(model)
    optimizer = backend.optimizer(model, config.optimizer, extra=2)
    loss_of = backend.loss_function(model)

    checkpointer = Checkpointer(config, run, backend, journal)
    restored = checkpointer.restore(optimizer.tensors())
    step = restored.step if restored else 0
    spikes = SpikeMonitor(restored.shared["recent_grad_norms"] if restored else None)
    if restored:
        optimizer.step_count = restored.shared["optimizer_steps"]
        set_rng_state(restored.ranks[backend.rank % len(restored.ranks)]["rng"])
    loader = _loader(config, run, backend, restored)

    total_steps, tokens_per_step = config.total_steps, config.tokens_per_step
    _note(
        journal, "train_started", resumed_from_step=step, tokens=step * tokens_per_step, world=backend.world_size,
        device=str(backend.device), parameters=llama.count_parameters(config.model),
        peak_flops_per_s=backend.peak_flops_per_s(),
    )  # fmt: skip

    first_step = step + 1
    while step < total_steps:
        step += 1
        started = time.perf_counter()
        loader.wait_s = 0.0
        optimizer.zero_grad()

        # Each process adds its share of the mean, so that the sum over processes is the whole batch's mean.
        share = 1.0 / (config.grad_accum_steps * backend.data_parallel_size)
        batch = (tokens.to(backend.device, non_blocking=True) for tokens in loader.next())
        for inputs, targets in zip(*(torch.split(tokens, config.micro_batch_size) for tokens in batch), strict=True):
            loss = loss_of(inputs, targets) * share
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.extra[_LOSS] += loss.detach()
        optimizer.extra[_STOP] = float(stop.requested)
        backend.reduce_sum(optimizer.reduced)

        mean_loss, stops, grad_norm = (*optimizer.extra.tolist(), optimizer.grad_norm().item())
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            raise _not_finite(step, mean_loss, grad_norm)
        lr = learning_rate(step, config.optimizer, total_steps=total_steps)
        optimizer.step(lr=lr, grad_scale=clip_scale(grad_norm, config.optimizer.max_grad_norm))
        backend.step_boundary()
        param_norm = optimizer.param_norm().item()

        step_s = time.perf_counter() - started
        _note(
            journal, "step", step=step, tokens=step * tokens_per_step, loss=mean_loss, grad_norm=grad_norm,
            param_norm=param_norm, lr=lr, step_s=step_s, data_wait_s=loader.wait_s,
            tokens_per_s=tokens_per_step / step_s,
        )  # fmt: skip
        mean = spikes.observe(grad_norm)
        if mean is not None:
            _note(journal, "gradient_spike", step=step, grad_norm=grad_norm, mean=mean)
        if step == first_step and backend.compiles:
            _note_compile_cache(journal, backend, step_s)

        reason = _why_checkpoint(config, step, stopping=stops > 0)
        if reason:
            checkpointer.save(
                optimizer.tensors(), step=step, tokens=step * tokens_per_step, reason=reason,
                shared={"optimizer_steps": optimizer.step_count, "recent_grad_norms": spikes.recent},
                own={"loader": loader.state, "rng": rng_state()},
            )  # fmt: skip
        if reason == "stop":
            break

    loader.close()
    finished = step >= total_steps
    outcome = "finished" if finished else "stop"
    _note(journal, "train_stopped", durable=True, step=step, tokens=step * tokens_per_step, reason=outcome)
    return 0 if finished else EXIT_STOPPED


def compile_only(config: Config, backend: Backend) -> None:
    """Run forward and backward on random tokens at the real shapes, so that every graph is compiled and cached."""
    model = llama.build(config.model, seq_len=config.train.seq_len, seed=config.seed)
    backend.parallelize(model)
    # Gradients accumulate into the flat buffer here as in training.
    optimizer = backend.optimizer(model, config.optimizer, extra=2)
    loss_of = backend.loss_function(model)
    shape = (config.micro_batch_size, config.train.seq_len)
    tokens = torch.randint(config.model.vocab_size, shape, device=backend.device)
    optimizer.zero_grad()
    loss_of(tokens, tokens).backward()  # type: ignore[no-untyped-call]
    backend.step_boundary()


def train_journal(run: RunPaths, backend: Backend, attempt: int) -> JournalWriter | None:
    """Rank 0's journal; the other ranks write none."""
    return JournalWriter(run, train_writer(0), attempt) if backend.rank == 0 else None


class StopRequest:
    """Set by SIGTERM; the step that runs is finished, and all processes stop after the same one."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def _loader(config: Config, run: RunPaths, backend: Backend, restored: Restored | None) -> Loader:
    try:
        dataset = files.read_json(Path(run.dataset))
    except (OSError, ValueError) as error:
        raise DataError(f"{run.dataset}: not readable ({error})", hint="`python -m trainer.data.prepare`") from None
    state = [row for rank in restored.ranks for row in rank["loader"]] if restored else None
    return Loader(
        dataset, global_batch_size=config.train.global_batch_size, seq_len=config.train.seq_len, seed=config.seed,
        rank=backend.data_parallel_rank, size=backend.data_parallel_size,
        prefetch_batches=config.data.prefetch_batches, state=state,
    )  # fmt: skip


def _why_checkpoint(config: Config, step: int, *, stopping: bool) -> str | None:
    if step == config.total_steps:
        return "final"
    if stopping:
        return "stop"
    if step in config.milestones:
        return "milestone"
    return None if step % config.checkpoint.every_steps else "interval"


def _note(journal: JournalWriter | None, kind: str, *, durable: bool = False, **fields: Any) -> None:
    if journal:
        journal.append(kind, durable=durable, **fields)


def _note_compile_cache(journal: JournalWriter | None, backend: Backend, wall_s: float) -> None:
    counts = backend.gather(backend.compile_counters())
    hits, misses = (sum(count[key] for count in counts) for key in ("hits", "misses"))
    _note(journal, "compile_cache", hits=hits, misses=misses, wall_s=wall_s)


def _not_finite(step: int, loss: float, grad_norm: float) -> TrainingError:
    return TrainingError(
        f"step {step}: loss={loss}, grad_norm={grad_norm}: not finite; the parameters are not updated with it",
        hint="lower optimizer.lr, or look at the steps before it in the journal",
    )
