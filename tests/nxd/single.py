"""Run as one process: what only one can show, as JSON on the last line; not a test by itself.

With several processes every collective cuts the graph (on a CPU), so that a step that makes a new graph would not show.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from conf.load import load
from hlatctl.run.paths import RunPaths
from trainer.backends.nxd import Nxd
from trainer.step import loop


def compiled_at_each_boundary(backend: Nxd, run: RunPaths) -> list[int]:
    """Graphs that were compiled by the end of each graph of a run's training."""
    from torch_xla.debug.metrics import metric_data

    config, counts, boundary = load(run.config), [], backend.step_boundary

    def counted() -> None:
        boundary()
        counts.append(metric_data("CompileTime")[0])

    backend.step_boundary = counted  # type: ignore[method-assign]
    assert loop.Training(config, run, backend, None).run() == 0
    return counts


def attention_by_kernel(backend: Nxd) -> float:
    """Largest difference of the kernel's attention, and of its gradients, from torch's."""
    from trainer.backends.nxd_parts import NxdParts

    torch.manual_seed(0)
    shapes = ((1, 4, 2048, 8), (1, 2, 2048, 8), (1, 2, 2048, 8))
    inputs = [torch.randn(shape) for shape in shapes]
    results: list[list[torch.Tensor]] = []
    for flash in (False, True):
        parts = NxdParts(load(RunPaths(Path(sys.argv[1])).config).parallel, torch.float32, flash=flash)
        held = [tensor.to(backend.device).requires_grad_() for tensor in inputs]
        out: Any = parts.attend(held[0], held[1], held[2], None)
        out.square().sum().backward()
        results.append([tensor.detach().cpu() for tensor in (out, *(tensor.grad for tensor in held))])
    return max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))


def formats_of_sums() -> list[str]:
    """Return the number formats other than FP32 that the kernel keeps its softmax's sums in, of BF16 attention."""
    from neuronx_distributed.kernels import flash_attn

    from trainer.backends.nxd_parts import NxdParts

    formats: list[str] = []

    def config(lse_dtype: str = "", **_: Any) -> None:
        formats.append(lse_dtype)

    q = torch.zeros(1, 1, 2048, 8, dtype=torch.bfloat16)
    with mock.patch.object(flash_attn, "FlashConfig", config):
        NxdParts(load(RunPaths(Path(sys.argv[1])).config).parallel, q.dtype, flash=True).attend(q, q, q, None)
    return [each for each in formats if each]


def main() -> None:
    run = RunPaths(Path(sys.argv[1]))
    backend = Nxd(load(run.config))
    seen = {
        "compiled": compiled_at_each_boundary(backend, run),
        "attention": attention_by_kernel(backend),
        "sums": formats_of_sums(),
    }
    backend.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
