"""Rules about pipelines: their stages, their schedule, and what can't be combined with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conf.layouts import not_together
from conf.schema import Config
from hlatctl.run.errors import ConfigError


def _pipeline(config: Config) -> Iterator[ConfigError]:
    stages = config.parallel.pipeline_parallel_size
    if stages == 1:
        return
    here = f"parallel.pipeline_parallel_size={stages}"
    if stages > config.model.num_layers:
        yield ConfigError(
            f"{here}: more stages than model.num_layers={config.model.num_layers}",
            hint=f"use at most {config.model.num_layers} stages",
        )
    if config.data.mask_across_documents and config.backend.name == "nxd":
        yield not_together(
            here,
            "data.mask_across_documents=true",
            "later stages don't see the tokens",
            hint="set data.mask_across_documents=false, or backend=torch_native",
        )
    if config.model.tie_embeddings:
        yield not_together(
            here,
            "model.tie_embeddings=true",
            "the first and last stage would share a weight",
            hint="set model.tie_embeddings=false, or parallel.pipeline_parallel_size=1",
        )
    if config.grad_accum_steps < stages:
        yield ConfigError(
            f"{here}: needs at least {stages} micro-batches per step, but there are {config.grad_accum_steps} "
            f"(train.global_batch_size={config.train.global_batch_size} / data-parallel size "
            f"{config.data_parallel_size} / micro batch {config.micro_batch_size})",
            hint=_more_micro_batches(config, stages),
        )


def _sharded_stages(config: Config) -> Iterator[ConfigError]:
    """FSDP of pipeline stages, which others train with: the plan knows it, this project's loop does not."""
    stages, layout = config.parallel.pipeline_parallel_size, config.parallel.data_parallel
    if stages > 1 and layout != "replicate" and config.backend.name == "torch_native":
        yield not_together(
            f"parallel.pipeline_parallel_size={stages}",
            f"parallel.data_parallel={layout}",
            "backend.name=torch_native would gather the weights again in every micro-batch",
            hint="set parallel.data_parallel=replicate, or parallel.pipeline_parallel_size=1",
        )


def _schedule(config: Config) -> Iterator[ConfigError]:
    """The interleaved schedule of a pipeline."""
    parallel, layers = config.parallel, config.model.num_layers
    if parallel.pipeline_schedule == "1f1b":
        return
    here = f"parallel.pipeline_schedule={parallel.pipeline_schedule}"
    processes, stages = parallel.pipeline_parallel_size, parallel.pipeline_parallel_size * parallel.pipeline_chunks
    if config.backend.name == "nxd" or processes == 1:
        yield ConfigError(
            f"{here}: only for backend.name=torch_native with several pipeline-parallel processes, but here they are "
            f"{config.backend.name} and parallel.pipeline_parallel_size={processes}",
            hint="set parallel.pipeline_schedule=1f1b",
        )
    elif stages > layers:
        yield ConfigError(
            f"{here}: parallel.pipeline_parallel_size={processes} x parallel.pipeline_chunks="
            f"{parallel.pipeline_chunks} are more stages than model.num_layers={layers}",
            hint="set parallel.pipeline_schedule=1f1b, or fewer chunks",
        )
    rounds = max(1, config.grad_accum_steps // processes)
    if config.grad_accum_steps % rounds:
        yield ConfigError(
            f"{here}: the {config.grad_accum_steps} micro-batches of a step can't be divided into {rounds} equal "
            f"rounds of at least parallel.pipeline_parallel_size={processes}",
            hint=_more_micro_batches(config, processes, config.grad_accum_steps),
        )


def _more_micro_batches(config: Config, processes: int, least: int = 1) -> str:
    """Return the change after which a step has a multiple of so many micro-batches, and at least a number of them."""
    replicas, batch = config.data_parallel_size, config.train.global_batch_size
    own = batch // replicas
    fitting = (size for size in range(own, 0, -1) if not own % size and not own // size % processes)
    micro = next((size for size in fitting if own // size >= least), None)
    if micro:
        return f"set train.micro_batch_size={micro}"
    multiple = processes * replicas
    larger = -(-batch // multiple) * multiple
    return f"set train.global_batch_size={larger} train.micro_batch_size=1, or fewer pipeline-parallel processes"


#: Each yields an error for every rule that the configuration breaks.
RULES: tuple[Callable[[Config], Iterator[ConfigError]], ...] = (_pipeline, _schedule)
#: What can be planned, but not trained.
UNSUPPORTED: tuple[Callable[[Config], Iterator[ConfigError]], ...] = (_sharded_stages,)
