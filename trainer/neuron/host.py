"""The host under the devices: kernel settings, limits, network adapters. Looked at, never changed."""

from __future__ import annotations

import platform
import re
import resource
from pathlib import Path

from hlatctl.run.checks import Check

_PORTS = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
_SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
#: The kernel's list of RDMA adapters; those of EFA belong to its driver.
_RDMA = Path("/sys/class/infiniband")
_EFA_DRIVER = "efa"
#: Older kernels need FI_EFA_FORK_SAFE=1 (Neuron Runtime troubleshooting, "FI_EFA_FORK_SAFE").
_FORK_SAFE_KERNEL = (5, 15)


def ports_in(text: str) -> set[int]:
    """The ports of ``ip_local_reserved_ports``: numbers and ranges, ``41000,44000-44003``."""
    found: set[int] = set()
    for part in filter(None, re.split(r"[,\s]+", text)):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def reserved_ports(needed: list[int], file: Path = _PORTS) -> Check:
    """Nothing else can be given the ports that training listens on."""
    name, command = "reserved ports", "sysctl net.ipv4.ip_local_reserved_ports"
    try:
        missing = sorted(set(needed) - ports_in(file.read_text(encoding="utf-8")))
    except OSError as error:
        return Check(name=name, status="skip", shows=f"{file}: {error.strerror}", command=command)
    wanted = ",".join(map(str, sorted(needed)))
    problem = (
        f"{', '.join(map(str, missing))} not reserved (preflight.reserved_ports); an administrator sets "
        f"net.ipv4.ip_local_reserved_ports={wanted}"
        if missing
        else ""
    )
    return Check.of(name, problem, wanted or "none asked for", command=command)


def somaxconn(least: int, file: Path = _SOMAXCONN) -> Check:
    """Hundreds of processes connect to one store at once."""
    name, command = "waiting connections", "sysctl net.core.somaxconn"
    try:
        found = int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Check(name=name, status="skip", shows=f"{file}: not readable", command=command)
    problem = f"net.core.somaxconn={found}: below preflight.min_somaxconn={least}" if found < least else ""
    return Check.of(name, problem, str(found), command=command, values={"somaxconn": found})


def open_files(least: int) -> Check:
    """Enough files and sockets for each process."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    problem = f"open files={found}: below preflight.min_open_files={least}" if found < least else ""
    return Check.of("open files", problem, str(found), command="ulimit -n", values={"open_files": found})


def efa(least: int, folder: Path = _RDMA) -> Check:
    """The adapters that carry collectives between nodes are there."""
    adapters = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [a.name for a in adapters if (a / "device" / "driver").resolve().name == _EFA_DRIVER]
    problem = f"{len(found)} EFA adapters: below preflight.min_efa_devices={least}" if len(found) < least else ""
    shows = f"{len(found)}: {', '.join(found)}" if found else "none, and none asked for"
    return Check.of("EFA adapters", problem, shows, command="fi_info -p efa", values={"efa_devices": len(found)})


def fork_safety(variables: dict[str, str], release: str = platform.release()) -> Check:
    """An old kernel needs EFA to be told that processes fork."""
    version = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    needed = version < _FORK_SAFE_KERNEL and variables.get("FI_PROVIDER") == "efa"
    problem = (
        f"Linux {release} needs backend.env.FI_EFA_FORK_SAFE=1; without it collectives between nodes fail"
        if needed and variables.get("FI_EFA_FORK_SAFE") != "1"
        else ""
    )
    return Check.of("kernel and EFA", problem, f"Linux {release}", command="uname -r")
