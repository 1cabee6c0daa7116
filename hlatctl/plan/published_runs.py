"""Training runs whose speed or memory others have published (``published.json``), as configurations to plan.

Such a run may use what this project's software doesn't have, such as asynchronous tensor parallelism or FSDP inside
pipeline stages. So its configuration is not validated, and ``Execution`` names the differences.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from conf.schema import BackendConfig, ClusterConfig, Config, ModelConfig, ParallelConfig, PrecisionConfig, TrainConfig
from hlatctl.plan.execution import Execution
from hlatctl.plan.memory import Memory, memory
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
        collection: 1 for the first runs, 2 and 3 for those that were added later.
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
    def step_error_fraction(self) -> float:
        """The planned time of a step, relative to the published one, less 1."""
        return self.time.total_s / self.published_step_s - 1.0

    @property
    def memory_error_fraction(self) -> float | None:
        """The same of the memory."""
        return None if self.memory_gib is None else self.memory.need_bytes / _GIB / self.memory_gib - 1.0


def clusters() -> dict[str, str]:
    """Return the name of each device's cluster configuration, by device."""
    return {device: facts["cluster"] for device, facts in _file()["devices"].items()}


def published_runs(cluster_of: ClusterOf, devices: set[str] | None = None) -> list[PublishedRun]:
    """Return the published runs.

    Args:
        cluster_of: returns the cluster configuration of a name (this package doesn't import Hydra).
        devices: only these; None: all.
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
