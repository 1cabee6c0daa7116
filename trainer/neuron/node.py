"""``python -m trainer.neuron.node``: all checks of a Trainium node in order, before training uses its devices.

They change nothing and need no administrator. Each failure names the problem and who can fix it. The output of Neuron's
tools is parsed as the SDK's documentation defines it: ``neuron-ls -j`` ("Neuron LS User Guide"), ``neuron-monitor``
("Neuron Monitor User Guide"), ``nccom-test`` ("NCCOM-TEST User Guide").
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf import environment
from conf.environment import NEURON_PACKAGES, software_problem
from conf.load import load
from conf.registries import BACKENDS
from conf.schema import Config
from hlatctl.run import processes
from hlatctl.run.checks import Check
from hlatctl.run.errors import DependencyError, run_main
from hlatctl.run.files import private_folder
from hlatctl.run.provenance import package_versions

if TYPE_CHECKING:
    from trainer.backends.base import Backend

#: Where the package aws-neuronx-tools installs the tools.
_BIN = "/opt/aws/neuron/bin"


class ToolError(Exception):
    """A tool is missing, failed, timed out, or printed an unknown format; the message states which."""


def find_tool(name: str) -> str:
    """Return the path of a tool: on PATH, next to this interpreter, or in Neuron's folder.

    Raises a ToolError if it was not found.
    """
    places = [os.environ.get("PATH", ""), os.fspath(Path(sys.executable).parent), _BIN]
    path = shutil.which(name, path=os.pathsep.join(filter(None, places)))
    if path is None:
        package = "torch-neuronx" if name == "neuron_parallel_compile" else "aws-neuronx-tools"
        raise ToolError(f"{name}: not found on PATH or in {_BIN}; install the package {package}")
    return path


def tool_output(*command: str, timeout_s: float, env: dict[str, str] | None = None) -> str:
    """Return what a tool prints, within a time limit; ``env`` are variables in addition to those of this process.

    Raises a ToolError if it failed, or did not end in time.
    """
    try:
        result = subprocess.run(
            [find_tool(command[0]), *command[1:]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={**os.environ, **(env or {})},
        )
    except subprocess.TimeoutExpired:
        raise ToolError(f"{command[0]}: not finished after {timeout_s:g} s") from None
    except OSError as error:
        raise ToolError(f"{command[0]}: can't be run ({error.strerror})") from None
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        raise ToolError(f"{command[0]}: exit code {result.returncode} ({last})")
    return result.stdout


def tool_first_line(*command: str, timeout_s: float) -> str:
    """Return the first line of a tool that prints until it is killed.

    Raises a ToolError if it printed nothing in time.
    """
    argv = [find_tool(command[0]), *command[1:]]
    try:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise ToolError(f"{command[0]}: can't be run ({error.strerror})") from None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    with process:
        line = process.stdout.readline() if process.stdout else b""
        timer.cancel()
        process.kill()
    if not line:
        raise ToolError(f"{command[0]}: printed nothing in {timeout_s:g} s")
    return line.decode(errors="replace").rstrip("\n")


_DEVICES, _DEVICES_COMMAND = "Neuron devices", "neuron-ls -j"
_TOOL_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One Neuron device; ``used_by`` lists its processes as ``PID command``."""

    index: int
    cores: int
    memory_bytes: int
    used_by: tuple[str, ...]


def parse_devices(text: str) -> list[Device]:
    """Parse the output of ``neuron-ls -j``.

    The cores are logical if the tool shows their configuration (trn2), because processes use logical cores. Raises a
    ToolError if the format is unknown.
    """
    try:
        return [_device(entry) for entry in json.loads(text)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ToolError(f"neuron-ls: its output can't be read ({type(error).__name__}: {error})") from None


def _device(entry: dict[str, Any]) -> Device:
    processes = entry.get("neuron_processes") or []
    return Device(
        index=int(entry["neuron_device"]),
        cores=int(entry["nc_count"]) // int(entry.get("logical_neuroncore_config") or 1),
        memory_bytes=int(entry["memory_size"]),
        used_by=tuple(f"{process['pid']} {process['command']}" for process in processes),
    )


def find_devices(cores_needed: int) -> Check:
    """Check that there are enough cores, that all devices are of one kind, and that no process uses them."""
    try:
        devices = parse_devices(tool_output("neuron-ls", "-j", timeout_s=_TOOL_TIMEOUT_S))
    except ToolError as error:
        return Check(name=_DEVICES, status="fail", shows=str(error), command=_DEVICES_COMMAND)
    return check_devices(devices, cores_needed)


def check_devices(devices: list[Device], cores_needed: int) -> Check:
    """Return the check of parsed devices; see :func:`find_devices`."""
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
        _DEVICES,
        problem,
        f"{len(devices)} devices, {cores} NeuronCores, not in use",
        command=_DEVICES_COMMAND,
        values=values,
    )


SOFTWARE = "Neuron software"
#: The version of the loaded kernel module. ``modinfo`` shows the file's version, which an update may have replaced.
_DRIVER = Path("/sys/module/neuron/version")
#: System packages: the driver, its runtime, collectives and tools.
_SYSTEM_PACKAGES = ("aws-neuronx-dkms", "aws-neuronx-runtime-lib", "aws-neuronx-collectives", "aws-neuronx-tools")
_QUERIES = (
    ("dpkg-query", "--show", "--showformat", "${Package} ${Version}\n"),
    ("rpm", "--query", "--queryformat", "%{SOFTWARE} %{VERSION}\n"),
)


def installed_software(driver: Path = _DRIVER) -> dict[str, str]:
    """Return the installed versions by name."""
    versions = {**package_versions(NEURON_PACKAGES), **_system_packages()}
    if driver.is_file():
        versions["driver"] = driver.read_text(encoding="utf-8").strip()
    return versions


def _system_packages() -> dict[str, str]:
    for query in _QUERIES:
        try:
            result = subprocess.run(
                [*query, *_SYSTEM_PACKAGES], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        lines = (line.split() for line in result.stdout.splitlines())  # missing packages are reported on stderr
        return {words[0]: words[1] for words in lines if len(words) == 2 and words[0] in _SYSTEM_PACKAGES}
    return {}


def check_software(config: Config, versions: dict[str, str]) -> Check:
    """Check that the driver is loaded and that the packages match the backend's stack."""
    problem = software_problem(config, versions)
    if not problem and "torch-neuronx" not in versions:
        problem = f"backend.name={config.backend.name}: the package torch-neuronx is not installed"
    if not problem and (check := BACKENDS.part(config.backend.name, "software")):
        try:
            check(config)
        except DependencyError as error:
            problem = error.message
    needed = config.backend.kind.package
    if not problem and needed and needed not in versions:
        problem = f"backend.name={config.backend.name}: the package {needed} is not installed"
    if not problem and "driver" not in versions:
        problem = "the driver is not loaded (install aws-neuronx-dkms; lsmod | grep neuron)"
    shows = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return Check.of(SOFTWARE, problem, shows, command="pip list | grep -i neuron", values=versions)


_COUNTERS, _COUNTERS_COMMAND = "Neuron error counters", "neuron-monitor | head -1"
#: The tool reports every 5 s by default.
_MONITOR_TIMEOUT_S = 12
#: Corrected errors are harmless; after an uncorrected one a device has computed with wrong bits.
_FATAL = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")
_HARMLESS = ("mem_ecc_corrected", "sram_ecc_corrected")


def read_counters() -> Check:
    """Check that no device has counted an uncorrected error."""
    try:
        return check_counters(tool_first_line("neuron-monitor", timeout_s=_MONITOR_TIMEOUT_S))
    except ToolError as error:
        return Check(name=_COUNTERS, status="fail", shows=str(error), command=_COUNTERS_COMMAND)


def check_counters(line: str) -> Check:
    """Return the check of one report, which is one line of JSON. Raises a ToolError if the format is unknown."""
    try:
        report = json.loads(line)
        group = report["system_data"]["neuron_hw_counters"]
        devices = {int(device["neuron_device_index"]): device for device in group["neuron_devices"] or []}
        counts = {name: {i: int(d[name]) for i, d in devices.items()} for name in (*_FATAL, *_HARMLESS)}
        messages = [report["neuron_hardware_info"].get("error"), group.get("error"), *_runtime_errors(report)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ToolError(f"neuron-monitor: its output can't be read ({type(error).__name__}: {error})") from None
    problems = [f"device {i}: {name}={n}" for name in _FATAL for i, n in counts[name].items() if n]
    problems += [text for text in messages if text]
    if not devices and not problems:
        problems = ["it reports no device"]
    corrected = sum(sum(counts[name].values()) for name in _HARMLESS)
    values = {name: sum(by_device.values()) for name, by_device in counts.items()}
    return Check.of(
        _COUNTERS,
        "; ".join(problems),
        f"{len(devices)} devices, {corrected} corrected ECC events, none uncorrected",
        command=_COUNTERS_COMMAND,
        values=values,
    )


def _runtime_errors(report: dict[str, Any]) -> list[str]:
    errors = []
    for runtime in report.get("neuron_runtime_data") or []:
        stats = (runtime.get("report") or {}).get("execution_stats") or {}
        number = int((stats.get("error_summary") or {}).get("hardware", 0))
        errors += [f"process {runtime.get('pid')}: {number} hardware errors"] if number else []
    return errors


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


#: Large enough that bandwidth, not latency, dominates (the guide's own table levels off above).
_SIZE = "256MB"
_NCCOM_TIMEOUT_S = 600
#: Slurm sets this variable to the id of this process's job.
_SLURM_JOB = "SLURM_JOB_ID"


def nccom_command(cores: int, nodes: int, report: Path, slurm_job_id: str = "") -> tuple[str, ...]:
    """Return the command line for all cores of the nodes, which also checks the results; several need a Slurm job."""
    across = f"-N {nodes} --slurm-mode --slurm-job-id {slurm_job_id}" if nodes > 1 else ""
    options = f"-r {cores} {across} allr -b {_SIZE} -e {_SIZE} -d fp32 --check --non-interactive"
    return ("nccom-test", *options.split(), "--report-to-json-file", os.fspath(report))


def parse_nccom(text: str) -> dict[int, float]:
    """Parse ``--report-to-json-file``; return the bus bandwidth in GiB/s, by size in bytes.

    The tool writes GB/s and means 2^30 bytes. Raises a ToolError if the format is unknown, or there are no results.
    """
    try:
        results = {int(row["size(B)"]): float(row["busbw(GB/s)"]) for row in json.loads(text)["results"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ToolError(f"nccom-test: its report can't be read ({type(error).__name__}: {error})") from None
    if not results:
        raise ToolError("nccom-test: its report has no results")
    return results


def all_reduce(cores_per_node: int, nodes: int, least_gib_per_s: float, *, key: str) -> Check:
    """Check the result and the speed of an all-reduce over all cores.

    Args:
        nodes: 1, or the number of nodes of this process's Slurm job.
        least_gib_per_s: required bus bandwidth.
        key: configuration key that requires it, for the message.
    """
    name = "nccom-test in the node" if nodes == 1 else f"nccom-test over {nodes} nodes"
    slurm_job_id = os.environ.get(_SLURM_JOB, "")
    if nodes > 1 and not slurm_job_id:
        return Check(
            name=name,
            status="skip",
            shows=f"not in a Slurm job ({_SLURM_JOB} is not set); preflight measures its own all-reduce instead",
        )
    with private_folder("nccom") as own:
        report = own.path / "report.json"
        words = nccom_command(cores_per_node * nodes, nodes, report, slurm_job_id)
        shown = " ".join(words[:-2])
        try:
            tool_output(*words, timeout_s=_NCCOM_TIMEOUT_S)
            measured = max(parse_nccom(report.read_text(encoding="utf-8")).values())
        except OSError:
            return Check(name=name, status="fail", shows="nccom-test: left no report", command=shown)
        except ToolError as error:
            return Check(name=name, status="fail", shows=str(error), command=shown)
    text = f"all-reduce of {_SIZE}: {measured:.1f} GiB/s"
    problem = f"{text}, below {key}={least_gib_per_s:g}" if measured < least_gib_per_s else ""
    return Check.of(name, problem, text, command=shown, values={"nccom_gib_per_s": measured})


def look(config: Config, *, across_nodes: bool = False, thorough: bool = False) -> Iterator[Check]:
    """Yield the checks one after another.

    Args:
        across_nodes: also run the check that one node runs for all nodes.
        thorough: also measure what has no limit in the configuration.
    """
    cores, preflight = config.cluster.processes_per_node, config.preflight
    usable = find_devices(cores)
    yield usable
    yield check_software(config, installed_software())
    yield read_counters()
    yield efa(preflight.min_efa_devices)
    yield fork_safety(environment.variables(config))
    yield open_files(preflight.min_open_files)
    yield reserved_ports(preflight.reserved_ports)
    yield somaxconn(preflight.min_somaxconn)
    yield _compiler(config)
    if preflight.min_nccom_gib_per_s is not None or thorough:
        least, key = preflight.min_nccom_gib_per_s or 0.0, "preflight.min_nccom_gib_per_s"
        yield _if_usable(usable, lambda: all_reduce(cores, 1, least, key=key), "nccom-test in the node")
    if across_nodes and config.cluster.nodes > 1 and preflight.min_nccom_nodes_gib_per_s is not None:
        least_far, key_far = preflight.min_nccom_nodes_gib_per_s, "preflight.min_nccom_nodes_gib_per_s"
        yield _if_usable(
            usable, lambda: all_reduce(cores, config.cluster.nodes, least_far, key=key_far), "nccom-test over nodes"
        )


def measure(backend: Backend) -> dict[str, Any]:
    """Return nothing: ``nccom-test`` has measured the devices."""
    return {}


def _if_usable(usable: Check, check: Callable[[], Check], name: str) -> Check:
    """Run a check that needs the devices only if their own check has passed."""
    if usable.status == "pass":
        return check()
    return Check(name=name, status="skip", shows="the check of the Neuron devices failed")


def _compiler(config: Config) -> Check:
    name = "ahead-of-time compiler"
    if not config.backend.kind.torch_xla:
        return Check(name=name, status="skip", shows="torch.compile compiles; nothing else is needed")
    try:
        return Check(name=name, status="pass", shows=find_tool("neuron_parallel_compile"))
    except ToolError as error:
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
