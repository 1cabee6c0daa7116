"""The configuration, as typed dataclasses: type, default, bounds, choices, unit and meaning of every key.

A value that follows from others is a property, never a key. ``conf.constraints`` checks bounds and choices,
``conf.validate`` the rules across fields, and ``conf.load`` reads YAML. The modules contain the groups of keys; here
are ``Config``, which has all groups of a run, and ``SweepConfig`` and ``LadderConfig``. ``SimulationConfig`` is no part
of a run either.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from conf.constraints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range
from conf.devices import DeviceName
from conf.registries import BACKENDS
from conf.schema.cluster import (
    BaselineConfig,
    BudgetConfig,
    ClusterConfig,
    ContainerConfig,
    HardwareConfig,
    KubernetesConfig,
    PreflightConfig,
    SlurmConfig,
    SlurmDriverConfig,
)
from conf.schema.data import DataConfig, SourceConfig, TokenizerConfig
from conf.schema.eval import CodeConfig, EvalClusterConfig, EvalConfig, EvalGroupConfig
from conf.schema.model import ModelConfig, ParallelConfig, PrecisionConfig, PrecisionName
from conf.schema.simulation import FailureRatesConfig, PastFailure, SimulationConfig
from conf.schema.tracking import NotifyConfig, NotifyKind, TrackingConfig
from conf.schema.train import (
    BackendConfig,
    CheckpointConfig,
    ForkConfig,
    OptimizerConfig,
    RecoveryConfig,
    StageConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from conf.stages import Stage


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, complete."""

    experiment_name: str = "quickstart"
    """First part of the names of the runs; an experiment's file sets its own."""
    runs_dir: str = "runs"
    """Folder of the run directories (absolute once composed)."""
    runs_mode: str = "0700"
    """Mode of the folders that a run creates, as for chmod; with 0750 the group can read them, with 0770 also write."""
    seed: Annotated[int, Range(ge=0, le=2**64 - 1)] = 1234
    """Of the initial weights and of the order of documents."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    fork: ForkConfig = field(default_factory=ForkConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)

    @property
    def world_size(self) -> int:
        """Number of training processes."""
        return self.cluster.nodes * self.cluster.processes_per_node

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the model, each with sequences of its own."""
        parallel = self.parallel
        return self.world_size // (
            parallel.tensor_parallel_size * parallel.pipeline_parallel_size * parallel.context_parallel_size
        )

    @property
    def weight_replicas(self) -> int:
        """Processes over which gradients are summed, or the weights sharded: data parallel x context parallel."""
        return self.data_parallel_size * self.parallel.context_parallel_size

    @property
    def gathers_fp8(self) -> bool:
        """Whether FSDP gathers weights in FP8, which needs one scale for each matrix."""
        scaling = self.precision.fp8_scaling if self.precision.name == "fp8" else None
        return scaling == "tensorwise" and self.parallel.data_parallel == "fsdp"

    @property
    def stages_per_process(self) -> int:
        """Pipeline stages of a process. Stage s is on process s modulo `pipeline_parallel_size`."""
        return self.parallel.pipeline_chunks if self.parallel.pipeline_schedule == "interleaved_1f1b" else 1

    @property
    def eval_device(self) -> DeviceName:
        """Device that transformers evaluates on, which must exist. It can't use one of torch-xla."""
        return self.eval.device or ("cpu" if self.backend.kind.torch_xla else self.backend.device)

    @property
    def eval_devices(self) -> int:
        """Devices of training's kind that an evaluation uses; 0: it computes on the CPU."""
        wanted = self.eval
        if wanted.runner == "hf":
            return 0 if self.eval_device == "cpu" else wanted.replicas * wanted.tensor_parallel_size
        return 0 if (wanted.device or self.backend.device) == "cpu" else wanted.tensor_parallel_size

    @property
    def eval_placement(self) -> Literal["beside", "between"]:
        """When milestones are evaluated: while training runs, or between two attempts."""
        return self.eval.placement or ("between" if self.eval_shares_devices else "beside")

    @property
    def eval_shares_devices(self) -> bool:
        """Whether evaluations compute on the devices of training: on one machine nobody gives them others."""
        return self.cluster.jobs_run == "here" and self.eval_devices > 0

    @property
    def micro_batch_size(self) -> int:
        """Sequences per process and forward pass."""
        return self.train.micro_batch_size or self.train.global_batch_size // self.data_parallel_size

    @property
    def grad_accum_steps(self) -> int:
        """Forward passes per process and optimizer step."""
        return self.train.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes; in a run with stages, `during` has those of each."""
        return self.train.global_batch_size * self.train.seq_len

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that the run reaches; empty if it has none."""
        from conf.stages import layout  # which needs this module

        return layout(self)

    def stage_at(self, step: int) -> Stage | None:
        """Return the stage that a step belongs to; before and after the run, the first and the last one."""
        stages = self.stages
        return stages[min(bisect_left(stages, step, key=_last_step), len(stages) - 1)] if stages else None

    def ends_stage(self, step: int) -> bool:
        """Whether another stage follows after a step."""
        return any(stage.last_step == step for stage in self.stages[:-1])

    def during(self, step: int) -> Config:
        """Return the configuration with the values that are in force in a step."""
        stage = self.stage_at(step)
        return stage.config if stage else self

    @property
    def data_rows(self) -> int:
        """Number of rows of the corpus: endless streams, each of which gives sequences to the steps.

        It is the batch size of the first stage. A larger batch takes several sequences of each row, a smaller one takes
        sequences of the rows in turn.
        """
        first = self.stages[0].config if self.stages else self
        return first.train.global_batch_size

    def tokens_at(self, step: int) -> int:
        """Return the tokens that the optimizer has consumed after a step of this run."""
        if stage := self.stage_at(step):
            return stage.after_tokens + (step - stage.after_step) * stage.config.tokens_per_step
        return self.fork.tokens + (step - self.fork.step) * self.tokens_per_step

    def step_reaching(self, tokens: int) -> int:
        """Return the first step of this run after which the optimizer has consumed so many tokens."""
        if stages := self.stages:
            stage = next((stage for stage in stages if tokens <= stage.last_tokens), stages[-1])
            return stage.after_step - (stage.after_tokens - tokens) // stage.config.tokens_per_step
        return self.fork.step - (self.fork.tokens - tokens) // self.tokens_per_step

    def begins_data_at(self, step: int) -> bool:
        """Whether the corpus is read from its beginning although the training continues from this step."""
        return self.fork.restarts_data and step == self.fork.step

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps of the warm-up."""
        tokens = self.optimizer.warmup_tokens
        return self.optimizer.warmup_steps if tokens is None else max(0, self.step_reaching(tokens))

    @property
    def total_steps(self) -> int:
        """Number of the run's last optimizer step."""
        if self.stages:
            return self.stages[-1].last_step
        steps = self.step_reaching(self.train.tokens)
        return steps if self.train.max_steps is None else min(steps, self.train.max_steps)

    @property
    def total_tokens(self) -> int:
        """Tokens that the optimizer has consumed at the end of the run."""
        return self.tokens_at(self.total_steps)

    def is_permanent(self, step: int) -> bool:
        """Whether a step is the first to reach another multiple of `checkpoint.keep_every_tokens`, or ends a stage."""
        every = self.checkpoint.keep_every_tokens
        reaches = every is not None and self.tokens_at(step) // every > self.tokens_at(step - 1) // every
        return reaches or any(stage.last_step == step for stage in self.stages)

    @property
    def permanent_steps(self) -> list[int]:
        """The steps of the run's permanent checkpoints, ascending."""
        every = self.checkpoint.keep_every_tokens
        reaching = [self.step_reaching(tokens) for tokens in self._multiples(every)] if every else []
        return sorted({*reaching, *(stage.last_step for stage in self.stages)})

    def _multiples(self, every_tokens: int) -> range:
        """Return the multiples of a number of tokens that the run reaches, without those before its fork."""
        return range((self.fork.tokens // every_tokens + 1) * every_tokens, self.total_tokens + 1, every_tokens)

    @property
    def milestones(self) -> dict[int, int]:
        """Return the milestones' tokens by the optimizer step whose checkpoint is evaluated, in order.

        A milestone of T tokens belongs to the first step that has consumed T. The last step of the run is always one,
        with all tokens of the run, and so is that of each stage. Empty if evaluation is off.
        """
        if not self.eval.enabled:
            return {}
        milestones = {self.step_reaching(tokens): tokens for tokens in self._multiples(self.eval.every_tokens)}
        milestones |= {stage.last_step: stage.last_tokens for stage in self.stages}
        milestones[self.total_steps] = self.total_tokens
        return dict(sorted(milestones.items()))


def _last_step(stage: Stage) -> int:
    return stage.last_step


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Settings of `hlatctl sweep`, given as `sweep.*`; not part of a run's own configuration.

    An arm is one combination of values of all axes. A trial is the run of an arm with one seed.
    """

    sampler: Literal["grid", "random", "tpe"] | None = None
    """`grid`: every arm; `random`; `tpe`: tree-structured Parzen estimator. None: `grid`, or `tpe` with an interval."""
    trials: PositiveInt | None = None
    """Arms that `random` and `tpe` draw, by default 20; a grid runs all of its arms."""
    seeds: PositiveInt = 1
    """Trials per arm, with `seed`, `seed` + 1, and so on."""
    objective: str | None = None
    """The value to compare: `loss` (training), `validation_loss` or `eval.TASK`, each optionally at a milestone
    (`@tokens=N`). None: `validation_loss`, or `loss` if evaluation is off."""
    direction: Literal["min", "max"] | None = None
    """`min` or `max`; none: `max` for `eval.TASK`, `min` otherwise and for bits per byte (`eval.TASK_bpb`)."""
    parallel: PositiveInt = 1
    """Trials that run at the same time; local trials share this machine's cores."""
    pruner: Literal["none", "median", "asha"] = "none"
    """How to end inferior trials early: `median` of the others at the same tokens, `asha` (halving), or `none`."""
    rungs: PositiveInt = 8
    """Number of equally spaced points at which `loss` is compared; evaluations are compared at milestones."""
    startup_trials: NonNegativeInt = 5
    """Trials that must finish before `median` prunes and before `tpe` stops drawing at random."""
    stop_diverged: bool = True
    """End a trial if its loss or gradients are not finite, its gradient norm keeps growing, or its loss exceeds its
    initial value."""
    keep_pruned_checkpoints: bool = False
    """Keep the checkpoints of trials that ended early."""


@dataclass(frozen=True, kw_only=True)
class LadderConfig:
    """Settings of `hlatctl ladder`, given as `ladder.*`; not part of a run's own configuration.

    The configuration itself is the target. A rung is a smaller run; its other values are the target's.
    """

    by: Literal["shape", "width", "depth"] = "shape"
    """What differs between sizes: `depth` (layers), `width` (hidden_size; heads and feed-forward layer follow), or
    `shape` (layers, with the width in proportion)."""
    sizes: list[PositiveInt] = field(default_factory=list)
    """The rungs' models: values of model.hidden_size with `by=width`, otherwise of model.num_layers."""
    tokens_per_parameter: list[PositiveFloat] = field(default_factory=list)
    """Tokens of each size, for each of its parameters without the input embedding; every value is a rung of every size.
    Empty: the target's ratio."""
    tokens: list[PositiveInt] = field(default_factory=list)
    """Tokens of each size, instead of `tokens_per_parameter`; every value is a rung of every size."""
    max_compute_fraction: Annotated[float, Range(gt=0, lt=1)] | None = None
    """Leave out rungs with more than this share of the target's compute, such as 0.03. None: keep all."""
    lr: list[PositiveFloat] = field(default_factory=list)
    """Peak learning rate of each size. Empty: the target's, by the two powers."""
    lr_by_parameters: float | None = None
    """Power of (parameters / target's parameters) that the learning rate is multiplied with. None: -1/3 (OLMo's
    ladder), or 0 if `by=width` and the target has `model.mup_base_width`: one learning rate suits all widths."""
    lr_by_tokens: float = 0.0
    """The same of (tokens / target's tokens)."""
    batch: list[PositiveInt] = field(default_factory=list)
    """train.global_batch_size of each size. Empty: the target's, by the two powers."""
    batch_by_parameters: float | None = None
    """Power of (parameters / target's parameters) that the batch is multiplied with. None: 2/3 (OLMo's ladder), or 0
    where `lr_by_parameters` is 0 by default, because the best learning rate also depends on the batch."""
    batch_by_tokens: float = 0.0
    """The same of (tokens / target's tokens)."""
    set: dict[str, Any] = field(default_factory=dict)
    """Other values of all rungs, such as `{cluster.nodes:1,parallel.tensor_parallel_size:1}`."""
    train_target: bool = False
    """Train the target too, after its forecast was written into it."""
