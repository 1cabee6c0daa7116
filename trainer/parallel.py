"""How a model is cut over processes: tensor and sequence parallel, sharding, recomputation. PyTorch's own means only.

The order of the processes is pipeline stage, replica, tensor-parallel rank, the last fastest: neighbours exchange most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from conf.schema import Config
from trainer.loss import cross_entropy
from trainer.model import Llama
from trainer.optim import Held
from trainer.precision import Precision


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where this process stands.

    Args:
        mesh: ``pp`` x ``dp`` x ``tp``; none for a process that is alone.
        pp_rank: pipeline stage.
        dp_rank: replica, or shard of one.
        tp_rank: slice of each layer.
    """

    config: Config
    mesh: DeviceMesh | None
    pp_rank: int = 0
    dp_rank: int = 0
    tp_rank: int = 0

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The processes that have one layer together, if there are several."""
        return self.mesh["tp"] if self.mesh is not None and self.config.parallel.tensor_parallel_size > 1 else None

    @property
    def fsdp(self) -> bool:
        """Parameters, gradients and moments are sharded over the replicas."""
        return self.config.parallel.data_parallel == "fsdp" and self.config.data_parallel_size > 1

    @property
    def sequence_parallel(self) -> bool:
        """Between the layers' products each tensor-parallel rank has a slice of the sequence."""
        return self.config.parallel.sequence_parallel and self.tp_mesh is not None

    @property
    def stage_layers(self) -> range:
        """The layers of this pipeline stage: as even as can be, earlier stages have the larger shares."""
        stages, layers = self.config.parallel.pipeline_parallel_size, self.config.model.num_layers
        share, extra = divmod(layers, stages)
        start = self.pp_rank * share + min(self.pp_rank, extra)
        return range(start, start + share + (self.pp_rank < extra))


def make_layout(config: Config, device_type: str, world_size: int) -> Layout:
    """Lay the processes out; the process group is up."""
    if world_size == 1:
        return Layout(config=config, mesh=None)
    parallel = config.parallel
    sizes = (parallel.pipeline_parallel_size, config.data_parallel_size, parallel.tensor_parallel_size)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp", "tp"))
    pp, dp, tp = (mesh.get_local_rank(name) for name in ("pp", "dp", "tp"))
    return Layout(config=config, mesh=mesh, pp_rank=pp, dp_rank=dp, tp_rank=tp)


def cut(model: Llama, layout: Layout, precision: Precision, *, compiles: bool) -> None:
    """Cut a model that has no memory yet (on the meta device) and prepare its layers."""
    if layout.tp_mesh is not None:
        _tensor_parallel(model, layout.tp_mesh, layout.sequence_parallel)
    for layer in model.blocks():
        layer.recompute = layout.config.parallel.activation_checkpointing == "full"
        layer.attention.recompute_core = layout.config.parallel.activation_checkpointing == "selective"
        if compiles:
            # The inner function, so that hooks of the modules around it stay as they are; equal layers share a graph.
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
    if layout.fsdp:
        assert layout.mesh is not None
        policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=torch.float32)
        for module in (*model.blocks(), model):
            fully_shard(module, mesh=layout.mesh["dp"], mp_policy=policy)


def held_parameters(model: nn.Module, layout: Layout) -> dict[str, Held]:
    """The parameters of this process, and how many processes have the same values."""
    held = {}
    for name, parameter in model.named_parameters():
        axes = set() if layout.mesh is None else {"dp", "tp"}
        if isinstance(parameter, DTensor):
            placed = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
            axes -= {axis for axis, placement in placed if not placement.is_replicate()}
        holders = math.prod(layout.mesh[axis].size() for axis in axes) if layout.mesh is not None else 1
        held[name] = Held(parameter, holders, frozenset(axes), owns_gradient=layout.fsdp)
    return held


def loss_of(model: Llama, hidden: Tensor, targets: Tensor, layout: Layout, *, z_loss: float) -> Tensor:
    """The mean loss of the last stage's hidden states; the same on every tensor-parallel rank."""
    weight = model.output_weight
    if layout.tp_mesh is None:
        return cross_entropy(hidden, weight, targets, z_loss=z_loss)
    assert isinstance(weight, DTensor)
    here = Shard(1) if layout.sequence_parallel else Replicate()
    whole = DTensor.from_local(hidden, layout.tp_mesh, [here], run_check=False).redistribute(placements=[Replicate()])
    # Each rank's share of the vocabulary causes a part of the gradient: the parts are summed on the way back.
    hidden = whole.to_local(grad_placements=[Partial()])
    return cross_entropy(hidden, weight.to_local(), targets, z_loss=z_loss, group=layout.tp_mesh.get_group())


def _tensor_parallel(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Cut the layers by heads and by rows of the MLP (Megatron-LM, arXiv 1909.08053; sequence: arXiv 2205.05198)."""
    between = Shard(1) if sequence_parallel else Replicate()
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(),
    }
    layer: dict[str, ParallelStyle] = {
        "attention.qkv": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=between),
        "mlp.gate_up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        ends["norm"] = SequenceParallel(use_local_output=True)
        for norm in ("attention_norm", "mlp_norm"):
            layer[norm] = SequenceParallel(use_local_output=True)
        layer["attention"] = PrepareModuleInput(
            input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        )
        layer["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    held = dict(model.named_children())
    parallelize_module(model, mesh, {name: style for name, style in ends.items() if held.get(name) is not None})
    for block in model.blocks():
        parallelize_module(block, mesh, layer)
