"""HLAT's published figures beside this model's predictions: how accurate a plan is.

All are from HLAT (arXiv 2404.10630) and its authors' slides. Two points calibrate trn1's efficiencies, three bound its
workspace, one its pipeline overhead (``conf/cluster/trn1_32xlarge.yaml``); the others are checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conf.schema import Config
from hlatctl.plan.cost import cost
from hlatctl.plan.memory import memory
from hlatctl.plan.search import changed
from hlatctl.plan.step_time import StepTime, missing, step_time

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
        published, predicted: a fraction, or whether it fits.
    """

    name: str
    published: float | bool
    predicted: float | bool
    calibrates: bool

    @property
    def error_fraction(self) -> float | None:
        """The prediction's error relative to the published figure; None if that is not a number."""
        if isinstance(self.published, bool):
            return None
        return self.predicted / self.published - 1.0


def points(compose: Compose) -> list[Point]:
    """Return all points; none if these clusters' configurations lack a value that a plan needs.

    Args:
        compose: returns the configuration of overrides; this package does not import Hydra.
    """
    small, large = compose(["experiment=hlat_7b"]), compose(["experiment=hlat_70b"])
    gpu = compose(list(_GPU_BASELINE))
    if not all(_is_known(config) for config in (small, large, gpu)):
        return []
    few = changed(_on(large, 4), pipeline_parallel_size=4)
    return [
        Point("MFU of 7B on 32 nodes", 0.335, _time(_on(small, 32)).mfu_fraction, True),
        Point("MFU of 7B on 64 nodes", 0.279, _time(small).mfu_fraction, True),
        # The slides' scaling begins where Figure 4 does, with four nodes.
        Point("7B on 32 nodes, of the speed of 4", 0.87, _scaling(small, 32), False),
        Point("7B on 64 nodes, of the speed of 4", 0.72, _scaling(small, 64), False),
        Point("cost of 7B on 64 nodes, of p4d's", 0.54, _usd(small) / _usd(gpu), False),
        Point("7B fits at TP 8", True, bool(memory(small).fits), True),
        Point("70B fits 4 nodes at TP 32 x PP 4", False, bool(memory(few).fits), True),
        Point("70B fits 8 nodes at TP 32 x PP 8", True, bool(memory(_on(large, 8)).fits), True),
    ]


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
