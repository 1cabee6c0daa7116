from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hlatctl.run.errors import ConfigError, DependencyError
from hlatctl.run.registry import Registry, Row
from tests.foreign import install

GROUP = "hlatctl.shapes"
_MODULE = """
from tests.hlatctl.run.test_registry import Shape
SQUARE = Shape(code="acme_shapes:make", corners=4)
TEXT = "square"
RAISES = Shape(code="acme_shapes:fails", corners=5)
LACKING = Shape(code="acme_shapes:absent", corners=6)
def make(size):
    return ["square", size]
def fails(size):
    raise ValueError("no room")
"""


@dataclass(frozen=True, kw_only=True)
class Shape(Row):
    corners: int


def triangle(size: int) -> list[object]:
    return ["triangle", size]


SHAPES = Registry("page.shape", GROUP, Shape, {"triangle": Shape(code=f"{__name__}:triangle", corners=3)})


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path with a package that adds rows."""
    entries = {name: f"acme_shapes:{name.upper()}" for name in ("square", "text", "raises", "lacking", "typo")}
    entries |= {"triangle": "acme_shapes:SQUARE", "broken": "acme_broken:ROW"}
    files = {"acme_shapes.py": _MODULE, "acme_broken.py": "import a_package_that_is_missing\n"}
    install(tmp_path, "acme-shapes", files, {GROUP: entries, "console_scripts": {"acme": "acme_shapes:make"}})
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("acme_shapes", "acme_broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def test_rows_of_an_installed_package_are_found_by_name_and_made(packages: Path) -> None:
    assert "square" in SHAPES
    assert list(SHAPES) == ["triangle", "broken", "lacking", "raises", "square", "text", "typo"]
    assert "acme_shapes" not in sys.modules  # names are listed without importing
    assert SHAPES["square"].corners == 4
    assert SHAPES["square"] is SHAPES["square"]
    assert SHAPES.create("square", 2) == ["square", 2]
    assert (SHAPES.package("square"), SHAPES.package("triangle")) == ({"acme-shapes": "1.0"}, {})


def test_a_built_in_row_is_not_replaced(packages: Path) -> None:
    assert SHAPES["triangle"].corners == 3
    assert SHAPES.create("triangle", 1) == ["triangle", 1]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"page\.shape=circle: not known\nhint: use one of: triangle, or install"):
        SHAPES["circle"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("broken", "acme_broken:ROW", "ModuleNotFoundError: No module named 'a_package_that_is_missing'"),
        ("typo", "acme_shapes:TYPO", "AttributeError: module 'acme_shapes' has no attribute 'TYPO'"),
        ("text", "acme_shapes:TEXT", f"TypeError: acme_shapes:TEXT must be an instance of {__name__}.Shape"),
        ("raises", "acme_shapes:RAISES", "ValueError: no room"),
        ("lacking", "acme_shapes:LACKING", "AttributeError: module 'acme_shapes' has no attribute 'absent'"),
    ],
)
def test_an_error_in_a_package_names_it_its_entry_point_and_a_way_on(
    packages: Path, name: str, value: str, reason: str
) -> None:
    with pytest.raises(DependencyError) as failed:
        SHAPES.create(name, 1)
    adds = f"package acme-shapes 1.0 adds it (entry point {name} = {value} of {GROUP})"
    assert failed.value.message == f"page.shape={name}: {adds}, and failed: {reason}"
    assert failed.value.hint == "repair or update this package, or use one of: triangle"


def test_a_name_that_two_packages_add_is_refused(packages: Path) -> None:
    install(packages / "more", "other-shapes", {}, {GROUP: {"square": "acme_shapes:SQUARE"}})
    sys.path.insert(0, str(packages / "more"))  # the fixture restores it
    with pytest.raises(DependencyError, match=r"package other-shapes 1\.0 and package acme-shapes 1\.0 both add"):
        SHAPES["square"]


def test_packages_of_the_folder_that_a_program_starts_in_are_not_loaded(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(packages)  # and first on the path, as after `python -m`
    assert "square" not in SHAPES


def test_packages_of_that_folder_are_not_loaded_wherever_it_stands_on_the_path(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)  # as in PYTHONPATH=FOLDER:, whose end means the current folder
    monkeypatch.chdir(packages)
    assert "square" not in SHAPES


@pytest.mark.parametrize("content", [f"[{GROUP}]\nround\n", f"[{GROUP}]\n\xff = a:b\n", f"[{GROUP}]\n = a:b\n"])
def test_a_package_with_damaged_entry_points_does_not_hide_the_others(packages: Path, content: str) -> None:
    folder = packages / "ruined-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ruined\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_bytes(content.encode("latin-1"))
    assert list(SHAPES) == ["triangle", "broken", "lacking", "raises", "square", "text", "typo"]
