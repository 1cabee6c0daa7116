"""``neuron-ls -j``: list the devices of a node and the processes that use them ("Neuron LS User Guide")."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hlatctl.run.checks import Check
from trainer.neuron import tools

_NAME, _COMMAND = "Neuron devices", "neuron-ls -j"
_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One Neuron device; ``used_by`` lists its processes as ``PID command``."""

    index: int
    cores: int
    memory_bytes: int
    used_by: tuple[str, ...]


def parse(text: str) -> list[Device]:
    """Parse the output of ``neuron-ls -j``.

    The cores are logical if the tool shows their configuration (trn2), because processes use logical cores.

    Raises:
        ToolError: the format is unknown.
    """
    try:
        return [_device(entry) for entry in json.loads(text)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise tools.ToolError(f"neuron-ls: its output can't be read ({type(error).__name__}: {error})") from None


def _device(entry: dict[str, Any]) -> Device:
    processes = entry.get("neuron_processes") or []
    return Device(
        index=int(entry["neuron_device"]),
        cores=int(entry["nc_count"]) // int(entry.get("logical_neuroncore_config") or 1),
        memory_bytes=int(entry["memory_size"]),
        used_by=tuple(f"{process['pid']} {process['command']}" for process in processes),
    )


def check(cores_needed: int) -> Check:
    """Check that there are enough cores, that all devices are of one kind, and that no process uses them."""
    try:
        devices = parse(tools.output("neuron-ls", "-j", timeout_s=_TIMEOUT_S))
    except tools.ToolError as error:
        return Check(name=_NAME, status="fail", shows=str(error), command=_COMMAND)
    return check_devices(devices, cores_needed)


def check_devices(devices: list[Device], cores_needed: int) -> Check:
    """Return the check of parsed devices; see :func:`check`."""
    cores = sum(device.cores for device in devices)
    busy = [f"{user} on device {device.index}" for device in devices for user in device.used_by]
    problem = ""
    if not devices:
        problem = "no Neuron device; is the driver loaded (lsmod | grep neuron)?"
    elif cores < cores_needed:
        problem = f"{cores} NeuronCores on {len(devices)} devices, {cores_needed} are needed"
    elif len({(device.cores, device.memory_bytes) for device in devices}) > 1:
        problem = "devices differ in cores or memory"
    elif busy:
        problem = f"in use by process {busy[0]}" + (f" and {len(busy) - 1} more" if len(busy) > 1 else "")
    values = {"devices": len(devices), "cores": cores, "memory_bytes": sum(device.memory_bytes for device in devices)}
    return Check.of(
        _NAME, problem, f"{len(devices)} devices, {cores} NeuronCores, not in use", command=_COMMAND, values=values
    )
