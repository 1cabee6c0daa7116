"""Settings of `hlatctl generate` that are out of range name their option and a rule."""

from __future__ import annotations

import re
from typing import Any

import pytest

from conf.sampling import Sampling
from hlatctl.run.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"temperature": -1.0}, "--temperature=-1.0: must be 0 (always the likeliest token), or from 0.01 to 100"),
        ({"temperature": float("nan")}, "--temperature=nan: must be 0"),
        ({"temperature": 1e-300}, "--temperature=1e-300: must be 0"),
        ({"top_p": 0.0}, "--top-p=0.0: must be more than 0 and at most 1"),
        ({"top_p": float("nan")}, "--top-p=nan"),
        ({"top_k": -1}, "--top-k=-1: must be 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens=0: must be at least 1"),
        ({"seed": 2**32}, "--seed=4294967296: must be from 0 to 4294967295"),
    ],
)
def test_settings_out_of_range_are_refused(keys: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        Sampling(**keys)
