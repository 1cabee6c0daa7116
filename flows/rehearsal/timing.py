"""How long what a simulated cluster does takes; pure."""

from __future__ import annotations

from conf.schema import Config
from hlatctl.plan import arithmetic

#: Model FLOP/s that one process sustains, by device: an ordinary processor's core; an A100 at 40 % of its 312 TFLOP/s.
_FLOPS_PER_S = {"cpu": 20e9, "cuda": 0.4 * 312e12}
#: A NeuronCore at the MFU that HLAT reached on 64 nodes: 27.9 % of 95 TFLOP/s (arXiv 2404.10630 and its slides).
_NEURON_FLOPS_PER_S = 0.279 * 95e12


def step_s(config: Config) -> float:
    """One optimizer step, with every node healthy."""
    if config.rehearsal.step_s is not None:
        return config.rehearsal.step_s
    flops = arithmetic.flops_per_token(config.model, config.train.seq_len) * config.tokens_per_step
    return flops / (config.world_size * _FLOPS_PER_S.get(config.backend.device, _NEURON_FLOPS_PER_S))


def save_s(config: Config) -> float:
    """From the beginning of a checkpoint until all of its files are in the shared storage."""
    return arithmetic.checkpoint_bytes(config) / config.rehearsal.storage_bytes_per_s


def stall_s(config: Config) -> float:
    """How long training stands still for one: for the copy into the nodes' memory, or for the files."""
    if config.checkpoint.mode == "sync":
        return save_s(config)
    per_node_bytes = arithmetic.checkpoint_bytes(config) / config.cluster.nodes
    return per_node_bytes / config.rehearsal.host_copy_bytes_per_s


def load_s(config: Config) -> float:
    """Reading one; replicas get from each other what one of them has read."""
    return save_s(config)


def export_s(config: Config) -> float:
    """Reading one and writing its weights, a third of it."""
    return save_s(config) * 4 / 3
