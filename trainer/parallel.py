"""How the processes are laid out and a model is prepared for them: slices of layers, stages, replicas, shards.

The order of the processes is pipeline stage, replica, tensor-parallel rank, the last fastest: neighbours exchange most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from conf.schema import Config
from conf.sizes import stage_layers
from trainer.collectives import TensorParallel
from trainer.loss import cross_entropy
from trainer.model import Llama, cut_dim
from trainer.optim import ParameterShard
from trainer.precision import Precision
from trainer.shared_heads import SharedHeads


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where this process stands.

    Args:
        config: of the run.
        mesh: ``pp`` x ``tp`` x ``dp``; none for a process that is alone.
        pp_rank: pipeline stage.
        dp_rank: replica, or shard of one.
        tp: the processes that have each layer together, if there are several.
        heads: which key/value head this one has, if several of them have copies of one.
    """

    config: Config
    mesh: DeviceMesh | None = None
    pp_rank: int = 0
    dp_rank: int = 0
    tp: TensorParallel | None = None
    heads: SharedHeads | None = None

    @property
    def speaks_for_replica(self) -> bool:
        """Whether this is the first of the processes that have one replica together."""
        return self.pp_rank == 0 and (self.tp is None or self.tp.rank == 0)

    @property
    def fsdp(self) -> bool:
        """Parameters, gradients and moments are sharded over the replicas."""
        return self.config.parallel.data_parallel == "fsdp" and self.mesh is not None and self.mesh["dp"].size() > 1

    @property
    def stage_layers(self) -> range:
        """The layers of this pipeline stage."""
        return stage_layers(self.config, self.pp_rank)


def make_layout(config: Config, device_type: str, world_size: int) -> Layout:
    """Lay the processes out; the process group is up."""
    if world_size == 1:
        return Layout(config=config)
    parallel = config.parallel
    sizes = (parallel.pipeline_parallel_size, config.data_parallel_size, parallel.tensor_parallel_size)
    # Shards of a slice lie within it, so the mesh's axes are in the order of cutting, not in that of the ranks.
    ranks = torch.arange(world_size).view(sizes).transpose(1, 2)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=("pp", "tp", "dp"))
    tp = None
    if parallel.tensor_parallel_size > 1:
        tp = TensorParallel(
            mesh["tp"].get_group(), mesh.get_local_rank("tp"), parallel.tensor_parallel_size, parallel.sequence_parallel
        )
    return Layout(config=config, mesh=mesh, pp_rank=mesh.get_local_rank("pp"), dp_rank=mesh.get_local_rank("dp"), tp=tp)


def prepare(model: Llama, layout: Layout, precision: Precision, *, compile_backend: str | None) -> None:
    """Make a model that has no memory yet (on the meta device) recompute, compile and shard as it is asked to.

    Args:
        compile_backend: torch.compile's; none: nothing is compiled.
    """
    if compile_backend == "inductor":
        _keep_to_own_cache()
    checkpointing = layout.config.parallel.activation_checkpointing
    for layer in model.blocks():
        layer.recompute = checkpointing == "full"
        layer.attention.recompute_core = checkpointing == "selective"
        if compile_backend is not None:
            # The inner function, so that hooks of the modules around it stay as they are; equal layers share a graph.
            layer.forward = torch.compile(  # type: ignore[method-assign]
                layer.forward, fullgraph=True, dynamic=False, backend=compile_backend
            )
    if layout.fsdp:
        assert layout.mesh is not None
        policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=torch.float32)
        for module in (*model.blocks(), model):
            fully_shard(module, mesh=layout.mesh["dp"], mp_policy=policy)


def _keep_to_own_cache() -> None:
    """Switch precompiled headers off: what is compiled with them contains their code.

    They lie below the folder for temporary files, under a name that any user of the machine can take first, wherever
    the compiler's cache is. PyTorch 2.9 has no environment variable for this.
    """
    from torch._inductor import config

    config.cpp_cache_precompile_headers = False


def held_parameters(named: Iterable[tuple[str, nn.Parameter]], layout: Layout) -> dict[str, ParameterShard]:
    """The parameters of this process: how they are cut, and how many processes have the same values."""
    if layout.mesh is None:
        return {name: ParameterShard(parameter=parameter) for name, parameter in named}
    held = {}
    for name, parameter in named:
        dim = cut_dim(name) if layout.tp else None
        cuts = {axis for axis, is_cut in (("tp", dim is not None), ("dp", layout.fsdp)) if is_cut}
        copied_over = frozenset({"tp", "dp"} - cuts)
        holders = math.prod(layout.mesh[axis].size() for axis in copied_over)
        # Each process has seen a slice of the sequence only, so what it knows of the gradient is a part.
        partial = dim is None and layout.tp is not None and layout.tp.sequence
        held[name] = ParameterShard(
            parameter=parameter,
            holders=holders,
            copied_over=copied_over,
            mesh=layout.mesh["tp", "dp"],
            slice_dim=dim,
            sharded=layout.fsdp,
            partial_gradient=partial,
            cut=layout.heads.cut(name) if layout.heads else None,
        )
    return held


def loss_of(model: Llama, hidden: Tensor, targets: Tensor, layout: Layout) -> Tensor:
    """The mean loss of the last stage's hidden states; the same on every tensor-parallel rank."""
    z_loss, weight = layout.config.train.z_loss, model.output_weight
    if layout.tp is None:
        return cross_entropy(hidden, weight, targets, z_loss=z_loss)
    # Each process's share of the vocabulary causes a part of the gradient: `enter` adds the parts on the way back.
    return cross_entropy(layout.tp.enter(hidden), weight, targets, z_loss=z_loss, group=layout.tp.group)
