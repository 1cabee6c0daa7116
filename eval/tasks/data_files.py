"""The dataset files that a task needs, their places in ``eval.data_dir``, and their download from the Hugging Face hub.

The layout is ``<dataset>/<config>/<split>.jsonl``, JSON Lines with the hub's field names; the dataset is the last part
of its name on the hub. Shorter paths are read too if they are unambiguous. Only :func:`download_datasets` reads a
dataset: the `datasets` package reads each split, which is written atomically. Present files are kept, so an interrupted
download can be repeated.
"""

from __future__ import annotations

import os
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.serving.model import missing_package
from eval.tasks.catalog import Definition
from hlatctl.run.errors import ConfigError, DataError, StorageError
from hlatctl.run.files import fsync, new_file

#: Where datasets are from.
HUB, ARCHIVE = "the Hugging Face Hub", "CORE's bundle"
#: Folders of datasets whose path isn't made from the hub's dataset and config.
_FOLDERS = {("aps/super_glue", "boolq"): "boolq", ("jannalu/crows_pairs_multilingual", "english"): "crows_pairs"}
#: Names of a dataset's only config.
_ONLY_CONFIGS = (None, "default", "main")
_SPLIT_KEYS = ("training_split", "validation_split", "test_split")
#: Loaders of the `datasets` package; a definition that names one has its own files.
_LOADERS = ("json", "csv", "parquet", "text", "arrow")


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split of a dataset; a download writes to the first of its ``places`` below the data folder.

    Args:
        source: where it is from: the hub, or the archive of CORE's bundle.
    """

    dataset: str
    config: str | None
    split: str
    places: tuple[str, ...]
    source: str = HUB

    def find(self, data_dir: Path) -> Path | None:
        """Return its file, or None if it is missing."""
        return next((data_dir / place for place in self.places if (data_dir / place).is_file()), None)

    @property
    def title(self) -> str:
        """The dataset and its config as one name."""
        return f"{self.dataset}/{self.config}" if self.config else self.dataset


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The splits that one task reads.

    Args:
        shots_from: the split with the solved examples; None if there are none, or if the definition contains them.
        shots_named: whether the definition names that split, so that no other can replace it.
    """

    evaluated: Split
    shots_from: Split | None
    shots_named: bool


def shot_count(definition: Definition, wanted: int | None) -> int:
    """Return the number of solved examples; as on the harness's command line, a definition's 0 can't be overridden."""
    own = definition["num_fewshot"]
    return int(own or 0) if own == 0 or wanted is None else wanted


def needs(definition: Definition, shots: int) -> Needs:
    """Return the splits that a task reads; ConfigError if code creates its data, or the definition names no split."""
    if definition.place:
        return Needs(evaluated=_of_bundle(definition.place), shots_from=None, shots_named=False)
    dataset = definition["dataset_path"]
    if definition["custom_dataset"] or definition["class"] or not dataset or dataset in _LOADERS:
        raise ConfigError(
            f"eval.tasks: {definition.name} creates its dataset itself, so it can't be in eval.data_dir",
            hint="set eval.data_dir=null for it, with a network",
        )
    evaluated = definition["test_split"] or definition["validation_split"]
    if not evaluated:
        raise ConfigError(f"eval.tasks: {definition.name} names no split to evaluate")
    named, shots_from = _shots_split(definition) if shots else (False, None)
    config = definition["dataset_name"]
    single = len({definition[key] for key in _SPLIT_KEYS} - {None} | ({shots_from} - {None})) == 1

    def split(name: str) -> Split:
        return Split(dataset=dataset, config=config, split=name, places=_places(dataset, config, name, single=single))

    return Needs(evaluated=split(evaluated), shots_from=split(shots_from) if shots_from else None, shots_named=named)


def _of_bundle(place: str) -> Split:
    """Return the only split of a file in an archive of several datasets."""
    bundle, name = place.split("/", maxsplit=1)
    return Split(dataset=bundle, config=name.removesuffix(".jsonl"), split="test", places=(place,), source=ARCHIVE)


def is_local(definition: Definition) -> bool:
    """Return whether a definition names its own files, or code that creates its data."""
    loads = definition["dataset_path"] in _LOADERS
    return bool(definition["custom_dataset"] or definition["class"] or loads)


def of_own(definition: Definition) -> dict[str, Path]:
    """Return the files that a definition names, by split, the evaluated one first; empty if code creates its data.

    ConfigError: it names no file for the evaluated split, or several for one. DataError: a file is missing.
    """
    if definition["dataset_path"] not in _LOADERS:
        return {}
    arguments = definition["dataset_kwargs"]
    named = arguments.get("data_files") if isinstance(arguments, dict) else None
    named = {"train": named} if isinstance(named, str) else named
    evaluated = definition["test_split"] or definition["validation_split"]
    if not isinstance(named, dict) or evaluated not in named or not all(isinstance(f, str) for f in named.values()):
        raise ConfigError(
            f"{definition.path}: dataset_kwargs.data_files must name one file for each split, among them the evaluated "
            f"one ({evaluated})",
            hint="dataset_kwargs: {data_files: {test: FILE.jsonl}} and test_split: test",
        )
    paths = {split: definition.path.parent / named[split] for split in dict.fromkeys([evaluated, *named])}
    for split, path in paths.items():
        if not path.is_file():
            raise DataError(
                f"{definition.path}: data_files.{split}={named[split]}: no such file",
                hint=f"a path that is not absolute begins at {definition.path.parent}",
            )
    return paths


def other_arguments(definition: Definition) -> dict[str, Any]:
    """Return the definition's arguments of its loader, such as a delimiter, without the files."""
    arguments = {key: value for key, value in definition["dataset_kwargs"].items() if key != "data_files"}
    return {"dataset_kwargs": arguments} if arguments else {}


def point_at(definition: Definition, needed: Needs, files: dict[str, Path]) -> dict[str, Any]:
    """Return the keys that make a definition read only these files.

    Splits without a file are removed. If the split of the solved examples is missing, they come from the evaluated one,
    and the harness omits the question itself.
    """
    keys: dict[str, Any] = {"dataset_path": "json", "dataset_name": None}
    evaluated = needed.evaluated.split
    keys |= {key: None for key in _SPLIT_KEYS if definition[key] is not None and definition[key] not in files}
    if definition["fewshot_split"] is not None and definition["fewshot_split"] not in files:
        keys["fewshot_split"] = None
    of_shots = definition["fewshot_config"]
    if isinstance(of_shots, dict) and of_shots.get("split") not in (None, *files):
        keys["fewshot_config"] = {key: value for key, value in of_shots.items() if key != "split"}
    if needed.shots_from and needed.shots_from.split not in files:
        keys |= dict.fromkeys(_SPLIT_KEYS) | {"test_split": evaluated, "fewshot_split": evaluated}
    return keys


def _shots_split(definition: Definition) -> tuple[bool, str | None]:
    """Return whether the definition names the split of the solved examples, and the split by the harness's rule."""
    of_shots = definition["fewshot_config"] or {}
    if named := of_shots.get("split") or definition["fewshot_split"]:
        return True, named
    if of_shots.get("samples"):
        return False, None
    return False, next((definition[key] for key in _SPLIT_KEYS if definition[key]), None)


def _places(dataset: str, config: str | None, split: str, *, single: bool) -> tuple[str, ...]:
    if folder := _FOLDERS.get((dataset, config or "")):
        return (f"{folder}/{split}.jsonl",)
    name = dataset.rsplit("/", maxsplit=1)[-1]
    places = [f"{name}/{config}/{split}.jsonl"] if config else []
    if config in _ONLY_CONFIGS:
        places.append(f"{name}/{split}.jsonl")
    elif single:
        places.append(f"{name}/{config}.jsonl")
    return tuple(places)


_HUB = "https://huggingface.co"
_TIMEOUT_S = 20.0
ELSEWHERE = "run it on a machine with a network, copy the folder here, and set eval.data_dir to it"


def download_datasets(splits: list[Split], to: Path) -> None:
    """Fetch missing splits into a data folder. Without a network, a DataError; nothing is created then."""
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


def refuse_offline() -> None:
    """Refuse a download with a DataError if the environment says that there is no network."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise DataError("HF_HUB_OFFLINE is set, so nothing can be fetched", hint="unset HF_HUB_OFFLINE")


def _check_network() -> None:
    hub = os.environ.get("HF_ENDPOINT", _HUB)
    refuse_offline()
    if not hub.startswith(("http://", "https://")):
        raise DataError(f"HF_ENDPOINT={hub}: must start with http:// or https://", hint="unset HF_ENDPOINT")
    try:
        with urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=_TIMEOUT_S):
            return
    except urllib.error.HTTPError:
        return  # the hub answers
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise DataError(f"{hub}: can't be reached ({reason}), so nothing is fetched", hint=ELSEWHERE) from None


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
