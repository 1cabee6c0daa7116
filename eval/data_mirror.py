"""Fetch datasets from the Hugging Face hub into ``eval.data_dir``'s layout; each file is written atomically.

The `datasets` package reads a split, which is written as JSON Lines. Present files are kept, so an interrupted mirror
can be repeated.
"""

from __future__ import annotations

import os
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from eval.model import missing_package
from hlatctl.run.atomic import fsync, new_file
from hlatctl.run.errors import DataError, StorageError

if TYPE_CHECKING:
    from eval.data_files import Split

_HUB = "https://huggingface.co"
_TIMEOUT_S = 20.0
_ELSEWHERE = "run it on a machine with a network, copy the folder here, and set eval.data_dir to it"


def mirror(splits: list[Split], to: Path) -> None:
    """Fetch splits.

    Args:
        splits: the missing ones.
        to: the data folder.

    Raises:
        DataError: there is no network (nothing is created then), or a dataset can't be fetched.
        StorageError: the folder can't be written.
    """
    if not splits:
        return
    _check_network()
    try:
        to.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".hub-", dir=to) as cache:
            for number, split in enumerate(splits, start=1):
                target = to / split.places[0]
                print(f"[{number}/{len(splits)}] {split.title} {split.split} -> {target}", file=sys.stderr, flush=True)
                _fetch(split, target, Path(cache))
    except OSError as error:
        raise StorageError(f"--to={to}: {error.strerror or error}") from None


def _check_network() -> None:
    hub = os.environ.get("HF_ENDPOINT", _HUB)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise DataError("HF_HUB_OFFLINE is set, so nothing can be fetched", hint="unset HF_HUB_OFFLINE")
    if not hub.startswith(("http://", "https://")):
        raise DataError(f"HF_ENDPOINT={hub}: must start with http:// or https://", hint="unset HF_ENDPOINT")
    try:
        with urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=_TIMEOUT_S):
            return
    except urllib.error.HTTPError:
        return  # the hub answers
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise DataError(f"{hub}: can't be reached ({reason}), so nothing is fetched", hint=_ELSEWHERE) from None


def _fetch(split: Split, target: Path, cache: Path) -> None:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise missing_package(error.name) from None
    try:
        rows = datasets.load_dataset(split.dataset, split.config, split=split.split, cache_dir=str(cache))
    except Exception as error:  # the hub's client and the readers of its formats raise many kinds of errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{split.title}: split {split.split} can't be fetched ({reason})",
            hint="repeat the command: present files are kept",
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    with new_file(target) as temporary:
        rows.to_json(str(temporary), force_ascii=False)
    fsync(target.parent)
