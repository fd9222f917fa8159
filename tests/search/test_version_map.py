"""Readings and pages of version maps, and the result of a release."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.golden_files import assert_golden, missing
from tests.report_examples import REHEARSAL, VERSIONS, replace, report, run_of
from vllm_repro.report.model import arm_fields, verdict_fields
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Arm, Status
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, Standing, Verdict, arm_result, decide
from vllm_repro_search.record import markdown, terminal
from vllm_repro_search.versions.record import (
    DeathSignature,
    ReleaseResult,
    ReleaseRow,
    VersionMap,
    release_result,
    row_of,
    row_without_run,
)

STATUS = Status(bad=">=0.21.0,<0.24.0", good=">=0.24.0")
EXAMPLE = report(REHEARSAL)

PHRASES = {
    "lives in": ReleaseResult.LIVES,
    "dies in": ReleaseResult.DIES,
    "dies in some boots of": ReleaseResult.SOMETIMES,
    "fails in another way": ReleaseResult.FAILS_OTHERWISE,
    "fail in another way": ReleaseResult.FAILS_OTHERWISE,
    "does not cross the boundary": ReleaseResult.UNTRIGGERED,
    "do not cross the boundary": ReleaseResult.UNTRIGGERED,
    "does not boot": ReleaseResult.BOOT_FAILED,
    "do not boot": ReleaseResult.BOOT_FAILED,
    "cannot run it here": ReleaseResult.UNSUPPORTED,
    "could not be tried": ReleaseResult.INFRA,
    "is undecided": ReleaseResult.UNDECIDED,
    "are undecided": ReleaseResult.UNDECIDED,
    "was not tried": None,
    "were not tried": None,
}


def row(version: str, *outcomes: Outcome) -> ReleaseRow:
    return row_of(run_of(version, outcomes), version, STATUS.standing(version), "rehearsal")


def map_of(rows: Sequence[ReleaseRow], versions: Sequence[str] | None = None) -> VersionMap:
    return VersionMap(
        scenario=EXAMPLE.scenario,
        issue=EXAMPLE.issue,
        title=EXAMPLE.title,
        status=STATUS,
        server="rehearsal",
        evidence="rehearsal",
        arms=("reported",),
        trials=1,
        versions=tuple(versions or [row.version for row in rows]),
        boots=tuple(rows),
        harness_version="0.1.0",
        started_at="2026-01-01T00:00:00Z",
        duration_s=61.5,
        reproduce="vllm-repro versions tq-chunked-prefill",
    )


def shown(text: str, tested: Sequence[str]) -> dict[str, ReleaseResult | None]:
    """Parse a sentence of the map independently of the code that writes it."""

    def each(spanned: re.Match[str]) -> str:
        span = tested[tested.index(spanned[1]) : tested.index(spanned[2]) + 1]
        assert len(span) == int(spanned[3])
        return " and ".join(span)

    results: dict[str, ReleaseResult | None] = {}
    whole = re.sub(r"(\S+) to (\S+) \((\d+) tried\)", each, text)
    for clause in re.split(r"; |, (?=lives|dies)", whole.partition("against what is")[0]):
        phrase = re.sub(r"(, | and )?\d\S*\d", "", clause).strip()
        for version in re.findall(r"\d\S*\d", clause):
            assert version in tested
            assert version not in results, f"{version} is named twice in: {text}"
            results[version] = PHRASES[phrase]
    return results


MAPS = st.builds(
    lambda outcomes, cut: map_of(
        [row(version, *tried) for version, tried in zip(VERSIONS, outcomes, strict=False)][:cut],
        VERSIONS[: len(outcomes)],
    ),
    st.lists(
        st.lists(st.sampled_from(Outcome), min_size=1, max_size=2)
        | st.lists(st.just(Outcome.CLEAN), min_size=1, max_size=3),
        min_size=1,
        max_size=len(VERSIONS),
    ),
    st.integers(min_value=0, max_value=len(VERSIONS)),
)


@given(MAPS)
def test_reading_page_and_status_are_those_of_the_rows(version_map: VersionMap) -> None:
    """The reading names each release once, with its own result."""
    (text,) = version_map.readings
    results: Mapping[str, ReleaseResult | None] = {
        row.version: row.arms[0].fate for row in version_map.boots
    }
    assert shown(text, version_map.versions) == {
        version: results.get(version) for version in version_map.versions
    }, text
    for row in version_map.boots:
        lived = {trial.outcome for trial in row.arms[0].trials} == {Outcome.CLEAN}
        assert (row.arms[0].fate is ReleaseResult.LIVES) is lived
    loaded = version_map.as_dict()
    msgspec.convert(loaded, VersionMap)
    undecided = any(row.undecided for row in version_map.boots) or bool(version_map.pending)
    assert version_map.exit_status == (1 if version_map.surprises else 2 if undecided else 0)
    assert not (loaded["expected"] and (loaded["undecided"] or loaded["pending"]))
    assert [row["version"] for row in loaded["rows"]] + loaded["pending"] == loaded["versions"]
    assert ("**Not finished: " in markdown(version_map)) is bool(version_map.pending)
    named = text.partition("against what is declared: ")[2]
    surprises = [row.version for row in version_map.boots if row.surprise]
    assert re.findall(r"\d\S*\d", named) == list(version_map.surprises) == surprises


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            [
                row("0.20.2", Outcome.BOOT_FAILED),
                row("0.21.0", Outcome.CRASH),
                row("0.22.1", Outcome.CRASH),
                row("0.23.0", Outcome.CRASH),
                row("0.24.0", Outcome.CLEAN),
                row("0.25.1", Outcome.BOOT_FAILED),
                row("0.27.0", Outcome.CLEAN),
            ],
            (
                "dies in 0.21.0 to 0.23.0 (3 tried), lives in 0.24.0 and 0.27.0; 0.20.2 and 0.25.1"
                " do not boot"
            ),
        ),
        (
            [row("0.23.0", Outcome.CLEAN), row("0.24.0", Outcome.CRASH, Outcome.CLEAN)],
            (
                "lives in 0.23.0, dies in some boots of 0.24.0; against what is declared: 0.23.0"
                " and 0.24.0"
            ),
        ),
        (
            [row("0.24.0", Outcome.OTHER_CRASH)],
            "0.24.0 fails in another way; against what is declared: 0.24.0",
        ),
        (
            [row("0.24.0", Outcome.INFRA), row("0.25.1", Outcome.INFRA)],
            "0.24.0 and 0.25.1 could not be tried",
        ),
        ([row("0.23.0", Outcome.UNTRIGGERED)], "0.23.0 does not cross the boundary"),
        ([row(version, Outcome.CRASH) for version in VERSIONS[:2]], "dies in 0.20.2 and 0.21.0"),
        (
            [row(version, Outcome.BOOT_FAILED) for version in VERSIONS[:3]]
            + [row(version, Outcome.INFRA) for version in VERSIONS[3:6]],
            "0.20.2 to 0.22.1 (3 tried) do not boot; 0.23.0, 0.24.0 and 0.25.1 could not be tried",
        ),
    ],
)
def test_readings_that_were_reviewed(rows: list[ReleaseRow], text: str) -> None:
    assert map_of(rows).readings == (text,)


def test_vllms_and_packages_make_a_table() -> None:
    tried = [
        structs.replace(row("0.23.0", Outcome.CRASH), version="0.23.0 with a==1"),
        structs.replace(row("0.24.0", Outcome.CLEAN), version="0.24.0 with a==1"),
    ]
    both = map_of(tried, ["0.23.0 with a==1", "0.23.0", "0.24.0 with a==1"])
    assert both.grid == [
        ["vLLM", "a==1", "as it is"],
        ["0.23.0", "dies", "not tried"],
        ["0.24.0", "lives", "-"],
    ]
    assert both.readings[0].startswith("dies in 0.23.0 with a==1, lives in 0.24.0 with a==1;")
    assert "| 0.23.0 | dies | not tried |" in markdown(both), "its last column links no runs"
    assert "vLLM    a==1   as it is" in terminal(both, "x", "")
    assert map_of([row("0.23.0", Outcome.CRASH), row("0.24.0", Outcome.CLEAN)]).grid == []


def test_packages_of_all_vllms_are_named_once() -> None:
    names = [f"{release} with a=={n} with b==1" for release in ("0.23.0", "0.24.0") for n in (1, 2)]
    tried = [structs.replace(row(name[:6], Outcome.CRASH), version=name) for name in names]
    whole = map_of(tried, names)
    assert whole.grid[0] == ["vLLM", "a==1 with b==1", "a==2 with b==1"]
    for text in (terminal(whole, "x", ""), markdown(whole)):
        assert text.count("b==1") == 1
        assert "All vLLMs here also have: b==1." in text
    assert whole.abridged().grid[0] == ["vLLM", "a==1", "a==2"]
    swapped = [f"0.23.0 with {order}" for order in ("a==1 with b==1", "b==1 with a==1")]
    apart = [names[0], "0.23.0 with c==1"]
    # 0.23.0 without its packages is another vLLM; the names would be equal; nothing is shared
    for kept in (map_of(tried[:1], names[:1]), map_of([], swapped), map_of([], apart)):
        assert kept.abridged() is kept


def test_a_release_whose_run_has_no_such_arm_was_not_tried() -> None:
    """Compare a journal of the arms `branch` and `unreserved` with a map of `reported`."""
    other = row("0.23.0", Outcome.CRASH)
    other = structs.replace(
        other, arms=tuple(structs.replace(arm, name="branch") for arm in other.arms)
    )
    without = map_of([other, row("0.24.0", Outcome.CLEAN)])
    assert without.readings == ("lives in 0.24.0; 0.23.0 was not tried",)
    assert map_of([other]).readings == ("0.23.0 was not tried",)
    assert "**0.23.0 was not tried**" in markdown(map_of([other]))


def test_a_release_that_was_not_installed_has_its_reason() -> None:
    own = Arm("growing", Expected.DIES, bad=">=0.24.0")
    lost = row_without_run(
        "0.24.0",
        TQ,
        TQ.arms[:1],
        ReleaseResult.INFRA,
        "pip cannot\nreach its package index",
    )
    reason = "pip cannot reach its package index"
    assert (lost.why, lost.run, lost.undecided, lost.expected) == (reason, None, True, False)
    long = row_without_run("0.24.0", TQ, [own], ReleaseResult.INFRA, "a" * 400)
    assert len(long.why) == 300
    assert map_of([lost]).readings == ("0.24.0 could not be tried",)
    msgspec.convert(map_of([lost]).as_dict(), VersionMap)
    assert (lost.declared, lost.arms[0].declared) == (Standing.GOOD, Standing.GOOD)
    assert (
        row_without_run("0.24.0", TQ, [own], ReleaseResult.INFRA, "").arms[0].declared
        is Standing.BAD
    )


@pytest.mark.parametrize(
    ("reported", "believed"), [("0.24.0", True), ("0.24.0+cpu", True), ("0.23.0", False)]
)
def test_a_server_of_another_release_decides_nothing(reported: str, believed: bool) -> None:
    run = run_of("0.24.0", [Outcome.CLEAN], reported=reported)
    run = replace(run, surprises=("reported",))
    one = row_of(run, "0.24.0", Standing.GOOD, "rehearsal")
    assert (one.arms[0].fate, one.undecided) == (
        (ReleaseResult.LIVES, False) if believed else (ReleaseResult.UNDECIDED, True)
    )
    assert (f"the server reports vLLM {reported}" in one.why) is not believed
    assert one.surprises == (("reported",) if believed else ())


def test_a_mixed_build_is_shown_with_both_versions() -> None:
    report = run_of("0.24.0", [Outcome.CLEAN])
    arm = replace(report.arms[0], server=replace(report.arms[0].server, compiled="0.23.0"))
    row = row_of(replace(report, arms=(arm,)), "0.24.0", Standing.GOOD, report.evidence)
    found = map_of([row])
    note = "0.24.0: its Python code ran over the compiled parts of 0.23.0"
    assert f"\n- {note}\n" in markdown(found)
    assert f"\n{note}\n" in terminal(found, "versions.md", "")
    assert found.as_dict()["rows"][0]["compiled"] == "0.23.0"


def test_other_evidence_and_unimitated_bugs_decide_nothing() -> None:
    run = run_of("0.24.0", [Outcome.CLEAN])
    assert row_of(run, "0.24.0", Standing.GOOD, "cpu").arms[0].fate is ReleaseResult.UNDECIDED
    assert (
        row_of(replace(run, imitated=False), "0.24.0", Standing.GOOD, "rehearsal").arms[0].fate
        is ReleaseResult.UNDECIDED
    )


def test_several_arms_have_a_sentence_and_an_answer_each() -> None:
    """The example has six arms; one stays short of the boundary as declared."""
    one = row_of(replace(EXAMPLE, vllm_version="0.23.0"), "0.23.0", Standing.BAD, "rehearsal")
    several = structs.replace(map_of([one]), arms=tuple(arm.name for arm in one.arms))
    assert several.readings[:2] == ("reported: dies in 0.23.0", "eager: lives in 0.23.0")
    assert "near-miss-128: 0.23.0 does not cross the boundary" in several.readings
    assert {one.as_declared(arm) for arm in one.arms} == {"yes"}
    assert (one.why, one.verdict, several.exit_status) == ("", Verdict.REPRODUCES, 0)
    surprised = structs.replace(one, surprises=("eager",), expected=False)
    assert [surprised.as_declared(arm) for arm in surprised.arms][:2] == ["yes", "SURPRISE"]
    sentences = structs.replace(several, boots=(surprised,)).readings
    assert [
        number
        for number, text in enumerate(sentences)
        if "; against what is declared: 0.23.0" in text
    ] == [1]


def test_an_arm_that_is_not_the_reported_one_is_named_even_alone() -> None:
    """`lives in 0.23.0` of a workaround would read as if the bug did not exist."""
    one = row_of(replace(EXAMPLE, vllm_version="0.23.0"), "0.23.0", Standing.BAD, "rehearsal")
    alone = structs.replace(
        map_of([one]), arms=("eager",), boots=(structs.replace(one, arms=one.arms[1:2]),)
    )
    assert alone.readings == ("eager: lives in 0.23.0",)
    assert "reading:  eager: lives in 0.23.0" in terminal(alone, "x", "")
    assert structs.replace(map_of([one]), arms=("reported",)).readings == ("dies in 0.23.0",)


@pytest.mark.parametrize(
    ("crossed", "reading"), [(True, "0.24.0 fails in another way"), (False, "0.24.0 is undecided")]
)
def test_a_hang_that_is_not_the_bug_is_in_no_range_and_says_why(
    crossed: bool, reading: str
) -> None:
    run = run_of("0.24.0", [Outcome.HANG])
    result = arm_result(
        "reported", Expected.HANGS, [Outcome.HANG], strange=int(crossed), unproved=int(not crossed)
    )
    trial = replace(run.arms[0].trials[0], why="it never came to rest")
    arm = replace(run.arms[0], **arm_fields(result), trials=(trial,))
    verdict = decide([result], standing=Standing.UNKNOWN)
    one = row_of(
        replace(run, arms=(arm,), **verdict_fields(verdict)),
        "0.24.0",
        Standing.UNKNOWN,
        "rehearsal",
    )
    assert map_of([structs.replace(one, surprises=())]).readings == (reading,)
    assert one.why == "it never came to rest"


@pytest.mark.parametrize(
    ("expected", "outcome", "reading"),
    [
        (Expected.ERRS, Outcome.WRONG_OUTPUT, "answers wrongly in 0.24.0"),
        (Expected.HANGS, Outcome.HANG, "hangs in 0.24.0"),
        (Expected.SPINS, Outcome.HANG, "is never idle in 0.24.0"),
    ],
)
def test_a_bug_that_kills_nothing_is_not_called_a_death(
    expected: Expected, outcome: Outcome, reading: str
) -> None:
    run = run_of("0.24.0", [outcome])
    arm = replace(run.arms[0], **arm_fields(arm_result(run.arms[0].name, expected, [outcome])))
    one = row_of(replace(run, arms=(arm,)), "0.24.0", Standing.BAD, "rehearsal")
    assert map_of([structs.replace(one, surprises=())]).readings == (reading,)


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
    return structs.replace(map_of([one]), arms=tuple(arm.name for arm in one.arms))


@pytest.mark.parametrize(
    ("name", "version_map"),
    [("whole", structs.replace(WHOLE, stopped="SIGINT")), ("arms", several_arms())],
)
def test_a_map_is_what_was_reviewed(name: str, version_map: VersionMap) -> None:
    assert_golden(f"versions-{name}.md", markdown(version_map), "search")
    assert_golden(
        f"versions-{name}.txt",
        terminal(version_map, "reports/x/versions.md", "vllm-repro versions --resume reports/x"),
        "search",
    )


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
    arm = structs.replace(one.arms[0], expected=expected)
    version_map = map_of([structs.replace(one, arms=(arm,))])
    assert (
        missing(
            markdown(version_map),
            f"which excludes {event} in more than 95% of boots",
            f"| outcome | {head} | boundary |",
        )
        == []
    )
    assert f" {head} " in terminal(version_map, "", "").splitlines()[2]


def in_release(*outcomes: Outcome, unexplained: int = 0) -> ReleaseResult:
    arm = arm_result("reported", Expected.DIES, outcomes, unexplained=unexplained)
    return release_result(arm, imitated=True)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([Outcome.CLEAN], ReleaseResult.LIVES),
        ([Outcome.CRASH, Outcome.CRASH], ReleaseResult.DIES),
        ([Outcome.CRASH, Outcome.CLEAN], ReleaseResult.SOMETIMES),
        ([Outcome.OTHER_CRASH, Outcome.CLEAN], ReleaseResult.FAILS_OTHERWISE),
        ([Outcome.HANG], ReleaseResult.FAILS_OTHERWISE),
        ([Outcome.UNTRIGGERED], ReleaseResult.UNTRIGGERED),
        ([Outcome.UNTRIGGERED, Outcome.CLEAN], ReleaseResult.UNDECIDED),
        ([Outcome.BOOT_FAILED, Outcome.BOOT_FAILED], ReleaseResult.BOOT_FAILED),
        ([Outcome.BOOT_FAILED, Outcome.INFRA], ReleaseResult.UNDECIDED),
        ([Outcome.UNSUPPORTED], ReleaseResult.UNSUPPORTED),
        ([Outcome.INFRA], ReleaseResult.INFRA),
        ([Outcome.CANCELLED], ReleaseResult.UNDECIDED),
        ([], ReleaseResult.UNDECIDED),
    ],
)
def test_result_of_a_release(outcomes: list[Outcome], expected: ReleaseResult) -> None:
    assert in_release(*outcomes) is expected


def test_a_release_lives_only_if_all_boots_crossed_and_lived() -> None:
    for outcomes in combinations_with_replacement(Outcome, 3):
        assert (in_release(*outcomes) is ReleaseResult.LIVES) == (
            set(outcomes) == {Outcome.CLEAN}
        ), outcomes


def test_an_unexplained_death_is_not_another_failure() -> None:
    assert in_release(Outcome.OTHER_CRASH, unexplained=1) is ReleaseResult.UNDECIDED
    assert (
        in_release(Outcome.OTHER_CRASH, Outcome.HANG, unexplained=1)
        is ReleaseResult.FAILS_OTHERWISE
    )


@pytest.mark.parametrize("unexplained", [9, 10])
def test_verdict_and_release_agree_on_unexplained_failures(
    unexplained: int,
) -> None:
    arm = arm_result("reported", Expected.DIES, [Outcome.OTHER_CRASH] * 10, unexplained=unexplained)
    changed = unexplained < 10
    assert (release_result(arm, imitated=True) is ReleaseResult.FAILS_OTHERWISE) is changed
    assert (decide([arm], standing=Standing.BAD).verdict is Verdict.CHANGED) is changed


def test_releases_stand_in_the_order_that_was_asked_for() -> None:
    later, earlier = row("0.24.0", Outcome.CLEAN), row("0.23.0", Outcome.CRASH)
    empty = map_of([], ["0.23.0", "0.24.0"])
    whole = empty.after(later).after(earlier)
    assert (whole.boots, whole.trials) == ((earlier, later), 1)
    states = [
        (done.derived()["pending"], done.derived()["undecided"], done.derived()["expected"])
        for done in (empty, empty.after(later), whole)
    ]
    assert states == [(empty.versions, True, False), (("0.23.0",), True, False), ((), False, True)]
    assert whole.derived()["rehearsal"] is True
    assert replace(whole, evidence="lab").derived()["rehearsal"] is False


@pytest.mark.parametrize(
    ("outcomes", "outcome", "boundary"),
    [
        ((Outcome.CRASH,), "crash", "crossed"),
        ((Outcome.CRASH, Outcome.CRASH), "2 crash", "crossed"),
        ((Outcome.CLEAN, Outcome.UNTRIGGERED), "1 clean, 1 untriggered", "1 of 2 crossed"),
        ((Outcome.UNTRIGGERED, Outcome.UNTRIGGERED), "2 untriggered", "not crossed"),
        ((Outcome.BOOT_FAILED,), "boot-failed", "-"),
    ],
)
def test_words_of_an_arm_in_a_release(
    outcomes: tuple[Outcome, ...], outcome: str, boundary: str
) -> None:
    release = row("0.23.0", *outcomes)
    (arm,) = release.arms
    assert (arm.outcome, arm.boundary) == (outcome, boundary)
    assert (release.vllm_version, release.run) == ("0.23.0", run_of("0.23.0", outcomes).folder.name)


def test_signatures_and_boundary_of_an_arm() -> None:
    (arm,) = row("0.23.0", Outcome.CRASH, Outcome.UNTRIGGERED).arms
    assert (arm.signature, arm.boundary) == ("match", "1 of 2 crossed")
    crash, untriggered = arm.trials
    unknown = structs.replace(crash, death=DeathSignature(None))
    unbooted = structs.replace(untriggered, boot_s=None)
    arm = structs.replace(arm, trials=(crash, unknown, unbooted))
    assert (arm.signature, arm.boundary) == ("match, unknown", "crossed")


def test_an_unclear_boot_or_a_surprise_has_its_reason() -> None:
    assert row("0.23.0", Outcome.UNTRIGGERED).why == "it was untriggered"
    assert row("0.24.0", Outcome.CRASH).why == run_of("0.24.0", [Outcome.CRASH]).because != ""


def test_a_release_of_unknown_status_is_not_called_declared() -> None:
    release = row_of(run_of("0.23.0", [Outcome.CRASH]), "0.23.0", Standing.UNKNOWN, "rehearsal")
    arm = structs.replace(release.arms[0], declared=Standing.UNKNOWN)
    assert (release.as_declared(arm), release.as_declared(release.arms[0])) == ("-", "-")
    assert release.as_declared(structs.replace(arm, declared=Standing.BAD)) == "yes"


def test_a_range_ends_at_a_release_without_the_bug() -> None:
    rows = [
        row("0.21.0", Outcome.CRASH),
        row("0.22.1", Outcome.BOOT_FAILED),
        row("0.23.0", Outcome.CRASH),
    ]
    assert map_of(rows).readings == ("dies in 0.21.0 and 0.23.0; 0.22.1 does not boot",)
    more = map_of([*rows, row("0.24.0", Outcome.CRASH)]).readings[0]
    assert more.startswith("dies in 0.21.0, 0.23.0 and 0.24.0; ")
