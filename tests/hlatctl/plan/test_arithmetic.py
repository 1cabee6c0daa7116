"""Counts against hand-calculated ones."""

from __future__ import annotations

from conf.sizes import flops_per_token
from tests.conf.test_sizes import LLAMA_7B


def test_flops_per_token_of_7b() -> None:
    # 6 x (6,738,415,616 - 32,000 x 4,096) + 12 x 32 x 4,096 x 4,096
    assert flops_per_token(LLAMA_7B, 4096) == 39_644_061_696 + 6_442_450_944
