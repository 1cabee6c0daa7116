"""Time of an optimizer's update: state that is read and written, and Muon's products; pure arithmetic."""

from __future__ import annotations

from conf.schema import Config
from conf.sizes import BF16_BYTES, kv_width, process_layers, stage_parameters, state_bytes
from hlatctl.plan.activations import widths
from hlatctl.plan.collectives import neighbours_s, ring
from hlatctl.plan.execution import Execution, reducers, shards
from hlatctl.plan.memory import matrix_parameters, moment_bytes
from hlatctl.plan.products import Device, Product


def update_s(config: Config, execution: Execution, device: Device) -> float:
    """Return the time of an update: the state is read and written once. 0 if the memory's bandwidth is unknown."""
    each, held = state_bytes(config), stage_parameters(config, 0)
    state = held * (each.weights + each.gradients + each.master) + moment_bytes(config, execution, 0)
    read_and_write_s = 2 * state / shards(config, execution) * device.s_per_byte
    return read_and_write_s + (_muon_s(config, execution, device) if execution.muon_steps else 0.0)


def _muon_s(config: Config, execution: Execution, device: Device) -> float:
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
    products_s = layers * execution.muon_steps * sum(_iteration_s(*shape, device) for shape in _matrices(config))
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
    """Return the shapes of a layer's linear maps: query, key, value, output, gate, up and down."""
    hidden, tensor = config.model.hidden_size, config.parallel.tensor_parallel_size
    queries, ffn = widths(config)[0] * tensor, config.model.intermediate_size
    keys = kv_width(config) * min(tensor, config.model.num_kv_heads)
    return [(queries, hidden)] * 2 + [(keys, hidden)] * 2 + [(ffn, hidden)] * 3
