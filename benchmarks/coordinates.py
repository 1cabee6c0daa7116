"""Mean size of activations by width and step, without and with muP (Tensor Programs V, appendix D.1).

With muP they stay of the same size at every width; without, those of some parts grow with it. It trains a decoder of
two layers for a few steps on one batch, so it takes seconds. ``HLATCTL_BENCH_FIGURE`` names an SVG file for a plot of
AdamW's coordinates.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.registries import OPTIMIZERS
from conf.schema import Config, ModelConfig, OptimizerConfig
from trainer.model.decoder import Llama
from trainer.model.initial import build
from trainer.optim.adamw import ParameterShard

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTHS = (64, 128, 256, 512, 1024)
_STEPS, _BATCH, _SEQ_LEN, _VOCAB_SIZE, _HEAD_DIM, _BASE = 5, 8, 32, 256, 16, 64
_LEARNING_RATE = 3e-3


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The mean absolute values of a part's outputs: for each width, before each step and after the last one."""

    part: str
    widths: Sequence[int]
    sizes: list[list[float]]

    def growth(self, step: int) -> float:
        """Return the power of the width that the sizes after some steps follow; 0: they are the same."""
        xs = [math.log(width) for width in self.widths]
        ys = [math.log(sizes[step]) for sizes in self.sizes]
        x, y = sum(xs) / len(xs), sum(ys) / len(ys)
        return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def measure(
    widths: Sequence[int] = WIDTHS,
    *,
    base_width: int | None,
    steps: int = _STEPS,
    optimizer: str = "adamw",
    lr: float = _LEARNING_RATE,
) -> list[Coordinates]:
    """Return the coordinates of each part of the decoder.

    Args:
        base_width: ``model.mup_base_width``; None: without muP.
        optimizer: ``optimizer.name``.
        lr: learning rate, larger than one for training, to show what grows.
    """
    found = [_of_width(width, base_width, steps, optimizer, lr) for width in widths]
    return [
        Coordinates(part=part, widths=widths, sizes=[[step[part] for step in of_width] for of_width in found])
        for part in found[0][0]
    ]


def _of_width(width: int, base_width: int | None, steps: int, name: str, lr: float) -> list[dict[str, float]]:
    heads = width // _HEAD_DIM
    shape = ModelConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=3 * width,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=heads,
        mup_base_width=base_width,
    )
    config = replace(Config(), model=shape, optimizer=OptimizerConfig(name=name, weight_decay=0.0))
    model = build(shape, seq_len=_SEQ_LEN, seed=1)
    shards = {name: ParameterShard(parameter=parameter) for name, parameter in model.named_parameters()}
    optimizer = OPTIMIZERS.create(name, shards, config)
    tokens = torch.randint(_VOCAB_SIZE, (_BATCH, _SEQ_LEN + 1), generator=torch.Generator().manual_seed(2))
    measured = []
    for step in range(steps + 1):
        sizes, logits = _forward(model, tokens[:, :-1])
        measured.append(sizes)
        if step < steps:
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
            optimizer.step(lr=lr, number=step + 1)
    return measured


def _forward(model: Llama, tokens: Tensor) -> tuple[dict[str, float], Tensor]:
    """Return the mean absolute values of all parts' outputs, and the logits."""
    sizes: dict[str, float] = {}
    handles = []
    for name, module in model.named_modules():
        if name == "embedding" or name.endswith((".attention.qkv", ".attention", ".mlp")):

            def keep(_: nn.Module, __: object, output: Tensor, name: str = name) -> None:
                sizes[name] = float(output.detach().abs().mean())

            handles.append(module.register_forward_hook(keep))
    logits = F.linear(model(tokens), model.output_weight)
    for handle in handles:
        handle.remove()
    sizes["logits"] = float(logits.detach().abs().mean())
    return sizes, logits


def draw(standard: Sequence[Coordinates], mup: Sequence[Coordinates], path: Path) -> None:
    """Write a plot of the sizes after the last step by width: dashed without muP, solid with it."""
    from hlatctl.report.figures.figure import AXIS, INK, OTHERS, picture

    def plot(axes: Axes) -> None:
        colours = dict(zip((each.part for each in mup), (INK, *OTHERS, AXIS), strict=True))
        for coordinates, dash in ((standard, "--"), (mup, "-")):
            for each in coordinates:
                sizes = [of_width[-1] for of_width in each.sizes]
                label = each.part if coordinates is mup else None
                axes.plot(each.widths, sizes, dash, marker="o", color=colours.get(each.part), label=label)
        axes.set(xscale="log", yscale="log", xlabel="hidden_size", ylabel="mean size after 5 steps")
        axes.set_xticks(mup[0].widths, [str(width) for width in mup[0].widths], minor=False)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    path.write_bytes(picture(plot, path.suffix.removeprefix("."), width_in=5.5, height_in=2.8))


def run() -> None:
    """Print a table for each optimizer, without and with muP."""
    torch.set_num_threads(1)
    for optimizer in os.environ.get("HLATCTL_BENCH_OPTIMIZERS", "adamw,muon").split(","):
        found = {base_width: measure(base_width=base_width, optimizer=optimizer) for base_width in (None, _BASE)}
        for base_width, coordinates in found.items():
            print(f"\n{optimizer}, {'standard' if base_width is None else f'model.mup_base_width={base_width}'}")
            widths = "".join(f"{width:>9}" for width in WIDTHS)
            print(f"{'mean size after 5 steps':24}{widths}   power of the width: before, after")
            for each in coordinates:
                values = "".join(f"{sizes[-1]:9.3g}" for sizes in each.sizes)
                print(f"{each.part:24}{values}   {each.growth(0):+.2f}  {each.growth(-1):+.2f}", flush=True)
        if optimizer == "adamw" and (path := os.environ.get("HLATCTL_BENCH_FIGURE")):
            draw(found[None], found[_BASE], Path(path))
