"""The layout of the processes, and how it divides a model: pipeline stages, slices, replicas, shards, gradient sums.

Ranks are ordered by pipeline stage, replica and tensor-parallel rank. The last changes fastest, because tensor-parallel
processes communicate most.

``OverlappedSum`` sums gradients over replicas while the backward pass is still running. The optimizer's gradient buffer
is divided into buckets. A bucket is exchanged once the step's last backward pass has filled it, so communication
overlaps with computation (PyTorch DDP, arXiv 2006.15704, section 3.2.3).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from conf.schema import Config
from conf.sizes import process_layers
from trainer.model.decoder import Llama, is_shared_by_heads, slice_dim
from trainer.model.loss import cross_entropy
from trainer.model.precision import Precision
from trainer.optim.adamw import AdamW, ParameterShard
from trainer.parallel.tensor import SharedHeads, TensorParallel


@dataclass(frozen=True, kw_only=True)
class Layout:
    """This process's place in the layout.

    Args:
        mesh: ``pp`` x ``tp`` x ``dp``; None for a single process. With hybrid sharding ``dp`` has the processes that
            share a copy of the parameters, and ``replicate``, before it, those with the same shard.
        pp_rank: this process's stage in the pipeline.
        dp_rank: which share of the batch this process trains on.
        tp: the tensor-parallel group, if it has several processes.
        shards_parameters: FSDP2 shards parameters and moments, and gradients between steps, over ``dp``.
        heads: which heads this process has, if several processes share a key/value head.
    """

    config: Config
    mesh: DeviceMesh | None = None
    pp_rank: int = 0
    dp_rank: int = 0
    shards_parameters: bool = False
    tp: TensorParallel | None = None
    heads: SharedHeads | None = None

    @property
    def is_replica_leader(self) -> bool:
        """Whether this is the first of the processes that make up one replica."""
        return self.pp_rank == 0 and (self.tp is None or self.tp.rank == 0)

    def data_ranks(self, rank: int) -> list[int]:
        """Return the ranks of this process's replica and node that need tokens; the first reads them for all.

        The first pipeline stage needs the inputs, the last one the targets, and all stages need the inputs for masks
        within documents. A node's ranks are consecutive.
        """
        if self.mesh is None:
            return [rank]
        stages = slice(None) if self.config.data.mask_across_documents else [0, -1]
        needing = self.mesh.mesh.flatten(2)[stages, :, self.dp_rank].flatten().tolist()
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return [other for other in dict.fromkeys(needing) if other // per_node == rank // per_node]

    @property
    def layers(self) -> list[int]:
        """The layers of this process."""
        return process_layers(self.config, self.pp_rank)


def make_layout(config: Config, device_type: str, world_size: int) -> Layout:
    """Return this process's layout. The process group must exist."""
    if world_size == 1:
        return Layout(config=config)
    parallel, replicas = config.parallel, config.data_parallel_size
    names: tuple[str, ...] = ("pp", "tp", "dp")
    data_sizes: tuple[int, ...] = (replicas,)
    if parallel.fsdp_size is not None and parallel.fsdp_size < replicas:
        names, data_sizes = ("pp", "tp", "replicate", "dp"), (replicas // parallel.fsdp_size, parallel.fsdp_size)
    tensor = parallel.tensor_parallel_size
    # FSDP shards slices, so `tp` comes before `dp` in the mesh, unlike in the ranks.
    ranks = torch.arange(world_size).view(parallel.pipeline_parallel_size, replicas, tensor).transpose(1, 2)
    mesh = DeviceMesh(device_type, ranks.reshape(*ranks.shape[:2], *data_sizes), mesh_dim_names=names)
    tp = None
    if tensor > 1:
        tp = TensorParallel(mesh["tp"].get_group(), mesh.get_local_rank("tp"), tensor, parallel.sequence_parallel)
    return Layout(
        config=config,
        mesh=mesh,
        pp_rank=mesh.get_local_rank("pp"),
        dp_rank=dist.get_rank() // tensor % replicas,
        shards_parameters=parallel.data_parallel != "replicate" and replicas > 1,
        tp=tp,
    )


def prepare(model: Llama, layout: Layout, precision: Precision, *, compile_backend: str | None) -> None:
    """Set up recomputation, compilation and sharding of a model on the meta device.

    Without torch.compile's backend nothing is compiled.
    """
    if compile_backend == "inductor":
        _keep_to_own_cache()
    if compile_backend is not None:
        _let_layers_add_numbers()
    checkpointing = layout.config.parallel.activation_checkpointing
    for layer in model.blocks():
        layer.recompute = checkpointing == "full"
        layer.attention.recompute_core = checkpointing == "selective"
        if compile_backend is not None:
            # Compile only the function: hooks of the module stay outside, and equal layers share a graph.
            layer.forward = torch.compile(  # type: ignore[method-assign]
                layer.forward, fullgraph=True, dynamic=False, backend=compile_backend
            )
    if layout.shards_parameters:
        _shard(model, layout, precision)


def _shard(model: Llama, layout: Layout, precision: Precision) -> None:
    """Make FSDP2 shard parameters, and exchange weights and gradients while other layers are computed."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    assert layout.mesh is not None
    parallel = layout.config.parallel
    is_hybrid = "replicate" in (layout.mesh.mesh_dim_names or ())
    mesh = layout.mesh["replicate", "dp"] if is_hybrid else layout.mesh["dp"]
    # A layer's inputs have their formats: activations that of the computation, and rotary tables FP32.
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    again = parallel.data_parallel == "fsdp" and parallel.reshard_after_forward == "always"

    def shard(module: nn.Module | list[nn.Module], *, again: bool) -> FSDPModule:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        unit = module[0] if isinstance(module, list) else module
        assert isinstance(unit, FSDPModule)
        return unit

    units = [shard(layer, again=again) for layer in model.blocks()]
    if model.embedding is not None and not layout.config.model.tie_embeddings:
        embedding = shard(model.embedding, again=again)
        # Its gradient needs only the ids. PyTorch would prefetch for it the end of the previous micro-batch.
        embedding.set_unshard_in_backward(False)
        embedding.set_modules_to_backward_prefetch([embedding])
        embedding.set_modules_to_forward_prefetch(units[:1])
    if model.norm is not None and model.head is not None:
        # As in torchtitan (distributed/fsdp.py). The loss follows, so the weights stay.
        units.append(shard([model.norm, model.head], again=False))
    # What is left, tied embeddings and the norm, is needed at both ends of the model.
    shard(model, again=False)
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


def before_micro_batch(model: Llama, layout: Layout, *, is_last: bool) -> None:
    """Tell FSDP2 what to exchange with a micro-batch of a step.

    Gradients are summed over copies of the shards only in the last one, and with ``zero1`` also over the shards. Where
    weights are kept after the forward pass, they are kept for the next micro-batch too.
    """
    if not layout.shards_parameters:
        return
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(model, FSDPModule)
    parallel = layout.config.parallel
    is_zero1 = parallel.data_parallel == "zero1"
    model.set_is_last_backward(is_last)
    model.set_requires_gradient_sync(is_last or not is_zero1)
    model.set_requires_all_reduce(is_last)
    model.set_reshard_after_backward(is_last or not (is_zero1 or parallel.reshard_after_forward == "never"))


def _let_layers_add_numbers() -> None:
    """Let compiled layers that are recomputed add to ``StepNumbers``; PyTorch 2.9 may refuse to compile such layers."""
    from torch._dynamo import config

    if hasattr(config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


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
    axes = (layout.mesh.mesh_dim_names or ())[1:]  # without the pipeline's stages
    for name, parameter in named:
        dim = slice_dim(name) if layout.tp else None
        is_sharded = dict.fromkeys(axes, False) | {"tp": dim is not None, "dp": layout.shards_parameters}
        replicated_over = frozenset(axis for axis in is_sharded if not is_sharded[axis])
        replication = math.prod(layout.mesh[axis].size() for axis in replicated_over)
        # With sequence parallelism each process computes the gradient from its slice of the sequence only, and the
        # gradient of a norm that all heads share from its own heads only.
        partial = dim is None and layout.tp is not None and (layout.tp.sequence or is_shared_by_heads(name))
        shards[name] = ParameterShard(
            parameter=parameter,
            replication=replication,
            replicated_over=replicated_over,
            mesh=layout.mesh[axes],
            slice_dim=dim,
            sharded=layout.shards_parameters,
            partial_gradient=partial,
            shard_spec=layout.heads.shard_spec(name) if layout.heads else None,
        )
    return shards


def loss_of(model: Llama, hidden: Tensor, targets: Tensor, layout: Layout) -> Tensor:
    """Return the mean loss of this process's tokens, which is equal on all tensor-parallel ranks.

    The last pipeline stage has the hidden states. ``targets`` are the next ids of whole sequences (batch, seq).
    """
    z_loss, weight = layout.config.train.z_loss, model.output_weight
    if layout.tp is None:
        return cross_entropy(hidden, weight, targets, z_loss=z_loss)
    # Each process computes the gradient from its share of the vocabulary; `enter` sums them in the backward pass.
    return cross_entropy(layout.tp.enter(hidden), weight, targets, z_loss=z_loss, group=layout.tp.group)


#: Minimum gradients of a bucket: 160 MB in FP32, which uses a network well (Megatron-LM's default).
BUCKET_ENTRIES = 40_000_000


@dataclass
class _Bucket:
    """A range of the buffer, and how many of its gradients are not complete yet in this step."""

    values: Tensor
    names: set[str]
    missing: set[str] = field(default_factory=set)
    work: dist.Work | None = None


class OverlappedSum:
    """Sums the gradients of an optimizer of whole parameters over the replicas, which all have them.

    A step has ``passes`` backward passes.
    """

    def __init__(self, optimizer: AdamW, group: dist.ProcessGroup, passes: int) -> None:
        self._optimizer, self._group, self._passes = optimizer, group, passes
        self._buckets = _buckets(optimizer)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._done: dict[str, int] = {}
        for name, parameter in optimizer.parameters():
            parameter.register_post_accumulate_grad_hook(self._counter(name))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin a step: mark all gradients as incomplete."""
        self._done = dict.fromkeys(self._bucket_of, 0)
        for bucket in self._buckets:
            bucket.missing, bucket.work = set(bucket.names), None

    def finish(self) -> None:
        """Exchange the remaining buckets, such as those with gradients that no hook reported, and wait for all."""
        for bucket in self._buckets:
            self._exchange(bucket)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()

    def _counter(self, name: str) -> Callable[[nn.Parameter], None]:
        def count(_: nn.Parameter) -> None:
            self._done[name] = self._done.get(name, 0) + 1
            if self._done[name] == self._passes:
                bucket = self._bucket_of[name]
                bucket.missing.discard(name)
                if not bucket.missing:
                    self._exchange(bucket)

        return count

    def _exchange(self, bucket: _Bucket) -> None:
        if bucket.work is None:
            bucket.work = dist.all_reduce(bucket.values, group=self._group, async_op=True)


def _buckets(optimizer: AdamW) -> list[_Bucket]:
    """Divide the buffer into buckets. The last bucket comes first, as the backward pass fills it first."""
    buckets: list[_Bucket] = []
    names: set[str] = set()
    stop = start = len(optimizer.gradients)
    for name, _ in reversed(optimizer.parameters()):
        names.add(name)
        start -= optimizer.gradient(name).numel()
        if stop - start >= BUCKET_ENTRIES or start == 0:
            buckets.append(_Bucket(optimizer.gradients[start:stop], names))
            names, stop = set(), start
    return buckets
