"""With muP, activations have the same size at every width before and after some steps; without, they grow."""

from __future__ import annotations

import pytest

from benchmarks.coordinates import measure

WIDTHS = (32, 64, 128, 256)
STEPS = 3


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_activations_don_t_depend_on_the_width_with_mup_and_grow_without(optimizer: str) -> None:
    for each in measure(WIDTHS, base_width=32, steps=STEPS, optimizer=optimizer):
        if each.part == "logits":  # an untrained model's become smaller with the width, as in the paper
            assert each.growth(0) == pytest.approx(-0.5, abs=0.05)
            assert each.growth(STEPS) < 0.1
            continue
        assert each.growth(0) == pytest.approx(0.0, abs=0.1), each.part
        assert each.growth(STEPS) == pytest.approx(0.0, abs=0.25), each.part
    for each in measure(WIDTHS, base_width=None, steps=STEPS, optimizer=optimizer):
        if each.part != "embedding":
            assert each.growth(STEPS) > 0.35, each.part
