"""``python -m trainer.convert.merge --source RUN_DIR STEP WEIGHT … --to DIR``: average the weights of checkpoints.

Writes a Hugging Face folder, as :mod:`trainer.convert.export` does, whose weights are the weighted mean of those of
several checkpoints of one model: of a run (as its learning rate decays, or instead of that), or of runs that began with
the same weights ("model soups", arXiv 2203.05482). The sums are FP32. ``merged_from.json`` says what it was made of.
Prints a summary as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.of_run import of_run
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.checkpoint import read_manifest
from hlatctl.run.errors import CheckpointError, ConfigError, run_main
from hlatctl.run.files import new_folder
from hlatctl.run.model_folder import hashes
from hlatctl.run.paths import RunPaths
from trainer.convert.export import DTYPES, choose, tokenizer_of, write_model
from trainer.convert.hugging_face import Weights

#: Says which checkpoints a model is the mean of.
MERGED_FROM = "merged_from.json"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint of a mean, and its share of it; the shares add up to 1."""

    run: str
    step: int
    tokens: int
    manifest_sha256: str
    share: float


class _Mean:
    """The mean of the weights of several checkpoints, which is read like the weights of one."""

    def __init__(self, parts: Sequence[Weights], sources: Sequence[Source]) -> None:
        self._parts, self._sources = parts, sources
        self.ours, self.config = parts[0].ours, parts[0].config
        for part, source in zip(parts, sources, strict=True):
            _check_same_model(self.ours, part.ours, sources[0], source)

    def read(self, ours: Sequence[str]) -> dict[str, Tensor]:
        mean: dict[str, Tensor] = {}
        for part, source in zip(self._parts, self._sources, strict=True):
            for name, tensor in part.read(ours).items():
                if name in mean:
                    mean[name].add_(tensor, alpha=source.share)
                else:
                    mean[name] = tensor.float() * source.share
        return mean


def merge(sources: Sequence[tuple[RunPaths, int | None, float]], target: Path, dtype: str | None) -> dict[str, Any]:
    """Write the Hugging Face folder of the mean atomically.

    Args:
        sources: run, step (None: the newest valid checkpoint) and relative weight of each.
        dtype: dtype of the written weights, one of :data:`DTYPES`; None: that of the first checkpoint.

    Returns:
        ``{"to", "parameters", "dtype", "bytes", "left_out", "sources": [...]}``.

    Raises:
        CheckpointError: a checkpoint isn't valid, or is of another model than the first.
        ConfigError: the weights don't make a mean, or a checkpoint is named twice.
        DataError: a run's tokenizer is missing.
        StorageError: the folder exists, or can't be written.
    """
    total = sum(weight for *_, weight in sources)
    if not all(math.isfinite(weight) for *_, weight in sources) or not total:
        weights = ",".join(f"{weight:g}" for *_, weight in sources)
        raise ConfigError(f"--weights={weights}: must be finite, and their sum not 0", hint="omit it for equal ones")
    with new_folder(target) as partial:
        configs: list[Config] = []
        parts: list[Weights] = []
        merged: list[Source] = []
        tokenizer = tokenizer_of(sources[0][0])
        for run, step, weight in sources:
            _check_same_tokenizer(tokenizer, run, sources[0][0])
            folder = choose(run, step)
            manifest = read_manifest(folder)
            source = Source(
                run=run.run_id,
                step=manifest.step,
                tokens=manifest.tokens,
                manifest_sha256=manifest.sha256,
                share=weight / total,
            )
            for each in merged:
                if each.manifest_sha256 == source.manifest_sha256:
                    what = "is named twice" if each.run == source.run else f"is the same checkpoint as {_name(each)}"
                    raise ConfigError(
                        f"{_name(source)}: {what}", hint="name each checkpoint once; --weights gives it a share"
                    )
            configs.append(of_run(run).during(manifest.step))
            parts.append(Weights.open(folder, configs[-1]))
            merged.append(source)
        mean = _Mean(parts, merged)
        named = dtype or str(next(iter(mean.ours.values())).dtype).removeprefix("torch.")
        size = write_model(mean, partial, config=configs[0], tokenizer=tokenizer, dtype=named)
        provenance = [asdict(source) for source in merged]
        files.write_sealed_json(partial / MERGED_FROM, {"sources": provenance})
    return {
        "to": os.fspath(target),
        "parameters": sum(tensor.numel() for tensor in mean.ours.values()),
        "dtype": named,
        "bytes": size,
        "left_out": sorted({name for part in parts for name in part.left_out}),
        "sources": provenance,
    }


def _check_same_model(expected: dict[str, Tensor], found: dict[str, Tensor], first: Source, source: Source) -> None:
    for name in sorted(set(expected) | set(found)):
        shapes = [tuple(each[name].shape) if name in each else "missing" for each in (expected, found)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{_name(source)}: {name} is {shapes[1]}, in {_name(first)} {shapes[0]}; only checkpoints of one model "
                "can be merged",
                hint="name checkpoints of one run, or of its forks",
            )


def _check_same_tokenizer(tokenizer: dict[str, Any], run: RunPaths, first: RunPaths) -> None:
    own = tokenizer_of(run)
    if own["path"] != tokenizer["path"] and (
        hashes(Path(own["path"]), with_config=False) != hashes(Path(tokenizer["path"]), with_config=False)
    ):
        raise CheckpointError(
            f"run {run.run_id}: has another tokenizer than run {first.run_id}, so the weights of their tokens can't be "
            "averaged",
            hint="name checkpoints of one run, or of its forks",
        )


def _name(source: Source) -> str:
    return f"{source.run}@{source.step}"


def main(argv: list[str] | None = None) -> int:
    """Merge checkpoints; return the exit code."""
    parser = argparse.ArgumentParser(prog="trainer.convert.merge", description=__doc__)
    parser.add_argument("--source", nargs=3, action="append", required=True, metavar=("RUN_DIR", "STEP", "WEIGHT"))
    parser.add_argument("--to", type=Path, required=True, help="new folder")
    parser.add_argument("--dtype", choices=DTYPES, help="of written weights; default: the first checkpoint's")
    arguments = parser.parse_args(argv)
    sources = [
        (RunPaths(Path(run).absolute()), None if step == "newest" else int(step), float(weight))
        for run, step, weight in arguments.source
    ]
    print(json.dumps(merge(sources, arguments.to.absolute(), arguments.dtype)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
