"""Which files a Hugging Face model folder needs for an evaluation, their sizes, and hashes of all but the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hlatctl.run.contract import digest
from hlatctl.run.files import sha256_file
from hlatctl.run.reading import check_size

WEIGHTS = "safetensors weights"
_NEEDED = {"config.json": "config.json", "tokenizer_config.json": "tokenizer_config.json", "*.safetensors": WEIGHTS}
#: Files from which transformers builds a tokenizer. A folder has some of them, depending on the kind of tokenizer.
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
#: Defaults for generated answers, such as a repetition penalty.
_GENERATION = "generation_config.json"


def lacking(folder: Path) -> str:
    """Return the first missing file of a folder. Empty if it is complete. Pickled weights don't count."""
    return next((what for pattern, what in _NEEDED.items() if not any(folder.glob(pattern))), "")


def check_sizes(folder: Path) -> None:
    """Refuse files that transformers would read as a whole into memory, all except weights.

    Raises:
        OSError: names a file that is too large or is no regular file.
    """
    for path in sorted({path for pattern in ("*.json", *_TOKENIZER) for path in folder.glob(pattern)}):
        if not path.is_dir():
            check_size(path)


def fingerprint(folder: Path) -> str:
    """Return a hash of the files' names, sizes and times. It changes if the weights are replaced."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return digest([[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files])


def hashes(folder: Path, *, with_config: bool) -> dict[str, Any]:
    """Return the hashes of the files that affect scores, except weights: tokenizer and generation defaults.

    Args:
        folder: of a model, or of a tokenizer only.
        with_config: include ``config.json``, which a folder with only a tokenizer doesn't have.
    """
    names = {path.name for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    hashed: dict[str, Any] = {"tokenizer": {name: sha256_file(folder / name) for name in sorted(names)}}
    for name in [_GENERATION, *(["config.json"] if with_config else [])]:
        hashed[name] = sha256_file(folder / name) if (folder / name).is_file() else None
    return hashed
