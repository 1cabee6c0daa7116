"""Time of a layer's operations on one device: an additive roofline; pure arithmetic.

A matrix product takes its FLOPs at ``compute_efficiency`` of the peak, plus its operands and its result once at the
memory's bandwidth. So a product with a small dimension reaches less of the peak than a large one. Element-wise
operations take their bytes at that bandwidth. If the bandwidth is unknown, bytes take no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config
from conf.sizes import COMPUTE_BYTES, kv_width
from hlatctl.plan.execution import Execution

#: The peak in FP8, relative to BF16 (NVIDIA's data sheets of H100 and H200), and the mean bytes of an entry: operands
#: have one byte, results two.
_FP8_SPEEDUP, _FP8_BYTES = 2.0, 4 / 3
#: Bytes to scale and cast an entry to FP8: read for the largest value, read again, and written.
_FP8_CAST_BYTES = 5
#: Passes over memory of a layer's element-wise operations (reads and writes of one tensor), by the tensor's width:
#: hidden size (two norms, two sums), queries and keys (rotation), feed-forward width (SiLU and product). Without
#: compilation norms and rotations go through FP32, operation by operation: their bytes are given in BF16 passes.
_COMPILED_PASSES = (9, 2, 3)
_EAGER_PASSES = (36, 10, 5)
#: The same for norms of queries and keys, compiled (read, write) and eager (cast to FP32, norm, cast). Not measured.
_NORM_PASSES = (2, 10)
#: Bytes moved for each entry of the logits: written, read and cast, softmax, gradient, cast and read twice.
_LOGIT_BYTES_MOVED = 24


@dataclass(frozen=True)
class Device:
    """What one process's device reaches.

    Args:
        flops_per_s: with large products.
        s_per_byte: of its memory; 0: unknown.
        entry_bytes: of an activation.
    """

    flops_per_s: float
    s_per_byte: float
    entry_bytes: int

    @classmethod
    def of(cls, config: Config, peak_flops_per_s: float) -> Device:
        """Return a configuration's device."""
        hardware = config.cluster.hardware
        s_per_byte = 0.0 if hardware.memory_bytes_per_s is None else 1.0 / hardware.memory_bytes_per_s
        efficiency = hardware.compute_efficiency
        return cls(peak_flops_per_s * efficiency, s_per_byte, COMPUTE_BYTES[config.precision.name])


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
        flops_per_s = device.flops_per_s * (_FP8_SPEEDUP if fp8 else 1.0)
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


def linears(config: Config) -> dict[str, Product]:
    """Return the products of a layer's weights for one micro-batch, on one tensor-parallel process."""
    tokens, model = config.micro_batch_size * config.train.seq_len, config.model
    width, ffn = (size // config.parallel.tensor_parallel_size for size in (model.query_width, model.intermediate_size))
    return {
        "qkv": Product(tokens, model.hidden_size, width + 2 * kv_width(config)),
        "o": Product(tokens, width, model.hidden_size),
        "gate_up": Product(tokens, model.hidden_size, 2 * ffn),
        "down": Product(tokens, ffn, model.hidden_size),
    }


def layer_products(config: Config, execution: Execution, device: Device) -> Work:
    """Return the time of a layer's matrix products.

    The backward pass of a product is two products of the same sizes. Flash attention skips the masked half and computes
    the scores again in the backward pass: five products instead of four (arXiv 2307.08691, section 3.1). Its scores
    stay on the chip, but the exponentials between its products take about as long as moving the scores would.
    """
    products = linears(config)
    linear_s = sum(product.time_s(device, fp8=execution.fp8) for product in products.values())
    flash = uses_flash(config, execution)
    core_s = sum(product.time_s(device) for product in _core(config)) * (0.5 if flash else 1.0)
    again = {"selective": core_s, "full": linear_s + core_s}
    again_s = again.get(config.parallel.activation_checkpointing, 0.0)
    if execution.recomputes_half:
        again_s = sum(product.time_s(device, fp8=execution.fp8) for product in _every_second(config))
    return Work(linear_s + core_s, 2 * linear_s + (2.5 if flash else 2.0) * core_s, again_s)


def uses_flash(config: Config, execution: Execution) -> bool:
    """Return whether attention is one fused kernel; HLAT's model on NxD computes all scores."""
    return config.backend.name != "nxd" if execution.flash_attention is None else execution.flash_attention


def _every_second(config: Config) -> list[Product]:
    """Return the products that torchtitan's option ``op`` recomputes: keys, output and up."""
    products, model = linears(config), config.model
    tokens, up = products["qkv"].rows, products["gate_up"].columns // 2
    return [Product(tokens, model.hidden_size, kv_width(config)), products["o"], Product(tokens, model.hidden_size, up)]


def _core(config: Config) -> list[Product]:
    """Return the products of attention's core: scores, and their products with the values."""
    seq_len, width = config.train.seq_len, config.model.head_width
    heads = config.micro_batch_size * config.model.num_heads / config.parallel.tensor_parallel_size
    return [Product(seq_len, width, seq_len, heads), Product(seq_len, seq_len, width, heads)]


def layer_passes(config: Config, execution: Execution, device: Device) -> Work:
    """Return the time of a layer's element-wise operations. A backward pass moves about twice as many bytes."""
    model, parallel = config.model, config.parallel
    tokens, tensor = config.micro_batch_size * config.train.seq_len, parallel.tensor_parallel_size
    hidden = model.hidden_size // (tensor if parallel.sequence_parallel else 1)
    heads, ffn = model.query_width // tensor + kv_width(config), model.intermediate_size // tensor
    compiled = config.backend.compile or config.backend.name == "nxd"
    by_hidden, by_heads, by_ffn = _COMPILED_PASSES if compiled else _EAGER_PASSES
    pass_s = tokens * device.entry_bytes * device.s_per_byte
    by_heads += 0 if model.qk_norm == "none" else _NORM_PASSES[not compiled]
    rotations_s = pass_s * by_heads * heads
    forward_s = pass_s * (by_hidden * hidden + by_ffn * ffn) + rotations_s
    whole = parallel.activation_checkpointing == "full" or execution.recomputes_half
    selective = parallel.activation_checkpointing == "selective"
    again_s = forward_s if whole else rotations_s if selective else 0.0
    casts_s = _cast_bytes(config) * tokens * device.s_per_byte if execution.fp8 else 0.0
    return Work(forward_s + casts_s, 2 * forward_s + 2 * casts_s, again_s)


def _cast_bytes(config: Config) -> int:
    """Return the bytes per token to cast the inputs of a layer's products to FP8; its gradients take twice as many."""
    model, tensor = config.model, config.parallel.tensor_parallel_size
    sliced = (model.query_width + model.intermediate_size) // tensor
    return _FP8_CAST_BYTES * (2 * model.hidden_size + sliced)


def head_product(config: Config, device: Device) -> Work:
    """Return the time of the output projection."""
    tokens, hidden = config.micro_batch_size * config.train.seq_len, config.model.hidden_size
    forward_s = Product(tokens, hidden, _entries(config)).time_s(device)
    return Work(forward_s, 2 * forward_s)


def loss_s(config: Config, device: Device) -> float:
    """Return the time of the loss and of its gradient."""
    return _LOGIT_BYTES_MOVED * config.micro_batch_size * config.train.seq_len * _entries(config) * device.s_per_byte


def _entries(config: Config) -> int:
    return config.model.vocab_size // config.parallel.tensor_parallel_size
