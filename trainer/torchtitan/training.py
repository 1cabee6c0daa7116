"""One process's part of a training attempt with torchtitan's loop, and what the manager sees of it.

torchtitan's ``Trainer`` runs the steps. It calls this module where a step begins (``train_step``), before the update
(``maybe_wait_for_staging``), where it logs (``MetricsProcessor.log``) and after the step (``checkpointer.save``).

The processes agree on requests to stop and on the driver's orders by a sum over the hosts, which is begun with a step
and read with the next one. So no step waits for it, and the device's queue stays full between two logged steps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

from conf.schema import Config
from conf.training_rules import Outcome, learning_rate
from hlatctl.run import startup
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths
from trainer.backends.base import ENDS, NEWS, Stopwatch
from trainer.checkpoint.dcp import DcpFiles
from trainer.step import training
from trainer.step.corruption import Subject
from trainer.step.monitor import MonitorEvent
from trainer.torchtitan import float8, torch_2_13
from trainer.torchtitan.configuration import share_of_peak, trainer_config
from trainer.torchtitan.data import Loader, NoTokenizer, micro_batches
from trainer.torchtitan.process import Process

#: How torchtitan's error about a step's loss begins (``Trainer.train_step``).
_NOT_FINITE = "Loss is not finite"


class Rates(LRSchedulersContainer):
    """This project's schedules (``conf.registries.SCHEDULES``) in torchtitan's container."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """The configuration that has the schedule."""

        _of: Config | None = None

        def build(self, *, optimizers: Any, training_steps: int) -> Rates:
            """Return the schedulers of these optimizers."""
            config = self._of
            assert config is not None
            return Rates(optimizers, lambda updates: share_of_peak(config, updates))


class Metrics(MetricsProcessor):
    """Hands the numbers of logged steps to the journal instead of torchtitan's own loggers."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """Who takes the numbers."""

        _training: Training | None = None

    def should_log(self, step: int) -> bool:
        """Return whether a step's loss is read: as torchtitan does, an attempt's first, and before each checkpoint."""
        training = self.config._training
        return bool(super().should_log(step)) or training.must_know(step)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Take a step's numbers, which are the same on all processes of a pipeline stage."""
        self.config._training.logged(step, global_avg_loss, grad_norm)
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()


class _Weights(ModelWrapper):
    """The weights of a model, also where FSDP gathers them in FP8."""

    def _get_state_dict(self) -> dict[str, Any]:
        return {name: float8.plain(value) for name, value in super()._get_state_dict().items()}


class Checkpoints(BaseCheckpointManager):
    """What torchtitan's loop calls instead of its own manager."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's settings of checkpoints, which have no effect, and who saves."""

        enable: bool = True
        _training: Training | None = None

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        assert config._training is not None
        self.enable, self.save_future, self._training = True, None, config._training
        self._model = _Weights(model_parts)
        self._states = {**states, OPTIMIZER: optimizers, DATALOADER: dataloader, LR_SCHEDULER: lr_schedulers}

    @property
    def states(self) -> dict[str, Any]:
        """All states under torchtitan's names: the weights by their own, the others by their objects'."""
        return {**self._states, **self._model.state_dict()}

    def put(self, states: dict[str, Any]) -> None:
        """Hand weights that were read to the model; the others have taken theirs."""
        self._model.load_state_dict({name: value for name, value in states.items() if name not in self._states})

    def _load(self, step: int = -1) -> bool:
        return self._training.begin(self)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        return self._training.after_step(curr_step, self)

    def _maybe_wait_for_staging(self) -> None:
        self._training.before_update()

    def _wait_for_saving(self) -> None:
        pass  # the manager's writer waits

    def _close(self) -> None:
        pass


class _Whole(nn.Module):
    """A layer that may be compiled, and sharded, as a module whose hooks are outside of the compiled graph."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_forward_pre_hook(lambda *_: layer.unshard() if isinstance(layer, FSDPModule) else None)

    def forward(self, *inputs: Any, **others: Any) -> Any:
        return self.layer(*inputs, **others)


@contextmanager
def whole_layers(parts: Sequence[Any]) -> Iterator[list[nn.Module]]:
    """Return the layers of these models; hooks see their outputs and whole weights in this block, also if compiled."""
    layers = [(part.layers, name, layer) for part in parts for name, layer in part.layers.items()]
    wrapped = [_Whole(layer) for *_, layer in layers]
    try:
        for (owner, name, _), whole in zip(layers, wrapped, strict=True):
            owner[name] = whole
        yield list(wrapped)
    finally:
        for owner, name, layer in layers:
            owner[name] = layer


class _Engine(Trainer):
    """torchtitan's trainer in processes that are already connected."""

    def __init__(self, config: Any, training: Training) -> None:
        self._training = training
        super().__init__(config)
        if self.parallel_dims.pp_enabled:
            torch_2_13.take_micro_batches(self.pp_schedule)

    def init_distributed(self) -> ParallelDims:
        """Return the layout of the processes; ``Process`` has connected them."""
        return self._training.process.dims

    def train_step(self, data_iterator: Any) -> None:
        """Run one step."""
        self._training.begin_step(self.step)
        try:
            super().train_step(data_iterator)
        except RuntimeError as error:
            if not str(error).startswith(_NOT_FINITE):
                raise
            self._training.logged(self.step, math.nan, math.nan)
        self._training.update_scales()

    def forward_backward_step(self, **inputs: Any) -> Tensor:
        """Run one micro-batch, or all of a pipeline."""
        if not self.config.training.disable_cuda_graphs:
            self._training.own_work_ends()
        loss: Tensor = super().forward_backward_step(**inputs)
        return loss

    def replay(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run a micro-batch, or a pipeline's, forward and backward without an effect on training; return its loss.

        Gradients, buffers (they count experts' tokens), random states and the number of tokens are as before.
        """
        training, device = self._training, self.device
        buffers = [_local(buffer) for part in self.model_parts for buffer in part.buffers()]
        before = [buffer.to("cpu", copy=True) for buffer in buffers]
        states = self.state_dict()  # has the number of tokens
        batches: list[dict[str, Tensor]] = []
        labels: list[Tensor] = []
        size = training.config.micro_batch_size
        for batch, following in micro_batches(inputs, targets, size, training.document_end_id):
            batches.append({name: tensor.to(device) for name, tensor in batch.items()})
            labels.append(following.to(device))
        in_stages = self.parallel_dims.pp_enabled
        self.optimizers.zero_grad()
        with torch.random.fork_rng([] if device.index is None else [device.index], device_type=device.type):
            loss: Tensor = super().forward_backward_step(
                input_dict=batches if in_stages else batches[0],
                labels=labels if in_stages else labels[0],
                global_valid_tokens=torch.tensor(targets.numel(), device=device),
            )
        self.optimizers.zero_grad()
        self.load_state_dict(states)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        return loss.detach()

    def should_continue_training(self) -> bool:
        """Return whether another step follows."""
        return bool(super().should_continue_training()) and self._training.outcome is None


class Training(training.Training):
    """See :class:`trainer.step.training.Training`: torchtitan's loop, which calls this object."""

    def __init__(
        self,
        config: Config,
        run: RunPaths,
        process: Process,
        journal: JournalWriter | None,
        *,
        attempt: int = 0,
        max_checkpoint_step: int | None = None,
    ) -> None:
        super().__init__(
            config,
            run,
            process,
            journal,
            attempt=attempt,
            max_checkpoint_step=max_checkpoint_step,
            storage=DcpFiles(process.rank, process.device, process.storage_group),
        )
        self.process = process
        self.outcome: Outcome | None = None
        self._ending: Outcome | None = None
        self._signal: tuple[Tensor, Any] | None = None
        self._loads: Tensor | None = None
        self._first_step, self._logged_step = 1, 0
        self._unread: list[int] = []  # batches since the last logged step
        self._logged_s, self._wait_s = time.perf_counter(), 0.0
        self._own_work: Stopwatch | None = None
        self._own_times: deque[Stopwatch] = deque()
        self.engine = _Engine(self._titan_config(), self)
        self._scales = float8.Scales(self.engine.model_parts) if config.gathers_fp8 else None
        self.measure(self.engine.metrics_processor.num_flops_per_token)
        self.watch_for_corruption(self._subject)
        if self.engine.config.training.disable_cuda_graphs:  # no event may be recorded while a graph is captured
            self.engine.model_parts[-1].register_forward_hook(lambda *_: self.own_work_ends())

    def _subject(self) -> Subject:
        engine = self.engine

        def tensors() -> list[Tensor]:
            states = [state for optimizer in engine.optimizers for state in optimizer.state.values()]
            moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
            return [*(weight.detach() for part in engine.model_parts for weight in part.parameters()), *moments]

        return Subject(
            place=self.process.place,
            replica=self.process.replica,
            parts=engine.model_parts,
            blocks=lambda: whole_layers(engine.model_parts),
            tensors=tensors,
            replay=engine.replay,
        )

    def _titan_config(self) -> Any:
        titan = trainer_config(self.config)
        titan.dump_folder = str(self.run_paths.logs(0).parent)
        titan.tokenizer, titan.dataloader = NoTokenizer.Config(), Loader.Config(_training=self)
        titan.lr_scheduler = Rates.Config(_of=self.config)
        titan.metrics = Metrics.Config(log_freq=titan.metrics.log_freq, _training=self)
        titan.checkpoint = Checkpoints.Config(_training=self)
        return titan

    def run(self) -> int:
        """Train to the last step, or until SIGTERM or an amendment ends the attempt; see the native ``Training``."""
        startup.imported()
        try:
            self.engine.train()
            self.checkpoints.wait()
            if not self.outcome:
                self.checkpoints.finish(lambda: self.stop.requested)
        finally:
            self.close()
        self.engine.close()  # not after an error: it may wait for the device
        return self.end(self.engine.step, self.outcome)

    def begin(self, checkpoints: Checkpoints) -> bool:
        """Continue from the newest checkpoint, or otherwise read the weights of ``train.init_from``."""
        states, settings = checkpoints.states, self._settings()
        restored = self.restore(states)
        if restored:
            checkpoints.put(states)
            self._set(settings)
        elif self.config.train.init_from:
            checkpoints.put(states)
        self.update_scales()
        self._first_step, self._logged_step = self.engine.step + 1, self.engine.step
        self.open_batches(restored)
        log_freq = self.engine.metrics_processor.config.log_freq
        self.note_start(self.engine.step, self._parameters() if self.journal else 0, log_freq=log_freq)
        self.check_for_corruption(self.engine.step)
        self._logged_s = time.perf_counter()
        return restored is not None

    def _settings(self) -> list[dict[str, Any]]:
        """Return the settings of each group of parameters, which checkpoints have too."""
        groups = [group for optimizer in self.engine.optimizers for group in optimizer.param_groups]
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def _set(self, settings: list[dict[str, Any]]) -> None:
        """Set them again, because an amendment may have changed them, with the rates of the next update."""
        factor, known = share_of_peak(self.config, self.engine.step), iter(settings)
        for scheduler in self.engine.lr_schedulers:
            rates = [base * factor for base in scheduler.base_lrs]
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group.update(next(known), lr=rate)
            scheduler._last_lr = rates

    def update_scales(self) -> None:
        """Compute the scales of weights that are gathered in FP8, before each step."""
        if self._scales:
            self._scales.update()

    def _parameters(self) -> int:
        spec = self.engine.config.model_spec
        with torch.device("meta"):
            model = spec.model.build()
        return int(spec.model.get_nparams_and_flops(model, self.config.train.seq_len)[0])

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the next step (sequences, seq_len), int64."""
        self.batches.wait_s = 0.0
        batch = self.batches.next()
        self._wait_s += self.batches.wait_s
        self._unread.append(self.batches.batch)
        return batch

    def begin_step(self, step: int) -> None:
        """Take what the processes agreed on in the previous step, and begin the next agreement."""
        agreed = self._agreed()
        if agreed & NEWS:
            self.take_orders(step - 1)
        self._ending = "stop" if agreed % NEWS else "amend" if agreed & ENDS else None
        if product := self.time_product(step):
            self._own_times.append(product)
        signal = torch.tensor([self.signal(step)], dtype=torch.int64)
        work = dist.all_reduce(signal, group=self.process.host_group, async_op=True)
        self._signal = signal, work

    def _agreed(self) -> int:
        if self._signal is None:
            return 0
        signal, work = self._signal
        self._signal = None
        work.wait()
        return int(signal)

    def must_know(self, step: int) -> bool:
        """Return whether a step must be known to be finite: an attempt's first, and one that is saved or checked."""
        is_kept = self.policy.reason_to_save(step, stopping=self._ending is not None) or self.is_checked(step)
        return step == self._first_step or bool(is_kept)

    def own_work_ends(self) -> None:
        """Stop the time of this process's own work: from one update to the end of the next step's first forward pass.

        As in the native engine, it includes waiting for other processes of the replica.
        """
        if self._own_work:
            self._own_work.stop()
            self._own_times.append(self._own_work)
            self._own_work = None

    def before_update(self) -> None:
        """Begin the time of own work, and keep the experts' loads of a logged step: the update sets them to 0."""
        self._own_work = None if self.waits_within_steps else self.process.stopwatch()
        if self.engine.metrics_processor.should_log(self.engine.step):
            loads = [
                module.tokens_per_expert_E
                for part in self.engine.model_parts
                for module in part.modules()
                if hasattr(module, "tokens_per_expert_E")
            ]
            self._loads = torch.stack([_local(load).float() for load in loads]) if loads else None

    def logged(self, step: int, loss: float, grad_norm: float) -> None:
        """Journal a step's numbers. All processes call this for the same steps."""
        loss, grad_norm, load = self._from_last_stage(loss, grad_norm, self._expert_load())
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.outcome = self.nonfinite(step, self._unread, loss, grad_norm)  # any of the batches may be the cause
            return
        now_s = time.perf_counter()
        steps = step - self._logged_step
        step_s, wait_s = (now_s - self._logged_s) / steps, self._wait_s / steps
        self._logged_s, self._logged_step, self._wait_s = now_s, step, 0.0
        self._unread.clear()
        for _ in range(steps):  # a step that isn't finite would have spoiled this one
            self.checkpoints.healthy_step()
        self.note_step(
            step,
            batch=self.batches.batch,
            loss=loss,
            grad_norm=grad_norm,
            **({} if load is None else {"expert_load": load}),
            lr=learning_rate(step, self.config),  # as all parameters would have it without muP
            data_wait_s=wait_s,
            step_s=step_s,
        )
        for event in [*self.monitor.observe(step, loss, grad_norm), *self._compare_ranks(step)]:
            self.note(event.kind, **event.fields)

    def _compare_ranks(self, step: int) -> list[MonitorEvent]:
        while self._own_times:
            self.rank_times.add(self._own_times.popleft().read_s())
        return self.compare_ranks(step)

    def _expert_load(self) -> float:
        """Return the tokens of the busiest expert, as a multiple of the mean, averaged over layers; NaN: no experts."""
        if self._loads is None:
            return math.nan
        loads, self._loads = self._loads, None
        mesh = self.process.dims.get_optional_mesh("loss")
        if mesh is not None:
            dist.all_reduce(loads, group=mesh.get_group())
        return float((loads.max(dim=1).values / loads.mean(dim=1).clamp_min(1e-9)).mean())

    def _from_last_stage(self, loss: float, grad_norm: float, load: float) -> tuple[float, float, float | None]:
        """Return the numbers on every process: only the last stage of a pipeline knows the loss."""
        if self.process.dims.pp_enabled:
            size = self.process.world_size // self.process.dims.pp
            knows = self.process.world_size - size
            mine = [loss, grad_norm, load] if self.process.rank == knows else [0.0] * 3
            numbers = torch.tensor(mine, dtype=torch.float64)
            dist.all_reduce(numbers, group=self.process.host_group)
            loss, grad_norm, load = numbers.tolist()
        return loss, grad_norm, None if math.isnan(load) else load

    def after_step(self, step: int, checkpoints: Checkpoints) -> bool:
        """Save a checkpoint if one is due, and end the attempt if the processes agreed to."""
        if self.outcome == "rollback":
            return False
        if self.is_checked(step):
            self._own_work = None
            self._logged_s += self.check_for_corruption(step)
        if self.config.ends_stage(step):
            self._ending = self._ending or "amend"
        self.outcome = self._ending
        reason = self.policy.reason_to_save(step, stopping=self._ending is not None)
        if reason:
            self.save(checkpoints.states, step, reason, optimizer_steps=step)
        self.profiling.step(step)
        return reason is not None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
