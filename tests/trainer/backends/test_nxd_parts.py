"""Which attention NeuronX Distributed's kernel computes, with stand-ins for the libraries."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from conf.schema import ParallelConfig
from trainer.model.decoder import Parts

_MODULES = (
    "neuronx_distributed",
    "neuronx_distributed.kernels",
    "neuronx_distributed.kernels.flash_attn",
    "neuronx_distributed.parallel_layers",
    "neuronx_distributed.parallel_layers.layers",
    "neuronx_distributed.parallel_layers.loss_functions",
    "neuronx_distributed.utils",
    "neuronx_distributed.utils.model_utils",
    "torch_xla",
    "torch_xla.utils",
    "torch_xla.utils.checkpoint",
)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The libraries' modules, whose functions do nothing, by name."""
    modules: dict[str, Any] = {name: MagicMock(spec=ModuleType) for name in _MODULES}
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    layers = modules["neuronx_distributed.parallel_layers.layers"]
    layers.ParallelEmbedding = layers.ColumnParallelLinear = layers.RowParallelLinear = nn.Module
    modules["neuronx_distributed.parallel_layers"].mappings = MagicMock()
    modules["neuronx_distributed.parallel_layers"].parallel_state = MagicMock()
    modules["neuronx_distributed.parallel_layers.loss_functions"].parallel_cross_entropy = MagicMock()
    modules["torch_xla.utils.checkpoint"].checkpoint = MagicMock()
    monkeypatch.delitem(sys.modules, "trainer.backends.nxd_parts", raising=False)
    yield modules
    sys.modules.pop("trainer.backends.nxd_parts", None)


@pytest.mark.parametrize(
    ("cores", "heads", "seq_len", "by_kernel"),
    [(1, 3, 2048, True), (2, 4, 2048, True), (2, 3, 2048, False), (2, 4, 1024, False)],
)
def test_the_kernel_computes_on_all_physical_cores_of_a_logical_one_or_not_at_all(
    library: dict[str, Any], cores: int, heads: int, seq_len: int, by_kernel: bool
) -> None:
    """Two cores share the heads, so an odd number of heads would lose one."""
    library["neuronx_distributed.utils.model_utils"].get_platform_lnc = lambda: cores
    kernel = library["neuronx_distributed.kernels.flash_attn"].nki_flash_attn_func = MagicMock(
        side_effect=lambda q, k, v, **_: Parts().attend(q, k, v, None)
    )
    parts = importlib.import_module("trainer.backends.nxd_parts").NxdParts(ParallelConfig(), torch.float32, flash=True)
    q, k, v = (torch.randn(1, count, seq_len, 4) for count in (heads, 1, 1))
    out: Tensor = parts.attend(q, k, v, None)
    torch.testing.assert_close(out, Parts().attend(q, k, v, None))
    assert kernel.called == by_kernel
    if by_kernel:
        assert kernel.call_args.kwargs["lnc"] == cores
        assert [part.shape[1] for part in kernel.call_args.args] == [heads] * 3
