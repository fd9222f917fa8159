"""A journal renders in every format wherever it was cut or damaged, and every format reports it."""

from __future__ import annotations

import contextlib
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.report_examples import DIED, EXAMPLES, REHEARSAL, report
from vllm_repro.cli import main
from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Entry, Recording, read
from vllm_repro.report import files
from vllm_repro.report.build import build, build_foreign, report_of
from vllm_repro.report.files import FORMATS, render
from vllm_repro.report.model import RunReport
from vllm_repro.report.summary import summary
from vllm_repro.report.tables import arms_table
from vllm_repro.scenario import catalogue
from vllm_repro.verdict.verdict import Verdict

SMALLEST = min(EXAMPLES, key=lambda folder: (folder / "journal.jsonl").stat().st_size)
LARGEST = max(EXAMPLES, key=lambda folder: (folder / "journal.jsonl").stat().st_size)

KILLED, DAMAGED = (
    "The journal is incomplete: the run was killed",
    "The journal is damaged: some lines cannot be read",
)


def says_so(form: str, text: str, *, killed: bool) -> bool:
    """Return True if a rendering reports a killed run, or a damaged journal."""
    if form == "python":
        return True  # a script states nothing about the run's result
    if form == "json":
        return json.loads(text)["journal_cut"] is True
    if form != "junit":
        return (KILLED if killed else DAMAGED) in text
    root = ET.fromstring(text)
    cut = [one.get("value") for one in root.iter("property") if one.get("name") == "journal_cut"]
    errors = [error.get("message", "") for error in root.iter("error")]
    counted = int(root.get("errors", "0")) == len(errors)
    return (
        cut == ["true"]
        and counted
        and ("the run was killed, its journal is incomplete" in errors) is killed
    )


@pytest.fixture(autouse=True)
def scenarios_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the scenario files once for all drafts."""
    monkeypatch.setattr(files, "all_scenarios", cache(catalogue.all_scenarios))


def rendered(journal: Iterable[bytes], folder: Path) -> RunReport | None:
    """Check that each format reports the cut of a journal; None without the start of a run."""
    (folder / "journal.jsonl").write_bytes(b"".join(journal))
    if read(folder / "journal.jsonl").first("run-started") is None:
        with pytest.raises(UsageError, match="does not hold the start of a run") as refused:
            build(folder)
        assert refused.value.hint
        return None
    report = build(folder)
    assert report.journal_cut
    for form in FORMATS:
        assert says_so(form, render(report, form), killed=report.killed), form
    assert (KILLED if report.killed else DAMAGED) in summary(report)
    if not any(arm.trials for arm in report.arms):
        assert report.verdict is Verdict.INCONCLUSIVE
    return report


def test_a_journal_cut_at_or_beside_the_end_of_any_line(tmp_path: Path) -> None:
    raw = (SMALLEST / "journal.jsonl").read_bytes()
    ends = [at + 1 for at, byte in enumerate(raw) if byte == ord("\n")]
    for end in ends:
        for at in (end - 2, end - 1, end, end + 1):
            if at < len(raw) - 1:
                started = rendered([raw[:at]], tmp_path) is not None
                assert started is (at >= ends[0] - 1)


def test_a_kill_and_an_interrupt_give_the_same_report(tmp_path: Path) -> None:
    """Cut in the second of eight arms and compare the verdict and every table."""
    lines = (REHEARSAL / "journal.jsonl").read_bytes().splitlines(keepends=True)
    ended = [at for at, line in enumerate(lines) if b'"event": "trial-ended"' in line]
    killed = rendered(lines[: ended[1]], tmp_path)
    assert killed is not None
    cut = {**json.loads(lines[ended[1]]), "outcome": "cancelled", "why": "the run was interrupted"}
    last = {**json.loads(lines[-1]), "interrupted": "SIGINT"}
    entries = [*lines[: ended[1]], *(json.dumps(entry).encode() + b"\n" for entry in (cut, last))]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(entries))
    interrupted = build(tmp_path)
    rest = (
        "; interrupted: eager; not run: graphs-off, bigger-chunk, near-miss-128, near-miss-129,"
        " prefix-hit, growing-chat"
    )
    for made, word in ((killed, "interrupted"), (interrupted, "cancelled")):
        assert (made.verdict, made.as_expected) == (Verdict.REPRODUCES, None)
        assert made.because.endswith(rest)
        rows = [row[1] for row in arms_table(made).rows]
        assert rows == ["crash, match", word, *["not run"] * 6]
        table = summary(made).splitlines()[3 : 3 + len(rows)]
        assert [line.endswith(word) for line, word in zip(table, rows, strict=True)] == [
            True
        ] * len(rows)


@settings(
    max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # each example writes its file anew
@given(share=st.floats(0, 1, exclude_max=True), folder=st.sampled_from(EXAMPLES))
def test_a_journal_cut_at_any_byte(tmp_path: Path, share: float, folder: Path) -> None:
    raw = (folder / "journal.jsonl").read_bytes()
    rendered([raw[: int(share * (len(raw) - 1))]], tmp_path)


@settings(
    max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # each example writes its file anew
@given(data=st.data())
def test_a_journal_that_lost_lines_in_its_middle(tmp_path: Path, data: st.DataObject) -> None:
    """Drop lines, as a full disk does."""
    lines = (LARGEST / "journal.jsonl").read_bytes().splitlines(keepends=True)
    torn = data.draw(st.sets(st.integers(1, len(lines) - 1), min_size=1, max_size=len(lines) // 2))
    report = rendered(
        [line[: len(line) // 2] + b"\n" if at in torn else line for at, line in enumerate(lines)],
        tmp_path,
    )
    assert report is not None
    assert report.killed is (len(lines) - 1 in torn)


def changed(event: str, /, **fields: object) -> list[bytes]:
    """Return a journal with other fields in its first such line; None removes a field."""
    lines = (REHEARSAL / "journal.jsonl").read_bytes().splitlines(keepends=True)[:-1]
    at, entry = next(
        (at, one) for at, one in enumerate(map(json.loads, lines)) if one["event"] == event
    )
    listed = {key: value for key, value in {**entry, **fields}.items() if value is not None}
    return [*lines[:at], json.dumps(listed).encode() + b"\n", *lines[at + 1 :]]


@pytest.mark.parametrize("verb", ["report", "run --resume"])
@pytest.mark.parametrize(
    ("journal", "message"),
    [
        (
            changed("run-started", schema=99, harness_version="9.9"),
            "has schema 99, and this release reads schema 1",
        ),
        (changed("run-started", arms=None, reproduce=None), "it lacks '"),
        (changed("trial-ended", outcome="exploded"), "'exploded' is not a valid Outcome"),
        (changed("run-started") * 2, "holds 2 runs, or one of them several times"),
    ],
    ids=["schema", "arms", "outcome", "twice"],
)
def test_a_journal_of_another_release_is_wrong_usage(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    journal: list[bytes],
    message: str,
) -> None:
    (tmp_path / "journal.jsonl").write_bytes(b"".join(journal))
    assert main([*verb.split(), str(tmp_path)]) == 64
    shown = capsys.readouterr().err
    assert f"the journal in {tmp_path} " in shown
    assert message in shown
    assert "next: " in shown


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("bisect/tq-chunked-prefill/bisection.md", "a bisection"),
        ("threshold/tq-chunked-prefill/threshold.md", "a search of the shortest prompt"),
        ("versions/sco-hybrid/versions.md", "a version map"),
    ],
)
def test_a_folder_of_several_runs_is_named_and_its_text(
    capsys: pytest.CaptureFixture[str], text: str, what: str
) -> None:
    path = REHEARSAL.parent / text
    for where in (path.parent, path.with_suffix(".json")):
        assert main(["report", str(where)]) == 64
        shown = capsys.readouterr().err
        assert f"{path.parent} is {what}, not a run" in shown
        assert f"next: read {path}" in shown


def test_whatever_a_journal_lacks_is_no_fault_of_the_harness(tmp_path: Path) -> None:
    for event in (
        "run-started",
        "trial-started",
        "server-started",
        "answer",
        "sign",
        "trial-ended",
    ):
        fields = next(entry for entry in map(json.loads, changed(event)) if entry["event"] == event)
        for name in fields:
            (tmp_path / "journal.jsonl").write_bytes(b"".join(changed(event, **{name: None})))
            with contextlib.suppress(UsageError):  # what this release can do without is rendered
                build_foreign(tmp_path)


@pytest.mark.parametrize(
    "raw", [b"", b"\n", b"{", b'{"t": 1, "event": "run-ended"}\n', b"\x00" * 4096, b"[]\n1\nnull\n"]
)
def test_what_does_not_hold_the_start_of_a_run_is_wrong_usage(tmp_path: Path, raw: bytes) -> None:
    assert rendered([raw], tmp_path) is None


WHOLE = read(REHEARSAL / "journal.jsonl")


def resumed(*, outcome: str, sent: bool) -> Iterator[Entry]:
    """Yield the example's run with its first boot repeated.

    outcome: of the first one. sent: whether it had sent a request.
    """
    first = next(WHOLE.of("trial-started"))
    ended = next(entry for entry in WHOLE.of("trial-ended") if entry["arm"] == first["arm"])

    def changed(entry: Entry, **fields: object) -> Entry:
        return replace(entry, fields={**entry.fields, **fields})

    for entry in WHOLE.entries:
        if entry is first:
            yield entry
            if sent:
                yield changed(next(WHOLE.of("request-sent")), name="interrupted")
            yield changed(ended, outcome=outcome, death=None, why="a signal, or a full disk")
            if outcome == "cancelled":
                yield replace(WHOLE.entries[-1], t=entry.t, fields={"interrupted": "SIGINT"})
                yield replace(WHOLE.entries[0], t=entry.t, event="run-resumed")
        repeated = entry.get("arm") == first["arm"] and entry.get("trial") is not None
        yield changed(entry, trial=2) if repeated else entry


@pytest.mark.parametrize(
    ("outcome", "sent"), [("cancelled", False), ("cancelled", True), ("infra", True)]
)
def test_a_repeated_boot_is_shown_and_not_counted(outcome: str, sent: bool) -> None:
    made = report_of(Recording(tuple(resumed(outcome=outcome, sent=sent)), cut=False), REHEARSAL)
    arm = made.arms[0]
    assert [trial.outcome for trial in arm.trials] == [outcome, "crash"]
    assert arm.counted.outcomes == ("crash",)
    assert arm.requests == report_of(WHOLE, REHEARSAL).arms[0].requests != ()
    assert [row[1] for row in arms_table(made).rows if row[0] == "reported"] == [
        f"{outcome}, repeated",
        "crash, match",
    ]
    first, second = [line for line in summary(made).splitlines() if line.startswith("reported ")]
    assert (first.endswith(f"{outcome}, repeated"), second.endswith("crash, match")) == (True, True)
    root = ET.fromstring(render(made, "junit"))
    assert next((one.get("name"), one.find("error")) for one in root.iter("testcase")) == (
        "reported",
        None,
    )


@pytest.mark.parametrize(
    ("arm", "events"),
    [
        (
            "reported",
            [
                *("ready", "short chat", "long chat", "stream (decisive)", "log", "health"),
                *("engine-process (decisive)", "process (decisive)", "end"),
            ],
        ),
        ("eager", ["ready", "short chat", "long chat", "canary", "end"]),
    ],
)
def test_the_events_of_a_trial_in_the_order_of_time(arm: str, events: list[str]) -> None:
    timeline = report(DIED).timelines[arm, 1]
    assert [at for at, _, _ in timeline] == sorted(at for at, _, _ in timeline)
    assert list(dict.fromkeys(what for _, what, _ in timeline)) == events
