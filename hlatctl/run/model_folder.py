"""What a Hugging Face folder must hold to be a model that can be judged, and hashes of its files besides weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hlatctl.run.contract import digest
from hlatctl.run.files import sha256_file

_NEEDED = {
    "config.json": "config.json",
    "tokenizer_config.json": "tokenizer_config.json",
    "*.safetensors": "safetensors weights",
}
#: Files that transformers makes a tokenizer from; which of them a folder has depends on the kind of tokenizer.
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)
#: Defaults of every generated answer, such as a penalty for repetition.
_GENERATION = "generation_config.json"


def lacking(folder: Path) -> str:
    """What the folder lacks first; empty if nothing. A pickle is no weights here: none is ever opened."""
    return next((what for pattern, what in _NEEDED.items() if not any(folder.glob(pattern))), "")


def fingerprint(folder: Path) -> str:
    """Of its files' names, sizes and times: another one if somebody replaces the weights."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return digest([[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files])


def hashes(folder: Path, *, with_config: bool) -> dict[str, Any]:
    """What of a model besides its weights decides a score: tokenizer and defaults of generation, by file.

    Args:
        folder: a model, or a tokenizer alone.
        with_config: ``config.json`` too, which a folder with a tokenizer alone has not.
    """
    names = {path.name for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    found: dict[str, Any] = {"tokenizer": {name: sha256_file(folder / name) for name in sorted(names)}}
    for name in [_GENERATION, *(["config.json"] if with_config else [])]:
        found[name] = sha256_file(folder / name) if (folder / name).is_file() else None
    return found
