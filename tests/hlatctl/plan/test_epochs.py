"""How often a run repeats its sources, and from when on that is remarked."""

from __future__ import annotations

import pytest

from conf.compose import compose
from hlatctl.plan.epochs import epochs
from hlatctl.plan.sections import corpus_section

MIXTURE = ["data.sources=[{path:/a,weight:3},{path:/b,weight:1}]", "train.tokens=4096000", "train.global_batch_size=8"]


def test_each_source_is_counted_by_its_share_of_the_tokens() -> None:
    dataset = {"sources": [{"path": "/a", "estimated_tokens": 3_072_000}, {"path": "/b", "estimated_tokens": 100_000}]}
    sources = epochs(compose(MIXTURE), dataset)
    assert [source.count for source in sources] == pytest.approx([1.0, 10.24])
    assert sources[0].warning == ""
    assert sources[1].warning == (
        "data: the run trains on /b about 10 times: 1,024,000 tokens from a corpus of about 100,000; repeats beyond 4 "
        "add little (arXiv 2305.16264)"
    )
    assert [figure.text for figure in corpus_section(sources).figures] == [
        "3,072,000 (from a sample)",
        "1",
        "100,000 (from a sample)",
        "10 (more than 4 add little)",
    ]


@pytest.mark.parametrize("dataset", [{}, {"sources": [{"path": "/a"}, {"path": "/b"}]}, {"sources": []}])
def test_a_corpus_without_counted_tokens_has_no_epochs(dataset: dict[str, object]) -> None:
    assert epochs(compose(MIXTURE), dataset) == []
