"""A small Neuron cache in the layout that the compiler's wrapper leaves behind."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

VERSION = "neuronxcc-2.16.372.0+4a9b2326"
MakeModule = Callable[..., Path]


def neff(content: bytes) -> bytes:
    return struct.pack("<3Q", 2, 1024, len(content)).ljust(1024, b"\0") + content


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def make_module(source: Path) -> MakeModule:
    def make(number: int, *, done: bool = True, content: bytes = b"program") -> Path:
        folder = source / VERSION / f"MODULE_{number:020d}+39f12043"
        folder.mkdir(parents=True)
        (folder / "model.neff").write_bytes(neff(content + str(number).encode()))
        (folder / "compile_flags.json").write_text('["--target=trn1"]')
        (folder / "model.hlo_module.pb.gz").write_bytes(b"graph")
        if done:
            (folder / "model.done").touch()
        return folder

    return make


def tree(folder: Path) -> dict[str, bytes]:
    """What a compiler sees of a cache."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in paths.items()
        if name != "cache_manifest.json" and not name.startswith(".") and "/." not in name
    }
