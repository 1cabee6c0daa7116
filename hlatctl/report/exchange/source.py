"""Finds and reads the results file of another evaluator. The file is not trusted, so its size is limited."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hlatctl.report.exchange import imported, lighteval, lm_eval, olmes
from hlatctl.report.exchange.imported import Figures
from hlatctl.run.errors import ConfigError, DataError
from hlatctl.run.files import DAMAGED, files_below, parse_json, read_bytes, why
from hlatctl.units import one_line, size

#: The largest results file; the harness's own have a few MiB.
MOST_BYTES = 32 << 20
#: lighteval writes to ``results/ORGANISATION/MODEL``, or below ``results`` as deep as a model's path.
_MOST_FILES, _DEPTH = 20_000, 8
#: Names that evaluators give to their results.
_PATTERNS = ("results_*.json", "results.json", "metrics.json", "metrics-all.jsonl")
_DATE = re.compile(r"results_(\d{4}-\d{2}-\d{2})T")
_ITEMS = {
    lm_eval.FORM: lm_eval.find_samples,
    lighteval.FORM: lighteval.find_details,
    olmes.FORM: olmes.find_predictions,
}
_HINT = "name a results_*.json of lm-evaluation-harness or lighteval, or a metrics.json of OLMES"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of results that was read.

    Args:
        samples: the file of each task's items, in this project's columns; empty if the evaluator wrote none.
    """

    path: Path
    sha256: str
    bytes: int
    figures: Figures
    samples: dict[str, Path]

    @property
    def provenance(self) -> dict[str, Any]:
        """What is known about the figures' origin, as JSON."""
        known = {key: value for key, value in asdict(self.figures).items() if key != "figures"}
        return {
            "file": one_line(self.path.name),
            "sha256": self.sha256,
            "bytes": self.bytes,
            **known,
            "samples": sorted(self.samples),
        }


def read(path: Path, items_to: Path | None = None) -> Source:
    """Return the figures of a file, or of the only results file in a folder or below.

    Items are written to ``items_to``. ConfigError: there is no such file, or a folder has several. DataError: the file
    is too large, is not JSON, or has an unknown format.
    """
    path = _only_file(path) if os.path.isdir(path) else path  # Path.is_dir raises for names that no file can have
    try:
        content = read_bytes(path, MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"FILE={path}: can't be read ({why(error)}; must be a file of at most {size(MOST_BYTES)})", hint=_HINT
        ) from None
    try:
        value = _value(path, content)
        figures = _form(value)(value)
    except DAMAGED as error:
        raise DataError(f"{path}: can't be imported ({one_line(why(error))})", hint=_HINT) from None
    except DataError as error:
        raise DataError(f"{path}: {error.message}", hint=error.hint) from None
    if not figures.figures:
        raise DataError(f"{path}: has no figure that is a finite number", hint=_HINT)
    if not figures.date and (named := _DATE.match(path.name)):
        figures.date = named[1]
    items = {} if items_to is None else _items(path, value, figures, items_to)
    return Source(
        path=path, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content), figures=figures, samples=items
    )


def _items(path: Path, value: dict[str, Any], figures: Figures, folder: Path) -> dict[str, Path]:
    try:
        found = _ITEMS[figures.form](path, value)
    except (OSError, *DAMAGED) as error:
        raise DataError(
            f"{path}: its items can't be found ({one_line(why(error))})",
            hint="copy the file to a folder of its own to import the scores alone",
        ) from None
    files = imported.write(folder, {task: file for task, file in found.items() if task in figures.figures})
    for task, file in files.items():
        figure = figures.figures[task]
        if figure.n is None and figures.form != lm_eval.FORM:  # the harness can have several rows of an item
            figures.figures[task] = replace(figure, n=imported.count(file))
    return files


def _only_file(folder: Path) -> Path:
    try:
        below = files_below(folder, most=_MOST_FILES, depth=_DEPTH)
    except ValueError as error:
        raise ConfigError(f"FOLDER={folder}: {error}", hint=_HINT) from None
    found = [path for path in below if any(fnmatchcase(path.name, pattern) for pattern in _PATTERNS)]
    # OLMES writes the same figures twice.
    if len(found) > 1 and {path.name for path in found} == {"metrics.json", "metrics-all.jsonl"}:
        found = [path for path in found if path.name == "metrics.json"]
    if len(found) != 1:
        names = ", ".join(one_line(str(path.relative_to(folder))) for path in found[:3])
        raise ConfigError(
            f"FOLDER={folder}: has {len(found)} files of results" + (f" ({names}, …)" if found else ""),
            hint="name one of them" if found else _HINT,
        )
    return found[0]


def _value(path: Path, content: bytes) -> dict[str, Any]:
    if path.suffix != ".jsonl":
        value = parse_json(content, any_number=True)  # figures that are not finite numbers are dropped
    else:
        tasks = [parse_json(line, any_number=True) for line in content.splitlines() if line.strip()]
        value = {"all_primary_scores": [], "tasks": tasks, "model_config": tasks[0].get("model_config")}
    if not isinstance(value, dict):
        raise ValueError(f"holds {type(value).__name__}, expected an object")
    return value


def _form(value: dict[str, Any]) -> Callable[[dict[str, Any]], Figures]:
    if "all_primary_scores" in value or ("metrics" in value and "task_config" in value):
        return olmes.read
    if "config_general" in value and "results" in value:
        return lighteval.read
    if "results" in value:
        return lm_eval.read
    raise ValueError("has none of the keys results, config_general and all_primary_scores")
