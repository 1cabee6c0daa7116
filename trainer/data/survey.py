"""``python -m trainer.data.survey --config FILE --dataset FILE``: describe a prepared corpus, as JSON on stdout.

Documents and bytes count the whole corpus. Lengths in tokens are measured on random documents, so that a corpus
of terabytes can be described too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from conf.load import load
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import run_main
from hlatctl.run.files import reading
from trainer.data.documents import Source, TokenSource, sources_of
from trainer.data.loader import Loader
from trainer.data.packing import Permutation, encoded
from trainer.data.remote import RemoteDocuments, in_order
from trainer.data.tokenizer import Encode, make_encoder, tokenizer_of

_SAMPLE_TOKENS = 200


def survey(config: Config, dataset: dict[str, Any], *, documents: int) -> dict[str, Any]:
    """Return the contents of a prepared corpus, after tokenizing so many documents of each source.

    They are ``sources`` (see :func:`_survey_source`), totals as in ``dataset.json``, and ``sample``: the first tokens
    of the first packed sequence as text.
    """
    described = tokenizer_of(dataset)
    encode, eos_id = make_encoder(described), dataset["tokenizer"]["eos_id"]
    weights = config.data.source_weights
    sources = [
        {**_survey_source(source, encode, eos_id, documents), "weight": weight / sum(weights), **_counts(entry)}
        for source, entry, weight in zip(sources_of(dataset), dataset["sources"], weights, strict=True)
    ]
    totals = {key: dataset[key] for key in ("documents", "text_bytes", "skipped_rows", "corrupt_count", "corrupt")}
    return {
        **totals,
        "warnings": dataset["warnings"],
        "fingerprint": dataset["fingerprint"],
        "validation_documents": dataset["validation"]["documents"],
        "vocab_size": dataset["tokenizer"]["vocab_size"],
        "sources": sources,
        "tokens": sum(source["tokens"] for source in sources),
        "sample": _sample(config, dataset, described),
    }


def _counts(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in ("rows", "documents", "text_bytes", "skipped_rows", "corrupt_count")}


def _survey_source(source: Source | TokenSource, encode: Encode, eos_id: int, documents: int) -> dict[str, Any]:
    """Return the number of tokens of a source and the lengths of its documents.

    ``tokens`` includes the end-of-sequence tokens; beyond ``measured_documents`` it is extrapolated by bytes.
    ``length_histogram`` counts the measured documents by the power of two above their number of tokens.
    """
    total = len(source.documents)
    order = Permutation(total, source.fingerprint)
    drawn = range(total) if documents >= total else [order[place] for place in range(documents)]
    lengths: Counter[int] = Counter()
    tokens = sizes = 0
    documents_: RemoteDocuments[Any] = source.documents
    for document in in_order(documents_, drawn):
        length = len(encoded(document, encode, eos_id))
        lengths[1 << length.bit_length()] += 1
        tokens, sizes = tokens + length, sizes + (len(document.encode()) if isinstance(document, str) else 0)
    if len(drawn) < total:
        tokens = round(tokens / sizes * source.text_bytes) if isinstance(source, Source) else source.estimated_tokens
    return {
        "path": source.name,
        "tokens": tokens,
        "measured_documents": len(drawn),
        "length_histogram": {str(limit): lengths[limit] for limit in sorted(lengths)},
    }


def _sample(config: Config, dataset: dict[str, Any], described: Any) -> str:
    loader = Loader(config, dataset, rank=0, size=1)
    try:
        inputs, _ = loader.next()
    finally:
        loader.close()
    return str(described.decode(inputs[0, :_SAMPLE_TOKENS].tolist(), skip_special_tokens=False))


def main(argv: list[str] | None = None) -> int:
    """Print the survey as JSON."""
    parser = argparse.ArgumentParser(prog="trainer.data.survey", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--dataset", type=Path, required=True, help="dataset.json")
    parser.add_argument("--documents", type=int, required=True, help="documents of each source to tokenize")
    arguments = parser.parse_args(argv)
    with reading(arguments.dataset, hint="remove its folder; it is prepared again"):
        dataset = files.read_sealed_json(arguments.dataset)
    print(json.dumps(survey(load(arguments.config), dataset, documents=arguments.documents)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
