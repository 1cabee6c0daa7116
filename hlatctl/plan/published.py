"""Published figures next to this model's predictions: how accurate a plan is.

``published.json`` has training runs whose speed or memory others have published. Other figures compare two plans, or
say what fits; they are from HLAT (arXiv 2404.10630) and its authors' slides. Two points calibrate trn1's efficiencies,
three bound its workspace, one its pipeline overhead (``conf/cluster/trn1_32xlarge.yaml``); the others are checks.

A published run may use features that this project's software doesn't have, such as asynchronous tensor parallelism or
FSDP inside pipeline stages. So its configuration is not validated, and ``Execution`` names the differences.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from conf.schema import BackendConfig, ClusterConfig, Config, ModelConfig, ParallelConfig, PrecisionConfig, TrainConfig
from conf.sizes import parameters
from hlatctl.plan.budget import cost
from hlatctl.plan.execution import Execution
from hlatctl.plan.memory import Memory, memory
from hlatctl.plan.search import changed
from hlatctl.plan.step_time import StepTime, missing, step_time

_FILE = Path(__file__).with_name("published.json")
_GIB = 1 << 30

ClusterOf = Callable[[str], ClusterConfig]


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A run with what was published about it. Figures that were not published are None.

    Args:
        device: a key of ``devices`` in the file.
        fits: the numbers that were fitted to it; those of the device's cluster are keys of ``cluster.hardware``.
        collection: 1 for the first runs, 2 and 3 for those that were added later, 4 for mixtures of experts.
    """

    name: str
    device: str
    config: Config
    execution: Execution
    source: str
    note: str
    fits: tuple[str, ...]
    collection: int
    tokens_per_s_per_device: float | None
    mfu_fraction: float | None
    memory_gib: float | None

    @property
    def calibrates(self) -> bool:
        """Whether a number was fitted to its speed."""
        return any(number != "workspace_bytes" for number in self.fits)

    @property
    def calibrates_memory(self) -> bool:
        """Whether a number was fitted to its memory."""
        return "workspace_bytes" in self.fits

    @property
    def time(self) -> StepTime:
        """The planned time of a step."""
        time = step_time(self.config, self.execution)
        assert time is not None, f"{self.device}: {missing(self.config, self.execution)}"
        return time

    @property
    def memory(self) -> Memory:
        """The planned memory of a process."""
        return memory(self.config, self.execution)

    @property
    def published_step_s(self) -> float:
        """The time of a step that follows from the published speed."""
        if self.mfu_fraction is not None:
            return self.time.total_s * self.time.mfu_fraction / self.mfu_fraction
        assert self.tokens_per_s_per_device is not None
        return self.config.tokens_per_step / self.config.world_size / self.tokens_per_s_per_device

    @property
    def speed(self) -> str:
        """The published speed in words, with the run and the source."""
        step_s, of = self.published_step_s, self.config
        tokens_per_s = of.tokens_per_step / of.world_size / step_s
        mfu_fraction = self.time.mfu_fraction * self.time.total_s / step_s
        what = f"{of.model.name} on {of.world_size:,} of {self.device}, precision {of.precision.name}"
        return f"{tokens_per_s:,.0f} tokens/s a device, MFU {mfu_fraction:.1%}: {what} ({self.source})"

    @property
    def step_error_fraction(self) -> float:
        """The planned time of a step, relative to the published one, minus 1."""
        return self.time.total_s / self.published_step_s - 1.0

    @property
    def memory_error_fraction(self) -> float | None:
        """The planned memory, relative to the published one, minus 1."""
        return None if self.memory_gib is None else self.memory.need_bytes / _GIB / self.memory_gib - 1.0


def clusters() -> dict[str, str]:
    """Return the name of each device's cluster configuration, by device."""
    return {device: facts["cluster"] for device, facts in _file()["devices"].items()}


def published_runs(cluster_of: ClusterOf, devices: set[str] | None = None) -> list[PublishedRun]:
    """Return the published runs.

    Args:
        cluster_of: returns a cluster's configuration by name (this package doesn't import Hydra).
        devices: devices to include; None: all.
    """
    runs = [facts for facts in _file()["runs"] if devices is None or facts["device"] in devices]
    names = clusters()
    composed = {name: cluster_of(name) for name in sorted({names[facts["device"]] for facts in runs})}
    return [_run(facts, composed[names[facts["device"]]]) for facts in runs]


@cache
def _file() -> dict[str, Any]:
    contents: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return contents


def _run(facts: dict[str, Any], cluster: ClusterConfig) -> PublishedRun:
    hardware = dataclasses.replace(cluster.hardware, **_file()["devices"][facts["device"]]["hardware"])
    config = Config(
        model=ModelConfig(name=facts["model"], **_file()["models"][facts["model"]]),
        cluster=dataclasses.replace(cluster, nodes=facts["nodes"], hardware=hardware),
        parallel=ParallelConfig(**facts["parallel"]),
        train=TrainConfig(**facts["train"]),
        precision=PrecisionConfig(name=facts["precision"]),
        backend=BackendConfig(**facts["backend"]),
    )
    published = facts["published"]
    return PublishedRun(
        name=facts["name"],
        device=facts["device"],
        config=config,
        execution=dataclasses.replace(Execution.of(config), **facts.get("execution", {})),
        source=facts["source"],
        note=facts.get("note", ""),
        fits=tuple(facts.get("fits", ())),
        collection=facts.get("collection", 1),
        tokens_per_s_per_device=published.get("tokens_per_s_per_device"),
        mfu_fraction=published.get("mfu_fraction"),
        memory_gib=published.get("memory_gib"),
    )


Compose = Callable[[Sequence[str]], Config]

_GPU_BASELINE = (
    "experiment=hlat_7b",
    "cluster=p4d_24xlarge",
    "cluster.nodes=64",
    "parallel.tensor_parallel_size=2",
    "precision=mixed",
)


@dataclass(frozen=True)
class Point:
    """A published figure and the prediction.

    Args:
        calibrates: the model was fitted to it, so agreement proves nothing.
        published, predicted: a fraction, tokens/s per device, or whether it fits.
        unit: ``%`` or ``tokens/s``.
    """

    name: str
    published: float | bool
    predicted: float | bool
    calibrates: bool
    unit: str = "%"

    @property
    def error_fraction(self) -> float | None:
        """The prediction's error relative to the published figure; None if that is not a number."""
        if isinstance(self.published, bool):
            return None
        return self.predicted / self.published - 1.0


def points(compose: Compose, cluster: str = "") -> list[Point]:
    """Return HLAT's points, other runs on trn1, and runs on the devices of a cluster.

    None if the configurations of HLAT's clusters lack a value that a plan needs.

    Args:
        compose: returns the configuration for overrides (this package doesn't import Hydra).
        cluster: name of a cluster configuration.
    """
    small, large = compose(["experiment=hlat_7b"]), compose(["experiment=hlat_70b"])
    gpu = compose(list(_GPU_BASELINE))
    if not all(_is_known(config) for config in (small, large, gpu)):
        return []
    few = changed(_on(large, 4), pipeline_parallel_size=4)
    devices = {device for device, name in clusters().items() if name in (small.cluster.name, cluster)}
    return [
        *(_speed(run) for run in published_runs(_cluster_of(compose), devices)),
        # The slides' scaling begins where Figure 4 does, with four nodes.
        Point("7B on 32 nodes, of the speed of 4", 0.87, _scaling(small, 32), False),
        Point("7B on 64 nodes, of the speed of 4", 0.72, _scaling(small, 64), False),
        Point("cost of 7B on 64 nodes, of p4d's", 0.54, _usd(small) / _usd(gpu), False),
        Point("7B fits at TP 8", True, bool(memory(small).fits), True),
        Point("70B fits 4 nodes at TP 32 x PP 4", False, bool(memory(few).fits), True),
        Point("70B fits 8 nodes at TP 32 x PP 8", True, bool(memory(_on(large, 8)).fits), True),
    ]


def _cluster_of(compose: Compose) -> ClusterOf:
    return lambda name: compose([f"cluster={name}", "train.global_batch_size=1024"]).cluster


#: Devices whose peaks differ by less than this share are of one kind.
_SAME_PEAK = 0.05


def nearest(config: Config, compose: Compose) -> PublishedRun | None:
    """Return the published run that is most like a configuration; None if there is none on devices of its kind.

    It has devices with the same peak in BF16, then the same precision, the nearest number of parameters and the nearest
    number of devices.

    Args:
        compose: returns the configuration for overrides (this package doesn't import Hydra).
    """
    peak, size = config.cluster.hardware.bf16_flops_per_s, parameters(config.model).total

    def unlike(run: PublishedRun) -> tuple[bool, float, float]:
        of_model = abs(math.log(parameters(run.config.model).total / size))
        of_devices = abs(math.log(run.config.world_size / config.world_size))
        return run.config.precision.name != config.precision.name, of_model, of_devices

    def is_alike(run: PublishedRun) -> bool:
        theirs = run.config.cluster.hardware.bf16_flops_per_s
        return bool(peak and theirs and abs(theirs / peak - 1.0) < _SAME_PEAK)

    return min(filter(is_alike, published_runs(_cluster_of(compose))), key=unlike, default=None)


def _speed(run: PublishedRun) -> Point:
    if run.mfu_fraction is not None:
        return Point(run.name, run.mfu_fraction, run.time.mfu_fraction, run.calibrates)
    assert run.tokens_per_s_per_device is not None
    planned = run.config.tokens_per_step / run.config.world_size / run.time.total_s
    return Point(run.name, run.tokens_per_s_per_device, planned, run.calibrates, "tokens/s")


def _on(config: Config, nodes: int) -> Config:
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, nodes=nodes))


def _is_known(config: Config) -> bool:
    cluster = config.cluster
    return not missing(config) and None not in (cluster.price_usd_per_node_hour, cluster.hardware.memory_bytes)


def _time(config: Config) -> StepTime:
    time = step_time(config)
    assert time is not None
    return time


def _scaling(config: Config, nodes: int) -> float:
    return _time(_on(config, nodes)).mfu_fraction / _time(_on(config, 4)).mfu_fraction


def _usd(config: Config) -> float:
    usd = cost(config, _time(config).total_s).usd_per_4m_tokens
    assert usd is not None
    return usd
