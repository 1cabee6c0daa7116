"""Prints what the extras of pyproject.toml require: ``requirements.py PYPROJECT EXTRA...``."""

import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = (name for extra in sys.argv[2:] for name in project["optional-dependencies"][extra])
print("\n".join((*project["dependencies"], *extras)))
