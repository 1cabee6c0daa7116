"""Write one part of a corpus's token ids: a pair of files in Megatron's format, and then a record of it.

A part is written by one process of ``trainer.data.tokenize``. Ids never pass between processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hlatctl.run import files
from hlatctl.run.errors import DataError
from hlatctl.run.files import DAMAGED, reading
from trainer.data import documents, workers
from trainer.data.documents import Source, sources_of
from trainer.data.packing import encoded
from trainer.data.remote import in_order
from trainer.data.tokenizer import Encode, make_encoder, tokenizer_of

PLAN = "plan.json"
#: Bytes of text between updates of the progress.
_COUNT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TokenizationPlan:
    """Which documents belong to which part.

    Args:
        dataset: path of the text's ``dataset.json``.
        fingerprint: fingerprint of the text, its held-out documents and the tokenizer.
        documents: number of training documents in the text.
        part_documents: number of documents in each part but the last.
        dtype: type of the ids.
    """

    dataset: str
    fingerprint: str
    documents: int
    part_documents: int
    dtype: str

    def __len__(self) -> int:
        return -(-self.documents // self.part_documents)

    def part(self, number: int) -> range:
        """Return the positions of a part's documents."""
        first = number * self.part_documents
        return range(first, min(first + self.part_documents, self.documents))


@dataclass(frozen=True)
class Part:
    """One part of the plan in a folder."""

    folder: Path
    number: int

    @property
    def prefix(self) -> Path:
        """Return the prefix of its files."""
        return self.folder / f"part-{self.number:06d}"

    @property
    def record(self) -> Path:
        """Return the file that is written last."""
        return self.prefix.with_suffix(".json")


def write_part(part: Part) -> dict[str, Any]:
    """Write the files of a part and then its record; return the record.

    Returns:
        ``name``; ``documents``; ``tokens``, with an end-of-sequence token per document that has text; ``text_bytes``;
        ``bin_sha256``; ``idx_sha256``.

    Raises:
        DataError: the text can't be read.
        OSError: the files can't be written.
    """
    plan, source, encode, eos_id = _prepared(part.folder)
    positions, prefix = plan.part(part.number), part.prefix
    with documents.Writer(prefix, np.dtype(plan.dtype)) as writer:
        tokens = text_bytes = counted_tokens = counted_bytes = 0
        for position, text in zip(positions, in_order(source.documents, positions), strict=True):
            ids = encoded(text, encode, eos_id)
            writer.add(ids)
            tokens, text_bytes = tokens + len(ids), text_bytes + len(text.encode())
            if text_bytes - counted_bytes >= _COUNT_BYTES or position == positions[-1]:
                workers.count(documents=tokens - counted_tokens, input_bytes=text_bytes - counted_bytes)
                counted_tokens, counted_bytes = tokens, text_bytes
        writer.finish()
    record = {
        "name": prefix.name,
        "documents": len(positions),
        "tokens": tokens,
        "text_bytes": text_bytes,
        "bin_sha256": files.sha256_file(documents.data_path(prefix)),
        "idx_sha256": files.sha256_file(documents.index_path(prefix)),
    }
    files.write_sealed_json(part.record, record)
    return record


def read_record(part: Part) -> dict[str, Any] | None:
    """Return the record of a part whose files are complete; None if the part must be written."""
    try:
        record = files.read_sealed_json(part.record)
        header = documents.read_header(part.prefix)
        size = documents.data_path(part.prefix).stat().st_size
        complete = (header.documents, size) == (record["documents"], record["tokens"] * header.dtype.itemsize)
    except (OSError, DataError, *DAMAGED):
        return None
    return record if complete else None


def read_plan(folder: Path) -> TokenizationPlan:
    """Return the plan in a folder. Raises a DamagedFileError if it is missing or damaged."""
    with reading(folder / PLAN, hint=f"remove {folder}, and run the same command"):
        return TokenizationPlan(**files.read_sealed_json(folder / PLAN))


@lru_cache(maxsize=1)
def _prepared(folder: Path) -> tuple[TokenizationPlan, Source, Encode, int]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
    plan = read_plan(folder)
    with reading(Path(plan.dataset)):
        dataset = files.read_sealed_json(Path(plan.dataset))
    (source,) = sources_of(dataset)
    assert isinstance(source, Source)
    return plan, source, make_encoder(tokenizer_of(dataset)), int(dataset["tokenizer"]["eos_id"])
