"""What the driver says of the software that nodes report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flows.stages.preflight import _differences
from hlatctl.run import files
from hlatctl.run.paths import RunPaths


def test_software_that_differs_from_the_record_is_named_with_its_hosts(tmp_path: Path) -> None:
    ctx: Any = SimpleNamespace(run=RunPaths(tmp_path))
    node = {"torch": "2.9.0", "python": "3.11.7", "hlatctl": "0.5.0"}
    workers: list[dict[str, Any]] = [{"host": f"n{number}", "versions": node} for number in range(6)]
    workers.append({"host": "n0"})  # another process of a node, or a record of an older version
    assert _differences(ctx, workers) == [], "nothing was recorded"
    record = {"packages": {"torch": "2.13.0", "numpy": "2.0.0"}, "python": "3.11.7 (main, …) [GCC 12.2.0]"}
    files.write_json(ctx.run.provenance, record)
    assert _differences(ctx, workers) == [
        "n0, n1, n2, n3 and 2 more: torch 2.9.0, but the run's provenance.json has 2.13.0"
    ]
