"""Durations on a simulated cluster; pure."""

from __future__ import annotations

from conf.schema import Config
from conf.sizes import checkpoint_bytes, flops_per_token
from hlatctl.plan.step_time import step_time_s

#: Model FLOP/s of one process if the plan doesn't know the hardware: one core of a common CPU.
_UNKNOWN_FLOPS_PER_S = 20e9


def step_s(config: Config) -> float:
    """Return the seconds of one step on healthy nodes: as configured, or as planned, or by a common CPU."""
    planned_s = config.rehearsal.step_s or step_time_s(config)
    if planned_s is not None:
        return planned_s
    flops = flops_per_token(config.model, config.train.seq_len) * config.tokens_per_step
    return flops / (config.world_size * _UNKNOWN_FLOPS_PER_S)


def save_s(config: Config) -> float:
    """Return the seconds from the start of a checkpoint until all its files are in the shared storage."""
    return checkpoint_bytes(config) / config.rehearsal.storage_bytes_per_s


def stall_s(config: Config) -> float:
    """Return the seconds that training waits for a checkpoint: for the copy to host memory, or for the files."""
    if config.checkpoint.mode == "sync":
        return save_s(config)
    per_node_bytes = checkpoint_bytes(config) / config.cluster.nodes
    return per_node_bytes / config.rehearsal.host_copy_bytes_per_s


def load_s(config: Config) -> float:
    """Return the seconds to read a checkpoint; one replica reads it and sends it to the others."""
    return save_s(config)


def export_s(config: Config) -> float:
    """Return the seconds to read a checkpoint and write its weights, a third of it."""
    return save_s(config) * 4 / 3
