from __future__ import annotations

from dataclasses import replace

import pytest

from tests.golden_files import assert_golden
from tests.report.test_version_map import EXAMPLE, map_of, row
from vllm_repro.report.version_map import VersionMap, row_of, row_without_run
from vllm_repro.report.version_map_text import markdown, terminal
from vllm_repro.scenario.catalogue import find
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.release_result import ReleaseResult
from vllm_repro.verdict.verdict import Expected, Standing

TQ = find("tq-chunked-prefill")
WHOLE = map_of(
    [
        row("0.20.2", Outcome.BOOT_FAILED),
        row("0.21.0", Outcome.CRASH),
        row("0.22.1", Outcome.CLEAN),
        row("0.23.0", Outcome.CRASH, Outcome.CRASH, Outcome.CLEAN),
        row("0.24.0", Outcome.CLEAN),
        row("0.25.1", Outcome.UNTRIGGERED),
        row_without_run("0.26.0", TQ, TQ.arms[:1], ReleaseResult.INFRA, "no such | wheel"),
    ],
    ["0.20.2", "0.21.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.0"],
)


def several_arms() -> VersionMap:
    one = row_of(replace(EXAMPLE, arms=EXAMPLE.arms[:4]), "0.23.0", Standing.BAD, "rehearsal")
    return replace(map_of([one]), arms=tuple(arm.name for arm in one.arms))


@pytest.mark.parametrize(
    ("name", "version_map"),
    [("whole", replace(WHOLE, interrupted="SIGINT")), ("arms", several_arms())],
)
def test_a_map_is_what_was_reviewed(name: str, version_map: VersionMap) -> None:
    assert_golden(f"versions-{name}.md", markdown(version_map))
    assert_golden(f"versions-{name}.txt", terminal(version_map, "reports/x/versions/y/versions.md") + "\n")


@pytest.mark.parametrize(
    ("expected", "head", "event"),
    [
        (Expected.DIES, "died", "a crash"),
        (Expected.HANGS, "hung", "that it hung"),
        (Expected.ERRS, "answered wrongly", "that it answered wrongly"),
    ],
)
def test_a_map_words_what_the_bug_does(expected: Expected, head: str, event: str) -> None:
    one = row("0.24.0", Outcome.CLEAN)
    arm = replace(one.arms[0], result=replace(one.arms[0].result, expected=expected))
    version_map = map_of([replace(one, arms=(arm,))])
    assert f"which excludes {event} in more than 95% of boots" in markdown(version_map)
    assert f"| outcome | {head} | boundary |" in markdown(version_map)
    assert f" {head} " in terminal(version_map, "").splitlines()[2]
