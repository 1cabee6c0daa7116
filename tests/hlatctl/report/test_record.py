"""Profiles and the evidence of hangs, as the report links them."""

from __future__ import annotations

from hlatctl.report.build import build
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import stacks_name, trace_name
from tests.hlatctl.conftest import MakeRun


def test_the_report_links_what_there_is(make_run: MakeRun) -> None:
    run = make_run()
    with JournalWriter(run, "train-rank00000", 1) as journal:
        for number in (1, 2):
            journal.append("profile_requested", number=number, steps=5, ranks=[3], memory=True, by="ana")
            journal.append("profiled", number=number, first_step=7, step=11, bytes=2048)
        journal.append("hang", evidence="no step after step 7 for 60 s", path="logs/attempt-0001/hang")
    for folder, name in ((run.profile(1), trace_name(3)), (run.hang(1), stacks_name(0))):
        folder.mkdir(parents=True)
        (folder / name).touch()
    page = build(run).read_text(encoding="utf-8")
    assert "profile 1, steps 7 to 11, 2 KiB" in page
    assert f'<a href="../profiles/0001/{trace_name(3)}">' in page
    assert "profile 2" not in page, "its folder was removed"
    assert f'<a href="../logs/attempt-0001/hang/{stacks_name(0)}">' in page
