"""The native training loop, from top to bottom. It is independent of device, storage format and launcher."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from conf.schema import Config
from conf.sizes import flops_per_token, parameters
from conf.training_rules import Outcome, SaveReason, learning_rate
from hlatctl.run import startup
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths
from trainer.backends.base import Backend, Optimizer, StepMetrics, Stopwatch
from trainer.checkpoint.manager import seed_rng
from trainer.model.decoder import Llama
from trainer.step import training
from trainer.step.corruption import Subject
from trainer.step.monitor import DRIFT_EVERY_STEPS, drift_alarm, skipped_alarm

#: Steps between collections of Python's garbage (torchtitan's default, its tools/utils.py).
_COLLECT_EVERY_STEPS = 50


@contextmanager
def _collecting_by_hand() -> Iterator[None]:
    """Keep Python from collecting garbage by itself.

    It would do so in another step on each process, while all others wait for that one. A full collection takes a
    second, because PyTorch has hundreds of thousands of objects; :meth:`Training._collect` leaves these out.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class _PendingStep:
    """A step whose metrics have not been read yet.

    Args:
        batch: number of its batch in the data's order, from 1; skipped batches count.
        started_s: start time on the performance clock, s.
        own_time: stopwatch of everything before the exchange of gradients; with FSDP, of a product, or None.
        metrics: returns its metrics; may wait for the device.
    """

    step: int
    batch: int
    started_s: float
    lr: float
    data_wait_s: float
    own_time: Stopwatch | None
    metrics: Callable[[], StepMetrics]


class Training(training.Training):
    """See :class:`trainer.step.training.Training`. The constructor restores the newest checkpoint."""

    def __init__(
        self,
        config: Config,
        run: RunPaths,
        backend: Backend,
        journal: JournalWriter | None,
        *,
        attempt: int = 0,
        max_checkpoint_step: int | None = None,
    ) -> None:
        super().__init__(config, run, backend, journal, attempt=attempt, max_checkpoint_step=max_checkpoint_step)
        config = self.config
        self.backend = backend
        drawn = self.chosen is None and not config.train.init_from
        self.model = backend.build_model(document_end_id=self.document_end_id, drawn=drawn)
        self.optimizer = backend.optimizer(self.model)
        self.measure(flops_per_token(config.model, config.train.seq_len))
        self.pending: deque[_PendingStep] = deque()
        self.last_finished_s = 0.0
        seed_rng(config.seed)
        restored = self.restore(self.optimizer.tensors())
        self.step = self.first_step = restored.step if restored else 0
        if restored:
            self.optimizer.loaded(restored.shared["optimizer_steps"])
        self.open_batches(restored)
        self.watch_for_corruption(lambda: subject_of(backend, self.model, self.optimizer))

    def run(self) -> int:
        """Train to the last step, or until SIGTERM, an amendment or the stage's end ends the attempt.

        Returns:
            The process's exit code, from ``conf.training_rules.EXIT_CODES``.

        Raises:
            TrainingError: the loss or the gradients are not finite, and ``train.on_nonfinite`` says to stop; or a
                process computes wrong numbers.
            StorageError: a checkpoint can't be written.
        """
        startup.imported()
        self.note_start(self.step, parameters(self.config.model).total, attention=self.backend.attention)
        with _collecting_by_hand():
            outcome = self._train()
        return self.end(self.step, outcome)

    def _train(self) -> Outcome | None:
        """Run the steps; return why training ends before the last one."""
        outcome: Outcome | None = None
        try:
            self.check_for_corruption(self.step)
            while self.step < self.config.total_steps and not outcome:
                self.step += 1
                self._start_step()
                self._collect()
                outcome = self._finish_steps(leave=self.backend.steps_ahead)
                if self.config.ends_stage(self.step):
                    outcome = outcome or "amend"
                is_checked, is_copied = self.is_checked(self.step), self.checkpoints.copies_after(self.step)
                if outcome or is_checked or is_copied or self._reason_to_save(outcome):
                    outcome = self._finish_steps(leave=0) or outcome  # never save a step that may not be finite
                if is_checked and not outcome:
                    self.check_for_corruption(self.step)
                if is_copied and not outcome:
                    tensors, updates = self.optimizer.tensors(), self.optimizer.step_count
                    self.copy_to_memory(tensors, self.step, optimizer_steps=updates)
                reason = self._reason_to_save(outcome)
                if reason:
                    self.save(self.optimizer.tensors(), self.step, reason, optimizer_steps=self.optimizer.step_count)
                self.profiling.step(self.step)
            self.checkpoints.wait()
            if not outcome:
                self.checkpoints.finish(lambda: self.stop.requested)
        finally:
            self.close()
        return outcome

    def _collect(self) -> None:
        """Collect garbage in the same step on each process, while the device works; not what the first steps left."""
        if self.step == self.first_step + 2:
            gc.freeze()
        elif self.step % _COLLECT_EVERY_STEPS == 0:
            gc.collect()

    def _start_step(self) -> None:
        """Issue one optimizer step. The device may still run the previous one when this returns."""
        started_s = time.perf_counter()
        own_time = self.time_product(self.step) if self.waits_within_steps else self.backend.stopwatch()
        self.batches.wait_s = 0.0
        self.optimizer.zero_grad()
        inputs, targets = self.batches.next()
        loss_share = self.backend.forward_backward(self.model, inputs, targets)
        if own_time and not self.waits_within_steps:
            own_time.stop()
        lr, signal = learning_rate(self.step, self.config), self.signal(self.step)
        limits = self.monitor.update_limits.limits if self.config.train.on_spike == "skip" else None
        metrics = self.backend.update(self.optimizer, loss_share, lr=lr, step=self.step, signal=signal, limits=limits)
        self.backend.step_boundary()
        batch, wait_s = self.batches.batch, self.batches.wait_s
        self.pending.append(_PendingStep(self.step, batch, started_s, lr, wait_s, own_time, metrics))

    def _finish_steps(self, *, leave: int) -> Outcome | None:
        """Read the metrics of all pending steps but the newest ``leave``; return why training ends, if it must."""
        outcome: Outcome | None = None
        while len(self.pending) > leave:
            pending = self.pending.popleft()
            outcome = self._finish_step(pending, pending.metrics()) or outcome
        return outcome

    def _finish_step(self, pending: _PendingStep, metrics: StepMetrics) -> Outcome | None:
        if pending.own_time:
            self.rank_times.add(pending.own_time.read_s())
        if metrics.has_news:
            self.take_orders(self.step)
        stopping: Outcome | None = "stop" if metrics.stops else "amend" if metrics.ends else None
        if not metrics.finite:
            batch, norm = pending.batch, metrics.grad_norm
            outcome = self.nonfinite(pending.step, [batch], metrics.loss, norm, weights=self._weights)
            if outcome:
                self.step = pending.step
                self.pending.clear()  # later steps used parameters that are not finite
            return outcome or stopping
        self.nonfinite_steps = 0
        now_s = time.perf_counter()
        step_s = now_s - max(pending.started_s, self.last_finished_s)
        self.last_finished_s = now_s
        self.note_step(
            pending.step,
            batch=pending.batch,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            param_norm=metrics.param_norm,
            **metrics.others,
            lr=pending.lr,
            data_wait_s=pending.data_wait_s,
            step_s=step_s,
        )
        self._watch(pending.step, metrics, step_s)
        self.checkpoints.healthy_step()
        return stopping

    def _weights(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.optimizer.tensors().values()

    def _reason_to_save(self, outcome: Outcome | None) -> SaveReason | None:
        if outcome == "rollback":
            return None
        return self.policy.reason_to_save(self.step, stopping=outcome in ("stop", "amend"))

    def _watch(self, step: int, metrics: StepMetrics, step_s: float) -> None:
        """Journal what the monitors report about the step, and after the first one the compile counters."""
        events = self.monitor.observe(step, metrics.loss, metrics.grad_norm)
        if metrics.skipped:
            events.append(skipped_alarm(step, metrics.loss, metrics.grad_norm))
        first = step == self.first_step + 1
        if step == self.first_step + 2:
            self.backend.expect_steps(step_s)
        if self.backend.world_size > 1 and (first or step % DRIFT_EVERY_STEPS == 0):
            events += drift_alarm(step, self.backend.drift(self.optimizer))
        events += self.compare_ranks(step)
        for event in events:
            self.note(event.kind, **event.fields)
        if first and self.backend.compiles and (mine := self.backend.compile_counters()):
            counts = self.backend.gather(mine)
            hits, misses = (sum(count[key] for count in counts) for key in ("hits", "misses"))
            self.note("compile_cache", hits=hits, misses=misses, wall_s=step_s)


def subject_of(backend: Backend, model: Llama, optimizer: Optimizer) -> Subject:
    """Return what checks for corruption compare."""
    return Subject(
        place=backend.place,
        replica=backend.data_parallel_rank,
        parts=[model],
        blocks=lambda: nullcontext(list(model.blocks())),
        tensors=lambda: optimizer.tensors().values(),
        replay=lambda inputs, targets: backend.replay(model, optimizer, inputs, targets),
    )
