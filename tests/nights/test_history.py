"""History of nights: state of each bug, changes, setups, pages, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import UTC, date, timedelta, timezone
from itertools import permutations
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.conftest import Harness
from tests.golden_files import assert_golden, assert_refused, missing
from tests.nights.made import FIRST, NIGHTLY, POINT, arm, measured, row
from tests.report_examples import EXAMPLES, REHEARSAL, report
from vllm_repro.journal.journal import Recording, read
from vllm_repro.report.build import report_of
from vllm_repro.report.json_report import ServerReport
from vllm_repro.report.runs import Run, run_of
from vllm_repro.verdict.verdict import Expected, Standing, Verdict
from vllm_repro_nights.bug_state import ABSENT, BugState, bug_state, is_nightly
from vllm_repro_nights.frames import death_label
from vllm_repro_nights.history import NIGHTS, History, history, night_of
from vllm_repro_nights.history_formats import as_json, change_lines, html_page, terminal
from vllm_repro_nights.throughput import setup_of

Rows = list[tuple[date, Run]]


def verdicts(rows: Rows) -> list[str]:
    """Return the verdict after each night."""
    return [bug_state(rows[: number + 1]).verdict for number in range(len(rows))]


def test_a_bug_is_fixed_and_regresses() -> None:
    rows = [row(0, 5, 5), row(1, 5, 5), row(2, 0, 1), row(3, 0, 5), row(4, 2, 2), row(5, 0, 80)]
    assert verdicts(rows) == [*["reproduces"] * 3, "fixed", "regressed", "fixed"]
    assert [bug_state(rows[:nights]).reason for nights in (3, 4)] == [
        f"died in 10 of 10 boots, last in {NIGHTLY.format(1)}; 1 of 6 quiet boots for a fix",
        f"died in 10 of 10 boots, then 6 quiet in a row up to {NIGHTLY.format(3)}",
    ]
    regressed = bug_state(rows[:5])
    assert (regressed.crashed, regressed.boots) == (2, 2), "older crashes have another rate"


GOOD, BAD = Standing.GOOD, Standing.BAD
DIED_LATER = row(2, 1, 1, version="0.25.0", standing=GOOD)
SAME_RELEASE = [row(0, 1, 1, version="0.24.0"), row(1, 0, 100, version="0.24.0")]
BRANCH = [row(0, 5, 5), row(1, 0, 9), row(2, 5, 5, version="0.24.1")]
OLDER = [
    row(0, 5, 5, version="0.23.0"),
    row(1, 0, 9, version="0.24.0"),
    row(2, 5, 5, version="0.22.0"),
]
HOSTS = [row(night, 1, 1, host=host) for night in range(9) for host in ("aaaa0001", "bbbb0002")]
ONE_QUIET = [*HOSTS, row(9, 0, 50)]
FLAKY = [row(night, night % 2, 1) for night in range(1, 40)]
QUIET = [row(40 + night, 0, 1) for night in range(bug_state(FLAKY).needed or 0)]


def declared_good(crashes: int) -> Rows:
    return [
        row(0, crashes, 1, version="0.24.0"),
        row(1, 0, 1, version="0.25.0", standing=GOOD),
    ]


@pytest.mark.parametrize(
    ("rows", "verdict", "reason"),
    [
        *(
            (declared_good(crashes), "fixed", "0.25.0 is declared good, and lived")
            for crashes in (0, 1)
        ),
        *(([*declared_good(crashes), DIED_LATER], "regressed", "") for crashes in (0, 1)),
        # a declared bug is no regression
        (
            [
                row(0, 0, 1, version="0.18.0", standing=GOOD),
                row(1, 1, 1, version="0.23.0", standing=BAD),
            ],
            "reproduces",
            "",
        ),
        # a later crash of an older release is no regression
        (OLDER, "fixed", "died in 10 of 10 boots"),
        ([*OLDER, row(3, 1, 1, version="0.25.0")], "regressed", ""),
        # the quiet boots of a release, which does not change, are no fix of its crash
        *(
            (rows, "reproduces", "died in 1 of 101 boots (flaky)")
            for rows in (SAME_RELEASE, SAME_RELEASE[::-1])
        ),
        # a release branch does not hide a nightly fix
        (BRANCH, "fixed", ""),
        (BRANCH[2:], "reproduces", ""),
        # what decides nothing changes nothing
        ([row(0, 0, 0)], "inconclusive", ""),
        ([row(0, 0, 0), row(1, 3, 3), row(2, 0, 0)], "reproduces", ""),
        ([row(0, 0, 3)], "quiet", "never died here; quiet boots: 3"),
        # the worst host decides
        (ONE_QUIET, "reproduces", ""),
        ([*ONE_QUIET, row(10, 0, 50, host="bbbb0002")], "fixed", ""),
        # it may need the other GPU
        ([*HOSTS, row(10, 0, 50, host="cccc0003")], "reproduces", ""),
        # the other host is gone
        ([*ONE_QUIET, row(9 + ABSENT.days, 0, 1)], "fixed", ""),
        # a flaky bug is fixed only after so many quiet boots
        ([*FLAKY, *QUIET[:-1]], "reproduces", ""),
        ([*FLAKY, *QUIET], "fixed", ""),
        # a bisection of a declared fix, in any order
        *(
            (
                [
                    row(night, crashes, 1, version=version, standing=standing)
                    for night, (version, crashes, standing) in enumerate(boots)
                ],
                "fixed",
                "",
            )
            for boots in permutations(
                (("0.19.0", 0, Standing.UNKNOWN), ("0.23.0", 1, BAD), ("0.33.0", 0, GOOD))
            )
        ),
    ],
)
def test_the_state_of_a_bug(rows: Rows, verdict: str, reason: str) -> None:
    state = bug_state(rows)
    assert state.verdict == verdict
    assert reason in state.reason


_RUN = st.tuples(
    st.sampled_from(["0.22.0", "0.23.0", "0.24.0"]), st.integers(0, 2), st.integers(0, 12)
)


@given(st.lists(_RUN, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_runs_does_not_matter(
    runs: list[tuple[str, int, int]], shuffle: Random
) -> None:
    def state() -> BugState:
        return bug_state(
            [
                row(night, min(crashed, boots), boots, version=version)
                for night, (version, crashed, boots) in enumerate(runs)
            ]
        )

    before, crashed = state(), any(min(run[1:]) for run in runs)
    shuffle.shuffle(runs)
    assert state() == before
    assert 0 <= before.crashed <= before.boots
    assert crashed or before.verdict in (
        Verdict.QUIET,
        Verdict.INCONCLUSIVE,
    ), "no fix without a crash"


def test_a_flaky_bug_is_no_change_night_after_night() -> None:
    assert set(verdicts(FLAKY)) == {"reproduces"}


def test_a_build_of_a_commit_has_no_place_in_the_order_of_releases() -> None:
    assert bug_state([row(1, 1, 1, version="0.24.0+commit.4689392ab1")]) == BugState()


@given(st.lists(st.booleans(), min_size=2, max_size=40))
def test_the_quick_bound_never_hides_a_fix(crashes: list[bool]) -> None:
    rows = [row(night, int(crashed), 1) for night, crashed in enumerate([True, *crashes])]
    for last in range(1, len(rows)):
        state = bug_state(rows[: last + 1])
        assert state.verdict is Verdict.FIXED or state.streak < (state.needed or 0)
        if state.verdict is Verdict.FIXED:
            break


def test_what_a_bug_does_that_kills_nothing() -> None:
    _, run = row(0, 2, 2)
    hung = replace(run, arms=(arm(2, 2, expected=Expected.HANGS),))
    assert bug_state([(FIRST, hung)]).reason.startswith("hung in 2 of 2 boots, last in ")


def history_of(rows: Rows, last: int = 1) -> History:
    return history([run for _, run in rows], UTC, last=last)


def kinds(rows: Rows, last: int = 1) -> list[str]:
    return [change.kind for change in history_of(rows, last).changes]


@pytest.mark.parametrize(
    ("started", "zone", "night"),
    [
        ("2026-11-21T17:59:59Z", 0, date(2026, 11, 21)),
        ("2026-11-21T18:00:00Z", 0, date(2026, 11, 22)),
        ("2026-12-31T23:00:00Z", 0, date(2027, 1, 1)),
        ("2026-11-22T01:59:59Z", -8, date(2026, 11, 21)),
        ("2026-11-22T02:00:00Z", -8, date(2026, 11, 22)),
    ],
)
def test_a_night_is_named_for_its_morning(started: str, zone: int, night: date) -> None:
    assert night_of(started, timezone(timedelta(hours=zone))) == night


def test_each_change_comes_once() -> None:
    rows = [row(night, 1, 1) for night in range(10)] + [row(10, 0, 9)]
    (fix,) = history_of(rows).changes
    assert (fix.kind, fix.call, fix.run) == ("fixed", True, rows[-1][1].id)
    assert (kinds([*rows, row(11, 0, 1)]), kinds([*rows, row(11, 1, 1)])) == ([], ["regressed"])
    assert kinds([*rows, row(11, 0, 1)], last=3) == ["fixed"], "over more nights the end counts"


def test_a_declared_fix_is_no_claim() -> None:
    rows = [
        row(0, 1, 1, version="0.23.0", standing=Standing.BAD),
        row(1, 0, 1, version="0.24.0", standing=Standing.GOOD),
    ]
    (change,) = history_of(rows).changes
    assert (change.call, change.text) == (
        False,
        "fixed (was reproduces): 0.24.0 is declared good, and lived",
    )


def test_what_did_not_run_is_a_change() -> None:
    rows = [row(0, 1, 1), row(0, 1, 1, scenario="other"), row(1, 1, 1)]
    assert change_lines(history_of(rows)) == [
        "not run: other: it ran in the night of 2026-09-01, and not in the last one"
    ]


def test_the_first_night_has_nothing_to_be_compared_with() -> None:
    assert "no earlier night" in terminal(history_of([row(0, 1, 1)]))
    for text in (terminal(history_of([])), html_page(history_of([]), "reports")):
        assert "no run of these scenarios in the last night" in text


def test_the_table_has_the_last_14_nights() -> None:
    rows = [row(night, 1, 1) for night in range(20)]
    assert [cell.night for cell in history_of(rows).bugs[0].nights] == [
        when for when, _ in rows[-NIGHTS:]
    ]


def test_a_night_of_several_runs_shows_the_worst() -> None:
    rows = [row(0, 0, 1), row(0, 1, 1, hour=3), row(0, 0, 0, hour=4)]
    (cell,) = history_of(rows).bugs[0].nights
    assert (cell.result, cell.runs[0]) == ("reproduces", rows[1][1].id)
    (cell,) = history_of([row(0, 1, 1, standing=Standing.GOOD)]).bugs[0].nights
    assert cell.result == "regressed"


@pytest.mark.parametrize("verdict", [one for one in Verdict if one is not Verdict.INCONCLUSIVE])
def test_controls_and_patched_arms_alone_decide_nothing(verdict: Verdict) -> None:
    _, run = row(0, int(verdict in (Verdict.REPRODUCES, Verdict.REGRESSED)), 1)
    run = replace(run, verdict=verdict)
    assert history([run], UTC).bugs[0].nights[0].result == verdict
    for changed in ({"patched": True}, {"expected": Expected.LIVES}):
        arms = tuple(replace(tried, **changed) for tried in run.arms)
        assert history([replace(run, arms=arms)], UTC).bugs[0].nights[0].result == "inconclusive"


def test_bugs_that_no_run_decided_are_folded() -> None:
    nothing = replace(row(0, 0, 0, scenario="no-gpu-here")[1], infra=("no GPU",))
    shown = history([row(0, 1, 1)[1], nothing], UTC)
    assert terminal(shown).endswith("without a conclusive run: no-gpu-here")
    folded = r"<details><summary>1 without .*no-gpu-here<"
    assert re.search(folded, html_page(shown, "reports"))
    alone = history([nothing], UTC)
    assert ("reason" in terminal(shown), "reason" in terminal(alone)) == (True, False)
    assert "<table" not in html_page(alone, "reports")
    failed = replace(nothing, verdict=Verdict.CHANGED)
    assert history([failed], UTC).bugs[0].decided


def test_kinds_of_evidence_are_never_mixed() -> None:
    rows = [row(night, 1, 1, evidence="lab") for night in range(3)] + [
        row(3, 0, 50, evidence="rehearsal")
    ]
    assert [bug.state.verdict for bug in history_of(rows).bugs] == ["reproduces", "quiet"]
    assert not terminal(history_of(rows)).startswith("REHEARSAL")
    assert terminal(history_of(rows[3:])).startswith("REHEARSAL: a simulated engine")
    page = html_page(history_of(rows[3:]), "reports")
    assert page.index("REHEARSAL: a simulated engine") < page.index("What changed")


def fortnight() -> Rows:
    """Return nights with a fix, a flaky bug and a loss of throughput."""
    rows = [row(night, 2 * (night < 12), 2, scenario="tq-chunked-prefill") for night in range(16)]
    rows += [row(night, night % 2, 1, scenario="sco-hybrid") for night in range(16)]
    rows += [
        measured(night, {"eager": 900.0 + night}, scenario="tq-prefix-hit") for night in (13, 15)
    ]
    rows += [row(15, 0, 0, scenario="dsv4-tp2", evidence="lab")]
    return sorted(rows, key=lambda pair: pair[1].started_at)


def test_the_terminal_shows_the_last_nights() -> None:
    assert_golden("history.txt", terminal(history_of(fortnight(), last=4)) + "\n", "nights")


def test_throughput_is_the_last_figure_and_the_one_before() -> None:
    (figure,) = history_of(fortnight()).throughput
    assert (figure.arm, figure.last, figure.before) == ("eager", 915.0, 913.0)
    assert (figure.night, figure.load) == (FIRST + timedelta(days=15), str(POINT))
    assert figure.label == "1 x NVIDIA H200"
    when, run = measured(1, {"eager": 1.0})
    edited = replace(run, arms=tuple(replace(each, command="vllm serve --x") for each in run.arms))
    other = history_of([measured(0, {"eager": 2.0}), (when, edited)]).throughput
    assert [figure.before for figure in other] == [
        None,
        None,
    ], "figures of other flags are not compared"
    assert history_of([(when, replace(run, evidence="lab"))]).throughput == ()


def test_json_has_what_the_terminal_has() -> None:
    data = as_json(history_of(fortnight(), last=4))
    assert (data["schema"], data["rehearsal"]) == (3, False)
    assert [(change["kind"], change["call"]) for change in data["changes"]] == [("fixed", True)]
    assert data["bugs"][1]["state"]["verdict"] == "reproduces"
    assert data["bugs"][1]["nights"][-1]["result"] == "reproduces"
    assert data["throughput"][0]["last"] == 915.0
    assert data["last_night"] == [run.id for run in history_of(fortnight()).last_night]


def test_the_page_links_runs_relative_to_itself() -> None:
    rows = fortnight()
    near = next(run.id for night, run in rows if night == rows[-1][0] and run.died)
    text = html_page(history_of(rows), "../reports", near={near: "copy/report.html"})
    headings = ("What changed since", "The last 14 nights", "Throughput<")
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)
    copy, *others = sorted({*re.findall(r'href="([^"]*)"', text)} - {"#main"}, reverse=True)
    assert copy == "copy/report.html"
    assert others
    assert all(re.fullmatch(r"\.\./reports/[\w-]+/\w+-\w+/", link) for link in others)
    assert near not in text


def test_nothing_in_the_page_is_markup_of_others() -> None:
    runs = [run for _, run in (row(0, 1, 1), row(1, 0, 50, version="<script>alert(1)</script>"))]
    runs = [
        replace(run, id=f'x/"><b>{number}', scenario="<b>&amp;") for number, run in enumerate(runs)
    ]
    text = html_page(history(runs, UTC), "re ports")
    assert "<script>alert" not in text
    assert missing(text, "&lt;b&gt;&amp;amp;", 'href="re%20ports/x/%22%3E%3Cb%3E') == []
    assert not re.search(r"https?://", text)


def test_no_host_name_is_kept() -> None:
    """A journal holds the host name and kernel; no history does."""
    first, *others = read(REHEARSAL / "journal.jsonl").entries
    machine = {**first["machine"], "os": "Linux 6.1 of secretbox"}
    fields = {**first.fields, "hosts": ["secretbox"], "machine": machine}
    head = dataclasses.replace(first, fields=fields)
    fields = {**others[-1].fields, "interrupted": "SIGTERM on secretbox"}
    ended = dataclasses.replace(others[-1], fields=fields)
    run = run_of(report_of(Recording((head, *others[:-1], ended), cut=False), REHEARSAL))
    shown = history([run], UTC)
    texts = (json.dumps(as_json(shown)), terminal(shown), html_page(shown, "."), repr(run))
    assert "secretbox" not in "".join(texts)


@pytest.mark.parametrize(
    ("version", "nightly"),
    [
        ("0.24.0", False),
        ("0.24.0+cu130", False),
        ("0.24.0.post1", False),
        ("0.24.1rc1.dev12+gabc1234", True),
        ("0.24.1rc2", True),
        (None, False),
        ("main", False),
    ],
)
def test_nightly_or_release(version: str | None, nightly: bool) -> None:
    assert is_nightly(version) is nightly


def test_a_signature_says_whether_it_matches() -> None:
    for tried in (tried for folder in EXAMPLES for tried in report(folder).arms):
        deaths = [trial.death for trial in tried.trials if trial.death]
        matched = any(death.signature == "match" for death in deaths)
        assert death_label(tried).startswith("match: ") is matched


DOCKER = "docker run -p 127.0.0.1:{}:8000 {image} Qwen/Qwen3-8B --max-num-seqs 2 --port {}"
OLD, NEW = "vllm/vllm-openai:v0.23.0", "vllm/vllm-openai:v0.24.0"
FIRST_SETUP = (DOCKER.format(45421, 8000, image=OLD), OLD)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (FIRST_SETUP, (DOCKER.format(999, 8001, image=NEW), NEW), True),
        (FIRST_SETUP, (FIRST_SETUP[0].replace("seqs 2", "seqs 3"), OLD), False),
        (FIRST_SETUP, (FIRST_SETUP[0].replace("8B", "4B"), OLD), False),
        (
            ("/a/releases/0.23.0/bin/vllm serve /m/x --f", None),
            ("/b/0.24.0/bin/vllm serve /n/x --f", None),
            True,
        ),
    ],
)
def test_a_setup_is_its_flags_and_model_and_not_this_run(
    one: tuple[str, str | None], other: tuple[str, str | None], same: bool
) -> None:
    rehearsed = run_of(report(REHEARSAL)).arms[0]
    setups = {
        setup_of(
            replace(rehearsed, command=command, server=ServerReport(kind="docker", image=image))
        )
        for command, image in (one, other)
    }
    assert len(setups) == (1 if same else 2)


IN_UTC = {"TZ": "UTC"}


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Write the runs of some nights into the reports folder."""
    root = tmp_path / "reports"
    for _, run in fortnight():
        folder = root / run.id
        folder.mkdir(parents=True)
        (folder / "journal.jsonl").touch()
        (folder / "report.json").write_bytes(msgspec.json.encode(run))
    return root


@pytest.mark.usefixtures("reports")
def test_the_last_nights_are_compared_with_those_before(harness: Harness) -> None:
    done = harness("history", "--json", "--nights", "4", env=IN_UTC)
    assert [change["scenario"] for change in json.loads(done.out)["changes"]] == [
        "tq-chunked-prefill"
    ]
    done = harness("history", "--scenario", "sco-hybrid", env=IN_UTC)
    assert "since the night of 2026-09-15:\n  nothing changed" in done.out
    assert "tq-prefix-hit" not in done.out


def test_a_file_is_written_and_no_table_printed(harness: Harness, reports: Path) -> None:
    page, table = reports / "nights.html", reports / "runs.csv"
    done = harness(
        "history", "--html", str(page), "--csv", str(table), "--scenario", "sco-hybrid", env=IN_UTC
    )
    assert (done.status, done.out) == (0, "")
    assert done.err == f"wrote {page}\nwrote {table}\n"
    assert "What changed since the night of 15 September" in page.read_text(encoding="utf-8")
    assert len(table.read_text(encoding="utf-8").splitlines()) == 1 + 16


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize(
    ("option", "first", "last"),
    [("--csv", "night,id,scenario,", "2026-09-16,"), ("--html", "<!doctype html>", "</html>")],
)
def test_a_dash_prints_it_and_nothing_else(
    harness: Harness, option: str, first: str, last: str
) -> None:
    done = harness("history", option, "-", env=IN_UTC)
    assert (done.status, done.err) == (0, "")
    lines = done.out.lower().splitlines()
    assert lines[0].startswith(first)
    assert lines[-1].startswith(last)


def test_a_folder_of_copies_is_named_as_that(harness: Harness) -> None:
    assert_refused(
        harness("history", "--out", str(EXAMPLES[0].parent)),
        "the folders in it are runs of one scenario, or copies",
        f"vllm-repro report {sorted(EXAMPLES)[0]} --format md",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scenario", "tq-prefix"), "it has: dsv4-tp2, sco-hybrid"),
        (("--nights", "14"), "is no number of nights from 1 to 13"),
        (("--out", "/nowhere/at/all"), "there is no folder"),
        (("--html", "/nowhere/at/all.html"), "name another file with --html"),
        (("--csv", "/proc/nowrite"), "name another file with --csv"),
        (("--html", "-", "--csv", "-"), "only one of --json, --html - and --csv - can be printed"),
    ],
)
@pytest.mark.usefixtures("reports")
def test_wrong_usage_names_the_remedy(
    harness: Harness, words: tuple[str, ...], message: str
) -> None:
    assert_refused(harness("history", *words), message)
