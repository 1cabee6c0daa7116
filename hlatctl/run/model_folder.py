"""Which files a Hugging Face model folder needs for an evaluation, their sizes, and hashes of all but the weights.

A folder with ``checkpoint.json`` has everything except the weights, which are in a run's checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.contract import digest
from hlatctl.run.files import DAMAGED, check_size, sha256_file

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
    """Return the first missing file of a model's folder. Empty if it is complete. Pickled weights don't count."""
    return next((what for pattern, what in _NEEDED.items() if not any(folder.glob(pattern))), "")


def check_sizes(folder: Path) -> None:
    """Refuse files that transformers would read as a whole into memory, all except weights.

    Raises:
        OSError: a file is too large or not a regular file; names it.
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
        folder: folder of a model, or only of a tokenizer.
        with_config: include ``config.json``, which a folder with only a tokenizer doesn't have.
    """
    names = {path.name for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    hashed: dict[str, Any] = {"tokenizer": {name: sha256_file(folder / name) for name in sorted(names)}}
    for name in [_GENERATION, *(["config.json"] if with_config else [])]:
        hashed[name] = sha256_file(folder / name) if (folder / name).is_file() else None
    return hashed


LINK = "checkpoint.json"


@dataclass(frozen=True, kw_only=True)
class Link:
    """Where a model's weights are.

    Args:
        run_dir: absolute path of the run.
        manifest_sha256: identifies the checkpoint, whose files were verified.
        weights: which of its weights, a value of ``eval.weights``.
        left_out: the checkpoint's tensors that the Hugging Face model lacks.
    """

    run_dir: str
    step: int
    manifest_sha256: str
    weights: str = "trained"
    left_out: tuple[str, ...] = field(default=(), compare=False)


def write_link(
    folder: Path,
    *,
    run_dir: Path,
    step: int,
    manifest_sha256: str,
    weights: str = "trained",
    left_out: Sequence[str] = (),
) -> None:
    """Write the link into a model's folder."""
    link = Link(
        run_dir=os.fspath(run_dir),
        step=step,
        manifest_sha256=manifest_sha256,
        weights=weights,
        left_out=tuple(left_out),
    )
    files.write_sealed_json(folder / LINK, asdict(link))


def read_link(folder: Path) -> Link | None:
    """Return a folder's link. None if it has none, or the file is damaged or someone else's."""
    try:
        record = files.read_sealed_json(folder / LINK)
        return Link(
            run_dir=str(record["run_dir"]),
            step=int(record["step"]),
            manifest_sha256=str(record["manifest_sha256"]),
            weights=str(record["weights"]),
            left_out=tuple(map(str, record["left_out"])),
        )
    except (OSError, *DAMAGED):
        return None
