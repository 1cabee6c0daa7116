"""``python -m trainer.device_check --config FILE``: check that this machine has a device for each of its processes."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from conf.devices import DEVICES
from conf.load import load
from hlatctl.run.errors import DependencyError, run_main

if TYPE_CHECKING:
    import torch


def main(argv: list[str] | None = None) -> int:
    """Check the devices; an error names the missing one."""
    parser = argparse.ArgumentParser(prog="trainer.device_check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    config = load(parser.parse_args(argv).config)
    from trainer.backends.torch_native import own_device

    device = own_device(config.backend.device, config.cluster.processes_per_node - 1)
    if config.precision.name == "fp8":
        check_fp8(device)
    return 0


def check_fp8(device: torch.device) -> None:
    """Check that this node has what ``precision=fp8`` needs.

    Raises a DependencyError if torchao is not installed, or the device has no FP8 products.
    """
    import torch

    if importlib.util.find_spec("torchao") is None:
        raise DependencyError(
            "precision.name=fp8: torchao is not installed", hint="pip install torchao, or set precision=mixed"
        )
    facts = DEVICES[device.type]
    needed = facts.fp8_capability
    if needed is None:
        return  # a rule of the configuration refuses it
    if torch.version.hip:
        found = torch.get_device_module(device).get_device_properties(device).gcnArchName.partition(":")[0]
        if found not in facts.fp8_architectures:
            raise DependencyError(
                f"precision.name=fp8: needs one of {', '.join(facts.fp8_architectures)}, but this device is {found}",
                hint="set precision=mixed",
            )
        return
    capability = torch.get_device_module(device).get_device_capability(device)
    if tuple(capability) < needed:
        raise DependencyError(
            f"precision.name=fp8: needs compute capability {needed[0]}.{needed[1]}, but this device has "
            f"{capability[0]}.{capability[1]}",
            hint="set precision=mixed",
        )


if __name__ == "__main__":
    sys.exit(run_main(main))
