"""The nearest name to one that does not exist."""

from __future__ import annotations

from hlatctl.run.suggest import nearest, suggest


def test_the_nearest_known_name_is_suggested_before_all_of_them() -> None:
    assert suggest("locl", ["local", "mock"], prefix="cluster=") == "did you mean cluster=local? known: local, mock"


def test_without_a_near_name_the_known_ones_are_listed() -> None:
    assert suggest("x", ["local", "mock"]) == "known: local, mock"
    assert suggest("x", []) == "known: none"


def test_another_hint_takes_the_place_of_the_list() -> None:
    assert suggest("frist-1", ["first-1"], otherwise="`hlatctl runs` lists them") == "did you mean first-1?"
    assert suggest("x", ["first-1"], otherwise="`hlatctl runs` lists them") == "`hlatctl runs` lists them"


def test_a_name_must_be_similar_enough() -> None:
    assert nearest("vocabsize", ["vocab_size", "seq_len"]) == "vocab_size"
    assert nearest("vocabs", ["vocab_size", "seq_len"], similarity=0.9) is None
