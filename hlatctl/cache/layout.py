"""What files make up a compiled graph, in Neuron's layout and in Inductor's, and whether all of them are there.

Pure: works on a listing, wherever that comes from.

Neuron (``neuronx-cc``)::   neuronxcc-<version>/MODULE_<hash>+<flags>/{model.neff, model.done, compile_flags.json, ...}
Inductor::                  <2 letters>/<kernel>.*, fxgraph/<2>/<key>/*, aotautograd/<key>/*, triton/<device>/<kernel>/*
TorchNeuron::               <key>.neff, each a graph of its own, written under another name and renamed
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

NEURON, INDUCTOR, TORCH_NEURON = "neuron", "inductor", "torch_neuron"
#: Ours; see ``manifest.py``.
MANIFEST = "cache_manifest.json"
#: Written by the compiler's wrapper when all other files of a module are there.
DONE = "model.done"
NEFF = "model.neff"
#: A NEFF begins with a header of this size, which says how much follows (little-endian, three 64-bit numbers: packaging
#: version, size of the header, size of the rest; so Amazon's KLR, ``NEFF.lean``, reads and writes it).
_NEFF_HEADER = struct.Struct("<3Q")
_NEFF_HEADER_BYTES = 1024


@dataclass(frozen=True)
class File:
    """A file of a cache.

    Args:
        path: within the cache, with slashes.
        bytes: its size.
        mtime_ns: when it was last written; 0 where that is not known.
        problem: why it can't be taken, whatever it holds.
    """

    path: str
    bytes: int
    mtime_ns: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Module:
    """One compiled graph or kernel.

    Args:
        name: the part of the path that its files share.
        layout: ``neuron``, ``inductor`` or ``torch_neuron``.
        files: the one that completes it comes last.
        problem: why it must not be used; empty for a complete one.
    """

    name: str
    layout: str
    files: tuple[File, ...] = field(repr=False)
    problem: str = ""

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(file.bytes for file in self.files)


def modules(files: Iterable[File]) -> list[Module]:
    """The modules that files make up, by name. Locks, hidden and temporary files belong to none."""
    found: dict[tuple[str, str], list[File]] = defaultdict(list)
    for file in files:
        if not is_passing(file.path):
            found[_place(file.path)].append(file)
    return [
        _module(name, layout, members) for (layout, name), members in sorted(found.items(), key=lambda item: item[0])
    ]


def is_lock(path: str) -> bool:
    """Whether a path names a lock, which says something about a process and nothing about a graph."""
    return path.endswith(".lock")


def is_passing(path: str) -> bool:
    """Whether a path names a lock, a temporary file or one of our own: what writes a cache hides it behind a dot."""
    return is_lock(path) or path.endswith(".tmp") or path.startswith(".") or "/." in path or path == MANIFEST


def why_no_neff(head: bytes, size_bytes: int) -> str:
    """What is wrong with a compiled program by its first bytes; empty if nothing is, or if its header is unknown."""
    if size_bytes == 0:
        return "is empty: its compilation failed"
    if len(head) < _NEFF_HEADER.size:
        return f"has {size_bytes} bytes, less than a header"
    _, header_bytes, data_bytes = _NEFF_HEADER.unpack(head[: _NEFF_HEADER.size])
    if header_bytes == _NEFF_HEADER_BYTES and header_bytes + data_bytes != size_bytes:
        return f"has {size_bytes} bytes, its header says {header_bytes + data_bytes}"
    return ""


def _place(path: str) -> tuple[str, str]:
    """Layout and name of the module that a file belongs to."""
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
            problem = f"has no {DONE}: its compilation never ended"
        elif not sizes.get(NEFF):
            problem = f"has {DONE} but no {NEFF}: its compilation failed"
    elif layout == TORCH_NEURON and not problem and not files[0].bytes:
        problem = "is empty"
    return Module(name, layout, files, problem)
