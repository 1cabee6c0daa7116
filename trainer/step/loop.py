"""The training loop, from top to bottom, with the step lines that rank 0 prints and each step's speed and memory.

It is independent of device, storage format and launcher.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from conf.amendments import with_changes
from conf.data_changes import DATA_CHANGED, SKIP_STEPS, TRAIN_STARTED
from conf.devices import DEVICES
from conf.schema import Config
from conf.sizes import mfu, parameters
from conf.training_rules import EXIT_CODES, CheckpointPolicy, Outcome, SaveReason, learning_rate
from hlatctl.run import files, startup
from hlatctl.run.errors import NONFINITE, TrainingError
from hlatctl.run.fence import Fence
from hlatctl.run.files import DAMAGED
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.paths import ProfileOrder, RunPaths
from hlatctl.run.processes import node_name
from hlatctl.run.step_metrics import texts
from trainer.backends.base import ENDS, NEWS, STOP, Backend, StepMetrics, Stopwatch
from trainer.checkpoint.manager import CheckpointManager, Restored, rng_state, seed_rng, set_rng_state
from trainer.checkpoint.remote import Chosen
from trainer.process import StopRequest
from trainer.step.inputs import open_batches, read_dataset
from trainer.step.monitor import DRIFT_EVERY_STEPS, Monitor, MonitorEvent, RankTimes, drift_alarm
from trainer.step.profiling import Profiling

#: The same as torchtitan's ``log_freq``.
EVERY_STEPS = 10


class StepLine:
    """Makes the lines that rank 0 prints, for people who read a run's logs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._last_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a step gets a line: the first of the attempt, and every tenth."""
        due = self._last_step is None or step % EVERY_STEPS == 0 or step == self._config.total_steps
        self._last_step = step if due else self._last_step
        return due

    def text(self, event: dict[str, Any]) -> str:
        """Return the line of a step from the fields of its event. Unknown values are omitted."""
        parts = [
            f"step {event['step']}/{self._config.total_steps}",
            f"tokens {event['tokens']:,}",
            *texts(event),
            f"data wait {event['data_wait_s'] / event['step_s']:.0%}",
        ]
        return "  ".join(parts)


#: Linux, proc(5): the second number counts the resident pages.
_OWN_PAGES = Path("/proc/self/statm")


class StepFigures:
    """Computes the figures of a process's steps: speed, share of the device's peak, and memory.

    Without the peak of one device, MFU is unknown.
    """

    def __init__(self, config: Config, device: torch.device, peak_flops_per_s: float | None) -> None:
        self._config, self._device, self._peak_flops_per_s = config, device, peak_flops_per_s

    def of(self, step_s: float) -> dict[str, float | int | None]:
        """Return the fields of a step event that follow from its duration, and this process's memory, without waiting.

        Costs about 35 us on a CPU.
        """
        tokens_per_s = self._config.tokens_per_step / step_s
        current, peak = memory_bytes(self._device)
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / self._config.world_size,
            "mfu": mfu(self._config, tokens_per_s, self._peak_flops_per_s),
            "memory_bytes": current,
            "peak_memory_bytes": peak,
        }


def memory_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Return this process's memory where the model is, current and peak; None if unknown.

    A device's own count is PyTorch's allocated memory. Reading it doesn't wait for the device.
    """
    facts = DEVICES.get(device.type)  # torch-xla's device has no row
    where = facts.memory if facts else "unknown"
    if where == "device":
        counts = torch.get_device_module(device).memory_stats(device)
        return counts.get("allocated_bytes.all.current"), counts.get("allocated_bytes.all.peak")
    return _host_memory_bytes() if where == "host" else (None, None)


def _host_memory_bytes() -> tuple[int | None, int]:
    current = None
    with suppress(OSError):
        current = int(_OWN_PAGES.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    return current, max(peak, current or 0)  # the kernel updates the peak later than the pages


#: Interval between reads of the file.
_LOOK_EVERY_S = 2.0
#: While the driver wants training to end, it touches the file more often than this. Without a driver, training
#: continues, because nothing would start the next attempt.
_FRESH_S = 120.0


class Orders:
    """The driver's orders to a running attempt: amendments of the run's configuration, and profiles.

    Only rank 0 reads the driver's file, a small one, at most once in two seconds. It notifies the others through the
    signal that each step's metrics carry, so that all begin or end with the same step.

    Args:
        attempt: number of the attempt.
        ahead: number of steps between the signal and its effect on every rank.
    """

    def __init__(self, run: RunPaths, attempt: int, *, ahead: int = 0) -> None:
        self._path, self._ahead = run.orders(attempt), ahead
        self._looked_s = self._changed_s = -_FRESH_S
        self._version: tuple[int, int] = (0, 0)
        self._order: dict[str, Any] = {}
        self._taken: set[int] = set()
        self._profiled = 0

    def signal(self, step: int) -> int:
        """Return what rank 0 adds to the signal of a step."""
        self._look()
        if not self._order:
            return 0
        end, is_fresh = self._order["end_after_step"], time.monotonic() - self._changed_s < _FRESH_S
        ends = end is not None and step + self._ahead >= end and is_fresh
        return ENDS * ends + NEWS * bool(set(self._order["numbers"]) - self._taken or self._new_profile())

    def take(self) -> tuple[list[int], dict[str, Any], dict[str, Any] | None]:
        """Return the numbers of the new amendments, the values of all amendments by key, and a profile if it is new."""
        new = sorted(set(self._order["numbers"]) - self._taken)
        self._taken.update(new)
        profile = self._new_profile()
        self._profiled = profile["number"] if profile else self._profiled
        return new, self._order["values"], profile

    def _new_profile(self) -> dict[str, Any] | None:
        profile: dict[str, Any] | None = self._order["profile"]
        return profile if profile and profile["number"] > self._profiled else None

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        try:
            status = os.stat(self._path)
            version = (status.st_mtime_ns, status.st_ino)
            if version != self._version:
                order = files.read_json(self._path)
                profile = order["profile"]
                self._order = {
                    **{name: order[name] for name in ("numbers", "values", "end_after_step")},
                    "profile": asdict(ProfileOrder.of(profile)) if profile else None,
                }
                self._version, self._changed_s = version, now_s
        except (OSError, *DAMAGED):  # it is written again, or not at all
            return


@dataclass(frozen=True)
class _PendingStep:
    """A step whose metrics have not been read yet.

    Args:
        batch: number of its batch in the data's order, from 1; skipped batches count.
        started_s: start time on the performance clock, s.
        own_time: stopwatch of everything before the exchange of gradients.
        metrics: returns its metrics; may wait for the device.
    """

    step: int
    batch: int
    started_s: float
    lr: float
    data_wait_s: float
    own_time: Stopwatch
    metrics: Callable[[], StepMetrics]


class Training:
    """One process's part of one training attempt. The constructor restores the newest checkpoint.

    Only rank 0 has a journal. Nothing is written after the end of the attempt. Checkpoints newer than
    ``max_checkpoint_step`` are ignored. Raises an HlatctlError if data, checkpoints or storage can't be used.
    """

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
        self.config, self.backend, self.journal = config, backend, journal
        self.policy = CheckpointPolicy(config)
        self.stop = StopRequest()
        self.orders = Orders(run, attempt, ahead=backend.steps_ahead) if attempt and backend.rank == 0 else None
        self.profiling = Profiling(run, attempt, backend, self._note)
        dataset = read_dataset(run, backend)
        end_id = int(dataset["tokenizer"]["eos_id"]) if config.data.mask_across_documents else None
        self.checkpoints = CheckpointManager(config, run, backend, journal, attempt=attempt)
        chosen = self.checkpoints.choose(max_checkpoint_step)
        drawn = chosen is None and not config.train.init_from
        self.model = backend.build_model(document_end_id=end_id, drawn=drawn)
        self.optimizer = backend.optimizer(self.model)
        self.step = self.first_step = 0
        self.monitor = Monitor()
        self.rank_times = RankTimes(config.recovery.straggler_factor, config.recovery.straggler_steps)
        self.hosts: list[str] = backend.gather(node_name())
        self.figures, self.line = StepFigures(config, backend.device, backend.peak_flops_per_s()), StepLine(config)
        self.nonfinite_steps = 0
        self.pending: deque[_PendingStep] = deque()
        self.last_finished_s = 0.0
        restored = self._restore(chosen)
        self.dataset_fingerprint = str(dataset["fingerprint"])
        self.batches, self.added_skips = open_batches(config, run, dataset, backend, restored)

    def _restore(self, chosen: Chosen) -> Restored | None:
        """Continue from the newest checkpoint, or otherwise read the weights of ``train.init_from``."""
        tensors = self.optimizer.tensors()
        seed_rng(self.config.seed)
        restored = self.checkpoints.restore(tensors, chosen)
        if restored:
            self.step = self.first_step = restored.step
            self.monitor = Monitor(restored.shared["monitor"])
            self.optimizer.loaded(restored.shared["optimizer_steps"])
            set_rng_state(restored.rng)
        elif self.config.train.init_from:
            self.checkpoints.begin_from(Path(self.config.train.init_from), tensors)
        return restored

    def run(self) -> int:
        """Train to the last step, or until SIGTERM or an amendment ends the attempt.

        Returns:
            The process's exit code, from ``conf.training_rules.EXIT_CODES``.

        Raises:
            TrainingError: the loss or the gradients are not finite, and ``train.on_nonfinite`` says to stop.
            StorageError: a checkpoint can't be written.
        """
        startup.imported()
        self._note_start()
        outcome: Outcome | None = None
        try:
            while self.step < self.config.total_steps and not outcome:
                self.step += 1
                self._start_step()
                outcome = self._finish_steps(leave=self.backend.steps_ahead)
                if outcome or self._reason_to_save(outcome):
                    outcome = self._finish_steps(leave=0) or outcome  # never save a step that may not be finite
                reason = self._reason_to_save(outcome)
                if reason:
                    self._save(reason)
                self.profiling.step(self.step)
            self.checkpoints.wait()
            if not outcome:
                self.checkpoints.finish(lambda: self.stop.requested)
        finally:
            self.checkpoints.close()
            self.batches.close()
            self.profiling.close()
        if outcome != "rollback" and self.step >= self.config.total_steps:
            outcome = "finished"
        assert outcome is not None
        self._note("train_stopped", durable=True, step=self.step, tokens=self._tokens(self.step), reason=outcome)
        return EXIT_CODES[outcome]

    def _start_step(self) -> None:
        """Issue one optimizer step. The device may still run the previous one when this returns."""
        started_s, own_time = time.perf_counter(), self.backend.stopwatch()
        self.batches.wait_s = 0.0
        self.optimizer.zero_grad()
        inputs, targets = self.batches.next()
        loss_share = self.backend.forward_backward(self.model, inputs, targets)
        own_time.stop()
        lr = learning_rate(self.step, self.config)
        signal = STOP * self.stop.requested + (self.orders.signal(self.step) if self.orders else 0)
        metrics = self.backend.update(self.optimizer, loss_share, lr=lr, step=self.step, signal=signal)
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
        self.rank_times.add(pending.own_time.read_s())
        if metrics.has_news:
            self._take_orders()
        stopping: Outcome | None = "stop" if metrics.stops else "amend" if metrics.ends else None
        if not metrics.finite:
            return self._nonfinite(pending, metrics) or stopping
        self.nonfinite_steps = 0
        now_s = time.perf_counter()
        step_s = now_s - max(pending.started_s, self.last_finished_s)
        self.last_finished_s = now_s
        if self.journal:
            self._note_step(pending, metrics, step_s)
        self._watch(pending.step, metrics, step_s)
        self.checkpoints.healthy_step()
        return stopping

    def _take_orders(self) -> None:
        """Carry out, on every rank, the orders that rank 0 has found: change values, or begin a profile."""
        numbers, values, profile = self.backend.from_rank0(self.orders.take() if self.orders else None)
        self.config = with_changes(self.config, values)
        self.policy = CheckpointPolicy(self.config)
        self.checkpoints.reconfigure(self.config)
        for number in numbers:
            self._note("amendment_applied", durable=True, number=number, step=self.step)
        self.profiling.begin(profile)

    def _note_step(self, pending: _PendingStep, metrics: StepMetrics, step_s: float) -> None:
        fields: dict[str, Any] = {
            "step": pending.step,
            "tokens": self._tokens(pending.step),
            "batch": pending.batch,
            "loss": metrics.loss,
            "grad_norm": metrics.grad_norm,
            "param_norm": metrics.param_norm,
            **metrics.others,
            "lr": pending.lr,
            "step_s": step_s,
            "data_wait_s": pending.data_wait_s,
            **self.figures.of(step_s),
        }
        self._note("step", **fields)
        if self.line.is_due(pending.step):
            with suppress(OSError):  # a full disk, which training survives
                print(self.line.text(fields), flush=True)

    def _nonfinite(self, pending: _PendingStep, metrics: StepMetrics) -> Outcome | None:
        action, numbers = self.config.train.on_nonfinite, f"loss={metrics.loss}, grad_norm={metrics.grad_norm}"
        self.nonfinite_steps += 1
        if action == "skip" and self.nonfinite_steps > self.config.train.max_nonfinite_steps:
            action = "stop"
        self._note(
            "nonfinite",
            durable=True,
            step=pending.step,
            tokens=self._tokens(pending.step),
            batch=pending.batch,
            loss=str(metrics.loss),
            grad_norm=str(metrics.grad_norm),
            action=action,
        )
        if action == "stop":
            raise TrainingError(
                f"step {pending.step}: {numbers}: not finite; no checkpoint has this step",
                hint="lower optimizer.lr, or inspect the previous steps in the journal",
                code=NONFINITE,
            )
        if action == "skip":
            return None
        self._note(DATA_CHANGED, durable=True, key=SKIP_STEPS, value=[pending.batch], by="trainer", why=numbers)
        self.step = pending.step
        self.pending.clear()  # later steps used parameters that are not finite
        return "rollback"

    def _reason_to_save(self, outcome: Outcome | None) -> SaveReason | None:
        if outcome == "rollback":
            return None
        return self.policy.reason_to_save(self.step, stopping=outcome in ("stop", "amend"))

    def _save(self, reason: SaveReason) -> None:
        self.checkpoints.save(
            self.optimizer.tensors(),
            step=self.step,
            tokens=self._tokens(self.step),
            reason=reason,
            shared={
                "optimizer_steps": self.optimizer.step_count,
                "monitor": self.monitor.state,
                "dataset_fingerprint": self.dataset_fingerprint,
            },
            own={"loader": self.batches.state if self.backend.is_replica_leader else [], "rng": rng_state()},
        )

    def _tokens(self, step: int) -> int:
        return self.config.tokens_at(step)

    def _note_start(self) -> None:
        self._note(
            TRAIN_STARTED,
            resumed_from_step=self.step,
            tokens=self._tokens(self.step),
            world=self.backend.world_size,
            device=str(self.backend.device),
            parameters=parameters(self.config.model).total,
            peak_flops_per_s=self.backend.peak_flops_per_s(),
            added_skips=self.added_skips,
        )

    def _watch(self, step: int, metrics: StepMetrics, step_s: float) -> None:
        """Journal what the monitors report about the step, and after the first one the compile counters."""
        events = self.monitor.observe(step, metrics.loss, metrics.grad_norm)
        first = step == self.first_step + 1
        if self.backend.world_size > 1 and (first or step % DRIFT_EVERY_STEPS == 0):
            events += drift_alarm(step, self.backend.drift(self.optimizer))
        events += self._compare_ranks(step)
        for event in events:
            self._note(event.kind, **event.fields)
        if first and self.backend.compiles and (mine := self.backend.compile_counters()):
            counts = self.backend.gather(mine)
            hits, misses = (sum(count[key] for count in counts) for key in ("hits", "misses"))
            self._note("compile_cache", hits=hits, misses=misses, wall_s=step_s)

    def _compare_ranks(self, step: int) -> list[MonitorEvent]:
        """Compare the time of the ranks' own work once per window of steps, on rank 0."""
        if not self.rank_times.full:
            return []
        own_s = self.rank_times.take_s()
        times_s = self.backend.numbers_on_rank0(own_s) if self.backend.world_size > 1 else None
        return [] if times_s is None else self.rank_times.compare(step, times_s, self.hosts)

    def _note(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        if self.journal:
            self.journal.append(kind, durable=durable, **fields)


def train_journal(run: RunPaths, backend: Backend, attempt: int) -> JournalWriter | None:
    """Open rank 0's journal; return None on other ranks."""
    if backend.rank != 0:
        return None
    return JournalWriter(run, train_writer(0), attempt, check=Fence(run, attempt).check)
