"""The loss alone, forward and backward: time, memory and exactness of ours and of named peers.

Each starts from BF16 inputs and FP32 weights of the output projection, as in mixed precision, and ends with the
gradients of both. Prints a table for each size of the vocabulary, as JSON. A peer without its package, or whose package
refuses the device, has the reason in its place. Inputs are random, with the size that they have in a new model.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peers
from conf.load import load
from trainer.model.loss import cross_entropy

#: Llama 3's, beside that of the configuration.
_LARGE_VOCAB = 128_256
_ROUNDS, _WARM_UP_ROUNDS = 10, 2

#: (rows, hidden) BF16 inputs, (vocabulary, hidden) FP32 weights and (rows) targets to the mean loss.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class _Way:
    """A way to compute the loss, and what was measured.

    Args:
        make: returns the function; it may fail without a package.
        error: why it was not measured.
        difference: relative difference of the inputs' gradient from the exact one.
        peak_bytes: above the inputs; None on a CPU.
    """

    make: Callable[[], Loss]
    seconds: list[float] = field(default_factory=list)
    error: str | None = None
    difference: float = 0.0
    peak_bytes: int | None = None


def main() -> None:
    """Measure all ways in turn, and print the tables."""
    given = peers.arguments().parse_args()
    peers.add_packages()
    config, device = load(given.config), torch.device(given.device)
    rows = config.micro_batch_size * config.train.seq_len
    vocabs = [config.model.vocab_size] + [_LARGE_VOCAB] * (device.type == "cuda")
    notes = [line for vocab in vocabs for line in _table(rows, config.model.hidden_size, vocab, device)]
    print(json.dumps({"notes": notes}))


def _table(rows: int, hidden_size: int, vocab_size: int, device: torch.device) -> list[str]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab_size, hidden_size, device=device) * 0.02).requires_grad_()
    inputs = hidden, weight, torch.randint(vocab_size, (rows,), device=device)
    exact = exact_gradient(*inputs)
    ways = _ways(compiled=device.type != "cpu")
    functions = {}
    for name, way in ways.items():
        try:
            functions[name] = way.make()
            for _ in range(_WARM_UP_ROUNDS):
                gradient = _gradient(functions[name], inputs)
            way.difference = float((gradient - exact).norm() / exact.norm())
        except Exception as error:  # a peer may fail in any way; the others still count
            functions.pop(name, None)
            way.error = f"not measured: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:140]
    for _ in range(_ROUNDS):
        for name, function in functions.items():
            _time(ways[name], function, inputs)
    title = f"{rows:,} rows, hidden {hidden_size:,}, vocabulary {vocab_size:,}"
    head = f"{title:50s} {'median ms':>10s} {'min ms':>8s} {'peak GiB':>9s} {'gradient off by':>16s}"
    return [head, *(_row(name, way) for name, way in ways.items())]


def _ways(*, compiled: bool) -> dict[str, _Way]:
    ways: dict[str, Callable[[], Loss]] = {
        "hlatctl: in blocks of rows": lambda: cross_entropy,
        "all logits, BF16": lambda: _all_at_once(torch.bfloat16),
        "all logits, softmax in FP32": lambda: _all_at_once(torch.float32),
        "all logits, softmax in FP32, compiled": lambda: torch.compile(_all_at_once(torch.float32)),
        "Liger, fused linear cross-entropy": _liger,
        "cut-cross-entropy": functools.partial(_cut, filter_eps="high"),
        "cut-cross-entropy, all gradients": functools.partial(_cut, filter_eps=None),
    }
    return {name: _Way(make) for name, make in ways.items() if compiled or not name.endswith("compiled")}


def _all_at_once(softmax: torch.dtype) -> Loss:
    """Return a loss with all logits in memory, computed in the inputs' precision."""
    return lambda hidden, weight, targets: F.cross_entropy(
        F.linear(hidden, weight.to(hidden.dtype)).to(softmax), targets
    )


def _liger() -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, targets: LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight.to(hidden.dtype), targets
    )[0]


def _cut(filter_eps: str | None) -> Loss:
    """Return Apple's loss; by default it omits gradients that BF16 sums would round away."""
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, targets: linear_cross_entropy(
        hidden, weight.to(hidden.dtype), targets, filter_eps=filter_eps
    )


@torch.no_grad()
def exact_gradient(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int = 1024) -> Tensor:
    """Return the mean loss's gradient of the inputs, (rows, hidden) FP32, with products in FP32, in blocks of rows.

    1,024 rows of 128,256 logits are 0.5 GiB in FP32.
    """
    blocks = []
    for start in range(0, len(hidden), rows):
        block = slice(start, start + rows)
        gradient = (hidden[block].float() @ weight.T).softmax(-1)
        gradient.scatter_add_(1, targets[block, None], gradient.new_full((1, 1), -1.0).expand(len(gradient), 1))
        blocks.append(gradient @ weight / len(hidden))
    return torch.cat(blocks)


def _gradient(function: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the gradient of the inputs, FP32."""
    hidden, weight, _ = inputs
    hidden.grad = weight.grad = None
    function(*inputs).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    return hidden.grad.float()


def _time(way: _Way, function: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    module = torch.get_device_module(inputs[0].device)
    on_device = inputs[0].device.type != "cpu"
    inputs[0].grad = inputs[1].grad = None
    before_bytes = 0
    if on_device:
        module.reset_peak_memory_stats()
        before_bytes = module.memory_allocated()
    module.synchronize()
    started_s = time.perf_counter()
    function(*inputs).backward()  # type: ignore[no-untyped-call]
    module.synchronize()
    way.seconds.append(time.perf_counter() - started_s)
    if on_device:
        way.peak_bytes = module.max_memory_allocated() - before_bytes


def _row(name: str, way: _Way) -> str:
    if way.error is not None:
        return f"{name:50s} {way.error}"
    peak = "?" if way.peak_bytes is None else f"{way.peak_bytes / 2**30:.2f}"
    median_ms, least_ms = statistics.median(way.seconds) * 1e3, min(way.seconds) * 1e3
    return f"{name:50s} {median_ms:10.2f} {least_ms:8.2f} {peak:>9s} {way.difference:16.2e}"


if __name__ == "__main__":
    main()
