"""Check the host's kernel settings, limits and network adapters, without changing anything."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from hlatctl.run import processes
from hlatctl.run.checks import Check

_PORTS = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
_SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
#: The kernel's list of RDMA adapters; EFA adapters are identified by their driver.
_RDMA = Path("/sys/class/infiniband")
_EFA_DRIVER = "efa"
#: Older kernels need FI_EFA_FORK_SAFE=1 (Neuron Runtime troubleshooting, "FI_EFA_FORK_SAFE").
_FORK_SAFE_KERNEL = (5, 15)


def ports_in(text: str) -> set[int]:
    """Parse ``ip_local_reserved_ports``: numbers and ranges, ``41000,44000-44003``."""
    ports: set[int] = set()
    for part in filter(None, re.split(r"[,\s]+", text)):
        first, _, last = part.partition("-")
        ports.update(range(int(first), int(last or first) + 1))
    return ports


def reserved_ports(needed: list[int], file: Path = _PORTS) -> Check:
    """Check that the kernel reserves the ports that training listens on."""
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
    return Check.of(name, problem, wanted or "none required", command=command)


def somaxconn(least: int, file: Path = _SOMAXCONN) -> Check:
    """Check the length of the accept queue: hundreds of processes connect to one store simultaneously."""
    name, command = "waiting connections", "sysctl net.core.somaxconn"
    try:
        length = int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Check(name=name, status="skip", shows=f"{file}: not readable", command=command)
    problem = f"net.core.somaxconn={length}: below preflight.min_somaxconn={least}" if length < least else ""
    return Check.of(name, problem, str(length), command=command, values={"somaxconn": length})


def open_files(least: int) -> Check:
    """Check the hard limit of open files and sockets, to which a job's processes raise their own limits."""
    limit = processes.most_open_files()
    problem = f"open files={limit}: below preflight.min_open_files={least}" if limit < least else ""
    return Check.of("open files", problem, str(limit), command="ulimit -Hn", values={"open_files": limit})


def efa(least: int, folder: Path = _RDMA) -> Check:
    """Check the number of adapters for collectives between nodes."""
    adapters = sorted(folder.iterdir()) if folder.is_dir() else []
    names = [a.name for a in adapters if (a / "device" / "driver").resolve().name == _EFA_DRIVER]
    problem = f"{len(names)} EFA adapters: below preflight.min_efa_devices={least}" if len(names) < least else ""
    shows = f"{len(names)}: {', '.join(names)}" if names else "none, none required"
    return Check.of("EFA adapters", problem, shows, command="fi_info -p efa", values={"efa_devices": len(names)})


def fork_safety(variables: dict[str, str], release: str = platform.release()) -> Check:
    """Check FI_EFA_FORK_SAFE, which EFA needs on old kernels."""
    version = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    needed = version < _FORK_SAFE_KERNEL and variables.get("FI_PROVIDER") == "efa"
    problem = (
        f"Linux {release} needs backend.env.FI_EFA_FORK_SAFE=1; without it collectives between nodes fail"
        if needed and variables.get("FI_EFA_FORK_SAFE") != "1"
        else ""
    )
    return Check.of("kernel and EFA", problem, f"Linux {release}", command="uname -r")
