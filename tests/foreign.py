"""Packages of others that add rows to a registry, as pip would install them."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, files: dict[str, str], entry_points: dict[str, dict[str, str]]) -> None:
    """Install version 1.0 of a package into a folder that is, or will be, on Python's path.

    Args:
        files: texts of its modules by path.
        entry_points: their values by group and name.
    """
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, rows in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in rows.items())]
    (facts / "entry_points.txt").write_text("\n".join(lines))
