"""``python -m trainer.device_check --config FILE``: check that this machine has a device for each of its processes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conf.load import load
from hlatctl.run.errors import run_main


def main(argv: list[str] | None = None) -> int:
    """Check the devices; an error names the missing one."""
    parser = argparse.ArgumentParser(prog="trainer.device_check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    config = load(parser.parse_args(argv).config)
    from trainer.backends.torch_native import own_device
    from trainer.model.precision import check_fp8

    check_fp8(config, own_device(config.backend.device, config.cluster.processes_per_node - 1))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
