"""What docs/architecture.md says of modules is true of the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from conf.schema import EvalConfig

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("conf", "eval", "flows", "hlatctl", "trainer")


def test_every_file_and_module_that_the_page_names_is_there() -> None:
    files = re.findall(rf"\b((?:{'|'.join(PACKAGES)}|tests)/[\w/]+\.(?:py|yaml|md))\b", PAGE)
    missing = {file for file in files if not (TOP / file).exists()}
    keys = {f"eval.{key.name}" for key in dataclasses.fields(EvalConfig)}
    # Groups of entry points.
    for table in ("conf/registries.py", "conf/tracking.py", "flows/drill/pool.py", "trainer/data/formats.py"):
        keys |= set(re.findall(r'"(hlatctl\.\w+)"', (TOP / table).read_text(encoding="utf-8")))
    for name in re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`", PAGE):
        steps = name.split(".")
        places = [TOP.joinpath(*steps[:count]) for count in range(2, len(steps) + 1)]
        known = [place for place in places if place.is_dir() or place.with_suffix(".py").is_file()]
        source = known[-1] if known else TOP / "none"
        text = (source / "__init__.py" if source.is_dir() else source.with_suffix(".py")).read_text() if known else ""
        rest = steps[len(source.relative_to(TOP).parts) :] if known else steps
        if not known or (rest and not re.search(rf"\b{rest[0]}\b", text)):
            missing.add(name)
    assert not {name for name in missing - keys if not re.search("NAME|SUITE", name)}


def test_the_page_names_the_modules_of_hlatctl_that_belong_to_no_package() -> None:
    modules = {path.stem for path in (TOP / "hlatctl").glob("*.py")} - {"__init__", "__main__"}
    paragraph = PAGE.partition("belong to no package")[2].partition("\n\n")[0]
    assert set(re.findall(r"`hlatctl\.(\w+)`", paragraph)) == modules
