"""How a run is executed: what its configuration says, and where other software differs.

Published runs may use features that this project doesn't have. ``Execution.of`` reads a configuration; a published run
replaces some of its fields. Sizes that follow from both are here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conf.schema import Config

Recomputed = Literal["none", "selective", "operators", "budget", "full"]
Fp8Scaling = Literal["rowwise", "tensorwise"]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run is executed. No configuration sets the fields from ``separate_products`` on; other software has them.

    Args:
        context_parallel_size: processes that share each sequence.
        chunks: pipeline stages of each process; more than one is the interleaved schedule (arXiv 2104.04473, section
            2.2.2).
        fsdp_size: processes with the same weights that share one sharded copy; None: all.
        reshards: FSDP frees gathered weights after the forward pass.
        recomputed: what the backward pass computes again. ``operators``: every second product of a layer, and all
            element-wise operations, but not attention (torchtitan's option ``op``).
        memory_budget: with ``budget``, stored share of a layer's activations, from 0 (as ``full``) to 1 (as ``none``).
        fp8: the layers' products run in FP8 with such scales; attention and the head don't.
        gathers_fp8: FSDP gathers the weights of layers in FP8, which needs one scale for all shards (tensorwise).
        separate_products: query, key and value are three products, and gate and up are two.
        asynchronous_tensor_parallel: products overlap the collectives of tensor parallelism.
        flash_attention: scores never leave the chip, and masked blocks are skipped; None: as the backend does.
        recomputes_elementwise: a process keeps only its results of products and of attention; element-wise
            operations are computed, and inputs of products, keys and values gathered, again.
        logit_bytes: memory for each entry of the logits; None: the loss is computed in blocks.
        fp8_experts: with ``fp8``, products of experts run in FP8, too.
        sends_once_per_node: a token is sent once to each node that has experts of it, and copied there (DeepEP,
            HybridEP); otherwise once to each expert.
    """

    context_parallel_size: int = 1
    chunks: int = 1
    fsdp_size: int | None = None
    reshards: bool = True
    recomputed: Recomputed = "none"
    memory_budget: float = 1.0
    fp8: Fp8Scaling | None = None
    gathers_fp8: bool = False
    separate_products: bool = False
    asynchronous_tensor_parallel: bool = False
    flash_attention: bool | None = None
    recomputes_elementwise: bool = False
    logit_bytes: int | None = None
    fp8_experts: bool = False
    sends_once_per_node: bool = False

    @classmethod
    def of(cls, config: Config) -> Execution:
        """Return the execution that a configuration describes."""
        parallel = config.parallel
        return cls(
            context_parallel_size=parallel.context_parallel_size,
            chunks=config.stages_per_process,
            fsdp_size=parallel.fsdp_size,
            reshards=parallel.reshard_after_forward == "always",
            recomputed=parallel.activation_checkpointing,
            memory_budget=parallel.activation_memory_budget,
            fp8=config.precision.fp8_scaling if config.precision.name == "fp8" else None,
            gathers_fp8=config.gathers_fp8,
        )


def replicas(config: Config, execution: Execution) -> int:
    """Return the number of replicas of the model, each with different sequences."""
    parallel = config.parallel
    shared = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * execution.context_parallel_size
    return config.world_size // shared


def reducers(config: Config, execution: Execution) -> int:
    """Return the number of processes whose gradients of the same weights are summed."""
    return replicas(config, execution) * execution.context_parallel_size


def shards(config: Config, execution: Execution) -> int:
    """Return the number of processes that share one copy of moments and master weights, and with FSDP of weights."""
    if config.parallel.data_parallel == "replicate":
        return 1
    count = reducers(config, execution)
    return min(execution.fsdp_size or count, count)


def expert_shards(config: Config, execution: Execution) -> int:
    """Return the same for experts: expert-parallel processes are among those that share the other weights.

    torchtitan's mesh: replicas x tensor-parallel processes = processes that share an expert x expert-parallel ones.
    """
    parallel, sharing = config.parallel, shards(config, execution)
    if parallel.expert_parallel_size == 1:
        return sharing
    return max(1, sharing * parallel.tensor_parallel_size // parallel.expert_parallel_size)


def shards_weights(config: Config, execution: Execution) -> bool:
    """Return whether weights are sharded, too: FSDP does it, and with some backends ZeRO-1."""
    sharded = config.parallel.data_parallel != "replicate" and shards(config, execution) > 1
    return sharded and "shards_weights" in config.backend.kind.traits


def micro_batches(config: Config, execution: Execution) -> int:
    """Return the forward passes of a process in a step."""
    return config.train.global_batch_size // (sequences(config, execution) * replicas(config, execution))


def sequences(config: Config, execution: Execution) -> int:
    """Return the sequences of a micro-batch."""
    return config.train.micro_batch_size or config.train.global_batch_size // replicas(config, execution)


def tokens(config: Config, execution: Execution) -> int:
    """Return one process's tokens of a micro-batch, before tensor parallelism."""
    return sequences(config, execution) * config.train.seq_len // execution.context_parallel_size


def in_flight(config: Config, execution: Execution, stage: int) -> float:
    """Return the number of micro-batches in flight, in activations of the whole stage of a process.

    1F1B: the number of stages from this one to the last (arXiv 2104.04473, section 2.2). With v chunks, the process of
    the first stage has run (v - 1) p + 2 (p - 1) + 1 chunks before the first is freed (section 2.2.2).
    """
    stages, chunks = config.parallel.pipeline_parallel_size, execution.chunks
    behind = stages - stage - 1
    alive = ((chunks - 1) * stages + 2 * behind + 1) / chunks if chunks > 1 else behind + 1.0
    return min(alive, micro_batches(config, execution))
