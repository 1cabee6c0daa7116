"""Which files make up a compiled graph in each layout, and whether it is complete. Pure: it works on a listing.

Neuron (``neuronx-cc``)::   neuronxcc-<version>/MODULE_<hash>+<flags>/{model.neff, model.done, compile_flags.json, ...}
Inductor::                  <2 letters>/<kernel>.*, fxgraph/<2>/<key>/*, aotautograd/<key>/*, triton/<device>/<kernel>/*
TorchNeuron::               <key>.neff, one graph each, written under a temporary name and renamed
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

NEURON, INDUCTOR, TORCH_NEURON = "neuron", "inductor", "torch_neuron"
#: Written by ``manifest.py``.
MANIFEST = "cache_manifest.json"
#: Written by the compiler's wrapper after all other files of a module.
DONE = "model.done"
NEFF = "model.neff"
#: A NEFF begins with a header of three little-endian 64-bit numbers: packaging version, size of the header, size of the
#: rest (as Amazon's KLR, ``NEFF.lean``, reads and writes it).
_NEFF_HEADER = struct.Struct("<3Q")
_NEFF_HEADER_BYTES = 1024


@dataclass(frozen=True)
class File:
    """A file of a cache.

    Args:
        path: within the cache, with slashes.
        bytes: its size.
        mtime_ns: of its last change; 0 if unknown.
        problem: why it can't be used, whatever it contains.
    """

    path: str
    bytes: int
    mtime_ns: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Module:
    """One compiled graph or kernel.

    Args:
        name: the common part of its files' paths.
        layout: ``neuron``, ``inductor`` or ``torch_neuron``.
        files: the one that completes it comes last.
        problem: why it must not be used; empty if it is complete.
    """

    name: str
    layout: str
    files: tuple[File, ...] = field(repr=False)
    problem: str = ""

    @property
    def bytes(self) -> int:
        """The size of all its files."""
        return sum(file.bytes for file in self.files)


def modules(files: Iterable[File]) -> list[Module]:
    """Return the modules of a listing, sorted by name. Locks, hidden and temporary files belong to none."""
    members: dict[tuple[str, str], list[File]] = defaultdict(list)
    for file in files:
        if not is_transient(file.path):
            members[_place(file.path)].append(file)
    return [_module(name, layout, own) for (layout, name), own in sorted(members.items(), key=lambda item: item[0])]


def is_lock(path: str) -> bool:
    """Return whether a path names a lock."""
    return path.endswith(".lock")


def is_transient(path: str) -> bool:
    """Return whether a path names a lock, a temporary file, or a file of hlatctl: hidden, or the manifest."""
    return is_lock(path) or path.endswith(".tmp") or path.startswith(".") or "/." in path or path == MANIFEST


def why_no_neff(head: bytes, size_bytes: int) -> str:
    """Return what is wrong with a compiled program; empty if nothing is, or if its header is unknown."""
    if size_bytes == 0:
        return "is empty: its compilation failed"
    if len(head) < _NEFF_HEADER.size:
        return f"has {size_bytes} bytes, less than a header"
    _, header_bytes, data_bytes = _NEFF_HEADER.unpack(head[: _NEFF_HEADER.size])
    if header_bytes == _NEFF_HEADER_BYTES and header_bytes + data_bytes != size_bytes:
        return f"has {size_bytes} bytes, its header says {header_bytes + data_bytes}"
    return ""


def _place(path: str) -> tuple[str, str]:
    """Return the layout and name of the module that a file belongs to."""
    parts = path.split("/")
    if len(parts) > 2 and parts[0].startswith("neuronxcc-") and parts[1].startswith("MODULE_"):
        return NEURON, "/".join(parts[:2])
    if parts[-1].endswith(".neff"):
        return TORCH_NEURON, path
    if len(parts) == 1:
        return INDUCTOR, parts[0]
    if len(parts) == 2:
        return INDUCTOR, f"{parts[0]}/{parts[1].split('.')[0]}"
    return INDUCTOR, "/".join(parts[:-1])


def _module(name: str, layout: str, members: list[File]) -> Module:
    files = tuple(sorted(members, key=lambda file: (file.path.endswith("/" + DONE), file.path)))
    problem = next((f"{file.path}: {file.problem}" for file in files if file.problem), "")
    if layout == NEURON and not problem:
        sizes = {file.path.removeprefix(f"{name}/"): file.bytes for file in files}
        if DONE not in sizes:
            problem = f"has no {DONE}: its compilation did not finish"
        elif not sizes.get(NEFF):
            problem = f"has {DONE} but no {NEFF}: its compilation failed"
    elif layout == TORCH_NEURON and not problem and not files[0].bytes:
        problem = "is empty"
    return Module(name, layout, files, problem)
