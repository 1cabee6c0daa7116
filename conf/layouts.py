"""Rules about the model's shape and its layout: backend, device, split of the model, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conf.environment import CASTING
from conf.schema import Config
from hlatctl.run.errors import ConfigError

#: 256 bytes, the special tokens, and room for a few merges.
_MIN_TRAIN_VOCAB_SIZE = 300


def _model(config: Config) -> Iterator[ConfigError]:
    model = config.model
    if model.hidden_size % model.num_heads:
        yield _indivisible("model.hidden_size", model.hidden_size, "model.num_heads", model.num_heads)
    elif model.head_dim % 2:
        yield ConfigError(
            f"model.hidden_size={model.hidden_size}: gives heads of width {model.head_dim} with "
            f"model.num_heads={model.num_heads}; rotary embeddings need an even width"
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
        # If there are fewer key/value heads than processes, NxD copies each head to several processes.
        copied = key == "num_kv_heads" and config.backend.name == "nxd" and tensor % model.num_kv_heads == 0
        if getattr(model, key) % tensor and not copied:
            yield _indivisible(f"model.{key}", getattr(model, key), "parallel.tensor_parallel_size", tensor)
    if parallel.sequence_parallel and tensor == 1:
        yield ConfigError(
            "parallel.sequence_parallel=true: splits the sequence over tensor-parallel processes, but "
            "parallel.tensor_parallel_size=1",
            hint="set parallel.tensor_parallel_size, or parallel.sequence_parallel=false",
        )
    if parallel.sequence_parallel and config.train.seq_len % tensor:
        yield _indivisible("train.seq_len", config.train.seq_len, "parallel.tensor_parallel_size", tensor)
    if tensor > 1 and model.tie_embeddings:
        yield not_together(
            "model.tie_embeddings=true",
            f"parallel.tensor_parallel_size={tensor}",
            "the embedding would have to be split in two ways at once",
        )


def _backend(config: Config) -> Iterator[ConfigError]:
    name, device, layout = config.backend.name, config.backend.device, config.parallel.data_parallel
    if name == "nxd" and device not in ("neuron", "cpu"):
        yield ConfigError(
            f"backend.device={device}: backend.name=nxd trains on NeuronCores (or, for tests, on a CPU)",
            hint="set backend.device=neuron, or backend=torch_native",
        )
    if layout == "fsdp" and name == "nxd":
        yield ConfigError(
            "parallel.data_parallel=fsdp: backend.name=nxd doesn't support it", hint="set parallel.data_parallel=zero1"
        )


def _sharding(config: Config) -> Iterator[ConfigError]:
    parallel, replicas = config.parallel, config.data_parallel_size
    if parallel.reshard_after_forward == "never" and parallel.data_parallel != "fsdp":
        yield ConfigError(
            f"parallel.reshard_after_forward=never: parallel.data_parallel={parallel.data_parallel} gathers weights "
            "only once per step anyway",
            hint="set parallel.data_parallel=fsdp, or parallel.reshard_after_forward=always",
        )
    if parallel.fsdp_size is None:
        return
    here = f"parallel.fsdp_size={parallel.fsdp_size}"
    if config.backend.name == "nxd" or parallel.data_parallel == "replicate":
        yield ConfigError(
            f"{here}: only for backend.name=torch_native with parallel.data_parallel=fsdp or zero1, but here they are "
            f"{config.backend.name} and {parallel.data_parallel}",
            hint="set parallel.fsdp_size=null, or parallel.data_parallel=fsdp and backend=torch_native",
        )
    elif replicas % parallel.fsdp_size:
        yield ConfigError(
            f"{here}: the data-parallel size {replicas} is not divisible by it",
            hint=f"use a divisor of {replicas}, such as the number of replicas of a node",
        )


def _pipeline(config: Config) -> Iterator[ConfigError]:
    stages = config.parallel.pipeline_parallel_size
    if stages == 1:
        return
    here = f"parallel.pipeline_parallel_size={stages}"
    if stages > config.model.num_layers:
        yield ConfigError(f"{here}: more stages than model.num_layers={config.model.num_layers}")
    layout = config.parallel.data_parallel
    if layout != "replicate" and config.backend.name == "torch_native":
        yield not_together(here, f"parallel.data_parallel={layout}", "every micro-batch would gather the weights again")
    if config.data.mask_across_documents:
        yield not_together(here, "data.mask_across_documents=true", "later stages don't see the tokens")
    if config.model.tie_embeddings:
        yield not_together(here, "model.tie_embeddings=true", "the first and last stage would share a weight")
    if config.grad_accum_steps < stages:
        yield ConfigError(
            f"{here}: needs at least {stages} micro-batches per step, but there are {config.grad_accum_steps} "
            f"(train.global_batch_size={config.train.global_batch_size} / data-parallel size "
            f"{config.data_parallel_size} / micro batch {config.micro_batch_size})",
            hint="set a smaller train.micro_batch_size",
        )


def _nxd(config: Config) -> Iterator[ConfigError]:
    """Settings that NeuronX Distributed does not support."""
    if config.backend.name != "nxd":
        return
    here = "backend.name=nxd"
    if config.precision.name == "mixed" and config.parallel.data_parallel != "zero1":
        yield ConfigError(
            f"precision.name=mixed: with {here}, FP32 master weights need parallel.data_parallel=zero1, but "
            f"parallel.data_parallel={config.parallel.data_parallel}",
            hint="set parallel.data_parallel=zero1",
        )
    if config.model.tie_embeddings:
        yield not_together(here, "model.tie_embeddings=true", "embedding and head are separate layers")
    if config.train.z_loss:
        yield not_together(here, f"train.z_loss={config.train.z_loss:g}", "its cross-entropy has no such term")
    if config.train.on_nonfinite == "skip":
        yield ConfigError(
            f"train.on_nonfinite=skip: with {here}, the update happens before the loss is known",
            hint="set train.on_nonfinite=rollback",
        )
    for name in CASTING:
        value = config.backend.env.get(name)
        if value is not None and str(value) != "0":
            yield ConfigError(
                f"backend.env.{name}={value}: would change number formats independently of precision.name="
                f"{config.precision.name}",
                hint=f"backend.env.{name}=null selects number formats by precision.name alone",
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


def not_together(one: str, other: str, why: str) -> ConfigError:
    """Return the error for two settings that can't be combined, with the reason."""
    return ConfigError(f"{one} and {other}: can't be combined; {why}", hint="change one of them")


def _indivisible(key: str, value: int, other_key: str, other: int, *, hint: str = "") -> ConfigError:
    return ConfigError(
        f"{key}={value}: not divisible by {other_key}={other}", hint=hint or f"use a multiple of {other}"
    )


#: Each yields an error for every rule that the configuration breaks.
RULES: tuple[Callable[[Config], Iterator[ConfigError]], ...] = (
    _model,
    _backend,
    _nxd,
    _parallel,
    _sharding,
    _batches,
    _pipeline,
)
