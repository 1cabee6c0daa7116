"""How often a run repeats each of its sources; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.schema import Config

#: Up to about 4 times, repeated text is nearly as good as new text (Muennighoff et al. 2023, arXiv 2305.16264).
GOOD_EPOCHS = 4.0


@dataclass(frozen=True)
class Epochs:
    """One source of a corpus.

    Args:
        source: its path.
        tokens: in the source, estimated from a sample.
        trained_tokens: that the whole run trains on.
    """

    source: str
    tokens: int
    trained_tokens: int

    @property
    def count(self) -> float:
        """How often the run trains on the source."""
        return self.trained_tokens / self.tokens

    @property
    def warning(self) -> str:
        """A warning if the source is repeated too often; else empty."""
        if self.count <= GOOD_EPOCHS:
            return ""
        return (
            f"data: the run trains on {self.source} about {self.count:.0f} times: {self.trained_tokens:,} tokens from "
            f"a corpus of about {self.tokens:,}; repeats beyond {GOOD_EPOCHS:.0f} add little (arXiv 2305.16264)"
        )


def epochs(config: Config, dataset: Mapping[str, Any]) -> list[Epochs]:
    """Return the epochs of each source; empty if an older version prepared the corpus, without counting tokens.

    Args:
        config: of the run.
        dataset: ``dataset.json``.
    """
    sources = dataset.get("sources", [])
    weights = [source.weight for source in config.data.sources] or [1.0]
    if len(weights) != len(sources) or not all(source.get("estimated_tokens") for source in sources):
        return []
    return [
        Epochs(source["path"], source["estimated_tokens"], round(config.total_tokens * weight / sum(weights)))
        for source, weight in zip(sources, weights, strict=True)
    ]
