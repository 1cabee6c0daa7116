"""Training: optimizer, batches, checkpoints, restarts, and the backend that computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from conf.constraints import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range
from conf.devices import DeviceName
from conf.registries import BACKENDS, OPTIMIZERS, SCHEDULES, BackendKind


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule: linear warm-up to the peak, then decay to `min_lr_fraction` of it."""

    name: Annotated[str, OPTIMIZERS] = "adamw"
    """`muon`: Muon for the matrices of layers, AdamW for embedding, head and norms."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate. Muon scales its updates to the size of AdamW's, so one rate suits both."""
    min_lr_fraction: Annotated[float, Range(ge=0, le=1)] = 0.1
    """Final learning rate as a share of the peak."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    momentum: Fraction = 0.95
    """Muon: decay of the average of gradients."""
    nesterov: bool = True
    """Muon: orthogonalize the average as it would be after the same gradient once more."""
    newton_schulz_steps: Annotated[int, Range(ge=1, le=20)] = 5
    """Muon: iterations that orthogonalize a matrix."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    decay: Literal["all", "all_but_norms"] = "all"
    """Which weights decay: `all` (including norms, like HLAT) or `all_but_norms`."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global L2 norm."""
    ema_decay: Fraction | None = None
    """Keep an exponential moving average of the weights, in FP32, with this decay per update (such as 0.999). It is in
    every checkpoint; `eval.weights=ema` evaluates it. None: keep no average."""
    warmup_steps: NonNegativeInt = 2000
    """Optimizer steps until the peak is reached."""
    warmup_tokens: NonNegativeInt | None = None
    """Length of the warm-up in tokens, instead of `warmup_steps`."""
    schedule: Annotated[str, SCHEDULES] = "cosine"
    """Shape after the warm-up. `wsd`: warm-up, stable, decay."""
    wsd_decay_fraction: Fraction = 0.1
    """Share of the run's steps, at its end, over which `wsd` decays linearly."""


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """A stage of a run. It keeps the values of the stage before it, except those that it sets."""

    name: str = ""
    """Name, such as midtraining."""
    tokens: PositiveInt = 1
    """Tokens of the stage; it ends with the first step that reaches this number."""
    set: dict[str, Any] = field(default_factory=dict)
    """Values from the stage's first step on, as `SECTION.KEY: VALUE` or nested."""
    continues_schedule: bool | None = None
    """Continue the learning rate's schedule over this stage too; none: if `set` has no key of it."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the training and size of its batches."""

    init_from: str | None = None
    """Folder of the initial weights: written by `hlatctl checkpoint import`, or a run's checkpoint; none: random."""
    tokens: PositiveInt = 2_500_000
    """Tokens to train on; the run ends with the first step that reaches this number."""
    max_steps: PositiveInt | None = None
    """Ends the run if reached before `tokens`."""
    stages: list[StageConfig] = field(default_factory=list)
    """Stages that follow each other in one run, instead of `tokens`:
    `[{name: a, tokens: 10B}, {name: b, tokens: 1B, set: {optimizer.lr: 1e-4}}]` (docs/howto/stages.md)."""
    global_batch_size: PositiveInt = 8
    """Sequences per optimizer step over all processes."""
    micro_batch_size: PositiveInt | None = None
    """Sequences per process and forward pass; none: the process's whole share of the batch."""
    seq_len: PositiveInt = 512
    """Tokens per sequence."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log of the softmax denominator, added to the loss for the gradients only."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """If loss or gradients are not finite: `stop`, `skip` the update, or `rollback` to the newest valid checkpoint and
    skip the batch."""
    max_nonfinite_steps: PositiveInt = 3
    """Consecutive skipped updates before the run stops (`skip`); rollbacks are limited like other restarts."""
    on_spike: Literal["keep", "skip"] = "keep"
    """If the loss or the gradient norm is 6 standard deviations above the mean of the last 128 steps: `keep` or `skip`
    the update."""


@dataclass(frozen=True, kw_only=True)
class ForkConfig:
    """The checkpoint of another run that the run continues from; only `hlatctl fork` sets it."""

    run: str | None = None
    """Id of the other run; none: the run begins with its initial weights."""
    step: NonNegativeInt = 0
    """Step of the checkpoint; the run's own steps follow it."""
    tokens: NonNegativeInt = 0
    """Tokens that the optimizer had consumed until then."""
    restarts_data: bool = False
    """Read the corpus from its beginning; otherwise continue where the other run was."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to write checkpoints, and which to keep."""

    mode: Literal["async", "sync"] = "async"
    """`async`: copy to host memory and write files while training continues; `sync`: write files, then continue."""
    every_steps: PositiveInt = 100
    """Optimizer steps between checkpoints."""
    keep: PositiveInt = 3
    """Newest checkpoints to keep, besides the newest verified one and those of milestones not evaluated yet."""
    keep_every_tokens: PositiveInt | None = None
    """Keep one checkpoint permanently for every so many tokens (HLAT: 100e9); none: keep none permanently."""
    when_busy: Literal["wait", "skip"] = "wait"
    """What a save does while the previous one is still being written: `wait`, or `skip` (reported)."""
    survived_after_steps: PositiveInt = 20
    """Finite optimizer steps after a checkpoint before the journal records that it survived."""
    memory_every_steps: PositiveInt | None = None
    """Optimizer steps between copies to the memory of the nodes, from which a restart loses less; none: no copies."""
    fast_dir: str | None = None
    """Folder on the node's own disk to write to first, before copying to the run directory. None: no such folder."""
    remote_url: str | None = None
    """Folder in object storage (s3://bucket/folder) to which verified checkpoints are copied. None: no copies."""
    remote_keep: PositiveInt = 3
    """Newest checkpoints to keep there, besides those of milestones and permanent ones."""


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """When a failed attempt is restarted."""

    enabled: bool = True
    """False: no automatic restarts; after every failure, a person has to resume the run."""
    max_restarts_without_progress: NonNegativeInt = 3
    """Consecutive restarts without a new checkpoint before the run fails. Failures of nodes don't count."""
    max_nodes_without_progress: NonNegativeInt = 16
    """Different nodes that may fail in a row without a new checkpoint, although none of them fails its preflight."""
    max_node_wait_s: NonNegativeFloat = 86_400.0
    """How long a run waits for a node to replace an unfit one before it fails; 0: not at all."""
    backoff_s: NonNegativeFloat = 2.0
    """Delay of the first restart without progress; doubles with each further one."""
    max_backoff_s: NonNegativeFloat = 300.0
    """Longest delay of a restart."""
    hang_factor: Annotated[float, Range(gt=1)] = 20.0
    """An attempt counts as hung, and is ended, after this many recent median step times without a step."""
    hang_floor_s: PositiveFloat = 600.0
    """Minimum of that time; must exceed the longest checkpoint, during which no step ends."""
    start_timeout_s: PositiveFloat = 3600.0
    """The same for an attempt's first step, which includes loading and compiling."""
    straggler_factor: Annotated[float, Range(gt=1)] = 1.5
    """A process is a straggler if its own work takes this many times the median process's."""
    straggler_steps: PositiveInt = 100
    """Steps for which it must be one before it is reported."""
    corruption_check_steps: PositiveInt | None = None
    """Steps between two checks for devices that compute wrong numbers without an error (not with nxd). A check costs
    two steps or less; 1000 suits runs of many nodes. None: no checks."""


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Software and device for training."""

    name: Annotated[str, BACKENDS] = "torch_native"
    """`torch_native`, `torchtitan`, or `nxd`: NeuronX Distributed on torch-xla."""
    device: DeviceName = "cpu"
    """`cpu`, `cuda` or `neuron`."""
    compile: bool = True
    """Compile the model's graphs with torch.compile."""
    coverage_gate: bool = False
    """Before training, check with a few steps in a scratch folder that every graph is in the cache."""
    env: dict[str, str | int | None] = field(default_factory=dict)
    """Environment variables of the training processes; null: unset, even if set in this shell."""
    compiler_flags: list[str] = field(default_factory=list)
    """Flags of neuronx-cc (NEURON_CC_FLAGS), one word per item."""
    torchtitan: dict[str, Any] = field(default_factory=dict)
    """Further settings of torchtitan's `Trainer.Config`, as `SECTION.KEY: VALUE` or nested."""

    @property
    def kind(self) -> BackendKind:
        """What the backend can do."""
        return BACKENDS[self.name]
