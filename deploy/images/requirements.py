"""Prints what the extras of pyproject.toml require: ``requirements.py PYPROJECT EXTRA...``."""

import re
import sys
import tomllib
from collections.abc import Iterator

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]


def requirements(extra: str) -> Iterator[str]:
    """Yield an extra's requirements, with those of the extras that it contains."""
    for requirement in project["optional-dependencies"][extra]:
        if contained := re.fullmatch(r"hlatctl\[(.*)\]", requirement):
            for name in contained[1].split(","):
                yield from requirements(name)
        else:
            yield requirement


print("\n".join((*project["dependencies"], *(one for extra in sys.argv[2:] for one in requirements(extra)))))
