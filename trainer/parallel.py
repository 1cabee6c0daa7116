"""The layout of the processes, and the preparation of a model for it: pipeline stages, slices, replicas, shards.

Ranks are ordered by pipeline stage, replica and tensor-parallel rank. The last changes fastest, because
tensor-parallel processes exchange most.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from conf.schema import Config
from conf.sizes import stage_layers
from trainer.collectives import TensorParallel
from trainer.loss import cross_entropy
from trainer.model import Llama, is_shared_by_heads, slice_dim
from trainer.optim import ParameterShard
from trainer.precision import Precision
from trainer.shared_heads import SharedHeads


@dataclass(frozen=True, kw_only=True)
class Layout:
    """This process's place in the layout.

    Args:
        mesh: ``pp`` x ``tp`` x ``dp``; None for a single process.
        pp_rank: pipeline stage.
        dp_rank: replica, or shard of one.
        tp: the tensor-parallel group, if it has several processes.
        heads: which heads this process has, if several processes share a key/value head.
    """

    config: Config
    mesh: DeviceMesh | None = None
    pp_rank: int = 0
    dp_rank: int = 0
    tp: TensorParallel | None = None
    heads: SharedHeads | None = None

    @property
    def is_replica_leader(self) -> bool:
        """Whether this is the first of the processes that make up one replica."""
        return self.pp_rank == 0 and (self.tp is None or self.tp.rank == 0)

    def data_ranks(self, rank: int) -> list[int]:
        """Return the ranks of this process's replica and node that need tokens; the first reads them for all.

        The first pipeline stage needs the inputs, the last one the targets. A node's ranks follow each other.
        """
        if self.mesh is None:
            return [rank]
        ends = self.mesh.mesh[[0, -1], :, self.dp_rank].flatten().tolist()
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return [other for other in dict.fromkeys(ends) if other // per_node == rank // per_node]

    @property
    def fsdp(self) -> bool:
        """Whether parameters, gradients and moments are sharded over the replicas."""
        return self.config.parallel.data_parallel == "fsdp" and self.mesh is not None and self.mesh["dp"].size() > 1

    @property
    def stage_layers(self) -> range:
        """The layers of this pipeline stage."""
        return stage_layers(self.config, self.pp_rank)


def make_layout(config: Config, device_type: str, world_size: int) -> Layout:
    """Return this process's place. The process group must exist."""
    if world_size == 1:
        return Layout(config=config)
    parallel = config.parallel
    sizes = (parallel.pipeline_parallel_size, config.data_parallel_size, parallel.tensor_parallel_size)
    # FSDP shards slices, so `tp` comes before `dp` in the mesh, unlike in the ranks.
    ranks = torch.arange(world_size).view(sizes).transpose(1, 2)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=("pp", "tp", "dp"))
    tp = None
    if parallel.tensor_parallel_size > 1:
        tp = TensorParallel(
            mesh["tp"].get_group(), mesh.get_local_rank("tp"), parallel.tensor_parallel_size, parallel.sequence_parallel
        )
    return Layout(config=config, mesh=mesh, pp_rank=mesh.get_local_rank("pp"), dp_rank=mesh.get_local_rank("dp"), tp=tp)


def prepare(model: Llama, layout: Layout, precision: Precision, *, compile_backend: str | None) -> None:
    """Set up recomputation, compilation and sharding of a model on the meta device.

    Args:
        compile_backend: torch.compile's; None: nothing is compiled.
    """
    if compile_backend == "inductor":
        _keep_to_own_cache()
    checkpointing = layout.config.parallel.activation_checkpointing
    for layer in model.blocks():
        layer.recompute = checkpointing == "full"
        layer.attention.recompute_core = checkpointing == "selective"
        if compile_backend is not None:
            # Compile only the function: hooks of the module stay outside, and equal layers share a graph.
            layer.forward = torch.compile(  # type: ignore[method-assign]
                layer.forward, fullgraph=True, dynamic=False, backend=compile_backend
            )
    if layout.fsdp:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        assert layout.mesh is not None
        policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=torch.float32)
        for module in (*model.blocks(), model):
            fully_shard(module, mesh=layout.mesh["dp"], mp_policy=policy)


def _keep_to_own_cache() -> None:
    """Switch off precompiled headers, whose code ends up in the compiled kernels.

    PyTorch stores them below the folder for temporary files, under a name that any user of the machine can create
    first. PyTorch 2.9 has no environment variable for this.
    """
    from torch._inductor import config

    config.cpp_cache_precompile_headers = False


def parameter_shards(named: Iterable[tuple[str, nn.Parameter]], layout: Layout) -> dict[str, ParameterShard]:
    """Return this process's shards of the parameters, by name."""
    if layout.mesh is None:
        return {name: ParameterShard(parameter=parameter) for name, parameter in named}
    shards = {}
    for name, parameter in named:
        dim = slice_dim(name) if layout.tp else None
        is_sharded = {"tp": dim is not None, "dp": layout.fsdp}
        replicated_over = frozenset(axis for axis in is_sharded if not is_sharded[axis])
        replication = math.prod(layout.mesh[axis].size() for axis in replicated_over)
        # With sequence parallelism each process computes the gradient from its slice of the sequence only, and that of
        # a norm that all heads share from its own heads only.
        partial = dim is None and layout.tp is not None and (layout.tp.sequence or is_shared_by_heads(name))
        shards[name] = ParameterShard(
            parameter=parameter,
            replication=replication,
            replicated_over=replicated_over,
            mesh=layout.mesh["tp", "dp"],
            slice_dim=dim,
            sharded=layout.fsdp,
            partial_gradient=partial,
            shard_spec=layout.heads.shard_spec(name) if layout.heads else None,
        )
    return shards


def loss_of(model: Llama, hidden: Tensor, targets: Tensor, layout: Layout) -> Tensor:
    """Return the mean loss of the last stage's hidden states, which is equal on all tensor-parallel ranks."""
    z_loss, weight = layout.config.train.z_loss, model.output_weight
    if layout.tp is None:
        return cross_entropy(hidden, weight, targets, z_loss=z_loss)
    # Each process computes the gradient from its share of the vocabulary; `enter` sums them in the backward pass.
    return cross_entropy(layout.tp.enter(hidden), weight, targets, z_loss=z_loss, group=layout.tp.group)
