"""Plain PyTorch, on any device that ``conf.devices`` lists and PyTorch supports."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from conf.devices import DEVICES
from conf.environment import STOCHASTIC_ROUNDING, compiler_problem
from conf.registries import OPTIMIZERS
from conf.schema import Config
from hlatctl.run import peers
from hlatctl.run.errors import DependencyError
from trainer import rendezvous
from trainer.backends.base import (
    DeviceStopwatch,
    HostStopwatch,
    Limits,
    Optimizer,
    StepMetrics,
    Stopwatch,
    TorchDistributed,
    largest_difference,
    require_variables,
)
from trainer.checkpoint.shards import ShardFile, ShardIndex, load_tensors, save_tensors
from trainer.model.decoder import Llama, StepNumbers
from trainer.model.initial import initialize
from trainer.optim.adamw import AdamW, clip_divisor, local
from trainer.parallel.layout import OverlappedSum, before_micro_batch, loss_of, make_layout, parameter_shards, prepare

if TYPE_CHECKING:
    from trainer.parallel.pipeline import Pipeline


class TorchNative(TorchDistributed):
    """See :class:`trainer.backends.base.Backend`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compiles = config.backend.compile
        if self._facts.rounds_stochastically:
            require_variables(config, {STOCHASTIC_ROUNDING: str(int(self._precision.stochastic_rounding))})
        self.device = own_device(config.backend.device, int(os.environ.get("LOCAL_RANK", "0")))
        if self.world_size > 1 and not dist.is_initialized():
            bound = self.device if self._facts.binds_groups else None
            rendezvous.join(self._facts.process_group, timeout=rendezvous.TIMEOUT, device=bound)
        # Another thread writes checkpoints; it must not use the process groups of training.
        if self.world_size > 1:
            (self._beside,) = rendezvous.host_groups(rendezvous.TIMEOUT)
        with peers.connecting(self._facts.process_group):
            self._layout = make_layout(config, self.device.type, self.world_size)
        self.data_parallel_rank, self.data_parallel_size = self._layout.dp_rank, config.data_parallel_size
        self.is_replica_leader, self.data_ranks = self._layout.is_replica_leader, self._layout.data_ranks(self.rank)
        self.attention = faster_attention(self.device, self.warnings)
        self._numbers = StepNumbers()
        self._pipeline: Pipeline | None = None
        self._sum: OverlappedSum | None = None
        if config.precision.name == "bf16":
            self.warnings.append(
                "precision=bf16: weights rounded to the nearest lose small updates; the paper's runs diverged with it "
                "(precision=bf16_sr or precision=mixed do not)"
            )
        if self.compiles and (problem := compiler_problem(config.backend.device)):
            self.compiles = False
            self.warnings.append(f"{problem}: training runs uncompiled, which is slower")

    def take_values(self, config: Config) -> None:
        """See :class:`trainer.backends.base.Backend`."""
        super().take_values(config)
        self._layout = replace(self._layout, config=config)

    @property
    def steps_ahead(self) -> int:
        """See :class:`trainer.backends.base.Backend`."""
        return int(self._facts.runs_behind_host)

    @property
    def _compiler(self) -> str | None:
        return self._facts.compile_backend if self.compiles else None

    def build_model(self, *, document_end_id: int | None, drawn: bool = True) -> Llama:
        """Build and shard the model on the meta device, then allocate and initialize this process's part."""
        config, layout = self._config, self._layout
        with torch.device("meta"):
            model = Llama(
                config.model,
                config.train.seq_len,
                layers=layout.layers,
                compute_dtype=self._precision.compute,
                tp=layout.tp,
                document_end_id=document_end_id,
            ).to(self._precision.weights)
        prepare(model, layout, self._precision, compile_backend=self._compiler)
        model.to_empty(device=self.device)
        self._numbers = model.parts.numbers
        if drawn:
            initialize(model, config.model, config.seed)
        model.rotary.fill()
        if config.parallel.pipeline_parallel_size > 1:
            from trainer.parallel.pipeline import Pipeline  # importing torch's pipelining takes half a second

            self._pipeline = Pipeline(
                model, layout, lambda hidden, targets: self._loss(model, hidden, targets) * self._scale, self.device
            )
        return model

    def optimizer(self, model: Llama) -> AdamW:
        """Return the configured optimizer over this process's shards."""
        config = self._config
        optimizer: AdamW = OPTIMIZERS.create(
            config.optimizer.name,
            parameter_shards(model.named_parameters(), self._layout),
            config,
            stochastic_rounding=self._precision.stochastic_rounding and not self._facts.rounds_stochastically,
            seed=config.seed,
            fused=self._facts.fused_adamw,
            compile_backend=self._compiler,
        )
        if self._layout.mesh is not None and self._config.data_parallel_size > 1 and not self._layout.shards_parameters:
            group = self._layout.mesh["dp"].get_group()
            self._sum = OverlappedSum(optimizer, group, config.grad_accum_steps)
        if self.world_size > 1:
            rendezvous.set_timeout(rendezvous.timeout(config, None))  # all groups exist now
        return optimizer

    def forward_backward(self, model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the micro-batches one by one, or through the pipeline."""
        if self._sum is not None:
            self._sum.begin()
        return self._forward_backward(model, inputs, targets)

    @property
    def place(self) -> tuple[int, int, int]:
        """See :class:`trainer.backends.base.Backend`."""
        layout = self._layout
        shard = layout.mesh.get_local_rank("dp") if layout.mesh is not None and layout.shards_parameters else 0
        return layout.pp_rank, layout.tp.rank if layout.tp else 0, shard

    def replay(self, model: Llama, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
        """See :class:`trainer.backends.base.Backend`."""
        if self._sum is not None:
            self._sum.pause()
        optimizer.zero_grad()
        with self._numbers.kept():
            loss = self._forward_backward(model, inputs, targets)
        optimizer.zero_grad()
        return loss

    def _forward_backward(self, model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs, targets = self._on_device(inputs), self._on_device(targets)
        if self._pipeline is not None:
            total = self._pipeline.run(inputs, targets)
        else:
            total = torch.zeros((), device=self.device)
            pairs = [torch.split(tokens, self._config.micro_batch_size) for tokens in (inputs, targets)]
            for number, (some, following) in enumerate(zip(*pairs, strict=True), 1):
                before_micro_batch(model, self._layout, is_last=number == len(pairs[0]))
                loss = self._loss(model, model(some), following) * self._scale
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        # FSDP averages over the shards. All tensor-parallel ranks have the same loss.
        replicas = self._config.data_parallel_size if self._layout.shards_parameters else 1
        return total / (replicas * self._config.parallel.tensor_parallel_size)

    def expect_steps(self, step_s: float) -> None:
        """See :class:`trainer.backends.base.Backend`."""
        if self.world_size > 1:
            rendezvous.set_timeout(rendezvous.timeout(self._config, step_s))

    def _on_device(self, tokens: Tensor) -> Tensor:
        """Start copying tokens to the device; unless the source is pinned memory, the copy waits for the device."""
        return (tokens.pin_memory() if self._facts.pins_host_memory else tokens).to(self.device, non_blocking=True)

    @property
    def _scale(self) -> float:
        """Return the factor for a micro-batch's loss that makes all gradients add up to those of the mean."""
        replicas = 1 if self._layout.shards_parameters else self._config.data_parallel_size
        return 1.0 / (self._config.grad_accum_steps * replicas)

    def _loss(self, model: Llama, hidden: Tensor, targets: Tensor) -> Tensor:
        return loss_of(model, hidden, targets, self._layout)

    def update(
        self, optimizer: Optimizer, loss_share: Tensor, *, lr: float, step: int, signal: int = 0, limits: Limits = None
    ) -> Callable[[], StepMetrics]:
        """Update with the clipped gradients, or skip the update. Only the device must know immediately which."""
        assert isinstance(optimizer, AdamW)
        if self._sum is not None:
            self._sum.finish()
        optimizer.sum_partial_gradients()
        # A new tensor from the signal's value would wait for the device.
        own = (loss_share.reshape(1), loss_share.new_full((1,), signal), optimizer.squared_norms())
        names, numbers = self._numbers.take(self.gather, loss_share)
        shares = torch.cat((*own, numbers))
        self.reduce_sum(shares)
        loss, _, squared_norm = shares[:3].unbind()
        updates = loss.isfinite() & squared_norm.isfinite()
        if limits:
            updates &= (loss <= limits[0]) & (squared_norm.sqrt() <= limits[1])
        skip = 1.0 - updates.to(torch.float32)
        divisor = clip_divisor(squared_norm, self._config.optimizer.max_grad_norm)
        optimizer.step(lr=lr, number=step, divisor=divisor, skip=skip)
        return self._later(torch.cat((skip.reshape(1), shares)), names)

    def _later(self, numbers: Tensor, names: list[str]) -> Callable[[], StepMetrics]:
        """Start copying to the host whether a step was skipped, and its sums; the returned function waits for them."""
        host = numbers.to("cpu", non_blocking=True)
        copied = self._mark()

        def read() -> StepMetrics:
            copied()
            skipped, *sums = host.tolist()
            return replace(StepMetrics.of(sums, names), skipped=bool(skipped))

        return read

    def _mark(self) -> Callable[[], None]:
        """Return a function that waits until the device has done the work issued so far."""
        if not self._facts.runs_behind_host:
            return self._synchronize
        event = torch.get_device_module(self.device).Event()
        event.record()
        return event.synchronize  # type: ignore[no-any-return]

    def _synchronize(self) -> None:
        torch.get_device_module(self.device).synchronize()

    def drift(self, optimizer: Optimizer) -> float:
        """See :class:`trainer.backends.base.Backend`."""
        mesh = self._layout.mesh
        if mesh is None:
            return 0.0
        axes = (mesh.mesh_dim_names or ())[1:]
        return max(largest_difference(optimizer.replicated_norms(axis), mesh[axis].get_group()) for axis in axes)

    def stopwatch(self) -> Stopwatch:
        """See :class:`trainer.backends.base.Backend`."""
        return DeviceStopwatch(self.device) if self._facts.runs_behind_host else HostStopwatch(self._synchronize)

    def step_boundary(self) -> None:
        """Do nothing: PyTorch executes eagerly."""

    @property
    def _exchange(self) -> tuple[torch.device, dist.ProcessGroup | None]:
        return self.device, None

    def to_host(self, tensors: dict[str, Tensor], into: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy all tensors now, to pinned memory where that is faster."""
        pinned = self._facts.pins_host_memory
        host = into or {
            name: torch.empty_like(tensor, device="cpu", pin_memory=pinned) for name, tensor in tensors.items()
        }
        for name, tensor in tensors.items():
            local(host[name]).copy_(local(tensor), non_blocking=True)
        self._synchronize()
        return host

    def for_writing(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors unchanged: writing copies them one by one."""
        return tensors

    def save(self, tensors: dict[str, Tensor], folder: Path) -> ShardFile | None:
        """Write a safetensors shard."""
        return save_tensors(tensors, folder, number=self.rank + 1)

    def load(self, tensors: dict[str, Tensor], folder: Path, index: ShardIndex) -> Callable[[], None]:
        """Read safetensors shards in place."""
        load_tensors(tensors, folder, index)
        return lambda: None

    def compile_counters(self) -> dict[str, int]:
        """Return Inductor's counters; graphs that it can't cache count as misses. Other compilers don't count."""
        if not self._facts.counts_graphs:
            return {}
        from torch._dynamo.utils import counters

        counts = counters["inductor"]
        misses = counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
        return {"hits": counts["fxgraph_cache_hit"], "misses": misses}


def own_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of a process by its rank on the node, and make it the current one.

    Raises a DependencyError if PyTorch doesn't support the device, or the node has too few.
    """
    package = DEVICES[kind].package
    try:
        if package is not None:
            importlib.import_module(package)
        module = torch.get_device_module(kind)
    except (ImportError, RuntimeError) as error:
        raise DependencyError(
            f"backend.device={kind}: this PyTorch does not support it ({error})",
            hint=f"install {package} for this PyTorch, or set backend.device=cpu",
        ) from None
    if not DEVICES[kind].own_for_each_process:
        return torch.device(kind)
    if not module.is_available() or local_rank >= module.device_count():
        raise DependencyError(
            f"backend.device={kind}: process {local_rank} of this node has no such device "
            f"({module.device_count()} found)",
            hint="set cluster.processes_per_node to the number of devices, or backend.device=cpu; `hlatctl doctor` "
            "says why a GPU can't be used; a scheduler gives a job the devices of "
            "cluster.slurm.gpus_per_node or cluster.kubernetes.resources",
        )
    module.set_device(local_rank)
    return torch.device(kind, local_rank)


def faster_attention(device: torch.device, warnings: list[str]) -> str | None:
    """Let PyTorch use a faster kernel of attention, and return its name; None if this process has none.

    Newer versions of PyTorch do this for packages of others (``torch.nn.attention``).

    Args:
        warnings: gets a message if the package is installed but does not work.
    """
    facts = DEVICES[device.type].attention
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if facts is None or activate is None or importlib.util.find_spec(facts[2]) is None:
        return None
    capability, name, package = facts
    if torch.get_device_module(device).get_device_capability(device) != capability:
        return None
    try:
        activate(name)
    except (ImportError, OSError, RuntimeError) as error:
        warnings.append(f"{package} is installed but can't be used: {error}; attention runs with PyTorch's own kernel")
        return None
    return name
