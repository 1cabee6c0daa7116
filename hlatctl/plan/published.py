"""Published figures beside this model's predictions: how accurate a plan is.

The runs are in ``published.json``. Here are also figures that compare two plans, and what fits, from HLAT (arXiv
2404.10630) and its authors' slides. Two points calibrate trn1's efficiencies, three bound its workspace, one its
pipeline overhead (``conf/cluster/trn1_32xlarge.yaml``); the others are checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conf.schema import ClusterConfig, Config
from hlatctl.plan.cost import cost
from hlatctl.plan.memory import memory
from hlatctl.plan.published_runs import PublishedRun, clusters, published_runs
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
        compose: returns the configuration of overrides; this package does not import Hydra.
        cluster: name of a cluster configuration.
    """
    small, large = compose(["experiment=hlat_7b"]), compose(["experiment=hlat_70b"])
    gpu = compose(list(_GPU_BASELINE))
    if not all(_is_known(config) for config in (small, large, gpu)):
        return []
    few = changed(_on(large, 4), pipeline_parallel_size=4)
    composed = {config.cluster.name: config.cluster for config in (small, gpu)}

    def cluster_of(name: str) -> ClusterConfig:
        return composed.get(name) or compose([f"cluster={name}", "train.global_batch_size=1024"]).cluster

    devices = {device for device, name in clusters().items() if name in (small.cluster.name, cluster)}
    return [
        *(_speed(run) for run in published_runs(cluster_of, devices)),
        # The slides' scaling begins where Figure 4 does, with four nodes.
        Point("7B on 32 nodes, of the speed of 4", 0.87, _scaling(small, 32), False),
        Point("7B on 64 nodes, of the speed of 4", 0.72, _scaling(small, 64), False),
        Point("cost of 7B on 64 nodes, of p4d's", 0.54, _usd(small) / _usd(gpu), False),
        Point("7B fits at TP 8", True, bool(memory(small).fits), True),
        Point("70B fits 4 nodes at TP 32 x PP 4", False, bool(memory(few).fits), True),
        Point("70B fits 8 nodes at TP 32 x PP 8", True, bool(memory(_on(large, 8)).fits), True),
    ]


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
