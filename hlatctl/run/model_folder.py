"""What a Hugging Face folder must hold to be a model that can be judged; reads no file of it."""

from __future__ import annotations

from pathlib import Path

from hlatctl.run.contract import digest

_NEEDED = {
    "config.json": "config.json",
    "tokenizer_config.json": "tokenizer_config.json",
    "*.safetensors": "safetensors weights",
}


def lacking(folder: Path) -> str:
    """What the folder lacks first; empty if nothing. A pickle is no weights here: none is ever opened."""
    return next((what for pattern, what in _NEEDED.items() if not any(folder.glob(pattern))), "")


def fingerprint(folder: Path) -> str:
    """Of its files' names, sizes and times: another one if somebody replaces the weights."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return digest([[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files])
