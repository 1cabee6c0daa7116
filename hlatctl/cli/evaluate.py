"""`hlatctl eval data`: the datasets of an evaluation suite, told and fetched.

The harness and the datasets package are not imported here: a process of the evaluator's room answers (``flows.ask``).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hlatctl.cli.common import Json, Overrides, columns, print_json, say
from hlatctl.units import size

#: The suite that holds all others, asked about where no other is named.
_WHOLE_TABLE = "eval=hlat"
_HEADER = ["DATASET", "SPLIT", "FILES", "ROWS", "SIZE", "SHA256", "TASKS"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Evaluation: the datasets that its suites need.")
data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List a suite's datasets, and fetch them.")
app.add_typer(data, name="data")


@data.command("status")
def status(overrides: Overrides = None, as_json: Json = False) -> None:
    """Show what a suite needs and what is there; the whole table if no eval=SUITE is given."""
    _show(_ask(overrides, "status"), as_json=as_json)


@data.command("mirror")
def mirror(
    to: Annotated[Path, typer.Option("--to", help="Folder for the datasets; then eval.data_dir=DIR.", metavar="DIR")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Fetch a suite's datasets from the Hugging Face hub; what is there already is kept."""
    _show(_ask(overrides, "mirror", "--to", os.fspath(to.expanduser().absolute())), as_json=as_json)


def _ask(overrides: list[str] | None, *argv: str) -> dict[str, Any]:
    from conf.compose import compose
    from flows.ask import ask_about

    wanted = overrides or []
    if not any(override.startswith(("eval=", "eval.groups")) for override in wanted):
        wanted = [_WHOLE_TABLE, *wanted]
    found: dict[str, Any] = json.loads(ask_about("eval.data", compose(wanted), *argv, show_talk=True))
    return found


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    records = found["datasets"]
    if not records:
        say(f"suite {found['suite']} needs no dataset: its items are built in")
        return
    splits = {(record["dataset"], record["split"]): None for record in records}
    rows = [_row([r for r in records if (r["dataset"], r["split"]) == split]) for split in splits]
    typer.echo(columns([_HEADER, *rows]))
    _conclude(found)


def _conclude(found: dict[str, Any]) -> None:
    """What is missing, and what helps."""
    data_dir, suite = found["data_dir"], found["suite"]
    lacking = [record for record in found["datasets"] if record["required"] and record["file"] is None]
    if data_dir is None:
        say("eval.data_dir is not set: datasets come from the Hugging Face hub")
        return
    for record in lacking:
        say(f"missing: {data_dir}/{record['expected']}, for {', '.join(record['tasks'])}")
    if lacking:
        say(f"with a network: hlatctl eval data mirror --to {data_dir} eval={suite}")
    else:
        say(f"all that suite {suite} needs is in {data_dir}")


def _row(records: list[dict[str, Any]]) -> list[str]:
    """One split of a dataset in all its configs; the checksum of several files is that of their checksums."""
    there = [record for record in records if record["file"] is not None]
    tasks = list(dict.fromkeys(task for record in records for task in record["tasks"]))
    shown = ", ".join(tasks) if len(tasks) < 3 else f"{tasks[0]} and {len(tasks) - 1} more"
    files = str(len(there)) if len(there) == len(records) else f"{len(there)} of {len(records)}"
    if not any(record["required"] for record in records):
        files += " (optional)"
    facts = ["–", "–", "–"]
    if there:
        digests = [record["sha256"] for record in there]
        digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        rows, size_bytes = (sum(record[key] for record in there) for key in ("rows", "bytes"))
        facts = [f"{rows:,}", size(size_bytes), digest[:12]]
    return [records[0]["dataset"], records[0]["split"], files, *facts, shown]
