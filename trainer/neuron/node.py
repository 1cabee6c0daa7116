"""``python -m trainer.neuron.node``: all checks of a Trainium node in order, before training uses its devices.

They change nothing and need no administrator. Each failure names the problem and who can fix it.
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
from conf.registries import BACKENDS
from conf.schema import Config
from hlatctl.run.checks import Check
from hlatctl.run.errors import run_main
from trainer.neuron import collectives, devices, host, monitor, tools, versions


def look(config: Config, *, across_nodes: bool = False, thorough: bool = False) -> Iterator[Check]:
    """Yield the checks one after another.

    Args:
        across_nodes: also run the check that one node runs for all nodes.
        thorough: also measure what has no limit in the configuration.
    """
    cores, preflight = config.cluster.processes_per_node, config.preflight
    usable = devices.check(cores)
    yield usable
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
        yield _if_usable(usable, lambda: collectives.check(cores, 1, least, key=key), "nccom-test in the node")
    if across_nodes and config.cluster.nodes > 1 and preflight.min_nccom_nodes_gib_per_s is not None:
        least_far, key_far = preflight.min_nccom_nodes_gib_per_s, "preflight.min_nccom_nodes_gib_per_s"
        yield _if_usable(
            usable,
            lambda: collectives.check(cores, config.cluster.nodes, least_far, key=key_far),
            "nccom-test over nodes",
        )


def _if_usable(usable: Check, check: Callable[[], Check], name: str) -> Check:
    """Run a check that needs the devices only if their own check has passed."""
    if usable.status == "pass":
        return check()
    return Check(name=name, status="skip", shows="the check of the Neuron devices failed")


def _compiler(config: Config) -> Check:
    name = "ahead-of-time compiler"
    if not BACKENDS[config.backend.name].torch_xla:
        return Check(name=name, status="skip", shows="torch.compile compiles; nothing else is needed")
    try:
        return Check(name=name, status="pass", shows=tools.find("neuron_parallel_compile"))
    except tools.ToolError as error:
        return Check(name=name, status="fail", shows=str(error), command="which neuron_parallel_compile")


def main(argv: list[str] | None = None) -> int:
    """Print the checks of this node as JSON lines."""
    parser = argparse.ArgumentParser(prog="trainer.neuron.node", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    for check in look(load(parser.parse_args(argv).config), thorough=True):
        print(json.dumps(dataclasses.asdict(check)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
