"""Packed tokens/s of the loader, against the bare tokenizer and against the method of HLAT's loader.

All three read the same books with the Llama-2 tokenizer, on one thread, in turn. The bare tokenizer encodes all texts
in one call and packs nothing. HLAT's method is reimplemented from its paper and its public loader: it reads a
Hugging Face dataset row by row from a shuffled list of indices, counts words to guess when a batch is full, uses the
slow Python tokenizer, joins and cuts token lists, and makes a LongTensor of each batch and a copy as labels. Its
batches are HLAT's: one sequence of 4,096 tokens. Its tokenizer is the Python one of the current transformers, which may
be faster than that of HLAT's time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import DATA_FOLDER
from conf.compose import compose
from hlatctl.run import files

_TOKENS = 4_000_000
_SEQ_LEN = 4096
_ROUNDS = 3
_GOAL_BARE, _GOAL_HLAT = 0.9, 10.0
#: The timed work; returns the number of tokens it produced.
Work = Callable[[], int]


def run() -> None:
    """Print tokens/s of all three, and the ratios."""
    corpus, model = inputs()
    if not (corpus.is_file() and model.is_file()):
        print(f"skipped: {corpus} and {model} are not there")
        return
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}  # before torch is imported
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        dataset = prepare(Path(folder), corpus, model)
        rows = Path(folder) / "hugging_face"
        _save_as_hugging_face(dataset, rows)
        methods = {
            "hlatctl's loader": lambda: _loader(dataset),
            "bare tokenizers, encode_batch_fast": lambda: _bare(dataset),
            "the method of HLAT's loader": lambda: _hlat(rows, model),
        }
        rates: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(_ROUNDS):
            for name, method in methods.items():
                rates[name].append(_rate(method))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        print(f"{name:40s} {rate:12,.0f} tokens/s")
    ours, bare, hlat = medians.values()
    print(f"ratio to the bare tokenizer: {ours / bare:.2f} (goal {_GOAL_BARE})")
    print(f"ratio to the method of HLAT's loader: {ours / hlat:.2f} (goal {_GOAL_HLAT:g})")


def inputs() -> tuple[Path, Path]:
    """Return the paths of the books and of the tokenizer; they may be absent."""
    return DATA_FOLDER / "corpora" / "books-train.parquet", DATA_FOLDER / "tokenizers" / "llama2-tokenizer.model"


def _rate(method: Callable[[], Work]) -> float:
    """Tokens per second of processor time: each method keeps one core busy, and another's load does not count."""
    work = method()
    started = time.process_time()
    tokens = work()
    return tokens / (time.process_time() - started)


def prepare(folder: Path, corpus: Path, model: Path) -> dict[str, Any]:
    """Prepare a corpus in a folder; return its ``dataset.json``."""
    from trainer.data.prepare import prepare as prepare_corpus

    keys = [f"data.path={corpus}", f"tokenizer.path={model}", "model.vocab_size=32000", f"runs_dir={folder}"]
    prepare_corpus(compose(keys), folder / "data")
    dataset: dict[str, Any] = files.read_json(folder / "data" / "dataset.json")
    return dataset


def _loader(dataset: dict[str, Any]) -> Work:
    """Return the loader's work. Its cache of words starts empty, so filling it is part of the time."""
    from conf.schema import Config, DataConfig, TrainConfig
    from trainer.data.loader import Loader

    config = Config(seed=1, train=TrainConfig(seq_len=_SEQ_LEN), data=DataConfig(prefetch_batches=1))
    loader = Loader(config, dataset, rank=0, size=1)

    def work() -> int:
        batches = -(-_TOKENS // (8 * _SEQ_LEN))
        for _ in range(batches):
            loader.next()
        loader.close()
        return batches * 8 * _SEQ_LEN

    return work


def _bare(dataset: dict[str, Any]) -> Work:
    from trainer.data import tokenizer

    encoder = tokenizer.load(Path(dataset["tokenizer"]["path"]) / tokenizer.TOKENIZER_JSON)
    texts, size = [], 0
    for text in _texts(dataset):
        texts.append(text)
        size += len(text)
        if size > _TOKENS * 4:
            break
    return lambda: sum(map(len, encoder.encode_batch_fast(texts, add_special_tokens=False)))


def _texts(dataset: dict[str, Any]) -> Iterator[str]:
    from trainer.data.documents import Source, sources_of

    (source,) = sources_of(dataset)
    assert isinstance(source, Source)
    return iter(source.documents)


def _save_as_hugging_face(dataset: dict[str, Any], folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": list(_texts(dataset))}).save_to_disk(folder)


def _hlat(rows: Path, model: Path) -> Work:
    import numpy as np
    import torch
    from datasets import load_from_disk
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    backend: Any = SentencePieceBackend  # untyped
    tokenizer = backend(vocab_file=os.fspath(model), unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    corpus = load_from_disk(rows)
    order = np.arange(len(corpus), dtype=np.uint32)
    np.random.default_rng(1).shuffle(order)

    def work() -> int:
        spare: list[int] = []
        place = done = 0
        while done < _TOKENS:
            if len(spare) < _SEQ_LEN:
                texts: list[str] = []
                words = len(spare)
                while words < _SEQ_LEN:
                    texts.append(corpus.select([order[place % len(order)]])["text"][0])
                    words += len(texts[-1].split())
                    place += 1
                encoded = tokenizer(
                    texts,
                    add_special_tokens=False,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                    truncation=False,
                )
                for ids in encoded["input_ids"]:
                    spare += [*ids, tokenizer.eos_token_id]
            batch = torch.LongTensor(spare[:_SEQ_LEN]).reshape(1, _SEQ_LEN)
            spare = spare[_SEQ_LEN:]
            labels, mask = batch.clone(), torch.ones_like(batch)
            done += (labels * mask).numel()
        return done

    return work
