"""Time of collectives on a cluster's links: a ring of any group, and those of a layer; pure arithmetic.

Ranks are ordered by pipeline stage, replica, part of the sequence and tensor-parallel rank. The last changes fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config, HardwareConfig
from conf.sizes import COMPUTE_BYTES
from hlatctl.plan.activations import widths
from hlatctl.plan.execution import Execution, tokens
from hlatctl.plan.products import Work

#: Collectives of a layer's forward pass, and as many of its backward pass: into and out of attention and feed-forward.
_EXCHANGES = 4
#: What asynchronous tensor parallelism leaves visible of them: fitted to torchtitan's pair of runs of Llama 3.1 70B in
#: BF16 (597.3 and 652.4 tokens/s; benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md).
ASYNCHRONOUS_EXPOSED_FRACTION = 0.55
#: By how much a collective slows computation beside it: it takes processors, caches and bandwidth of the memory. The
#: mean of GPT and LLaMA models on A100, H100, MI210 and MI250, within a node (arXiv 2507.03114, abstract).
OVERLAP_SLOWDOWN_FRACTION = 0.189


@dataclass(frozen=True)
class Exchange:
    """A collective's time, and the part in which it slows computation beside it.

    NCCL runs as many channels as the slowest link keeps busy, and each takes a processor. So bytes that wait for a
    slow network take as much from computation as if they went over the links in a node: for a longer time, but less.
    """

    total_s: float
    slowing_s: float

    def __add__(self, other: Exchange) -> Exchange:
        """Return both, one after the other."""
        return Exchange(self.total_s + other.total_s, self.slowing_s + other.slowing_s)

    def beside_s(self, computation_s: float) -> float:
        """Return how much longer a computation takes with this beside it: what it doesn't hide, and what it slows."""
        if not self.total_s:
            return 0.0
        hidden_fraction = min(1.0, computation_s / self.total_s)
        slowed_s = OVERLAP_SLOWDOWN_FRACTION * self.slowing_s * hidden_fraction
        return (1.0 - hidden_fraction) * self.total_s + slowed_s


def ring(config: Config, held_bytes: float, size: int, stride: int, messages: float = 1.0) -> Exchange:
    """Return one half of an all-reduce of what each process has.

    It sends (n - 1) / n of that. A ring that goes node by node leaves each node once. All rings on a node share its
    network. Each message takes n - 1 steps, whatever its size (:func:`latency_s`).

    Args:
        config: has the cluster.
        held_bytes: before a scatter, or after a gather.
        size: processes of the ring.
        stride: ranks from one of them to the next.
        messages: rings that send these bytes, one after the other.
    """
    if size == 1:
        return Exchange(0.0, 0.0)
    cluster = config.cluster
    sent = (size - 1) / size * held_bytes
    together = min(size, max(1, cluster.processes_per_node // stride))
    within_s = sent / _link(cluster.hardware) if cluster.hardware.link_bytes_per_s else 0.0
    bytes_s = within_s if together > 1 else 0.0
    if size > together:
        bytes_s = max(bytes_s, sent * (cluster.processes_per_node / together) / _network(cluster.hardware))
    steps_s = messages * latency_s(config, size, stride)
    return Exchange(bytes_s + steps_s, min(within_s, bytes_s) + steps_s)


def latency_s(config: Config, size: int, stride: int) -> float:
    """Return the time of a ring's steps apart from the bytes: a step for each process but one.

    NCCL's own model of a ring (src/graph/tuning.cc): each step from node to node has the latency of the network, and
    each other step that of the link. So it grows with the number of processes, however few bytes there are.
    """
    hardware = config.cluster.hardware
    together = min(size, max(1, config.cluster.processes_per_node // stride))
    across = -(-size // together) - 1
    return (size - 1 - across) * hardware.link_latency_s + across * hardware.network_latency_s


def tensor_parallel_work(config: Config, execution: Execution) -> Work:
    """Return the time of one layer's collectives: four all-reduces, or the same volume in gathers and scatters.

    A ring sends (t - 1) / t of the tensor for each half of an all-reduce (arXiv 2205.05198, section 4.2.2: sequence
    parallelism sends as much).
    """
    tensor = config.parallel.tensor_parallel_size
    if tensor == 1:
        return Work(0.0, 0.0)
    held = tokens(config, execution) * config.model.hidden_size * COMPUTE_BYTES[config.precision.name]
    exposed = ASYNCHRONOUS_EXPOSED_FRACTION if execution.asynchronous_tensor_parallel else 1.0
    one_s = exposed * neighbours_s(config, held, tensor, 1)
    again = {"full": _EXCHANGES, "operators": _EXCHANGES // 2}.get(execution.recomputed, 0)
    return Work(_EXCHANGES * one_s, _EXCHANGES * one_s, again * one_s)


def context_parallel_work(config: Config, execution: Execution) -> Work:
    """Return the time of one layer's collectives of keys and values: gathered, and their gradients scattered.

    Attention waits for them (arXiv 2407.21783, section 3.3.2).
    """
    context = execution.context_parallel_size
    if context == 1:
        return Work(0.0, 0.0)
    _, kv, _, compute = widths(config)
    held = 2 * kv * compute * tokens(config, execution) * context
    one_s = neighbours_s(config, held, context, config.parallel.tensor_parallel_size)
    again = execution.recomputed in ("selective", "full") or execution.recomputes_elementwise
    return Work(one_s, one_s, one_s if again else 0.0)


def neighbours_s(config: Config, held_bytes: float, size: int, stride: int) -> float:
    """Return the time of a ring of ranks that follow each other: within a node, or at each process's share of it."""
    sent = (size - 1) / size * held_bytes
    within = size * stride <= config.cluster.processes_per_node
    rate = _link(config.cluster.hardware) if within else _share_of_network(config)
    return sent / rate + latency_s(config, size, stride)


def send_s(config: Config, execution: Execution) -> float:
    """Return the time to send a micro-batch's activations to the next stage, and its gradients back."""
    parallel = config.parallel
    if parallel.pipeline_parallel_size == 1:
        return 0.0
    cut = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    entries = tokens(config, execution) * config.model.hidden_size
    sent = 2 * entries * COMPUTE_BYTES[config.precision.name] / cut
    # Stages are the outermost dimension of the ranks, so a stage's successor is on another node if there is one.
    rate = _link(config.cluster.hardware) if config.cluster.nodes == 1 else _share_of_network(config)
    return sent / rate


def _link(hardware: HardwareConfig) -> float:
    assert hardware.link_bytes_per_s is not None
    return hardware.link_bytes_per_s * hardware.collective_efficiency


def _network(hardware: HardwareConfig) -> float:
    assert hardware.network_bytes_per_s is not None
    return hardware.network_bytes_per_s * hardware.collective_efficiency


def _share_of_network(config: Config) -> float:
    """Return one process's part of its node's network when all send at once."""
    return _network(config.cluster.hardware) / config.cluster.processes_per_node
