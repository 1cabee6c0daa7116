"""Files in every state that a disk, a person or another program can leave them in: one kind of error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlatctl.run import files
from hlatctl.run.errors import DamagedFileError
from hlatctl.run.reading import parse_json, reading

BAD_JSON = [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"[" * 200 + b"]" * 200]
OUT_OF_RANGE = ["1e999", "-1e999", "9" * 5000, "9" * 400, str(2**64 + 1), "NaN", "Infinity", "-Infinity"]


@pytest.mark.parametrize("content", BAD_JSON, ids=range(len(BAD_JSON)))
def test_invalid_or_deeply_nested_json_is_a_value_error(content: bytes) -> None:
    for any_number in (False, True):
        with pytest.raises(ValueError, match=r"."):
            parse_json(content, any_number=any_number)


@pytest.mark.parametrize("text", OUT_OF_RANGE, ids=lambda text: text[:10])
def test_a_number_out_of_range_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(f'{{"a": {text}}}')


def test_files_of_other_programs_may_hold_such_numbers() -> None:
    value = parse_json('{"model_max_length": 1000000000000000019884624838656, "a": 1e999}', any_number=True)
    assert value == {"model_max_length": 1000000000000000019884624838656, "a": float("inf")}


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_written_values_are_read_back_unchanged(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_file_that_is_not_regular_is_an_error_and_does_not_block(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.json"
    make(path)
    with pytest.raises(OSError, match=r"."):
        files.read_json(path)
    with pytest.raises(DamagedFileError, match=r"a\.json: can't be used \("), reading(path):
        files.read_json(path)


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"a": {}}', '{"a": [1e999]}', '{"a": [[]]}'])
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DamagedFileError, match=r"a\.json: can't be used") as caught, reading(path, hint="remove it"):
        int(files.read_json(path)["a"][0])
    assert caught.value.hint == "remove it"
