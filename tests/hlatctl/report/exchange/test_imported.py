"""The names of figures from other evaluators."""

from __future__ import annotations

from typing import Any

import pytest

from hlatctl.report.exchange.imported import Figures
from hlatctl.report.exchange.item_rows import row
from hlatctl.run.errors import DataError


def test_bits_per_byte_have_the_name_of_our_own() -> None:
    found = Figures(form="olmes")
    found.add("piqa", [("acc", "", 0.5, 0.1), ("bits_per_byte", "", 1.2, 0.05), ("acc_per_token", "", 0.6, 0.1)])
    assert list(found.figures) == ["piqa", "piqa_bpb", "piqa_acc_per_token"]
    found.add("wikitext", [("bits_per_byte", "none", 0.8, None)])
    assert list(found.figures)[3:] == ["wikitext"], "its first metric"


@pytest.mark.parametrize(
    ("metric", "value", "stderr", "says"),
    [
        ("acc", -5, -1, "piqa: acc=-5: must be 0 to 1"),
        ("acc_norm", 45.0, None, "piqa: acc_norm=45: must be 0 to 1"),
        ("exact_match", 1.01, None, "must be 0 to 1"),
        ("pass@10", 12, None, "pass@10=12: must be 0 to 1"),
        ("rougeL", 101, None, "must be 0 to 100"),
        ("mcc", -2, None, "must be -1 to 1"),
        ("word_perplexity", 0.5, None, "must be at least 1"),
        ("bits_per_byte", -0.1, None, "must be at least 0"),
        ("of_its_own", -5, -0.1, "piqa: of_its_own_stderr=-0.1: must be at least 0"),
    ],
)
def test_a_score_outside_of_its_metrics_range_is_refused(
    metric: str, value: float, stderr: float | None, says: str
) -> None:
    with pytest.raises(DataError) as raised:
        Figures(form="lm_eval").add("piqa", [(metric, "", value, stderr)])
    assert says in raised.value.message


def test_scores_at_the_ends_of_their_ranges_and_those_of_unknown_metrics_are_taken() -> None:
    metrics = [("acc", 1 + 1e-15), ("mcc", -1), ("f1", 87.5), ("ter", 120.0), ("logits_per_byte_corr", -7.5)]
    found = Figures(form="olmes")
    for name, value in metrics:
        found.add(name, [(name, "", value, 0.0)])
    assert len(found.figures) == len(metrics)


def test_an_items_accuracy_is_a_fraction_and_its_perplexity_can_be_a_log_likelihood() -> None:
    fixed: dict[str, Any] = {"item": 0, "document": None, "prompt": "", "target": ""}
    assert row(**fixed, metrics={"acc": True, "perplexity": -3.0})["metrics"] == [("acc", 1.0), ("perplexity", -3.0)]
    with pytest.raises(DataError, match="an item: acc=-5: must be 0 to 1"):
        row(**fixed, metrics={"acc": -5})
