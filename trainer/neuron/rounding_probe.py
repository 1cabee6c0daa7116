"""``python -m trainer.neuron.rounding_probe --config FILE``: measure how the device rounds to BF16.

1 + 2^-10 is an eighth of the way from 1 to the next BF16 number. Rounded to the nearest, all copies become 1. Rounded
stochastically, one in eight is rounded up, so their mean is 1 + 2^-10. A run's loss would show the wrong rounding
only after weeks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from conf import environment
from conf.load import load
from conf.schema import Config
from hlatctl.run.checks import Check
from hlatctl.run.errors import run_main

_NAME = "rounding to BF16 on the device"
_COPIES = 1 << 16
_STEP, _EXCESS = 2.0**-7, 2.0**-10  # to the next BF16 number above 1; and the part that is rounded
#: The mean of this many copies is within 14 standard deviations of the exact value.
_TOLERANCE = 14 * _STEP * (1 / 8 * 7 / 8 / _COPIES) ** 0.5


def check_rounding(mean_excess: float, *, stochastic: bool) -> Check:
    """Check that the mean of the rounded copies, minus 1, matches the configured rounding."""
    expected = _EXCESS if stochastic else 0.0
    measured = f"mean of 1 + 2^-10 in BF16 is 1 + {mean_excess:.6f}"
    how = "stochastically" if stochastic else "to the nearest"
    problem = (
        f"{measured}, not 1 + {expected:.6f}: not rounded {how}" if abs(mean_excess - expected) > _TOLERANCE else ""
    )
    return Check.of(_NAME, problem, f"{how}: {measured}", values={"mean_excess": mean_excess})


def measure(config: Config) -> float:
    """Return the mean of the rounded copies, minus 1, on the configured device."""
    import torch

    if config.backend.kind.torch_xla:
        import torch_xla

        device = torch_xla.device()
    else:
        device = torch.device(config.backend.device)
    copies = torch.full((_COPIES,), 1 + _EXCESS, device=device, dtype=torch.float32)
    return float(copies.to(torch.bfloat16).float().mean().item()) - 1


def main(argv: list[str] | None = None) -> int:
    """Print the check as JSON."""
    parser = argparse.ArgumentParser(prog="trainer.neuron.rounding_probe", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = load(parser.parse_args(argv).config)
    os.environ.update(environment.variables(config))  # before the runtime reads them
    check = check_rounding(measure(config), stochastic=config.precision.name == "bf16_sr")
    print(json.dumps(dataclasses.asdict(check)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
