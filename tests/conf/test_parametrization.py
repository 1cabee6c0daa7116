"""Initial weights and learning rates by the width, and what has no muP."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from conf.compose import compose
from conf.parametrization import initial_std, rate_factor
from conf.schema import ModelConfig
from hlatctl.run.errors import ConfigError

MATRICES = ("layers.0.attention.qkv.weight", "layers.0.mlp.down.weight", "head.weight")
OTHERS = ("embedding.weight", "norm.weight", "layers.0.attention_norm.weight")


def test_factors_follow_table_3_of_tensor_programs_v() -> None:
    standard = ModelConfig(hidden_size=256)
    wide = ModelConfig(hidden_size=256, mup_base_width=64)
    assert [rate_factor(name, wide) for name in (*MATRICES, *OTHERS)] == [1 / 4] * 3 + [1.0] * 3
    assert rate_factor(MATRICES[0], wide, orthogonalized=True) == 1 / 2
    factors = [initial_std(name, wide) / initial_std(name, standard) for name in (*MATRICES, OTHERS[0])]
    assert factors == pytest.approx([1 / 2, 1 / 2, 1 / 4, 1])
    assert initial_std("layers.1.mlp.down.weight", standard) == pytest.approx(0.021 / math.sqrt(4)), "as in HLAT"


def test_the_base_width_and_models_without_it_have_no_factors() -> None:
    for model in (ModelConfig(), ModelConfig(mup_base_width=ModelConfig().hidden_size)):
        assert {rate_factor(name, model) for name in (*MATRICES, *OTHERS)} == {1.0}
        assert initial_std("head.weight", model) == model.initializer_range


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["model.tie_embeddings=true"], "model.tie_embeddings=true: can't be combined", "model.tie_embeddings=false"),
        (["model=qwen3_moe_tiny", "backend=torchtitan"], "model.num_experts=", "model.mup_base_width=null"),
        (["backend=nxd"], "backend.name=nxd doesn't read this key", "model.mup_base_width=null"),
        (
            [
                "backend=torchtitan",
                "optimizer.decay=all_but_norms",
                "parallel.pipeline_parallel_size=2",
                "cluster.processes_per_node=2",
            ],
            "only one has an embedding",
            "optimizer.decay=all",
        ),
    ],
)
def test_what_has_no_mup_is_refused(overrides: list[str], message: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["model.mup_base_width=64", *overrides], tmp_path)
    assert "model.mup_base_width=64" in caught.value.message
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
