"""All checks of a node's GPUs, by what NVIDIA's NVML and AMD's SMI know about them, and how fast each GPU is.

``python -m trainer.gpu_node --config FILE`` prints the checks of this machine, for ``hlatctl doctor``.

They change nothing and need no administrator. A fact that can't be read here, because a library or a permission is
missing or the GPU has no such fact, is skipped and never fails a node. Names and meanings are those of nvidia-ml-py
12.535 to 13.615 ("NVML API Reference Guide", R590), of amdsmi 7.0, and of NVIDIA's "XID Errors" (2026). No GPU was at
hand: only stand-ins of these libraries have been read.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from conf.devices import DEVICES
from conf.load import load
from conf.schema import Config
from hlatctl.run.checks import Check, Status
from hlatctl.run.errors import install, run_main

if TYPE_CHECKING:
    from trainer.backends.base import Backend

#: The check whose values must be the same on all nodes.
SOFTWARE = "GPUs"


def runtime() -> dict[str, str]:
    """Return the version of what this PyTorch computes with on GPUs, by its name; empty: it has no GPUs."""
    versions = {"ROCm": torch.version.hip, "CUDA": torch.version.cuda}
    return {name: version for name, version in versions.items() if version}


def described(device: torch.device) -> str:
    """Return a GPU's name, and what PyTorch computes with on it; empty for other devices."""
    if device.type != "cuda":
        return ""
    name = torch.get_device_module(device).get_device_name(device)
    return ", ".join([name, *(f"{what} {version}" for what, version in runtime().items())])


class Unavailable(Exception):
    """A library can't be used on this node; the message says why and what would help."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """What is known of one GPU. None and empty: nothing, or nothing bad.

    Args:
        name: what PyTorch calls it too.
        identity: UUID, or address on the PCI bus.
        bus: address on the PCI bus, as the kernel's log writes it.
        lost: why the GPU can't be used at all.
        recovery: what the driver wants to be done before the GPU is used again.
        uncorrected: uncorrected errors of memory and caches since the driver was loaded or the GPU was reset.
        remap_failed: spare rows of memory are used up or broken.
        remap_pending: a bad row is replaced at the next reset. Until then the driver avoids it.
        slowed: why the clock is lowered now, other than by the power limit.
        links: active links to other GPUs.
        link_errors: repaired transmission errors of these links since the driver was loaded.
        facts: further values for the record, with units in their names.
        unread: facts that this GPU doesn't tell here.
    """

    index: int
    name: str = "unknown"
    identity: str = ""
    bus: str = ""
    lost: str = ""
    recovery: str = ""
    uncorrected: int | None = None
    remap_failed: bool = False
    remap_pending: bool = False
    slowed: tuple[str, ...] = ()
    links: int | None = None
    link_errors: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.identity or 'identity unknown'})"


class _Reader:
    """Reads facts one by one; those that a library refuses are listed in ``unread``."""

    def __init__(self, error: type[Exception], lost: Sequence[type[Exception]] = ()) -> None:
        self._error, self._lost = error, tuple(lost)
        self.unread: list[str] = []
        self.lost = ""

    def __call__(self, what: str, read: Callable[[], Any], default: Any = None) -> Any:
        try:
            return read()
        except self._lost as error:
            self.lost = str(error)
        except (self._error, AttributeError) as error:  # an older library has no such function
            self.unread.append(f"{what}: {error}")
        return default


#: NVML's reasons for a lower clock that mean a fault of cooling or power ("nvmlClocksEventReasons").
_SLOWED = {
    "HwThermalSlowdown": "too hot (hardware)",
    "SwThermalSlowdown": "too hot (driver)",
    "HwPowerBrakeSlowdown": "power brake of the node",
    "HwSlowdown": "hardware slowdown",
}
#: ``NVML_GPU_RECOVERY_ACTION_*``.
_RECOVERIES = {
    1: "reset the GPU (nvidia-smi --gpu-reset)",
    2: "reboot the node",
    3: "drain peer-to-peer traffic",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the GPU's bus",
    7: "reboot the system",
}
#: Errors of NVML after which a GPU computes nothing.
_LOST = ("GpuIsLost", "ResetRequired", "InsufficientPower", "CorruptedInforom")


class Nvml:
    """NVIDIA's library; a context manager. Raises Unavailable if it isn't installed or finds no driver."""

    def __init__(self) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            raise Unavailable(
                f"the package nvidia-ml-py is not installed, so nothing is known of the GPUs' health; {install('gpu')}"
            ) from None
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise Unavailable(f"NVML can't be used ({error})") from None

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def driver(self) -> str:
        """Return the driver's version; empty: unknown."""
        with suppress(self._nvml.NVMLError):
            return str(self._nvml.nvmlSystemGetDriverVersion())
        return ""

    def gpus(self) -> list[Health]:
        """Return the health of all GPUs of this node, in the order of the PCI bus."""
        try:
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            raise Unavailable(f"NVML can't count the GPUs ({error})") from None
        return [self._gpu(index, partial(self._nvml.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]

    def slowed(self, uuid: str) -> tuple[str, ...]:
        """Return why the GPU with this UUID is slowed down now; takes about a millisecond."""
        try:
            return self._slowed(self._nvml.nvmlDeviceGetHandleByUUID(uuid))
        except self._nvml.NVMLError:
            return ()

    def _slowed(self, gpu: Any) -> tuple[str, ...]:
        reasons = int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
        known = {text: getattr(self._nvml, f"nvmlClocksEventReason{name}") for name, text in _SLOWED.items()}
        return tuple(text for text, bit in known.items() if reasons & bit)

    def _gpu(self, index: int, find: Callable[[], Any]) -> Health:
        nvml = self._nvml
        read = _Reader(nvml.NVMLError, [getattr(nvml, f"NVMLError_{name}") for name in _LOST])
        gpu = read("handle", find)
        if gpu is None:
            return Health(index=index, lost=read.lost or "; ".join(read.unread))
        uncorrected = read(
            "ECC",
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
            ),
        )
        *_, pending, failed = read("row remapping", lambda: nvml.nvmlDeviceGetRemappedRows(gpu), (0, 0, 0, 0))
        slowed = read("clock reasons", lambda: self._slowed(gpu), ())
        links, link_errors = self._links(gpu, read)
        facts = {
            "temperature_celsius": read(
                "temperature", lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            "power_watts": read("power", lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
            "power_limit_watts": read("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3),
            "clock_mhz": read("clock", lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "max_clock_mhz": read("max clock", lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "persistence_mode": read("persistence mode", lambda: bool(nvml.nvmlDeviceGetPersistenceMode(gpu))),
        }
        return Health(
            index=index,
            name=read("name", lambda: str(nvml.nvmlDeviceGetName(gpu)), "unknown"),
            identity=read("UUID", lambda: str(nvml.nvmlDeviceGetUUID(gpu)), ""),
            bus=_bus(read("PCI bus", lambda: _text(nvml.nvmlDeviceGetPciInfo(gpu).busId), "")),
            recovery=read("recovery action", lambda: self._recovery(gpu), ""),
            uncorrected=uncorrected,
            remap_failed=bool(failed),
            remap_pending=bool(pending),
            slowed=slowed,
            links=links,
            link_errors=link_errors,
            facts={name: value for name, value in facts.items() if value is not None},
            lost=read.lost,
            unread=tuple(read.unread),
        )

    def _recovery(self, gpu: Any) -> str:
        nvml = self._nvml
        (value,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if value.nvmlReturn != nvml.NVML_SUCCESS or not value.value.uiVal:
            return ""  # the driver is older, or nothing is to be done
        return _RECOVERIES.get(int(value.value.uiVal), f"recovery action {value.value.uiVal}")

    def _links(self, gpu: Any, read: _Reader) -> tuple[int | None, int | None]:
        """Return the numbers of active links and of their repaired errors; None: it has no links."""
        nvml = self._nvml
        active, known, errors, why = 0, 0, 0, ""
        counters = [getattr(nvml, f"NVML_NVLINK_ERROR_DL_{name}") for name in ("REPLAY", "RECOVERY", "CRC_FLIT")]
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):  # more than any GPU has
            try:
                is_active = bool(nvml.nvmlDeviceGetNvLinkState(gpu, link))
            except nvml.NVMLError as error:
                why = str(error)
                continue
            known += 1
            active += is_active
            for counter in counters if is_active else ():
                with suppress(nvml.NVMLError):  # newer GPUs don't count these
                    errors += int(nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, counter))
        if not known:
            read.unread.append(f"NVLinks: {why}")
        return (active, errors) if known else (None, None)


class AmdSmi:
    """AMD's library, which comes with ROCm; see :class:`Nvml`."""

    def __init__(self) -> None:
        try:
            self._smi: Any = importlib.import_module("amdsmi")
        except (ImportError, KeyError, OSError):  # it looks for its library when it is imported
            raise Unavailable(
                "the Python package amdsmi of ROCm can't be imported, so nothing is known of the GPUs' health; "
                "pip install /opt/rocm/share/amd_smi"
            ) from None
        try:
            self._smi.amdsmi_init()
        except self._smi.AmdSmiException as error:
            raise Unavailable(f"AMD SMI can't be used ({_line(error)})") from None
        self._driver = ""

    def __enter__(self) -> AmdSmi:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(self._smi.AmdSmiException):
            self._smi.amdsmi_shut_down()

    def driver(self) -> str:
        """Return the driver's version; empty: unknown, or :meth:`gpus` was not called."""
        return self._driver

    def gpus(self) -> list[Health]:
        """Return the health of all GPUs of this node."""
        try:
            handles = self._smi.amdsmi_get_processor_handles()
        except self._smi.AmdSmiException as error:
            raise Unavailable(f"AMD SMI can't list the GPUs ({_line(error)})") from None
        return [self._gpu(index, gpu) for index, gpu in enumerate(handles)]

    def slowed(self, uuid: str) -> tuple[str, ...]:
        """Return nothing: AMD SMI's identity of a GPU isn't PyTorch's."""
        return ()

    def _gpu(self, index: int, gpu: Any) -> Health:
        smi = self._smi
        read = _Reader(smi.AmdSmiException)
        software = read("driver", lambda: smi.amdsmi_get_gpu_driver_info(gpu), {})
        self._driver = self._driver or str(software.get("driver_version", ""))
        now = read("violations", lambda: smi.amdsmi_get_violation_status(gpu), {})
        heat = {"prochot_thrm": "processor", "socket_thrm": "socket", "vr_thrm": "regulator", "hbm_thrm": "memory"}
        errors = read("XGMI errors", lambda: smi.amdsmi_gpu_xgmi_error_status(gpu))
        return Health(
            index=index,
            name=read("name", lambda: str(smi.amdsmi_get_gpu_asic_info(gpu)["market_name"]), "unknown"),
            identity=read("PCI bus", lambda: str(smi.amdsmi_get_gpu_device_bdf(gpu)), ""),
            uncorrected=read("ECC", lambda: int(smi.amdsmi_get_gpu_total_ecc_count(gpu)["uncorrectable_count"])),
            slowed=tuple(f"too hot ({part})" for name, part in heat.items() if now.get(f"active_{name}") is True),
            link_errors=None if errors is None else int(errors),
            unread=tuple(map(_line, read.unread)),
        )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _line(value: object) -> str:
    return " ".join(str(value).split())


def _bus(address: str) -> str:
    """Return ``0000:3b:00`` for NVML's ``00000000:3B:00.0`` and the kernel's ``PCI:0000:3b:00``."""
    found = re.search(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)", address.lower())
    return f"{int(found[1], 16):04x}:{found[2]}:{found[3]}" if found else ""


def library() -> Nvml | AmdSmi:
    """Return the library of the GPUs that this PyTorch is for. Raises Unavailable if it can't be used."""
    return AmdSmi() if torch.version.hip else Nvml()


def look(config: Config, *, across_nodes: bool = False) -> Iterator[Check]:
    """Yield the checks one after another; the first one says whether the node's GPUs can be used.

    Args:
        across_nodes: is ignored: the exchange between nodes is measured by all processes (:func:`measure`).
    """
    command = "amd-smi static" if torch.version.hip else "nvidia-smi -q"
    try:
        with library() as known:
            everything, driver = known.gpus(), known.driver()
    except Unavailable as error:
        yield Check(name=SOFTWARE, status="skip", shows=str(error), command=command)
        return
    gpus = _of_this_job(everything, config.cluster.processes_per_node)
    yield _check_gpus(gpus, config.cluster.processes_per_node, driver, command)
    yield _check_memory(gpus)
    yield _check_links(gpus)
    yield _check_clocks(gpus)
    if not torch.version.hip:
        yield check_kernel_log(gpus)
        if config.preflight.dcgm_level:
            yield _dcgm(config.preflight.dcgm_level, config.preflight.timeout_s)


def _of_this_job(gpus: list[Health], processes: int) -> list[Health]:
    """Return the GPUs that processes with local ranks from 0 use, as far as the environment shows; 0: all of them."""
    names = ["CUDA_VISIBLE_DEVICES"]
    if torch.version.hip:
        names = [] if "ROCR_VISIBLE_DEVICES" in os.environ else ["HIP_VISIBLE_DEVICES", *names]
    visible = next((os.environ[name] for name in names if name in os.environ), None)
    if visible is None:
        chosen = gpus
    elif "MIG-" in visible:
        return gpus  # parts of GPUs: which ones these are is not known here
    else:
        words = [word.strip() for word in visible.split(",")]
        chosen = [gpu for word in words for gpu in gpus if str(gpu.index) == word or _has_identity(gpu, word)]
    alike = len({gpu.name for gpu in chosen if not gpu.lost}) <= 1  # otherwise CUDA numbers the fastest GPU first
    return chosen[: processes or None] if alike else chosen


def _has_identity(gpu: Health, word: str) -> bool:
    return word.startswith("GPU-") and gpu.identity.startswith(word)


def _check_gpus(gpus: list[Health], needed: int, driver: str, command: str) -> Check:
    """Check that each process has a GPU. The values must be the same on all nodes."""
    problems = [f"{gpu}: can't be used ({gpu.lost})" for gpu in gpus if gpu.lost]
    problems += [f"{gpu}: the driver wants one to {gpu.recovery}" for gpu in gpus if gpu.recovery]
    if len(gpus) < needed:
        problems.append(f"{len(gpus)} of the {needed} GPUs of cluster.processes_per_node={needed} are here")
    names = ", ".join(sorted({gpu.name for gpu in gpus if not gpu.lost}))
    links = {gpu.links for gpu in gpus if gpu.links is not None}
    values = {"GPU": names, "driver": driver, **({"NVLinks": str(min(links))} if links else {})}
    shows = f"{len(gpus)} x {names}, driver {driver or 'unknown'}"
    return Check.of(SOFTWARE, "; ".join(problems), shows, command=command, values=values)


def _check_memory(gpus: list[Health]) -> Check:
    """Check that no GPU has computed with wrong bits, and that each can replace bad rows of its memory.

    A row that is to be replaced at the next reset is no failure: the driver avoids it ("Get number of remapped rows").
    """
    problems = [
        f"{gpu}: {gpu.uncorrected} uncorrected memory errors; reset the GPU, and replace it if they come back"
        for gpu in gpus
        if gpu.uncorrected
    ]
    problems += [
        f"{gpu}: a bad row of its memory can't be replaced; replace the GPU" for gpu in gpus if gpu.remap_failed
    ]
    pending = [str(gpu) for gpu in gpus if gpu.remap_pending]
    known = [gpu for gpu in gpus if gpu.uncorrected is not None]
    shows = f"no uncorrected errors on {len(known)} GPUs"
    shows += f"; a row is replaced at the next reset: {', '.join(pending)}" if pending else ""
    values = {"uncorrected": [gpu.uncorrected for gpu in gpus], "unread": sorted({t for g in gpus for t in g.unread})}
    if not known and not problems:
        return Check(name="GPU memory", status="skip", shows="this node doesn't tell", values=values)
    return Check.of(
        "GPU memory", "; ".join(problems), shows, command="nvidia-smi -q -d ECC,ROW_REMAPPER", values=values
    )


def _check_links(gpus: list[Health]) -> Check:
    """Check that all GPUs of the node have equally many links. Repaired errors are shown: their cost is measured."""
    links = {gpu.index: gpu.links for gpu in gpus if gpu.links is not None}
    most = max(links.values(), default=0)
    problems = [f"{gpu}: {gpu.links} of {most} NVLinks are active" for gpu in gpus if links.get(gpu.index, most) < most]
    errors = [gpu.link_errors for gpu in gpus]
    values = {"links": [gpu.links for gpu in gpus], "link_errors": errors}
    if not links and not any(errors):
        return Check(name="GPU links", status="skip", shows="these GPUs tell of no links", values=values)
    shows = f"{most} on each GPU, {sum(count or 0 for count in errors)} repaired errors"
    return Check.of("GPU links", "; ".join(problems), shows, command="nvidia-smi nvlink --status", values=values)


def _check_clocks(gpus: list[Health]) -> Check:
    """Check that no idle GPU is slowed down by heat or a lack of power."""
    problems = [f"{gpu}: slowed down: {', '.join(gpu.slowed)}" for gpu in gpus if gpu.slowed]
    temperatures = [gpu.facts["temperature_celsius"] for gpu in gpus if "temperature_celsius" in gpu.facts]
    shows = f"at most {max(temperatures)} degrees Celsius" if temperatures else "not slowed down"
    values = {f"GPU {gpu.index}": gpu.facts for gpu in gpus}
    return Check.of("GPU clocks", "; ".join(problems), shows, command="nvidia-smi -q -d PERFORMANCE", values=values)


_KERNEL_LOG = Path("/dev/kmsg")
#: ``NVRM: Xid (PCI:0000:3b:00): 79, …`` after ``priority,number,microseconds since boot,flags;`` (dev-kmsg).
_XID = re.compile(r"^\d+,\d+,(\d+),[^;]*;.*NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)", re.MULTILINE)
#: Faults of a GPU that need a reset of it, or more. Others are mostly errors of programs, such as 13, 31, 43 and 45.
_FAULTS = (46, 48, 62, 64, 74, 79, 95, 109, 119, 120, 140)
#: An older fault is shown only: somebody may have reset the GPU since, which the log doesn't tell.
_RECENT_S = 3600.0


def check_kernel_log(gpus: list[Health], file: Path = _KERNEL_LOG) -> Check:
    """Check that the driver has reported no recent fault of the job's GPUs (Xid)."""
    name, command = "GPU faults", "dmesg | grep Xid"
    try:
        text = _kernel_log(file)
    except OSError as error:
        return Check(name=name, status="skip", shows=f"{file}: {error.strerror}", command=command)
    now_s, by_bus = time.monotonic(), {gpu.bus: gpu for gpu in gpus if gpu.bus}
    recent, older = [], 0
    for microseconds, address, number in _XID.findall(text):
        gpu = by_bus.get(_bus(address))
        if gpu is None or int(number) not in _FAULTS:
            continue
        age_s = now_s - int(microseconds) / 1e6
        older += age_s > _RECENT_S
        if age_s <= _RECENT_S:
            recent.append(f"{gpu}: Xid {number} {age_s / 60:.0f} min ago; see NVIDIA's Xid catalog for what helps")
    shows = f"none in the last hour, {older} before" if older else "none"
    return Check.of(name, "; ".join(dict.fromkeys(recent)), shows, command=command, values={"older": older})


def _kernel_log(file: Path) -> str:
    """Return the kernel's messages. Each read returns one, or fails with EPIPE if it was overwritten meanwhile."""
    descriptor, parts = os.open(file, os.O_RDONLY | os.O_NONBLOCK), []
    try:
        while True:
            try:
                part = os.read(descriptor, 1 << 16)
            except BrokenPipeError:
                continue
            except BlockingIOError:
                break
            if not part:
                break
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace")


def _dcgm(level: int, timeout_s: float) -> Check:
    """Run DCGM's diagnostics, if it is installed and its service answers."""
    name, words = "DCGM", ("dcgmi", "diag", "-r", str(level), "-j")
    shown = " ".join(words)
    if shutil.which(words[0]) is None:
        return Check(name=name, status="skip", shows="dcgmi: not found on PATH", command=shown)
    try:
        result = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=timeout_s / 2, check=False
        )
    except subprocess.TimeoutExpired:
        shows = f"not finished after {timeout_s / 2:g} s, half of preflight.timeout_s"
        return Check(name=name, status="skip", shows=shows, command=shown)
    except OSError as error:
        return Check(name=name, status="skip", shows=f"dcgmi: can't be run ({error.strerror})", command=shown)
    return check_dcgm(result.stdout, shown)


def check_dcgm(output: str, command: str) -> Check:
    """Return the check of what ``dcgmi diag -j`` printed (DCGM 3 and 4): tests with a result for each GPU."""
    try:
        tests = list(_tests(json.loads(output[output.index("{") :])))
    except (ValueError, TypeError, AttributeError):
        tests = []
    if not tests:
        last = (output.strip() or "no output").splitlines()[-1]
        return Check(name="DCGM", status="skip", shows=f"it printed no results ({last})", command=command)
    problems = [
        f"{test['name']}: GPU {result.get('gpu_id', result.get('gpu_ids', result.get('entity_id', '?')))}: failed"
        + "".join(f" ({_warning(warning)})" for warning in _listed(result.get("warnings"))[:1])
        for test in tests
        for result in _listed(test.get("results"))
        if str(result.get("status", "")).lower() == "fail"
    ]
    return Check.of("DCGM", "; ".join(problems), f"{len(tests)} tests, none failed", command=command)


def _tests(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects with a name and results, wherever DCGM's version puts them."""
    if isinstance(node, dict):
        if "name" in node and "results" in node:
            yield node
        else:
            for value in node.values():
                yield from _tests(value)
    elif isinstance(node, list):
        for value in node:
            yield from _tests(value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _warning(warning: Any) -> str:
    return _line(warning.get("warning", warning) if isinstance(warning, dict) else warning)


#: Rows and columns of the product: large enough for a GPU's full speed, 3 x 128 MiB in BF16.
_PRODUCT_SIZE = 8192
#: Products take this long, so that the GPU gets as hot as in training, or shows that it is too hot.
_PRODUCT_S = 2.0
_PRODUCTS = 16
_EXCHANGE_BYTES = 256 << 20
_EXCHANGES = 4


def measure(
    backend: Backend, *, size: int = _PRODUCT_SIZE, seconds: float = _PRODUCT_S, exchange_bytes: int = _EXCHANGE_BYTES
) -> dict[str, Any]:
    """Measure this process's GPU, while all others do the same. ``slowed`` lists why the clock was lowered, if it was.

    Every GPU exchanges data with its two neighbours in the node, and then with the GPU of the same number in the nodes
    before and behind it, all at once, as in a ring of NCCL or RCCL. A slow link slows two GPUs down, and two nodes.
    """
    device = backend.device
    properties = torch.get_device_module(device).get_device_properties(device)
    uuid = f"GPU-{identity}" if (identity := getattr(properties, "uuid", None)) else ""
    values: dict[str, Any] = {"gpu": f"{getattr(properties, 'name', device)} {uuid}".strip(), **runtime()}
    backend.gather(None)  # begin together: a node's power supply may be too weak only for all of its GPUs
    values["gpu_tflops_per_s"], slowed = _products(device, size, seconds, uuid)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    node, nodes = backend.rank // local, backend.world_size // local
    neighbours = [node * local + (backend.rank + step) % local for step in (1, -1)]
    others = [(backend.rank + step * local) % backend.world_size for step in (1, -1)]
    for name, ranks, several in (
        ("gpu_node_gib_per_s", neighbours, local > 1),
        ("gpu_nodes_gib_per_s", others, nodes > 1),
    ):
        if several:
            values[name] = _exchange_gib_per_s(device, exchange_bytes, *ranks)
    return values | ({"slowed": list(slowed)} if slowed else {})


def _products(device: torch.device, size: int, seconds: float, uuid: str) -> tuple[float, tuple[str, ...]]:
    """Return the speed of BF16 products in TFLOP/s at the end of some seconds, and why the GPU was slowed down."""
    module, batches, slowed = torch.get_device_module(device), list[float](), dict[str, None]()
    left = torch.linspace(-1, 1, size * size, device=device, dtype=torch.bfloat16).view(size, size)
    right, into = left.t().contiguous(), torch.empty_like(left)
    with ExitStack() as stack:
        known: Nvml | AmdSmi | None = None
        with suppress(Unavailable):
            if uuid:
                opened = library()
                stack.enter_context(opened)
                known = opened
        began_s = time.perf_counter()
        while len(batches) < 4 or time.perf_counter() - began_s < seconds:
            module.synchronize()
            started_s = time.perf_counter()
            for _ in range(_PRODUCTS):
                torch.mm(left, right, out=into)
            if known and started_s - began_s > seconds / 2:  # it is warm, and computes now
                slowed |= dict.fromkeys(known.slowed(uuid))
            module.synchronize()
            batches.append(time.perf_counter() - started_s)
    newest = statistics.median(batches[len(batches) // 2 :])
    return 2 * size**3 * _PRODUCTS / newest / 1e12, tuple(slowed)


def _exchange_gib_per_s(device: torch.device, size_bytes: int, following: int, previous: int) -> float:
    """Return the speed in GiB/s of sending to one rank and receiving from another at the same time."""
    sent = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    received, best_s = torch.empty_like(sent), float("inf")
    for _ in range(_EXCHANGES):  # the first one connects
        started_s = time.perf_counter()
        both = [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, previous)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        received[-1].item()  # waits for the device
        best_s = min(best_s, time.perf_counter() - started_s)
    return size_bytes / best_s / 2**30


#: The device of this module in ``backend.device``.
_DEVICE = next(name for name, device in DEVICES.items() if device.node_checks == "trainer.gpu_node")


def check_pytorch(*, required: bool) -> Check:
    """Check that this PyTorch computes on each of the machine's GPUs. It fails only if GPUs are ``required``."""
    name, module = "PyTorch for GPUs", torch.get_device_module(_DEVICE)
    build = "".join(f", {what} {version}" for what, version in runtime().items())
    what, problem, count = f"PyTorch {torch.__version__}{build}", "", 0
    with warnings.catch_warnings(record=True) as warned:  # they say why PyTorch finds no GPU
        try:
            module.init()
            count = module.device_count()
            for index in range(count):
                ones = torch.ones(16, 16, device=torch.device(_DEVICE, index), dtype=torch.bfloat16)
                if (total := (ones @ ones).sum().item()) != 4096:
                    problem = f"on GPU {index} a product of ones has the sum {total:g} instead of 4096"
        except (RuntimeError, AssertionError) as error:  # PyTorch asserts that it was built for GPUs
            problem = str(error)
    if not problem and not count:
        problem = str(warned[-1].message) if warned else "it finds none"
    if problem:
        hint = "install the build for the driver's version (https://pytorch.org/get-started/locally)"
        problem = f"{what} can't use this machine's GPUs ({_line(problem).rstrip('.')}); {hint}"
    status: Status = "pass" if not problem else "fail" if required else "skip"
    command = f'python -c "import torch; torch.{_DEVICE}.init()"'
    return Check(name=name, status=status, shows=problem or f"{what}: {count} GPUs compute", command=command)


def main(argv: list[str] | None = None) -> int:
    """Print the checks of this machine as JSON lines, without DCGM's, which take long."""
    parser = argparse.ArgumentParser(prog="trainer.gpu_node", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    config = load(parser.parse_args(argv).config)
    required = config.backend.device == _DEVICE
    processes = config.cluster.processes_per_node if required else 0
    config = replace(
        config,
        cluster=replace(config.cluster, processes_per_node=processes),
        preflight=replace(config.preflight, dcgm_level=0),
    )
    checks = [check_pytorch(required=required)]
    if runtime():  # otherwise it isn't known whose GPUs they are
        checks += look(config)
    for check in checks:
        print(json.dumps(asdict(check)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
