"""torchtitan's ``Trainer.Config`` from a configuration, with the settings of ``backend.torchtitan``."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import TYPE_CHECKING, Any

from conf.devices import DEVICES
from conf.load import dotted_keys
from conf.parametrization import rate_factor
from conf.schema import Config
from conf.sizes import stage_layers
from conf.training_rules import learning_rate
from hlatctl.run.errors import ConfigError, suggest, unset
from trainer import rendezvous
from trainer.torchtitan.models import model_spec
from trainer.torchtitan.torch_2_13 import SPMD_BACKEND

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

#: torchtitan's settings that keys of this project set: passing them through would give one value two homes.
_OURS = {
    "model_spec": "model",
    "hf_assets_path": "tokenizer.path",
    "dump_folder": "runs_dir",
    "tokenizer": "tokenizer",
    "dataloader": "data.inputs",
    "validator": "eval",
    "training.local_batch_size": "train.micro_batch_size",
    "training.global_batch_size": "train.global_batch_size",
    "training.seq_len": "train.seq_len",
    "training.max_norm": "optimizer.max_grad_norm",
    "training.steps": "train.max_steps",
    "training.dtype": "precision",
    "training.mixed_precision_param": "precision",
    "optimizer": "optimizer",
    "lr_scheduler": "optimizer.schedule",
    "parallelism.data_parallel_replicate_degree": "parallel.fsdp_size",
    "parallelism.data_parallel_shard_degree": "parallel.fsdp_size",
    "parallelism.fsdp_reshard_after_forward": "parallel.reshard_after_forward",
    "parallelism.tensor_parallel_degree": "parallel.tensor_parallel_size",
    "parallelism.enable_sequence_parallel": "parallel.sequence_parallel",
    "parallelism.pipeline_parallel_degree": "parallel.pipeline_parallel_size",
    "parallelism.pipeline_parallel_microbatch_size": "train.micro_batch_size",
    "parallelism.pipeline_parallel_schedule": "parallel.pipeline_schedule",
    "parallelism.context_parallel_degree": "parallel.context_parallel_size",
    "parallelism.expert_parallel_degree": "parallel.expert_parallel_size",
    "checkpoint": "checkpoint",
    "activation_checkpoint": "parallel.activation_checkpointing",
    "compile.enable": "backend.compile",
    "profiler": "`hlatctl profile`",
    "metrics.enable_tensorboard": "tracking.mirrors",
    "metrics.enable_wandb": "tracking.mirrors",
    "debug.seed": "seed",
}
#: Why some of them have no other owner.
_WHY = {
    "dataloader": "; with torchtitan's loaders, a run could continue only with as many processes as before, and no "
    "batch could be looked up or skipped"
}
#: Settings that would have no effect: the journal takes the metrics, and the processes are connected before.
_WITHOUT_EFFECT = (
    "comm.init_timeout_seconds",
    "comm.mode",
    "comm.save_traces_file_prefix",
    "comm.save_traces_folder",
    "comm.trace_buf_size",
    "metrics.disable_color_printing",
    "metrics.save_for_all_ranks",
    "metrics.save_tb_folder",
    "training.enable_cpu_offload",  # needs processes that are connected by host and device
)


#: torchtitan's names of the matrices of a dense model's layers, and of its output projection.
_MATRICES = r"(attention\..*w[qkvo]|feed_forward\.w[123]|lm_head)\.weight$"


def trainer_config(config: Config) -> Trainer.Config:
    """Return torchtitan's configuration, without the parts that need a run (``trainer.torchtitan.training``).

    Raises:
        ConfigError: torchtitan lacks the model, or refuses a setting.
        DependencyError: a package is missing.
    """
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    train, spec = config.train, model_spec(config)
    stages = config.parallel.pipeline_parallel_size
    pieces = config.micro_batch_size
    vocab_size = getattr(spec.model, "vocab_size", config.model.vocab_size)
    titan = Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab_size)),
        optimizer=_optimizer(config),
        training=TrainingConfig(
            # A pipeline takes all micro-batches of a step at once.
            local_batch_size=train.global_batch_size // config.data_parallel_size if stages > 1 else pieces,
            global_batch_size=train.global_batch_size,
            seq_len=train.seq_len,
            max_norm=config.optimizer.max_grad_norm,
            steps=config.total_steps,
            dtype="bfloat16" if config.precision.name == "bf16" else "float32",
            mixed_precision_param="float32" if config.precision.name == "fp32" else "bfloat16",
            disable_cuda_graphs=not _uses_cuda_graphs(config),
        ),
        parallelism=ParallelismConfig(**parallelism(config)),
        activation_checkpoint=_recomputation(config),
        compile=CompileConfig(enable=config.backend.compile),
        # After the first step; trainer.torchtitan.process sets the first one's.
        comm=CommConfig(train_timeout_seconds=int(rendezvous.timeout(config, 0.0).total_seconds())),
        debug=DebugConfig(seed=config.seed),
    )
    titan.metrics.log_freq = 1
    titan.validator.enable = False  # this project evaluates checkpoints
    _pass_through(titan, config.backend.torchtitan)
    _check(titan, config)
    return titan


def _uses_cuda_graphs(config: Config) -> bool:
    """Whether torchtitan captures forward and backward pass: not with pipelines, nor where experts are chosen.

    A captured graph runs no hooks, by which ``trainer.step.corruption`` sees the layers' outputs.
    """
    dense = config.model.num_experts == 0 and config.model.module is None
    if config.recovery.corruption_check_steps:
        return False
    return DEVICES[config.backend.device].captures_graphs and dense and config.parallel.pipeline_parallel_size == 1


def parallelism(config: Config) -> dict[str, Any]:
    """Return the sizes of torchtitan's ``ParallelismConfig``."""
    parallel = config.parallel
    context, replicas = parallel.context_parallel_size, config.data_parallel_size
    shard = (parallel.fsdp_size or config.weight_replicas) // context if parallel.data_parallel == "fsdp" else 1
    schedule = {"1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}[parallel.pipeline_schedule]
    piped = parallel.pipeline_parallel_size > 1
    pipeline: dict[str, Any] = {
        "module_fqns_per_model_part": _stages(config),
        "pipeline_parallel_microbatch_size": config.micro_batch_size,
    }
    # Freed weights would be gathered again for every micro-batch of a stage.
    reshard = "never" if piped and parallel.reshard_after_forward == "always" else parallel.reshard_after_forward
    return {
        "data_parallel_replicate_degree": replicas // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": reshard,
        "tensor_parallel_degree": parallel.tensor_parallel_size,
        "enable_sequence_parallel": parallel.sequence_parallel,
        "context_parallel_degree": context,
        "expert_parallel_degree": parallel.expert_parallel_size,
        "pipeline_parallel_degree": parallel.pipeline_parallel_size,
        "pipeline_parallel_schedule": schedule,
        "spmd_backend": SPMD_BACKEND,
        **(pipeline if piped else {}),
    }


def _stages(config: Config) -> list[list[str]] | None:
    """Return the modules of each pipeline stage, split as the planner splits them; None: torchtitan chooses."""
    if config.model.module is not None:
        return None
    count = config.parallel.pipeline_parallel_size * config.stages_per_process
    stages = [[f"layers.{layer}" for layer in stage_layers(config, stage)] for stage in range(count)]
    return [["tok_embeddings", *stages[0]], *stages[1:-1], [*stages[-1], "norm", "lm_head"]]


def _recomputation(config: Config) -> Any:
    from torchtitan.distributed import activation_checkpoint as recompute

    level = config.parallel.activation_checkpointing
    if level == "budget":
        return recompute.MemoryBudgetAC.Config(memory_budget=config.parallel.activation_memory_budget)
    return {"none": None, "operators": recompute.SelectiveAC.Config(), "full": recompute.FullAC.Config()}[level]


def _optimizer(config: Config) -> Any:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    settings, model = config.optimizer, config.model
    options = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    #: Factor of the learning rate, and decay, by a pattern of names; the first one that matches counts.
    groups = {".*": (1.0, settings.weight_decay)}
    if model.mup_base_width is not None:  # dense, so these are all matrices
        groups = {_MATRICES: (rate_factor("head.weight", model), settings.weight_decay), **groups}
    if settings.decay == "all_but_norms":
        groups = {r"norm\.weight$": (1.0, 0.0), **groups}
    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=pattern,
                optimizer_name="AdamW",
                # PyTorch multiplies the decay by the group's learning rate.
                optimizer_kwargs={"lr": settings.lr * factor, **options, "weight_decay": decay / factor},
            )
            for pattern, (factor, decay) in groups.items()
        ],
        implementation="fused" if DEVICES[config.backend.device].fused_adamw else "foreach",
    )


def share_of_peak(config: Config, updates: int) -> float:
    """Return the learning rate of the update after ``updates`` others, as a share of the peak."""
    return learning_rate(updates + 1, config) / config.optimizer.lr


def _pass_through(titan: Trainer.Config, settings: dict[str, Any]) -> None:
    """Set torchtitan's settings. Raises a ConfigError if it has no such setting, or the value has another type."""
    for path, value in dotted_keys(settings).items():
        here = f"backend.torchtitan.{path}"
        for owned, ours in _OURS.items():
            if path == owned or path.startswith(f"{owned}."):
                why = _WHY.get(owned, "")
                raise ConfigError(f"{here}={value}: this is set by {ours}{why}", hint=f"set {ours}, and {unset(here)}")
        if path in _WITHOUT_EFFECT:
            raise ConfigError(f"{here}={value}: hlatctl doesn't support it", hint=unset(here))
        *sections, name = path.split(".")
        section: Any = titan
        for depth, step in enumerate([*sections, name]):
            fields = [field.name for field in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else []
            if step not in fields:
                above = ".".join(["backend.torchtitan", *sections[:depth]])
                raise ConfigError(f"{above}.{step}={value}: torchtitan has no such setting", hint=suggest(step, fields))
            if depth < len(sections):
                section = getattr(section, step)
        expected = typing.get_type_hints(type(section))[name]
        if not _fits(value, expected):
            raise ConfigError(f"{here}={value}: must be {_words(expected)}")
        setattr(section, name, float(value) if expected is float else value)


def _words(expected: Any) -> str:
    if typing.get_origin(expected) is typing.Literal:
        return f"one of: {', '.join(map(str, typing.get_args(expected)))}"
    return getattr(expected, "__name__", str(expected)).replace("typing.", "")


def _fits(value: Any, expected: Any) -> bool:
    """Return whether a value of YAML has an annotated type."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is typing.Annotated:
        return _fits(value, arguments[0])
    if origin is typing.Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin in (list, tuple):
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if expected is None or expected is type(None):
        return value is None
    if expected in (int, float):
        return isinstance(value, (int, expected)) and not isinstance(value, bool)
    return isinstance(expected, type) and isinstance(value, expected)


def _check(titan: Trainer.Config, config: Config) -> None:
    """Let every part of torchtitan's configuration check itself. Raises a ConfigError with its message."""
    if titan.metrics.log_freq < 1:
        here = "backend.torchtitan.metrics.log_freq"
        raise ConfigError(f"{here}={titan.metrics.log_freq}: must be at least 1", hint=unset(here))
    every = config.recovery.corruption_check_steps
    if every and not titan.training.disable_cuda_graphs:
        here = "backend.torchtitan.training.disable_cuda_graphs"
        raise ConfigError(
            f"{here}=false: a CUDA graph hides the layers' outputs from recovery.corruption_check_steps={every}",
            hint=unset(here),
        )
    try:
        for field in dataclasses.fields(titan):
            section = getattr(titan, field.name)
            if field.name != "model_spec" and dataclasses.is_dataclass(section):
                dataclasses.replace(section)  # type: ignore[type-var]
        dataclasses.replace(titan)
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"backend.name=torchtitan: torchtitan refuses this configuration: {error}") from None
