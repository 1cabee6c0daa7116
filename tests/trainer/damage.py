"""Damage to files; not a test by itself."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

WAYS = st.sampled_from(["flip", "cut", "delete"])


def damage(path: Path, how: str, where: int) -> None:
    """Flip one bit of a file, truncate it, or delete it; ``where`` is any number from 0."""
    content = path.read_bytes()
    at = where % max(1, len(content))
    if how == "flip":
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << where % 8]) + content[at + 1 :])
    elif how == "cut":
        path.write_bytes(content[:at])
    else:
        path.unlink()
