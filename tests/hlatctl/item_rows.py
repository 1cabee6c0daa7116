"""Files of items, as evaluations write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from hlatctl.run.paths import RunPaths

_TYPES = {
    "choices": pa.list_(pa.string()),
    "loglikelihoods": pa.list_(pa.float64()),
    "metrics": pa.map_(pa.string(), pa.float64()),
}
_TEXTS = ("task", "item", "filter", "document", "prompt", "target", "answer", "result")


def row(item: str, value: float, **more: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {**dict.fromkeys(_TEXTS, ""), "choices": [], "loglikelihoods": []}
    return {**empty, "task": "gsm8k", "item": item, "metrics": [("exact_match", value), ("other", 1.0 - value)], **more}


def write_items(run: RunPaths, tokens: int, task: str, rows: Sequence[dict[str, Any]]) -> None:
    schema = pa.schema([pa.field(name, _TYPES.get(name, pa.string())) for name in rows[0]])
    path = run.eval(tokens) / f"items-{task}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)
