"""The training loop, to be read from top to bottom. It knows no device, no storage format and no launcher."""

from __future__ import annotations

import platform
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from conf.amend import AMENDED, SKIP_STEPS, TRAIN_STARTED, amended_skips, check_same_corpus
from conf.schedule import learning_rate
from conf.schema import Config
from conf.sizes import parameters
from hlatctl.run import files
from hlatctl.run.errors import NONFINITE, DataError, TrainingError
from hlatctl.run.journal import JournalWriter, read_events, train_writer
from hlatctl.run.paths import RunPaths
from trainer.backends.base import Backend, StepMetrics
from trainer.checkpoint.manager import CheckpointManager, Restored, rng_state, set_rng_state
from trainer.data.loader import Loader
from trainer.monitor import DRIFT_EVERY_STEPS, Monitor, RankTimes, Sign, drift_alarm

_FINISHED, _STOP, _ROLLBACK = "finished", "stop", "rollback"
#: By why training ended: 75 has written a checkpoint because it was asked to, 76 wants to go back to the newest one.
_EXIT_CODES = {_FINISHED: 0, _STOP: 75, _ROLLBACK: 76}


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A step that was asked for: its number, its batch's, when (on the performance clock), and what gives its sums."""

    step: int
    batch: int
    started: float
    lr: float
    data_wait_s: float
    sums: Callable[[], StepMetrics]


class Training:
    """One process's training of one attempt: restored when made, then :meth:`run`.

    Args:
        config: of the run.
        run: its directory.
        backend: the device and its processes.
        journal: rank 0's, else None.
        max_checkpoint_step: begin from no newer checkpoint.

    Raises:
        HlatctlError: data, checkpoints or storage can't be used.
    """

    def __init__(
        self,
        config: Config,
        run: RunPaths,
        backend: Backend,
        journal: JournalWriter | None,
        *,
        max_checkpoint_step: int | None = None,
    ) -> None:
        self.config, self.backend, self.journal = config, backend, journal
        self.stop = _StopRequest()
        dataset = _dataset(run)
        end_id = int(dataset["tokenizer"]["eos_id"]) if config.data.mask_across_documents else None
        self.model = backend.build_model(document_end_id=end_id)
        self.optimizer = backend.optimizer(self.model)
        self.checkpoints = CheckpointManager(config, run, backend, journal)
        restored = self.checkpoints.restore(self.optimizer.tensors(), max_checkpoint_step)
        self.step = self.first_step = 0
        self.monitor = Monitor()
        self.rank_times = RankTimes(config.recovery.straggler_factor, config.recovery.straggler_steps)
        self.nonfinite_steps = 0
        self.asked: deque[_Asked] = deque()
        self.accounted = 0.0
        if restored:
            self.step = self.first_step = restored.step
            self.monitor = Monitor(restored.shared["monitor"])
            self.optimizer.loaded(restored.shared["optimizer_steps"])
            set_rng_state(restored.ranks[backend.rank % len(restored.ranks)]["rng"])
        elif config.train.init_from:
            self.checkpoints.begin_from(Path(config.train.init_from), self.optimizer.tensors())
        self.dataset_fingerprint = str(dataset["fingerprint"])
        self.loader, self.amended_skips = _loader(config, run, dataset, backend, restored)

    def run(self) -> int:
        """Train to the last step, or until asked to stop.

        Returns:
            0 when the last step is done, 75 when stopped by SIGTERM (either way a checkpoint holds it all), 76 to go
            back to the newest checkpoint.

        Raises:
            TrainingError: the loss or the gradients are not finite, and that is not to be skipped.
            StorageError: a checkpoint can't be written.
        """
        self._note_start()
        outcome = ""
        try:
            while self.step < self.config.total_steps and not outcome:
                self.step += 1
                self._ask_for_step()
                outcome = self._account(but_for=self.backend.steps_ahead)
                if outcome or self._why_checkpoint(outcome):
                    outcome = self._account(but_for=0) or outcome  # what is saved is known to be sound
                reason = self._why_checkpoint(outcome)
                if reason:
                    self._save(reason)
            self.checkpoints.wait()
        finally:
            self.checkpoints.close()
            self.loader.close()
        if self.step >= self.config.total_steps and outcome != _ROLLBACK:
            outcome = _FINISHED
        self._note("train_stopped", durable=True, step=self.step, tokens=self._tokens(self.step), reason=outcome)
        return _EXIT_CODES[outcome]

    def _ask_for_step(self) -> None:
        """One optimizer step; a lazily executing device may still be at the one before when this returns."""
        started = time.perf_counter()
        self.loader.wait_s = 0.0
        self.optimizer.zero_grad()
        inputs, targets = self.loader.next()
        loss_share = self.backend.forward_backward(self.model, inputs, targets)
        self.backend.wait()
        self.rank_times.add(time.perf_counter() - started)
        lr = learning_rate(self.step, self.config)
        sums = self.backend.update(self.optimizer, loss_share, lr=lr, asked_to_stop=self.stop.requested)
        self.backend.step_boundary()
        self.asked.append(
            _Asked(
                step=self.step,
                batch=self.loader.batch,
                started=started,
                lr=lr,
                data_wait_s=self.loader.wait_s,
                sums=sums,
            )
        )

    def _account(self, *, but_for: int) -> str:
        """Journal the steps that were asked for, but for the newest few; why training has to end, mostly empty."""
        outcome = ""
        while len(self.asked) > but_for:
            asked = self.asked.popleft()
            outcome = self._account_for(asked, asked.sums()) or outcome
        return outcome

    def _account_for(self, asked: _Asked, sums: StepMetrics) -> str:
        stopping = _STOP if sums.stops else ""
        if not sums.finite:
            return self._nonfinite(asked, sums) or stopping
        self.nonfinite_steps = 0
        now = time.perf_counter()
        step_s = now - max(asked.started, self.accounted)
        self.accounted = now
        self._note(
            "step",
            step=asked.step,
            tokens=self._tokens(asked.step),
            loss=sums.loss,
            grad_norm=sums.grad_norm,
            param_norm=sums.param_norm,
            lr=asked.lr,
            step_s=step_s,
            data_wait_s=asked.data_wait_s,
            tokens_per_s=self.config.tokens_per_step / step_s,
        )
        self._watch(asked.step, sums, step_s)
        self.checkpoints.healthy_step()
        return stopping

    def _nonfinite(self, asked: _Asked, sums: StepMetrics) -> str:
        """Leave the update out, or give the attempt up, as the configuration says."""
        action = self.config.train.on_nonfinite
        self.nonfinite_steps += 1
        if action == "skip" and self.nonfinite_steps > self.config.train.max_nonfinite_steps:
            action = "stop"
        self._note(
            "nonfinite",
            durable=True,
            step=asked.step,
            tokens=self._tokens(asked.step),
            loss=str(sums.loss),
            grad_norm=str(sums.grad_norm),
            action=action,
        )
        if action == "stop":
            raise _not_finite(asked.step, sums)
        if action == "skip":
            return ""
        self._note(
            AMENDED,
            durable=True,
            key=SKIP_STEPS,
            value=[asked.batch],
            by="trainer",
            why=f"loss={sums.loss}, grad_norm={sums.grad_norm}",
        )
        self.step = asked.step
        self.asked.clear()  # those after it were made with what it left
        return _ROLLBACK

    def _why_checkpoint(self, outcome: str) -> str | None:
        if outcome == _ROLLBACK:
            return None
        if self.step == self.config.total_steps:
            return "final"
        if outcome == _STOP:
            return "stop"
        if self.step in self.config.milestones:
            return "milestone"
        if self.config.is_permanent(self.step):
            return "permanent"
        return None if self.step % self.config.checkpoint.every_steps else "interval"

    def _save(self, reason: str) -> None:
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
            own={"loader": self.loader.state if self.backend.speaks_for_replica else [], "rng": rng_state()},
        )

    def _tokens(self, step: int) -> int:
        return step * self.config.tokens_per_step

    def _note_start(self) -> None:
        self._note(
            TRAIN_STARTED,
            resumed_from_step=self.step,
            tokens=self._tokens(self.step),
            world=self.backend.world_size,
            device=str(self.backend.device),
            parameters=parameters(self.config.model).total,
            peak_flops_per_s=self.backend.peak_flops_per_s(),
            amended_skips=self.amended_skips,
        )

    def _watch(self, step: int, sums: StepMetrics, step_s: float) -> None:
        """Journal what is remarkable about the step, and after the first one what was compiled."""
        signs = self.monitor.observe(step, sums.loss, sums.grad_norm)
        first = step == self.first_step + 1
        if self.backend.world_size > 1 and (first or step % DRIFT_EVERY_STEPS == 0):
            signs += drift_alarm(step, self.backend.drift(self.optimizer))
        signs += self._compare_ranks(step)
        for sign in signs:
            self._note(sign.kind, **sign.fields)
        if first and self.backend.compiles and (mine := self.backend.compile_counters()):
            counts = self.backend.gather(mine)
            hits, misses = (sum(count[key] for count in counts) for key in ("hits", "misses"))
            self._note("compile_cache", hits=hits, misses=misses, wall_s=step_s)

    def _compare_ranks(self, step: int) -> list[Sign]:
        """Once a window of steps, what each process took for its own work, and who is slower than the rest."""
        if not self.rank_times.full:
            return []
        mine = [platform.node(), self.rank_times.take_s()]
        return self.rank_times.compare(step, self.backend.gather(mine)) if self.backend.world_size > 1 else []

    def _note(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        if self.journal:
            self.journal.append(kind, durable=durable, **fields)


def compile_only(config: Config, backend: Backend) -> None:
    """Run a step on random tokens at the real shapes, so that every graph is compiled and cached."""
    model = backend.build_model(document_end_id=0 if config.data.mask_across_documents else None)
    optimizer = backend.optimizer(model)
    optimizer.zero_grad()
    # Where gradients are there already, adding to them may be another graph; a pipeline needs all micro-batches.
    micro_batches = config.grad_accum_steps if config.parallel.pipeline_parallel_size > 1 else 2
    shape = (config.micro_batch_size * min(micro_batches, config.grad_accum_steps), config.train.seq_len)
    tokens = torch.randint(config.model.vocab_size, shape)
    loss_share = backend.forward_backward(model, tokens, tokens)
    sums = backend.update(optimizer, loss_share, lr=learning_rate(1, config), asked_to_stop=False)
    backend.step_boundary()
    sums()
    backend.drift(optimizer)


def train_journal(run: RunPaths, backend: Backend, attempt: int) -> JournalWriter | None:
    """Rank 0's journal; the other ranks write none."""
    return JournalWriter(run, train_writer(0), attempt) if backend.rank == 0 else None


class _StopRequest:
    """Set by SIGTERM; the step that runs is finished, and all processes stop after the same one."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def _dataset(run: RunPaths) -> dict[str, Any]:
    try:
        return files.read_sealed_json(run.dataset)
    except (OSError, ValueError) as error:
        raise DataError(f"{run.dataset}: not readable ({error})", hint="`python -m trainer.data.prepare`") from None


def _loader(
    config: Config, run: RunPaths, dataset: dict[str, Any], backend: Backend, last: Restored | None
) -> tuple[Loader, list[int | str]]:
    """From where the checkpoint was taken, without what has been left out since, which is told; the corpus is the same.

    The journal may grow while the processes start, so one of them reads it for all.
    """
    kinds = (AMENDED, TRAIN_STARTED)
    told = [event for event in read_events(run) if event["kind"] in kinds] if backend.rank == 0 else None
    events = backend.from_rank0(told)
    state = None
    if last:
        check_same_corpus(last.shared.get("dataset_fingerprint"), dataset, events)
        state = [row for rank in last.ranks for row in rank["loader"]]
    loader = Loader(
        config, dataset, rank=backend.data_parallel_rank, size=backend.data_parallel_size, state=state, events=events
    )
    return loader, amended_skips(events)


def _not_finite(step: int, sums: StepMetrics) -> TrainingError:
    return TrainingError(
        f"step {step}: loss={sums.loss}, grad_norm={sums.grad_norm}: not finite, and nothing that is kept is",
        hint="lower optimizer.lr, or look at the steps before it in the journal",
        code=NONFINITE,
    )
