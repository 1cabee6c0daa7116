"""Time of an optimizer step and model FLOPs utilisation: a roofline with communication; pure arithmetic.

Large products run at a share of the peak, collectives at a share of the links' bandwidth (``cluster.hardware``, both
calibrated). If the hardware is unknown, there is no step time: nothing is guessed.

A matrix product takes its FLOPs at ``compute_efficiency`` of the peak, plus its operands and its result once at the
memory's bandwidth. So a product with a small dimension reaches less of the peak than a large one. Element-wise
operations take their bytes at that bandwidth. If the bandwidth is unknown, bytes take no time.

Collectives are rings. Ranks are ordered by pipeline stage, replica, part of the sequence and tensor-parallel rank; the
last changes fastest. Collectives over replicas count only where no computation hides them. The optimizer's update reads
and writes its state; Muon adds products.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from conf.registries import OPTIMIZERS
from conf.schema import Config, HardwareConfig
from conf.sizes import (
    BF16_BYTES,
    COMPUTE_BYTES,
    FP32_BYTES,
    average_bytes,
    expert_parameters,
    flops_per_token,
    has_shape,
    kv_width,
    layer_kinds,
    layer_parameters,
    process_layers,
    stage_parameters,
    state_bytes,
)
from hlatctl.plan.execution import (
    Execution,
    expert_shards,
    micro_batches,
    reducers,
    sequences,
    shards,
    shards_weights,
    tokens,
)
from hlatctl.plan.memory import (
    embedding_parameters,
    keeps_gathered,
    layer_weight_bytes,
    matrix_parameters,
    scatters_once,
    sharded_bytes,
    sharded_moment_bytes,
    widths,
)

#: The mean bytes of an entry in FP8: operands have one byte, results two.
_FP8_BYTES = 4 / 3
#: Bytes to scale and cast an entry to FP8: read for the largest value, read again, and written.
_FP8_CAST_BYTES = 5
#: Passes over memory of a layer's element-wise operations (reads and writes of one tensor), by the tensor's width:
#: hidden size (two norms, two sums), queries and keys (rotation), feed-forward width (SiLU and product). Without
#: compilation norms and rotations go through FP32, operation by operation: their bytes are given in BF16 passes.
_COMPILED_PASSES = (9, 2, 3)
_EAGER_PASSES = (36, 10, 5)
#: The same for norms of queries and keys, compiled (read, write) and eager (cast to FP32, norm, cast). Not measured.
_COMPILED_HEAD_NORM, _EAGER_HEAD_NORM = 2, 10
#: The same of a token's copies for its experts: ordered by expert, put back, weighted and summed. Not measured.
_ROUTED_PASSES = 6
#: Share that the experts' products, one after another in one kernel, reach of the speed of other products: fitted to
#: gpt-oss 120B on 64 H100 (Megatron-Bridge), whose exchanges stay within nodes.
GROUPED_EFFICIENCY = 0.5105
#: Bytes moved for each entry of the logits: written, read and cast, softmax, gradient, cast and read twice.
_LOGIT_BYTES_MOVED = 24


@dataclass(frozen=True)
class Device:
    """Speeds of one process's device.

    Args:
        flops_per_s: speed of large products on the slowest device, for which all others wait.
        s_per_byte: time per byte of memory traffic; 0: unknown.
        entry_bytes: bytes of one activation value.
        fp8_flops_per_s: speed of large products in FP8; 0: unknown.
    """

    flops_per_s: float
    s_per_byte: float
    entry_bytes: int
    fp8_flops_per_s: float = 0.0

    @classmethod
    def of(cls, config: Config, peak_flops_per_s: float) -> Device:
        """Return a configuration's device."""
        hardware = config.cluster.hardware
        s_per_byte = 0.0 if hardware.memory_bytes_per_s is None else 1.0 / hardware.memory_bytes_per_s
        slowest = 1.0 + hardware.speed_deviation_fraction * expected_largest(config.world_size)
        efficiency, fp8_peak = hardware.compute_efficiency / slowest, hardware.fp8_flops_per_s or 0.0
        return cls(
            peak_flops_per_s * efficiency, s_per_byte, COMPUTE_BYTES[config.precision.name], fp8_peak * efficiency
        )


def expected_largest(count: int) -> float:
    """Return the expected largest of ``count`` normal values, in standard deviations above the mean.

    Blom's approximation (Statistical Estimates and Transformed Beta-Variables, 1958): 0 of one, 1.4 of 8, 2.6 of 128,
    and 3.4 of 2,048.
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


@dataclass(frozen=True)
class Product:
    """``count`` matrix products of the same sizes.

    Args:
        grouped: it is of an expert, and one kernel computes those of all experts.
    """

    rows: float
    inner: int
    columns: int
    count: float = 1.0
    grouped: bool = False

    @property
    def flops(self) -> float:
        """FLOPs; a multiplication and an addition count as two."""
        return 2.0 * self.rows * self.inner * self.columns * self.count

    @property
    def entries(self) -> float:
        """Entries of both operands and the result."""
        sizes = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return sizes * self.count

    @property
    def results(self) -> float:
        """Entries of the result."""
        return self.rows * self.columns * self.count

    def time_s(self, device: Device, *, fp8: bool = False) -> float:
        """Return the product's time."""
        flops_per_s = device.fp8_flops_per_s if fp8 else device.flops_per_s
        flops_per_s *= GROUPED_EFFICIENCY if self.grouped else 1.0
        return self.flops / flops_per_s + self.entries * (_FP8_BYTES if fp8 else device.entry_bytes) * device.s_per_byte


@dataclass(frozen=True)
class Work:
    """Seconds of one micro-batch's forward pass through a layer or the head, its backward pass, and recomputation."""

    forward_s: float
    backward_s: float
    again_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Total of the three times."""
        return self.forward_s + self.backward_s + self.again_s

    def __add__(self, other: Work) -> Work:
        return Work(self.forward_s + other.forward_s, self.backward_s + other.backward_s, self.again_s + other.again_s)


@dataclass(frozen=True)
class _Result:
    """A result that a layer may keep instead of recomputing it: seconds to compute it, and its bytes."""

    again_s: float
    kept_bytes: int


def linears(config: Config, execution: Execution, *, mixture: bool = False) -> dict[str, Product]:
    """Return the products of a layer's weights for one micro-batch, on one tensor-parallel process.

    Args:
        mixture: a layer with experts, each of which has as many tokens as the others.
    """
    count, model, tensor = tokens(config, execution), config.model, config.parallel.tensor_parallel_size
    hidden, width = model.hidden_size, widths(config, mixture=mixture)
    if model.kv_lora_rank is None:
        products = {"qkv": Product(count, hidden, width.queries + width.keys + width.values)}
    else:
        latent, expanded = model.kv_lora_rank, model.num_heads * (model.qk_nope_head_dim + model.v_head_dim) // tensor
        products = {"kv_a": Product(count, hidden, latent + model.qk_rope_head_dim)}
        products["kv_b"] = Product(count, latent, expanded)
        if model.q_lora_rank is not None:
            products["q_a"] = Product(count, hidden, model.q_lora_rank)
        products["q"] = Product(count, model.q_lora_rank or hidden, width.queries)
    products["o"] = Product(count, width.outputs, hidden)
    ffn = width.ffn
    if mixture:
        experts, ffn = model.num_experts, model.shared_width // tensor
        products["router"] = Product(count, hidden, experts)
        parallel = config.parallel.expert_parallel_size
        # With expert parallelism, a process has some of the experts, and the tokens for them of all such processes.
        rows = count * model.experts_per_token / experts * (parallel / tensor if parallel > 1 else 1.0)
        each = model.expert_width // (1 if parallel > 1 else tensor)
        products["experts_gate_up"] = Product(rows, hidden, 2 * each, experts / parallel, grouped=True)
        products["experts_down"] = Product(rows, each, hidden, experts / parallel, grouped=True)
    if ffn:
        products |= {"gate_up": Product(count, hidden, 2 * ffn), "down": Product(count, ffn, hidden)}
    return products


def layer_products(config: Config, execution: Execution, device: Device, *, mixture: bool = False) -> Work:
    """Return the time of a layer's matrix products.

    The backward pass of a product is two products of the same sizes. Flash attention skips the masked half and computes
    the scores again in the backward pass: five products instead of four (arXiv 2307.08691, section 3.1). Its scores
    stay on the chip, but the exponentials between its products take about as long as moving the scores would.
    """
    products = linears(config, execution, mixture=mixture)
    linear_s = sum(_linear_s(product, execution, device) for product in products.values())
    flash = uses_flash(config, execution)
    core_s = sum(product.time_s(device) for product in _core(config, execution)) * (0.5 if flash else 1.0)
    again_s = {
        "none": 0.0,
        "selective": core_s,
        "operators": sum(_linear_s(again, execution, device) for again in _every_second(config, execution, products)),
        "budget": _over_budget_s(config, execution, device, core_s, products),
        "full": linear_s + core_s,
    }[execution.recomputed]
    return Work(linear_s + core_s, 2 * linear_s + (2.5 if flash else 2.0) * core_s, again_s)


def _linear_s(product: Product, execution: Execution, device: Device) -> float:
    fp8 = execution.fp8 is not None and (execution.fp8_experts or not product.grouped)
    return product.time_s(device, fp8=fp8)


def uses_flash(config: Config, execution: Execution) -> bool:
    """Return whether attention is one fused kernel; HLAT's model on NxD computes all scores."""
    if execution.flash_attention is not None:
        return execution.flash_attention
    return "fused_attention" in config.backend.kind.traits


def _every_second(config: Config, execution: Execution, products: dict[str, Product]) -> list[Product]:
    """Return the products that are recomputed with ``operators``: output, and if they are separate, keys and up.

    torchtitan recomputes routers and the experts' gates, too.
    """
    again = [products[name] for name in ("o", "router", "experts_gate_up", "kv_a") if name in products]
    if not execution.separate_products:
        return again
    count, hidden = tokens(config, execution), config.model.hidden_size
    if "qkv" in products:
        again.append(Product(count, hidden, widths(config).keys))
    if "gate_up" in products:
        again.append(Product(count, hidden, products["gate_up"].columns // 2))
    return again


def _over_budget_s(
    config: Config, execution: Execution, device: Device, core_s: float, products: dict[str, Product]
) -> float:
    """Return the time of the results that a layer recomputes because its budget has no room for them.

    It keeps the results with the longest time per byte first, like torch.compile's knapsack.
    """
    count, width = tokens(config, execution), widths(config)
    results = [
        _Result(_linear_s(product, execution, device), int(width.compute * product.results))
        for name, product in products.items()
        if not name.endswith("down")
    ] + [_Result(core_s, width.compute * count * width.outputs)]
    room = execution.memory_budget * sum(result.kept_bytes for result in results)
    again_s = 0.0
    for result in sorted(results, key=lambda result: result.again_s / result.kept_bytes, reverse=True):
        share = min(1.0, room / result.kept_bytes)
        room -= share * result.kept_bytes
        again_s += (1.0 - share) * result.again_s
    return again_s


def _core(config: Config, execution: Execution) -> list[Product]:
    """Return the products of attention's core: scores, and their products with the values.

    With context parallelism a process has its part of the queries, and the keys and values of the whole sequence.
    """
    seq_len, model = config.train.seq_len, config.model
    own = seq_len // execution.context_parallel_size
    heads = sequences(config, execution) * model.num_heads / config.parallel.tensor_parallel_size
    values = model.output_width // model.num_heads
    return [Product(own, model.head_width, seq_len, heads), Product(own, seq_len, values, heads)]


def layer_passes(config: Config, execution: Execution, device: Device, *, mixture: bool = False) -> Work:
    """Return the time of a layer's element-wise operations. A backward pass moves about twice as many bytes."""
    model, parallel = config.model, config.parallel
    hidden = model.hidden_size // (parallel.tensor_parallel_size if parallel.sequence_parallel else 1)
    width = widths(config, mixture=mixture)
    compiled = config.backend.compile or config.backend.kind.torch_xla
    by_hidden, by_heads, by_ffn = _COMPILED_PASSES if compiled else _EAGER_PASSES
    if model.qk_norm != "none":
        by_heads += _COMPILED_HEAD_NORM if compiled else _EAGER_HEAD_NORM
    pass_s = tokens(config, execution) * device.entry_bytes * device.s_per_byte
    rotations_s = pass_s * by_heads * (width.queries + width.keys)
    forward_s = pass_s * (by_hidden * hidden + by_ffn * width.ffn + _ROUTED_PASSES * width.routed) + rotations_s
    again_s = {
        "none": forward_s if execution.recomputes_elementwise else 0.0,
        "selective": rotations_s,
        "operators": forward_s,
        "budget": forward_s * (1.0 - execution.memory_budget),
        "full": forward_s,
    }[execution.recomputed]
    casts_s = 0.0
    if execution.fp8 is not None:
        casts_s = _cast_bytes(config, execution, mixture) * tokens(config, execution) * device.s_per_byte
    return Work(forward_s + casts_s, 2 * forward_s + 2 * casts_s, again_s)


def _cast_bytes(config: Config, execution: Execution, mixture: bool) -> int:
    """Return the bytes per token to cast the inputs of a layer's products to FP8; its gradients take twice as many."""
    width, model = widths(config, mixture=mixture), config.model
    ffn = width.ffn + width.routed
    if mixture and not execution.fp8_experts:
        ffn = model.shared_width // config.parallel.tensor_parallel_size
    return _FP8_CAST_BYTES * (2 * model.hidden_size + width.outputs + ffn)


def head_product(config: Config, execution: Execution, device: Device) -> Work:
    """Return the time of the output projection."""
    forward_s = Product(tokens(config, execution), config.model.hidden_size, _entries(config)).time_s(device)
    return Work(forward_s, 2 * forward_s)


def loss_work(config: Config, execution: Execution, device: Device) -> Work:
    """Return the time of the loss, and of its gradient in the backward pass."""
    whole_s = _LOGIT_BYTES_MOVED * tokens(config, execution) * _entries(config) * device.s_per_byte
    return Work(whole_s / 2, whole_s / 2)


def _entries(config: Config) -> int:
    return config.model.vocab_size // config.parallel.tensor_parallel_size


#: Collectives of a layer's forward pass, and as many of its backward pass: into and out of attention and feed-forward.
_EXCHANGES = 4
#: Their share that asynchronous tensor parallelism can't hide: fitted to torchtitan's pair of runs of Llama 3.1 70B in
#: BF16 (597.3 and 652.4 tokens/s; benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md).
ASYNCHRONOUS_EXPOSED_FRACTION = 0.55
#: How much a collective slows concurrent computation: it takes processors, caches and memory bandwidth. The
#: mean of GPT and LLaMA models on A100, H100, MI210 and MI250, within a node (arXiv 2507.03114, abstract).
OVERLAP_SLOWDOWN_FRACTION = 0.189


@dataclass(frozen=True)
class Exchange:
    """A collective's time, and the part in which it slows concurrent computation.

    NCCL runs as many channels as the slowest link keeps busy, and each takes a processor. So bytes that wait for a
    slow network take as much from computation as if they went over the links in a node: for a longer time, but less.
    """

    total_s: float
    slowing_s: float

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.total_s + other.total_s, self.slowing_s + other.slowing_s)

    def beside_s(self, computation_s: float) -> float:
        """Return how much longer a concurrent computation takes: the part that it doesn't hide, and the slowdown."""
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
        held_bytes: bytes of each process before a scatter, or after a gather.
        size: number of processes in the ring.
        stride: difference between the ranks of neighbours.
        messages: number of consecutive rings that send these bytes.
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
    """Return the latency of a ring, apart from the bytes: one step fewer than it has processes.

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
    width = widths(config)
    held = (width.keys + width.values) * width.compute * tokens(config, execution) * context
    one_s = neighbours_s(config, held, context, config.parallel.tensor_parallel_size)
    again = execution.recomputed in ("selective", "full") or execution.recomputes_elementwise
    return Work(one_s, one_s, one_s if again else 0.0)


def expert_parallel_work(config: Config, execution: Execution) -> Work:
    """Return the time of the exchanges with the processes that have a mixture's experts.

    Each token's copies are sent to its experts, and their results back: two all-to-alls in a forward pass and two in a
    backward pass (arXiv 2006.16668, section 3.1). The ranks follow each other, and what stays on a node and what leaves
    it are sent at the same time.
    """
    size = config.parallel.expert_parallel_size
    if size == 1:
        return Work(0.0, 0.0)
    width, cluster = widths(config, mixture=True), config.cluster
    sent = tokens(config, execution) * width.routed * width.compute
    here = min(size, cluster.processes_per_node)
    within, across = (here - 1) / size, (size - here) / size
    if execution.sends_once_per_node:
        within, across = (here - 1) / here, _copies_to_nodes(config, size // here)
    within_s = sent * within / _link(cluster.hardware) if here > 1 else 0.0
    across_s = sent * across / _share_of_network(config) if size > here else 0.0
    latency = cluster.hardware.network_latency_s if size > here else cluster.hardware.link_latency_s
    one_s = max(within_s, across_s) + latency
    again = execution.recomputed in ("full", "budget")
    return Work(2 * one_s, 2 * one_s, 2 * one_s if again else 0.0)


def _copies_to_nodes(config: Config, nodes: int) -> float:
    """Return the expected number of other nodes with experts of a token, as a share of its experts."""
    model = config.model
    others = (nodes - 1) * (1.0 - (1.0 - 1.0 / nodes) ** model.experts_per_token)
    if model.router_groups is not None and model.router_limited_groups is not None:
        others = min(others, model.router_limited_groups * (nodes - 1) / nodes)
    return others / model.experts_per_token


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
    return _network(config.cluster.hardware) / config.cluster.processes_per_node


def update_s(config: Config, execution: Execution, device: Device) -> float:
    """Return the time of an update, which reads and writes the state once. 0 if the memory's bandwidth is unknown."""
    each = state_bytes(config)
    held = each.weights + each.gradients + each.master + average_bytes(config)
    state = sharded_bytes(config, execution, 0, held)
    read_and_write_s = 2 * (state + sharded_moment_bytes(config, execution, 0)) * device.s_per_byte
    orthogonalizes = OPTIMIZERS[config.optimizer.name].orthogonalizes
    return read_and_write_s + (_orthogonalize_s(config, execution, device) if orthogonalizes else 0.0)


def _orthogonalize_s(config: Config, execution: Execution, device: Device) -> float:
    """Return the time of Muon's products and exchanges.

    The processes divide the matrices, so that each is orthogonalized once (arXiv 2502.16982, section 2.3). Pieces are
    gathered and sent back in BF16, and replicas exchange their results.
    """
    tensor, sharing, count = (
        config.parallel.tensor_parallel_size,
        shards(config, execution),
        reducers(config, execution),
    )
    layers = len(process_layers(config, 0))
    iterations = layers * config.optimizer.newton_schulz_steps
    products_s = iterations * sum(_iteration_s(*shape, device) for shape in _matrices(config))
    pieces = BF16_BYTES * matrix_parameters(config, 0) / sharing
    together = tensor * sharing
    pieces_s = 2 * neighbours_s(config, pieces, together, 1) if together > 1 else 0.0
    return products_s / (tensor * count) + pieces_s + ring(config, pieces, count // sharing, together).total_s


def _iteration_s(rows: int, columns: int, device: Device) -> float:
    """Return the time of a Newton-Schulz iteration: X X^T, its square, and their product with X."""
    short, long = sorted((rows, columns))
    products = Product(short, long, short), Product(short, short, short), Product(short, short, long)
    return sum(product.time_s(device) for product in products)


def _matrices(config: Config) -> list[tuple[int, int]]:
    hidden, tensor = config.model.hidden_size, config.parallel.tensor_parallel_size
    queries, ffn = config.model.query_width, config.model.intermediate_size
    keys = kv_width(config) * min(tensor, config.model.num_kv_heads)
    return [(queries, hidden)] * 2 + [(keys, hidden)] * 2 + [(ffn, hidden)] * 3


#: Minimum number of gradients that are exchanged together (also Megatron-LM's default).
BUCKET_ENTRIES = 40_000_000


def visible_s(config: Config, execution: Execution, layers: dict[bool, Work], backward_s: float) -> float:
    """Return the time of the collectives over replicas that nothing else hides.

    Args:
        layers: computation time of one layer without experts (False) and of one with experts (True).
        backward_s: time of a micro-batch's backward pass in the slowest stage.
    """
    if reducers(config, execution) == 1:
        return 0.0
    if shards_weights(config, execution):
        return _sharded_s(config, execution, layers)
    each, held = state_bytes(config), _largest_stage(config)
    if config.parallel.data_parallel == "zero1":
        # Gradients are scattered and weights gathered (arXiv 1910.02054, section 7), after the backward pass.
        return _ring(config, execution, (each.gradients + each.weights) * held, 2).total_s
    whole = _ring(config, execution, 2 * each.gradients * held, 2 * max(1.0, held / BUCKET_ENTRIES))
    if "overlaps_gradients" not in config.backend.kind.traits:
        return whole.total_s
    # A bucket is exchanged as soon as the last backward pass has filled it; nothing hides the one with the embedding
    # (arXiv 2006.15704, section 3.2.3).
    last = min(held, max(BUCKET_ENTRIES, stage_parameters(config, 0) - _in_layers(config)))
    alone = _ring(config, execution, 2 * each.gradients * last, 2)
    slowed_s = OVERLAP_SLOWDOWN_FRACTION * (whole.slowing_s - alone.slowing_s)
    return max(whole.beside_s(backward_s), alone.total_s + slowed_s)


def _sharded_s(config: Config, execution: Execution, layers: dict[bool, Work]) -> float:
    """Return the time that FSDP's prefetching doesn't hide.

    The weights of the next layer are gathered while a layer computes, and the gradients of the previous one are
    scattered. The visible time is by how much that takes longer than the computation, and by how much it slows it.
    Nothing hides the collectives at the ends: of one layer, and of the embedding (arXiv 2304.11277, section 3.3). Those
    of the output projection are hidden by the last layer, unless the embedding is tied to it. PyTorch's pipelines
    scatter all gradients after the last micro-batch. Experts have a ring of their own, of the processes that have the
    same ones.
    """
    kinds, count = layer_kinds(config, 0), micro_batches(config, execution)
    ends = _largest_stage(config) - _in_layers(config)
    is_split = config.parallel.pipeline_parallel_size == 1 and embedding_parameters(config) > 0
    first = embedding_parameters(config) if is_split else ends
    gather_head, gather_first = (
        _gather(config, execution, COMPUTE_BYTES[config.precision.name] * part) for part in (ends - first, first)
    )
    kept = keeps_gathered(config, execution)
    gathers = {kind: _gather_layer(config, execution, kind) for kind in kinds}
    most = max(kinds, key=lambda kind: kinds[kind])
    # One layer's collectives are not hidden.
    hidden = {kind: number - (kind == most) for kind, number in kinds.items()}
    forward_s = gather_first.total_s + gathers[most].total_s
    forward_s += gather_head.beside_s(layers[most].forward_s) if is_split else 0.0
    forward_s += sum(number * gathers[kind].beside_s(layers[kind].forward_s) for kind, number in hidden.items())

    def backward_s(*, sums: bool) -> float:
        scatters = {kind: _scatter_layer(config, execution, kind, sums=sums) for kind in kinds}
        scatter_head, scatter_first = (_scatter(config, execution, part, sums=sums) for part in (ends - first, first))
        if config.parallel.pipeline_parallel_size > 1:
            return sum(number * scatters[kind].total_s for kind, number in kinds.items()) + scatter_first.total_s
        total_s = scatters[most].total_s + scatter_first.total_s
        total_s += scatter_head.beside_s(layers[most].backward_s) if is_split else 0.0
        for kind, number in hidden.items():
            exchange = scatters[kind] if kept else scatters[kind] + gathers[kind]
            total_s += number * exchange.beside_s(layers[kind].backward_s + layers[kind].again_s)
        return total_s

    forwards = 1 if kept else count
    backwards = 1 if scatters_once(config) else count
    early_s = backward_s(sums="sums_copies_once" not in config.backend.kind.traits) if backwards > 1 else 0.0
    return forwards * forward_s + (backwards - 1) * early_s + backward_s(sums=True)


def _gather_layer(config: Config, execution: Execution, mixture: bool) -> Exchange:
    each, (others, experts) = layer_weight_bytes(config, execution), _split(config, mixture)
    exchange = _gather(config, execution, each * others)
    if not experts:
        return exchange
    sharing, stride = expert_shards(config, execution), _expert_stride(config)
    return exchange + ring(config, each * experts, sharing, stride)


def _scatter_layer(config: Config, execution: Execution, mixture: bool, *, sums: bool) -> Exchange:
    others, experts = _split(config, mixture)
    exchange = _scatter(config, execution, others, sums=sums)
    if not experts:
        return exchange
    sharing, stride = expert_shards(config, execution), _expert_stride(config)
    copies = reducers(config, execution) // shards(config, execution) if sums else 1
    summed = ring(config, 2 * FP32_BYTES * experts / sharing, copies, stride * sharing, 2)
    return exchange + ring(config, FP32_BYTES * experts, sharing, stride) + summed


def _split(config: Config, mixture: bool) -> tuple[int, int]:
    """Return a process's parameters of a layer that are not in experts, and those that are."""
    experts = expert_parameters(config) if mixture else 0
    return layer_parameters(config, mixture=mixture) - experts, experts


def _expert_stride(config: Config) -> int:
    """Return the difference between the ranks of neighbours that have the same experts."""
    parallel = config.parallel
    return parallel.expert_parallel_size if parallel.expert_parallel_size > 1 else parallel.tensor_parallel_size


def _gather(config: Config, execution: Execution, held_bytes: float) -> Exchange:
    return ring(config, held_bytes, shards(config, execution), config.parallel.tensor_parallel_size)


def _scatter(config: Config, execution: Execution, parameters: float, *, sums: bool) -> Exchange:
    """Return the scatter of FP32 gradients; with hybrid sharding also the sum over the copies, where it ``sums``."""
    sharing, stride = shards(config, execution), config.parallel.tensor_parallel_size
    copies = reducers(config, execution) // sharing if sums else 1
    summed = ring(config, 2 * FP32_BYTES * parameters / sharing, copies, stride * sharing, 2)
    return ring(config, FP32_BYTES * parameters, sharing, stride) + summed


def _ring(config: Config, execution: Execution, held_bytes: float, messages: float) -> Exchange:
    return ring(config, held_bytes, reducers(config, execution), config.parallel.tensor_parallel_size, messages)


def _largest_stage(config: Config) -> int:
    return max(stage_parameters(config, stage) for stage in {0, config.parallel.pipeline_parallel_size - 1})


def _in_layers(config: Config) -> int:
    """Return the parameters of the first stage's layers."""
    return sum(number * layer_parameters(config, mixture=kind) for kind, number in layer_kinds(config, 0).items())


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of an optimizer step's time, and the share of the hardware's peak that it reaches.

    Args:
        compute_s: products, including recomputation.
        elementwise_s: norms, rotations, activations and the loss, including recomputation.
        tensor_parallel_s: collectives within layers.
        context_parallel_s: keys, values and their gradients.
        expert_parallel_s: tokens that are sent to experts, and their results.
        pipeline_s: stages that wait for others, and transfers between stages.
        data_parallel_s: gradients and shards of weights over the replicas.
        optimizer_s: reading and writing weights, gradients and moments.
        mfu_fraction: model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B).
    """

    compute_s: float
    elementwise_s: float
    tensor_parallel_s: float
    context_parallel_s: float
    expert_parallel_s: float
    pipeline_s: float
    data_parallel_s: float
    optimizer_s: float
    mfu_fraction: float

    @property
    def total_s(self) -> float:
        """One optimizer step."""
        within_s = self.compute_s + self.elementwise_s + self.tensor_parallel_s + self.context_parallel_s
        return within_s + self.expert_parallel_s + self.pipeline_s + self.data_parallel_s + self.optimizer_s


def corruption_check_cost_steps(config: Config) -> float:
    """Return the largest time of a check for wrong numbers, in steps: two passes of a micro-batch, or a pipeline's."""
    return 2.0 if config.parallel.pipeline_parallel_size > 1 else 2.0 / config.grad_accum_steps


def step_time_s(config: Config) -> float | None:
    """Return the seconds of an optimizer step; None if a value of ``cluster.hardware`` is missing."""
    time = step_time(config)
    return None if time is None else time.total_s


def mean_step_s(config: Config, *, done: int = 0) -> float | None:
    """Return the mean seconds of the run's optimizer steps after ``done``, whose stages may differ; None as above."""
    seconds, steps = 0.0, 0
    for stage in config.stages:
        if left := max(0, stage.last_step - max(done, stage.after_step)):
            step_s = step_time_s(stage.config)
            if step_s is None:
                return None
            seconds, steps = seconds + left * step_s, steps + left
    return seconds / steps if steps else step_time_s(config)


def peak_flops_per_s(config: Config) -> float | None:
    """Return the peak of all processes together, which MFU refers to; None if unknown. With FP8 it is that of BF16."""
    hardware = config.cluster.hardware
    one = hardware.fp32_flops_per_s if config.precision.name == "fp32" else hardware.bf16_flops_per_s
    return None if one is None else one * config.world_size


def missing(config: Config, execution: Execution | None = None) -> list[str]:
    """Return the keys that a step time needs and that are not set."""
    hardware = config.cluster.hardware
    several = config.world_size > 1
    needed = {
        "fp32_flops_per_s" if config.precision.name == "fp32" else "bf16_flops_per_s": True,
        "fp8_flops_per_s": (execution or Execution.of(config)).fp8 is not None,
        "link_bytes_per_s": several and config.cluster.processes_per_node > 1,
        "network_bytes_per_s": several and config.cluster.nodes > 1,
    }
    lacking = [f"cluster.hardware.{key}" for key, asked in needed.items() if asked and getattr(hardware, key) is None]
    return lacking if has_shape(config.model) else [*lacking, "model.hidden_size and the other keys of the shape"]


def step_time(config: Config, execution: Execution | None = None) -> StepTime | None:
    """Return the parts of a step's time; None if a value of ``cluster.hardware`` is missing.

    The slowest pipeline stage sets the pace of a micro-batch.

    Args:
        execution: how other software runs it; None: as the configuration says.
    """
    how = execution or Execution.of(config)
    if missing(config, how):
        return None
    peak = peak_flops_per_s(config)
    assert peak is not None
    count, stages = micro_batches(config, how), config.parallel.pipeline_parallel_size
    pace = max((_pace(config, how, stage) for stage in {0, stages - 1}), key=lambda pace: pace.total_s)
    pipeline_s = _pipeline_s(config, how, pace, count)
    data_s = visible_s(config, how, pace.layers, pace.backward_s)
    optimizer_s = update_s(config, how, _device(config))
    total_s = count * pace.total_s + pipeline_s + data_s + optimizer_s
    model_flops = flops_per_token(config.model, config.train.seq_len) * config.tokens_per_step
    return StepTime(
        compute_s=count * pace.products_s,
        elementwise_s=count * pace.elementwise_s,
        tensor_parallel_s=count * pace.tensor_parallel_s,
        context_parallel_s=count * pace.context_parallel_s,
        expert_parallel_s=count * pace.expert_parallel_s,
        pipeline_s=pipeline_s,
        data_parallel_s=data_s,
        optimizer_s=optimizer_s,
        mfu_fraction=model_flops / (total_s * peak),
    )


@dataclass(frozen=True, kw_only=True)
class _Pace:
    products_s: float
    elementwise_s: float
    tensor_parallel_s: float
    context_parallel_s: float
    expert_parallel_s: float
    backward_s: float
    layers: dict[bool, Work]

    @property
    def total_s(self) -> float:
        within_s = self.products_s + self.elementwise_s + self.tensor_parallel_s
        return within_s + self.context_parallel_s + self.expert_parallel_s


def _pace(config: Config, execution: Execution, stage: int) -> _Pace:
    kinds, device = layer_kinds(config, stage), _device(config)
    layers, mixtures = sum(kinds.values()), kinds.get(True, 0)
    either = {config.model.is_mixture(layer) for layer in range(config.model.num_layers)}
    products = {kind: layer_products(config, execution, device, mixture=kind) for kind in either}
    passes = {kind: layer_passes(config, execution, device, mixture=kind) for kind in either}
    tensor, context = tensor_parallel_work(config, execution), context_parallel_work(config, execution)
    experts = expert_parallel_work(config, execution)
    layer = {kind: products[kind] + passes[kind] + tensor + context for kind in either}
    if True in layer:
        layer[True] += experts
    head, loss = Work(0.0, 0.0), Work(0.0, 0.0)
    if stage == config.parallel.pipeline_parallel_size - 1:
        head, loss = head_product(config, execution, device), loss_work(config, execution, device)
    backward_s = sum(number * (layer[kind].backward_s + layer[kind].again_s) for kind, number in kinds.items())
    return _Pace(
        products_s=sum(number * products[kind].total_s for kind, number in kinds.items()) + head.total_s,
        elementwise_s=sum(number * passes[kind].total_s for kind, number in kinds.items()) + loss.total_s,
        tensor_parallel_s=layers * tensor.total_s,
        context_parallel_s=layers * context.total_s,
        expert_parallel_s=mixtures * experts.total_s,
        backward_s=backward_s + head.backward_s + loss.backward_s,
        layers=layer,
    )


def _device(config: Config) -> Device:
    peak = peak_flops_per_s(config)
    assert peak is not None
    return Device.of(config, peak / config.world_size)


def _pipeline_s(config: Config, execution: Execution, pace: _Pace, count: int) -> float:
    """Return the time of waiting for other stages, and of transfers between stages.

    With m micro-batches, p stages and v chunks of each, the pipeline takes (m + (p - 1) / v) of them (arXiv 2104.04473,
    sections 2.2.1 and 2.2.2).
    """
    stages = config.parallel.pipeline_parallel_size
    if stages == 1:
        return 0.0
    one_s = send_s(config, execution) + config.cluster.hardware.pipeline_overhead_s
    wait_s = (stages - 1) / execution.chunks * (pace.total_s + one_s)
    return wait_s + execution.chunks * count * one_s
