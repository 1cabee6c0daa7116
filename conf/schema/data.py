"""The corpus, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from conf.constraints import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One corpus of a mixture."""

    path: str = ""
    """File or folder, like `data.path`."""
    name: str | None = None
    """Name in `data.weights`; none: its path, or the end of it."""
    weight: PositiveFloat = 1.0
    """Share of the trained tokens from this corpus, relative to the other weights."""
    text_column: str | None = None
    """Column that holds the text; none: `data.text_column`."""
    tokens: PositiveInt | None = None
    """Tokens of this corpus, as published. A plan counts with them until the corpus is prepared; no other effect."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus."""

    source: Literal["python_stdlib"] = "python_stdlib"
    """Corpus to build if no `path` is given: the standard library of the running interpreter."""
    path: str | None = None
    """File, folder or URL of Arrow, Parquet, JSON Lines (.gz, .zst), plain text or token ids (docs/data-loader.md)."""
    text_column: str = "text"
    """Column (or JSON field) that holds a document's text."""
    sources: list[SourceConfig] = field(default_factory=list)
    """A mixture, instead of `path`: `[{path: a, weight: 3}, {path: b}]`. Weights are shares of tokens."""
    weights: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """Shares of tokens by source, instead of those in `sources`: `{web: 1, math: 3}`, by their names or by the
    ends of their paths. Sources that are not in it are not read."""
    on_corrupt: Literal["fail", "skip"] = "fail"
    """What to do with a damaged row or file: `fail`, or `skip` (counted and reported)."""
    skip_steps: list[int | str] = field(default_factory=list)
    """Batches to skip, by 1-based number in the order without skips: `[7, "120-125"]`. Later batches move up."""
    mask_across_documents: bool = False
    """Attend only within a document, not to earlier documents of the same packed sequence (HLAT attends to all)."""
    validation_fraction: Fraction = 0.02
    """Share of the documents held out for validation, selected by a hash of their position."""
    prefetch_batches: PositiveInt = 4
    """Packed batches that the background loader prepares in advance."""

    @property
    def inputs(self) -> list[SourceConfig]:
        """Return the sources to read; `path` is the short form of one source. Empty if a corpus is built."""
        single = [] if self.path is None else [SourceConfig(path=self.path)]
        return [replace(s, text_column=s.text_column or self.text_column) for s in self.sources or single]

    @property
    def source_weights(self) -> list[float]:
        """Return each source's weight; `[1.0]` for a single one."""
        if not self.weights:
            return [source.weight for source in self.sources] or [1.0]
        return [sum(self.weights[name] for name in self.weights if is_named(s, name)) for s in self.sources]


def is_named(source: SourceConfig, name: str) -> bool:
    """Return whether `data.weights` means a source by a name: its own, or else its path or the path's end."""
    if source.name is not None:
        return source.name == name
    path, name = source.path.rstrip("/"), name.rstrip("/")
    return path == name or path.endswith(f"/{name}")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer."""

    path: str | None = None
    """SentencePiece `.model`, `tokenizer.json`, or a Hugging Face folder; none: train one on the corpus."""
    train_vocab_size: PositiveInt = 8192
    """Vocabulary size of the BPE tokenizer that is trained if no `path` is given."""
