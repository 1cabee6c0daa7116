"""Rules across fields, checked before any machine is touched.

Pure: reads nothing but the configuration and never changes a value. What needs the disk (does the corpus exist?) is a
stage's business.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from conf.amend import batch_numbers
from conf.constraints import violations
from conf.environment import CASTING, SET_ELSEWHERE
from conf.schema import Config
from hlatctl.run.errors import ConfigError

#: Suites whose items the package holds; every other one lists its groups of tasks.
_BUILT_IN_SUITES = ("smoke",)
#: The suites generate up to 96 tokens; what is left must hold a prompt.
_MIN_EVAL_SEQ_LEN = 128
#: 256 bytes, the special tokens, and room for a few merges.
_MIN_TRAIN_VOCAB_SIZE = 300
#: Each keeps a checkpoint and takes an evaluation; more are a slip of the pen.
_MAX_MILESTONES = 1000
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
    violations,
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
    _cluster,
    _sources,
    _skipped,
    _environment,
    _compiler_flags,
)
