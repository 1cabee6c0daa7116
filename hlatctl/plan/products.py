"""Time of a layer's operations on one device: an additive roofline; pure arithmetic.

A matrix product takes its FLOPs at ``compute_efficiency`` of the peak, plus its operands and its result once at the
memory's bandwidth. So a product with a small dimension reaches less of the peak than a large one. Element-wise
operations take their bytes at that bandwidth. If the bandwidth is unknown, bytes take no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from conf.schema import Config
from conf.sizes import COMPUTE_BYTES
from hlatctl.plan.activations import widths
from hlatctl.plan.execution import Execution, sequences, tokens

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
#: Bytes moved for each entry of the logits: written, read and cast, softmax, gradient, cast and read twice.
_LOGIT_BYTES_MOVED = 24


@dataclass(frozen=True)
class Device:
    """What one process's device reaches.

    Args:
        flops_per_s: with large products, on the slowest device: all others wait for it.
        s_per_byte: of its memory; 0: unknown.
        entry_bytes: of an activation.
        fp8_flops_per_s: with large products in FP8; 0: unknown.
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
    """Return how many standard deviations the largest of so many normal values is expected to be above the mean.

    Blom's approximation (Statistical Estimates and Transformed Beta-Variables, 1958): 0 of one, 1.4 of 8, 2.6 of 128,
    and 3.4 of 2,048.
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


@dataclass(frozen=True)
class Product:
    """``count`` matrix products of the same sizes."""

    rows: int
    inner: int
    columns: int
    count: float = 1.0

    @property
    def flops(self) -> float:
        """A multiplication and an addition are two."""
        return 2.0 * self.rows * self.inner * self.columns * self.count

    @property
    def entries(self) -> float:
        """Of both operands and the result."""
        sizes = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return sizes * self.count

    def time_s(self, device: Device, *, fp8: bool = False) -> float:
        """Return the product's time."""
        flops_per_s = device.fp8_flops_per_s if fp8 else device.flops_per_s
        return self.flops / flops_per_s + self.entries * (_FP8_BYTES if fp8 else device.entry_bytes) * device.s_per_byte


@dataclass(frozen=True)
class Work:
    """Seconds of one micro-batch's forward pass through a layer or the head, its backward pass, and recomputation."""

    forward_s: float
    backward_s: float
    again_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All three."""
        return self.forward_s + self.backward_s + self.again_s

    def __add__(self, other: Work) -> Work:
        """Return both, one after the other."""
        return Work(self.forward_s + other.forward_s, self.backward_s + other.backward_s, self.again_s + other.again_s)


@dataclass(frozen=True)
class _Result:
    """What a layer may keep instead of computing it again: seconds to compute it, and its bytes."""

    again_s: float
    kept_bytes: int


def linears(config: Config, execution: Execution) -> dict[str, Product]:
    """Return the products of a layer's weights for one micro-batch, on one tensor-parallel process."""
    count, hidden = tokens(config, execution), config.model.hidden_size
    width, kv, ffn, _ = widths(config)
    return {
        "qkv": Product(count, hidden, width + 2 * kv),
        "o": Product(count, width, hidden),
        "gate_up": Product(count, hidden, 2 * ffn),
        "down": Product(count, ffn, hidden),
    }


def layer_products(config: Config, execution: Execution, device: Device) -> Work:
    """Return the time of a layer's matrix products.

    The backward pass of a product is two products of the same sizes. Flash attention skips the masked half and computes
    the scores again in the backward pass: five products instead of four (arXiv 2307.08691, section 3.1). Its scores
    stay on the chip, but the exponentials between its products take about as long as moving the scores would.
    """
    fp8 = execution.fp8 is not None
    linear_s = sum(product.time_s(device, fp8=fp8) for product in linears(config, execution).values())
    flash = uses_flash(config, execution)
    core_s = sum(product.time_s(device) for product in _core(config, execution)) * (0.5 if flash else 1.0)
    again_s = {
        "none": 0.0,
        "selective": core_s,
        "operators": sum(product.time_s(device, fp8=fp8) for product in _every_second(config, execution)),
        "budget": _over_budget_s(config, execution, device, core_s),
        "full": linear_s + core_s,
    }[execution.recomputed]
    return Work(linear_s + core_s, 2 * linear_s + (2.5 if flash else 2.0) * core_s, again_s)


def uses_flash(config: Config, execution: Execution) -> bool:
    """Return whether attention is one fused kernel; HLAT's model on NxD computes all scores."""
    return config.backend.name != "nxd" if execution.flash_attention is None else execution.flash_attention


def _every_second(config: Config, execution: Execution) -> list[Product]:
    """Return the products that are recomputed with ``operators``: output, and if they are separate keys and up."""
    products, hidden = linears(config, execution), config.model.hidden_size
    if not execution.separate_products:
        return [products["o"]]
    count, up = products["qkv"].rows, products["gate_up"].columns // 2
    return [Product(count, hidden, widths(config)[1]), products["o"], Product(count, hidden, up)]


def _over_budget_s(config: Config, execution: Execution, device: Device, core_s: float) -> float:
    """Return the time of the results that a layer computes again because its budget has no room for them.

    It keeps those first that take longest to compute, per byte, as torch.compile's knapsack does.
    """
    count, (width, kv, ffn, compute) = tokens(config, execution), widths(config)
    fp8, by_name = execution.fp8 is not None, linears(config, execution)
    sizes = {"qkv": width + 2 * kv, "o": config.model.hidden_size, "gate_up": 2 * ffn}
    results = [
        _Result(by_name[name].time_s(device, fp8=fp8), compute * count * size) for name, size in sizes.items()
    ] + [_Result(core_s, compute * count * width)]
    room = execution.memory_budget * sum(result.kept_bytes for result in results)
    again_s = 0.0
    for result in sorted(results, key=lambda result: result.again_s / result.kept_bytes, reverse=True):
        share = min(1.0, room / result.kept_bytes)
        room -= share * result.kept_bytes
        again_s += (1.0 - share) * result.again_s
    return again_s


def _core(config: Config, execution: Execution) -> list[Product]:
    """Return the products of attention's core: scores, and their products with the values.

    With context parallelism a process has its own queries and the keys and values of the whole sequence.
    """
    seq_len, width = config.train.seq_len, config.model.head_width
    own = seq_len // execution.context_parallel_size
    heads = sequences(config, execution) * config.model.num_heads / config.parallel.tensor_parallel_size
    return [Product(own, width, seq_len, heads), Product(own, seq_len, width, heads)]


def layer_passes(config: Config, execution: Execution, device: Device) -> Work:
    """Return the time of a layer's element-wise operations. A backward pass moves about twice as many bytes."""
    model, parallel = config.model, config.parallel
    hidden = model.hidden_size // (parallel.tensor_parallel_size if parallel.sequence_parallel else 1)
    width, kv, ffn, _ = widths(config)
    compiled = config.backend.compile or config.backend.name == "nxd"
    by_hidden, by_heads, by_ffn = _COMPILED_PASSES if compiled else _EAGER_PASSES
    if config.model.qk_norm != "none":
        by_heads += _COMPILED_HEAD_NORM if compiled else _EAGER_HEAD_NORM
    pass_s = tokens(config, execution) * device.entry_bytes * device.s_per_byte
    rotations_s = pass_s * by_heads * (width + kv)
    forward_s = pass_s * (by_hidden * hidden + by_ffn * ffn) + rotations_s
    again_s = {
        "none": forward_s if execution.recomputes_elementwise else 0.0,
        "selective": rotations_s,
        "operators": forward_s,
        "budget": forward_s * (1.0 - execution.memory_budget),
        "full": forward_s,
    }[execution.recomputed]
    casts_s = 0.0
    if execution.fp8 is not None:
        casts_s = _cast_bytes(config) * tokens(config, execution) * device.s_per_byte
    return Work(forward_s + casts_s, 2 * forward_s + 2 * casts_s, again_s)


def _cast_bytes(config: Config) -> int:
    """Return the bytes per token to cast the inputs of a layer's products to FP8; its gradients take twice as many."""
    width, _, ffn, _ = widths(config)
    return _FP8_CAST_BYTES * (2 * config.model.hidden_size + width + ffn)


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
