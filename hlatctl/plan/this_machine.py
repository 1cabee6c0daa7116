"""A plan for this machine's processor: speeds that the configuration doesn't give are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from conf.registries import LAUNCHERS
from conf.schema import Config
from hlatctl.machine_speed import Speed, measure
from hlatctl.plan.step_time import missing

Measure = Callable[[tuple[int, int, int], int, int], Speed | None]


def measured(config: Config, speed_of: Measure = measure) -> tuple[Config, Speed | None]:
    """Return a configuration with measured values in place of unknown ones, and the measurement.

    It measures only if the plan has no step time without it, and the run would train in FP32 on this machine's
    processor, because the speed of other hardware differs. The product has the shape of a feed-forward projection of
    one micro-batch.
    """
    cluster = config.cluster
    here = LAUNCHERS[cluster.launcher].jobs_run == "here" and cluster.nodes == 1 and config.backend.device == "cpu"
    if not here or config.precision.name != "fp32" or not missing(config):
        return config, None
    shape = (config.micro_batch_size * config.train.seq_len, config.model.hidden_size, config.model.intermediate_size)
    speed = speed_of(shape, cluster.processes_per_node, cluster.threads_per_process)
    if speed is None:
        return config, None
    names = ("fp32_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s")
    unknown = {name: getattr(speed, name) for name in names if getattr(cluster.hardware, name) is None}
    hardware = dataclasses.replace(cluster.hardware, **unknown)
    return dataclasses.replace(config, cluster=dataclasses.replace(cluster, hardware=hardware)), speed
