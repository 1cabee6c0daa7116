"""NeuronX Distributed on torch-xla: Trainium with a Neuron SDK up to 2.29.

Execution is lazy: operations build a graph, and a step boundary sends it to the device. Step closures return values one
step later. Nothing here forces the device to wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from conf.environment import CASTING, STOCHASTIC_ROUNDING
from conf.schema import Config
from hlatctl.run.errors import ConfigError, DependencyError
from trainer import rendezvous
from trainer.backends.base import (
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
from trainer.model.initial import initial_slice
from trainer.model.precision import PRECISIONS
from trainer.optim.adamw import local
from trainer.parallel.layout import Layout, parameter_shards
from trainer.parallel.tensor import SharedHeads, TensorParallel

if TYPE_CHECKING:
    from trainer.backends.nxd_optim import NxdAdamW

#: How many processes of a node move their model from host memory to the device at the same time.
_MOVE_AT_ONCE = 11


class Nxd(TorchDistributed):
    """See :class:`trainer.backends.base.Backend`."""

    steps_ahead = 1
    compiles = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        _set_environment(config)
        self._nxd, self._xla = import_library()
        self.device = self._xla.device()
        if not dist.is_initialized():
            _join(self.world_size, timeout=rendezvous.TIMEOUT)
        self._nxd_config = self._describe()
        self._host, self._beside = rendezvous.host_groups(rendezvous.TIMEOUT, rendezvous.TIMEOUT)
        self._layout = self._find_layout()
        self.data_parallel_rank, self.data_parallel_size = self._layout.dp_rank, config.data_parallel_size
        self.is_replica_leader, self.data_ranks = self._layout.is_replica_leader, self._layout.data_ranks(self.rank)
        self.nxd_model: Any = None
        self._numbers = StepNumbers()
        self._optimizer: NxdAdamW | None = None

    def _describe(self) -> dict[str, Any]:
        """Return the library's configuration; this call also creates its process groups."""
        from neuronx_distributed.utils.model_utils import get_platform_lnc

        parallel = self._config.parallel
        zero1 = parallel.data_parallel == "zero1"
        return dict(
            self._nxd.neuronx_distributed_config(
                tensor_parallel_size=parallel.tensor_parallel_size,
                pipeline_parallel_size=parallel.pipeline_parallel_size,
                pipeline_config=self._pipeline_config(),
                optimizer_config={"zero_one_enabled": zero1, "grad_clipping": False},  # clipping: nxd_optim
                activation_checkpoint_config=None,  # recomputation: nxd_parts
                sequence_parallel=parallel.sequence_parallel,
                lnc_size=int(get_platform_lnc()),
                model_init_config={
                    "sequential_move_factor": _MOVE_AT_ONCE,
                    "meta_device_init": False,
                    "param_init_fn": None,
                },
                mixed_precision_config=dict.fromkeys(
                    ("use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt"),
                    zero1 and self._precision.weights == torch.float32,
                ),
            )
        )

    def _pipeline_config(self) -> dict[str, Any] | None:
        """Return the same stages as for other backends. The library splits the traced model after the named layers."""
        from trainer.backends.nxd_parts import pipeline_modules

        stages = self._config.parallel.pipeline_parallel_size
        if stages == 1:
            return None
        before = (Layout(config=self._config, pp_rank=stage).layers for stage in range(stages - 1))
        return {
            "num_microbatches": self._config.grad_accum_steps,
            "auto_partition": False,
            "pipeline_cuts": [f"llama.layers.{layers[-1]}" for layers in before],
            "input_names": ["inputs", "targets"],
            "output_loss_value_spec": True,
            "return_loss_on_cpu": False,
            "use_zero1_optimizer": self._config.parallel.data_parallel == "zero1",
            "use_optimizer_wrapper": True,
            **pipeline_modules(),
        }

    def _find_layout(self) -> Layout:
        from neuronx_distributed.parallel_layers import parallel_state as state

        mine = [
            state.get_pipeline_model_parallel_rank(),
            state.get_tensor_model_parallel_rank(),
            state.get_data_parallel_rank(),
        ]
        parallel = self._config.parallel
        sizes = (parallel.pipeline_parallel_size, parallel.tensor_parallel_size, self._config.data_parallel_size)
        ranks = torch.zeros(sizes, dtype=torch.int64)
        for rank, place in enumerate(self.gather(mine)):
            ranks[tuple(place)] = rank
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "tp", "dp"))
        tp = TensorParallel(
            state.get_tensor_model_parallel_group(), mine[1], parallel.tensor_parallel_size, parallel.sequence_parallel
        )
        tp_ranks = ranks[mine[0], :, mine[2]].tolist()
        heads = self._find_heads(tp_ranks)
        return Layout(config=self._config, mesh=mesh, pp_rank=mine[0], dp_rank=mine[2], tp=tp, heads=heads)

    def _find_heads(self, tp_ranks: list[int]) -> SharedHeads | None:
        """Ask the library which of these processes share a key/value head: it knows which can communicate.

        On trn1 they are strided (the first and third of 4 processes share one of 2 heads); on trn2 they are neighbours.
        """
        from neuronx_distributed.parallel_layers import parallel_state as state

        model = self._config.model
        kv_replicas = len(tp_ranks) // model.num_kv_heads
        if kv_replicas <= 1:
            return None
        state.initialize_kv_group(kv_replicas)
        return SharedHeads.of(model, self.rank, tp_ranks, state.get_kv_shared_group(as_list=True))

    def build_model(self, *, document_end_id: int | None, drawn: bool = True) -> Llama:
        """Build the model in host memory, then move it to the device, a few processes of a node at a time.

        :meth:`optimizer` draws the weights, because master weights may have more bits than the model's.
        """
        from trainer.backends.nxd_parts import NxdParts, WithLoss

        config, dtype = self._config, self._precision.compute
        parts = NxdParts(config.parallel, dtype, flash=config.backend.device == "neuron", heads=self._layout.heads)
        llama = Llama(
            config.model, config.train.seq_len, compute_dtype=dtype, document_end_id=document_end_id, parts=parts
        )
        for parameter in llama.parameters():
            parameter.data = parameter.data.to(dtype)  # but rotary tables stay FP32
        self._drawn = drawn
        self._numbers = parts.numbers
        for layer in llama.blocks():
            layer.recompute = config.parallel.activation_checkpointing == "full"
            layer.attention.recompute_core = config.parallel.activation_checkpointing == "selective"
        self.nxd_model = self._nxd.initialize_parallel_model(self._nxd_config, lambda: WithLoss(llama))
        self.step_boundary()
        return llama

    def optimizer(self, model: Llama) -> Optimizer:
        """Return the library's AdamW over this process's shards."""
        from trainer.backends.nxd_optim import NxdAdamW

        config, zero1 = self._config, self._config.parallel.data_parallel == "zero1"
        named = ((name.removeprefix("llama."), parameter) for name, parameter in self.nxd_model.named_parameters())
        shards = parameter_shards(named, self._layout)
        for name, shard in shards.items():
            if shard.partial_gradient:
                setattr(shard.parameter, "sequence_parallel_enabled", True)  # noqa: B010 (the library sums such gradients)
            if zero1:  # each replica has other rows of the master weights
                replication = shard.replication // self.data_parallel_size
                shards[name] = replace(shard, sharded=True, replication=replication)
        optimizer = NxdAdamW(shards, config.optimizer, self._nxd_config, dtype=self._precision.weights)
        if self._drawn:
            for name, shard in shards.items():
                shape = list(shard.parameter.shape)
                optimizer.write_weights(name, initial_slice(name, shape, model.parts, config.model, config.seed))
        self._optimizer = optimizer
        self.step_boundary()
        return optimizer

    def forward_backward(self, model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the micro-batches one by one, each in its own graph, or through the pipeline."""
        steps = self._config.grad_accum_steps
        total = torch.zeros((), device=self.device)
        if self._config.parallel.pipeline_parallel_size > 1:
            mean = self.nxd_model.run_train(inputs=inputs, targets=targets)  # only the last stage has it
            return (total if mean is None else mean) / self._copies_of_loss
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        size = self._config.micro_batch_size
        for some, following in zip(torch.split(inputs, size), torch.split(targets, size), strict=True):
            loss = self.nxd_model(some, following) / steps
            loss.backward()
            total = total + loss.detach()
            if steps > 1:
                self.step_boundary()
        return total / self._copies_of_loss

    @property
    def _copies_of_loss(self) -> int:
        """Return how many processes have the same loss, or a share of it, in the sum over all processes."""
        return self.data_parallel_size * self._config.parallel.tensor_parallel_size

    def update(
        self, optimizer: Optimizer, loss_share: Tensor, *, lr: float, step: int, signal: int = 0, limits: Limits = None
    ) -> Callable[[], StepMetrics]:
        """Add the update to the step's graph. A step closure fetches the metrics in another thread."""
        from torch_xla.core.xla_model import add_step_closure

        assert self._optimizer is not None
        assert optimizer is self._optimizer
        signals = torch.tensor([float(signal)]).to(self.device)  # data of the graph, not a constant in it
        names, numbers = self._numbers.take(self.gather, loss_share)
        sums = self._optimizer.step(torch.cat((loss_share.reshape(1), signals, numbers)), lr=lr)
        known: Future[StepMetrics] = Future()

        def fetch(values: Tensor) -> None:
            try:
                known.set_result(StepMetrics.of(values.tolist(), names))
            except Exception as error:  # raised again in the waiting thread
                known.set_exception(error)

        add_step_closure(fetch, args=(sums,), run_async=True)
        return known.result

    def expect_steps(self, step_s: float) -> None:
        """Do nothing: torch-xla's collectives have no timeouts."""

    def drift(self, optimizer: Optimizer) -> float:
        """Compare the norms over each group. This makes the device wait."""
        from neuronx_distributed.parallel_layers import parallel_state as state

        from trainer.backends.nxd_optim import KV_REPLICAS

        groups = {"dp": state.get_data_parallel_group(), "tp": state.get_tensor_model_parallel_group()}
        if self._layout.heads:
            groups[KV_REPLICAS] = state.get_kv_shared_group()
        return max(largest_difference(optimizer.replicated_norms(axis), group) for axis, group in groups.items())

    def stopwatch(self) -> Stopwatch:
        """Measure the time of building the graph: execution is lazy, so this doesn't wait."""
        return HostStopwatch(lambda: None)

    def step_boundary(self) -> None:
        """Send the graph to the device."""
        self._xla.sync()

    @property
    def _exchange(self) -> tuple[torch.device, dist.ProcessGroup | None]:
        """Gloo: these exchanges don't wait for the device."""
        return torch.device("cpu"), self._host

    def to_host(self, tensors: dict[str, Tensor], into: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy all tensors now: another thread can't read the device's memory during training."""
        assert self._optimizer is not None
        return {name: self._optimizer.as_distributed(name, tensor.cpu()) for name, tensor in tensors.items()}

    def for_writing(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors to host memory: another thread can't read the device's."""
        return self.to_host(tensors, {})

    def save(self, tensors: dict[str, Tensor], folder: Path) -> ShardFile | None:
        """Write safetensors shards, like every backend."""
        return save_tensors(tensors, folder, number=self.rank + 1)

    def load(self, tensors: dict[str, Tensor], folder: Path, index: ShardIndex) -> Callable[[], None]:
        """Read into host memory; the returned function copies to the device."""
        optimizer = self._optimizer
        assert optimizer is not None
        host = {name: optimizer.host_target(name) for name in tensors}
        load_tensors(host, folder, index)

        def put() -> None:
            for name, value in host.items():
                optimizer.write(name, local(value))
            self.step_boundary()

        return put

    def compile_counters(self) -> dict[str, int]:
        """Return an empty dict: torch-xla counts graphs, but only the compiler knows which were in its cache."""
        return {}

    def peak_flops_per_s(self) -> float | None:
        """Return None: unknown."""
        return None


def _set_environment(config: Config) -> None:
    """Set the environment variables that torch-xla, NxD and the runtime read. Raises a ConfigError if one conflicts.

    Tensors keep their number formats: the switches that changed them are deprecated (Neuron SDK, "Migration from
    XLA_USE_BF16/XLA_DOWNCAST_BF16"), and must be unset. ``XLA_DOWNCAST_BF16=0`` is NxD's sign of autocast: its
    attention then keeps the logarithms of the softmax's sums in BF16 (kernels/flash_attn.py, in 0.12 to 0.18). With
    them, the backward pass's probabilities are wrong by up to 3 %.
    """
    precision = PRECISIONS[config.precision.name]
    wanted = {
        "PJRT_DEVICE": {"neuron": "NEURON"}.get(config.backend.device, "CPU"),
        STOCHASTIC_ROUNDING: str(int(precision.stochastic_rounding)),
    }
    require_variables(config, wanted)
    for name in CASTING:
        if os.environ.pop(name, "0") != "0":
            raise ConfigError(
                f"{name} is set in the environment: it changes number formats independently of precision.name="
                f"{config.precision.name}",
                hint=f"unset {name}",
            )
    if precision.weights != precision.compute:
        # The largest bucket of gradients, in MB, that the same sign selects for master weights (trainer/trainer.py,
        # which knows of NaN losses with buckets of more than twice the size).
        os.environ.setdefault("ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB", "65")


def import_library() -> tuple[Any, Any]:
    """Return the modules neuronx_distributed and torch_xla.

    Raises a DependencyError if one of them is not installed, or can't be imported.
    """
    try:
        import neuronx_distributed
        import torch_xla
        import torch_xla.distributed.xla_backend
    except ImportError as error:
        name = error.name or str(error)
        if name.startswith("transformers."):
            raise DependencyError(
                f"backend.name=nxd: neuronx-distributed imports {name}, which the installed transformers lacks",
                hint="pip install 'transformers>=4.57,<5'",
            ) from None
        raise DependencyError(
            f"backend.name=nxd: {name} is not installed",
            hint="use an environment with the Neuron SDK's torch-neuronx and neuronx-distributed; see docs/neuron.md",
        ) from None
    return neuronx_distributed, torch_xla


def _join(world_size: int, *, timeout: timedelta) -> None:
    """Create the default process group of torchrun's processes, or of this single process."""
    if world_size > 1:
        rendezvous.join("xla", timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined] # public, but not in its module's list
        dist.init_process_group("xla", store=store, rank=0, world_size=1)
