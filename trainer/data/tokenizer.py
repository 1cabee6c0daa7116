"""Convert any known kind of tokenizer to a Hugging Face folder that ``AutoTokenizer`` loads.

Kinds of ``tokenizer.path``: a SentencePiece ``.model``, a ``tokenizer.json``, a Hugging Face folder that has one, or
none (a byte-level BPE is trained). No torch, no transformers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlatctl.run import files
from hlatctl.run.errors import DataError
from hlatctl.run.reading import check_size, reading, why

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_JSON = "tokenizer.json"
CONFIG_JSON = "tokenizer_config.json"
BOS, EOS = "<s>", "</s>"
#: The tokenizer's files in a Hugging Face folder, which may also contain a model's.
_FOLDER_FILES = (TOKENIZER_JSON, CONFIG_JSON, "special_tokens_map.json", "added_tokens.json")
_KNOWN = "a SentencePiece .model file, a tokenizer.json, or a Hugging Face folder that contains one"
#: Names of the end-of-text token in vocabularies, if no tokenizer_config.json names it.
_EOS_NAMES = (EOS, "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")
_BOS_NAMES = (BOS, "<|endoftext|>", "<|begin_of_text|>", "<bos>", "[CLS]")


def kind_of(path: Path) -> str:
    """Return ``sentencepiece``, ``json`` or ``folder``, from the path alone.

    Raises:
        DataError: the path is missing, or is none of these.
    """
    if path.is_dir():
        if (path / TOKENIZER_JSON).is_file():
            return "folder"
        raise DataError(f"tokenizer.path={path}: the folder has no {TOKENIZER_JSON}", hint=f"set it to {_KNOWN}")
    if not path.is_file():
        raise DataError(f"tokenizer.path={path}: no such file or folder", hint=f"set it to {_KNOWN}")
    if path.suffix == ".model":
        return "sentencepiece"
    if path.suffix == ".json":
        return "json"
    raise DataError(f"tokenizer.path={path}: unknown kind of tokenizer", hint=f"set it to {_KNOWN}")


def prepare(path: Path | None, folder: Path, *, texts: Iterable[str], train_vocab_size: int) -> None:
    """Write the Hugging Face folder of a tokenizer.

    Args:
        path: of the tokenizer; None trains one.
        folder: to write.
        texts: of the corpus, to train a tokenizer or compare a converted one.
        train_vocab_size: of a trained tokenizer.
    """
    folder.mkdir(parents=True)
    if path is None:
        _save(_train(texts, train_vocab_size), folder, bos=BOS, eos=EOS)
        return
    kind = kind_of(path)
    if kind == "sentencepiece":
        from trainer.data.sentencepiece import convert

        _save(convert(path, texts), folder, bos=BOS, eos=EOS)
    elif kind == "json":
        tokenizer = load(path)
        _save(tokenizer, folder, bos=_named(tokenizer, _BOS_NAMES), eos=_named(tokenizer, _EOS_NAMES))
    else:
        for file in (path / name for name in _FOLDER_FILES):
            if file.is_file():
                with reading(file):
                    check_size(file)
                shutil.copyfile(file, folder / file.name)
        if not (folder / CONFIG_JSON).is_file():
            tokenizer = load(folder / TOKENIZER_JSON)
            _save(tokenizer, folder, bos=_named(tokenizer, _BOS_NAMES), eos=_named(tokenizer, _EOS_NAMES))


def look(path: Path) -> dict[str, Any]:
    """Return :func:`describe` of the tokenizer at a path.

    Raises:
        DataError: it can't be used.
    """
    with tempfile.TemporaryDirectory(prefix="hlatctl-tokenizer-") as scratch:
        folder = Path(scratch) / "tokenizer"
        prepare(path, folder, texts=(), train_vocab_size=0)
        return describe(folder)


def load(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``; special tokens that occur in a text are encoded as plain text.

    Raises:
        DataError: it can't be read.
    """
    from tokenizers import Tokenizer

    try:
        check_size(path)
        tokenizer = Tokenizer.from_file(str(path))
    except OSError as error:
        raise DataError(f"{path}: not a readable tokenizer ({why(error)})") from None
    except Exception as error:  # the Rust side raises plain Exception
        raise DataError(f"{path}: not a readable tokenizer ({error})") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def describe(folder: Path) -> dict[str, Any]:
    """Return the entry of a tokenizer's folder in ``dataset.json``, without its path.

    Raises:
        DataError: it names no end-of-sequence token.
    """
    tokenizer = load(folder / TOKENIZER_JSON)
    with reading(folder / CONFIG_JSON):
        config = dict(files.read_json(folder / CONFIG_JSON))
    ids = {key: tokenizer.token_to_id(_content(config.get(f"{key}_token")) or "") for key in ("bos", "eos")}
    if ids["eos"] is None:
        raise DataError(
            f"{folder / CONFIG_JSON}: eos_token={config.get('eos_token')!r} is not in the vocabulary",
            hint="documents are separated by it; name it in the tokenizer's tokenizer_config.json",
        )
    content = (folder / TOKENIZER_JSON).read_bytes() + json.dumps(ids).encode()
    return {
        "vocab_size": max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        "bos_id": ids["eos"] if ids["bos"] is None else ids["bos"],
        "eos_id": ids["eos"],
        "fingerprint": hashlib.sha256(content).hexdigest()[:16],
    }


def _train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_batches(texts), trainer)
    return tokenizer


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == 256:
            yield batch
            batch = []
    yield batch


def _save(tokenizer: Tokenizer, folder: Path, *, bos: str, eos: str) -> None:
    tokenizer.save(str(folder / TOKENIZER_JSON))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    files.write_json(folder / CONFIG_JSON, config)


def _named(tokenizer: Tokenizer, names: tuple[str, ...]) -> str:
    token = next((name for name in names if tokenizer.token_to_id(name) is not None), None)
    if token is None:
        raise DataError(
            f"tokenizer.path: its vocabulary has none of the tokens {', '.join(names)}",
            hint=f"use a folder whose {CONFIG_JSON} names bos_token and eos_token",
        )
    return token


def _content(token: Any) -> str | None:
    """Return the text of a special token of tokenizer_config.json, which may be a string or an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
