"""All checks of a Trainium node in order, before its devices are taken by training; ``python -m trainer.neuron.node``.

They change nothing and need no administrator: what is not as it should be is said, with who can mend it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from conf import environment
from conf.load import load
from conf.schema import Config
from hlatctl.run.checks import Check
from hlatctl.run.errors import run_main
from trainer.neuron import collectives, devices, host, monitor, tools, versions


def look(config: Config, *, across_nodes: bool = False, thorough: bool = False) -> Iterator[Check]:
    """One check after the other.

    Args:
        across_nodes: also what one node does for all of them.
        thorough: measure too what the configuration asks nothing of.
    """
    cores, preflight = config.cluster.processes_per_node, config.preflight
    found = devices.check(cores)
    yield found
    yield versions.check(config, versions.installed())
    yield monitor.check()
    yield host.efa(preflight.min_efa_devices)
    yield host.fork_safety(environment.variables(config))
    yield host.open_files(preflight.min_open_files)
    yield host.reserved_ports(preflight.reserved_ports)
    yield host.somaxconn(preflight.min_somaxconn)
    yield _compiler(config)
    if preflight.min_nccom_gib_per_s is not None or thorough:
        least, key = preflight.min_nccom_gib_per_s or 0.0, "preflight.min_nccom_gib_per_s"
        yield _unless(found, lambda: collectives.check(cores, 1, least, key=key), "nccom-test in the node")
    if across_nodes and config.cluster.nodes > 1 and preflight.min_nccom_nodes_gib_per_s is not None:
        least_far, key_far = preflight.min_nccom_nodes_gib_per_s, "preflight.min_nccom_nodes_gib_per_s"
        yield _unless(
            found,
            lambda: collectives.check(cores, config.cluster.nodes, least_far, key=key_far),
            "nccom-test over nodes",
        )


def _unless(found: Check, check: Callable[[], Check], name: str) -> Check:
    """What needs the devices is not tried without them."""
    if found.status == "pass":
        return check()
    return Check(name=name, status="skip", shows="the Neuron devices are not as they should be")


def _compiler(config: Config) -> Check:
    """Graphs can be compiled ahead."""
    name = "ahead-of-time compiler"
    if config.backend.name != "nxd":
        return Check(name=name, status="skip", shows="torch.compile compiles; nothing else is needed")
    try:
        return Check(name=name, status="pass", shows=tools.find("neuron_parallel_compile"))
    except tools.ToolError as error:
        return Check(name=name, status="fail", shows=str(error), command="which neuron_parallel_compile")


def main(argv: list[str] | None = None) -> int:
    """Print the checks as JSON lines, those of one node."""
    parser = argparse.ArgumentParser(prog="trainer.neuron.node", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    for check in look(load(parser.parse_args(argv).config), thorough=True):
        print(json.dumps(dataclasses.asdict(check)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
