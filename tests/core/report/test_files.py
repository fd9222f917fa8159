from __future__ import annotations

import errno
import json
import os
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden_files import assert_golden
from tests.report_examples import DIED, EXAMPLES, REHEARSAL, replace, report
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.journal.journal import Entry, read
from vllm_repro.report.build import report_of
from vllm_repro.report.files import FORMATS, render, write_diffs, write_file, write_reports
from vllm_repro.report.json_report import report_dict
from vllm_repro.report.junit import junit
from vllm_repro.report.markdown import markdown
from vllm_repro.report.model import RunReport, arm_fields, verdict_fields
from vllm_repro.report.summary import summary
from vllm_repro.report.text import cell
from vllm_repro.verdict.outcome import Outcome, Outlasted
from vllm_repro.verdict.verdict import Verdict, VerdictReport, arm_result


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
@pytest.mark.parametrize("form", FORMATS)
def test_examples_are_what_their_journals_render_to(folder: Path, form: str) -> None:
    path = folder / FORMATS[form]
    text = render(report(folder), form)
    if os.environ.get("UPDATE_GOLDEN") and not os.environ.get("CI"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
    assert not re.search(r"/(root|home/(?!\[user\])|Users)/", text)


def test_no_link_of_an_example_is_dead() -> None:
    root = EXAMPLES[0].parent
    pages = sorted((*root.rglob("*.md"), *root.rglob("*.html")))
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r'(?:\]\(|href=")([^)"#]+)', page.read_text("utf-8"))
    ]
    near = [(page, link) for page, link in links if not link.startswith("https://")]
    assert ("report.json" in {link for _, link in near}, len(pages) > 30) == (True, True)
    assert [str(page / link) for page, link in near if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_the_terminal_says_verdict_cause_and_next_step(folder: Path) -> None:
    text = summary(report(folder))
    assert_golden(f"terminal-{folder.name}.txt", text + "\n")
    assert ("vllm-repro draft" in text) is (folder != REHEARSAL)
    assert text.index("verdict:") < text.index("report:") < text.index("again:")


def test_the_printed_commands_quote_their_folder() -> None:
    folder = Path("o ut; echo") / "it's"
    ended = replace(report(DIED), folder=folder, interrupted="SIGINT")
    shown = dict(
        line.split(":", 1)
        for line in summary(ended).splitlines()
        if line.startswith(("draft:", "resume:"))
    )
    assert shlex.split(shown["draft"]) == ["vllm-repro", "draft", str(folder)]
    # Without the scenario, whose name is not enough where it is a file of one's own.
    assert shlex.split(shown["resume"]) == ["vllm-repro", "run", "--resume", str(folder)]


def changed(source: RunReport, outcome: Outcome, verdict: VerdictReport) -> RunReport:
    """Return the example with a changed trial in its first arm."""
    first = source.arms[0]
    trial = replace(
        first.trials[0],
        outcome=outcome,
        death=None if outcome is Outcome.CLEAN else first.trials[0].death,
    )
    arm = replace(
        first, trials=(trial,), **arm_fields(arm_result(first.name, first.expected, [outcome]))
    )
    return replace(source, arms=(arm,), **verdict_fields(verdict))


@pytest.mark.parametrize(
    ("outcome", "expected", "surprises", "element"),
    [
        (Outcome.CRASH, True, (), None),
        (Outcome.CRASH, False, ("reported",), "failure"),
        (Outcome.CLEAN, True, (), None),
        (Outcome.CLEAN, False, ("reported",), "failure"),
        (Outcome.OTHER_CRASH, False, ("reported",), "failure"),
        (Outcome.OTHER_CRASH, None, (), "error"),
        (Outcome.UNTRIGGERED, None, (), "skipped"),
        (Outcome.UNSUPPORTED, None, (), "skipped"),
        (Outcome.INFRA, None, (), "error"),
        (Outcome.BOOT_FAILED, None, (), "error"),
        (Outcome.CANCELLED, None, (), "error"),
    ],
)
def test_junit_tells_failure_error_and_skipped_apart(
    outcome: Outcome, expected: bool | None, surprises: tuple[str, ...], element: str | None
) -> None:
    verdict = VerdictReport(
        verdict=Verdict.INCONCLUSIVE, expected=expected, because="because", surprises=surprises
    )
    root = ET.fromstring(junit(changed(report(REHEARSAL), outcome, verdict)))
    (case,) = root.iter("testcase")
    assert [child.tag for child in case if child.tag != "system-out"] == (
        [element] if element else []
    )
    counts = {kind: int(root.get(kind, "0")) for kind in ("failures", "errors", "skipped")}
    assert sum(counts.values()) == (element is not None)


def with_refused_requests() -> RunReport:
    """Return the example after a server that refused the requests of its arm `eager`."""

    def refuse(event: str, fields: dict[str, Any]) -> None:
        if event == "answer" and (fields["arm"], fields["status"]) == ("eager", 200):
            fields |= {"status": 400, "error": "too long"}

    return edited(refuse)


def test_requests_that_were_refused_are_told_of_everywhere() -> None:
    """Refused requests did not run, although the outcome counts only accepted ones."""
    made = with_refused_requests()
    (trial,) = next(arm for arm in made.arms if arm.name == "eager").trials
    shown = f"refused: 2 of {trial.requests['sent']} requests (400 x 2): too long"
    why = f"the boundary was crossed and the engine lived; {shown}"
    assert (trial.outcome, trial.why) == (Outcome.CLEAN, why)
    assert f"eager: {shown}" in summary(made).splitlines()
    assert f"eager: {shown}." in markdown(made).splitlines()
    assert f" eager: {shown}." in render(made, "html")
    assert f"trial 1: clean: {trial.why}" in junit(made)
    assert "refused" not in summary(report(REHEARSAL)) + markdown(report(REHEARSAL))


def test_reports_are_written_whole(tmp_path: Path) -> None:
    written = write_reports(replace(report(REHEARSAL), folder=tmp_path))
    assert {path.name for path in written} == set(FORMATS.values())
    assert {path.name for path in tmp_path.iterdir()} == set(FORMATS.values())
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["rehearsal"] is True
    with pytest.raises(UsageError, match="no format"):
        render(report(REHEARSAL), "pdf")


PATCHED = {"patches": [{"file": "vllm/a.py", "was": "a", "now": "b"}]}
SERVED = {"file": "vllm/a.py", "sha256": "0" * 64, "untried": ["kernel"]}


def edited(edit: Callable[[str, dict[str, Any]], None]) -> RunReport:
    """Return the report of the example after `edit` of the fields of each entry."""

    def change(entry: Entry) -> Entry:
        fields = dict(entry.fields)
        edit(entry.event, fields)
        return replace(entry, fields=fields)

    recording = read(REHEARSAL / "journal.jsonl")
    return report_of(replace(recording, entries=tuple(map(change, recording.entries))), REHEARSAL)


@pytest.mark.parametrize(
    ("imported", "verdict"), [(["vllm/a.py"], "quiet"), ([], "inconclusive"), (None, "quiet")]
)
def test_a_change_that_no_process_imported_was_not_tried(
    imported: list[str] | None, verdict: str
) -> None:
    """None: a journal from before this was recorded."""
    known = {} if imported is None else {"imported": imported}

    def patch(event: str, fields: dict[str, Any]) -> None:
        if event == "run-started":
            fields |= {"arms": [{**fields["arms"][0], **PATCHED}], "expect": "alive"}
        if event == "server-started":
            fields["facts"] = {**fields["facts"], "patched": [SERVED]}
        if event == "trial-ended":
            fields.pop("imported", None)
            fields |= {"outcome": "clean", "death": None, **known}

    made = edited(patch)
    assert made.verdict == verdict
    for text in (markdown(made), summary(made)):
        assert "the lab runs something else for kernel, so that change was not tried" in text
        assert ("no process of the server imported it" in text) is (imported == [])
    heading = "> **With vLLM's source changed, as shown below, in reported: vllm/a.py.**"
    assert heading in markdown(made).splitlines()
    suite = ET.fromstring(junit(made))
    properties = [(one.get("name"), one.get("value")) for one in suite.iter("property")]
    assert [value for name, value in properties if name == "patched"] == ["reported: vllm/a.py"]
    assert len(list(suite.iter("skipped"))) == (imported == [])


def test_a_change_that_was_not_tried_hides_no_other_arms_death() -> None:
    death = next(read(REHEARSAL / "journal.jsonl").of("trial-ended"))["death"]
    ends = {
        "reported": {"outcome": "clean", "death": None, "imported": []},
        "eager": {"outcome": "crash", "death": death},
    }

    def patch(event: str, fields: dict[str, Any]) -> None:
        if event == "run-started":
            (eager,) = (arm for arm in fields["arms"] if arm["name"] == "eager")
            patched = {**fields["arms"][0], **PATCHED}
            fields["arms"] = [patched, {**eager, "expected": "lives"}]
        if event == "server-started" and fields["arm"] == "reported":
            fields["facts"] = {**fields["facts"], "patched": [{**SERVED, "untried": []}]}
        if event == "trial-ended":
            fields |= ends.get(fields["arm"], {})

    made = edited(patch)
    result = (made.verdict, made.as_expected, made.surprises)
    assert result == (Verdict.INCONCLUSIVE, False, ("eager",))
    for words in ("so the patch was not tested", "unexpected in arm eager: crash"):
        assert words in made.because


def without_a_tested_boundary() -> RunReport:
    """Return the example after host trouble before the boundary was crossed."""
    verdict = VerdictReport(verdict=Verdict.REPRODUCES, expected=True, because="because")
    source = changed(report(REHEARSAL), Outcome.INFRA, verdict)
    trial = source.arms[0].trials[0]
    lost = replace(trial, death=None, trigger=replace(trial.trigger, crossed=False, evidence=()))
    return replace(source, arms=(replace(source.arms[0], trials=(lost,)),))


def test_host_trouble_does_not_test_the_boundary() -> None:
    made = without_a_tested_boundary()
    assert "- `reported`, trial 1: not tested. Boot: " in markdown(made)
    assert "not tested" in render(made, "html")


def test_a_report_says_whose_server_stayed_and_where_each_log_is() -> None:
    example = report(REHEARSAL)
    died, *others = example.arms
    trial = replace(
        died.trials[0],
        rank_logs=("logs/reported-1.rank1.log",),
        outlasted=(Outlasted(rank=1, watched_s=10.0, silent=True, ended_s=9.04),),
    )
    ranked = replace(example, arms=(replace(died, trials=(trial,)), *others))
    shown = (
        "The server of rank 1 kept running for 10 s after that of rank 0 was gone and logged"
        " nothing; stopping it took 9.0 s."
    )
    assert shown in markdown(ranked)
    assert shown in summary(ranked)
    assert f"Logs by rank: {trial.log}, logs/reported-1.rank1.log." in markdown(ranked)
    assert "kept running" not in markdown(example)


@pytest.mark.parametrize(
    ("attempts", "shown"),
    [
        (
            [500, None, 503],
            (
                "A program that sends this request with the openai SDK sees InternalServerError"
                ' "Error <b> 500" after 1.3 s. Its attempts got 500, no answer, 503: 1 of 2 retries'
                " reached a server."
            ),
        ),
        (
            [],
            (
                'A program with the openai SDK then saw InternalServerError "Error <b> 500" after'
                " 1.3 s (retries: 2)."
            ),
        ),
        (
            None,
            (
                'A program with the openai SDK then saw InternalServerError "Error <b> 500" after'
                " 1.3 s (retries: 2)."
            ),
        ),
    ],
)
def test_a_report_says_what_a_client_sees_of_the_crash(
    attempts: list[int | None] | None, shown: str
) -> None:
    recording = read(REHEARSAL / "journal.jsonl")
    entries = [entry for entry in recording.entries if entry.event != "client-saw"]
    at = next(
        at for at, entry in enumerate(entries) if entry.event == "trial-ended" and entry["death"]
    )
    ended = entries[at]
    saw = {
        "error": "InternalServerError",
        "message": "Error <b>\n500",
        "retries": 2,
        "seconds": 1.26,
        "text": None,
    }
    saw |= {} if attempts is None else {"attempts": attempts}
    entry = Entry(ended.t, "client-saw", {"arm": ended["arm"], "trial": ended["trial"], **saw})
    made = report_of(replace(recording, entries=(*entries[:at], entry, *entries[at:])), REHEARSAL)
    assert shown in summary(made)
    assert cell(shown) in markdown(made)
    trials = [trial for arm in report_dict(made)["arms"] for trial in arm["trials"]]
    assert next(trial["client_saw"] for trial in trials if trial["death"]) == saw
    old = report_of(replace(recording, entries=tuple(entries)), REHEARSAL)
    assert made.verdict == old.verdict
    assert "openai SDK" not in markdown(old)
    assert {trial["client_saw"] for arm in report_dict(old)["arms"] for trial in arm["trials"]} == {
        None
    }


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: object, **__: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "report.html"
    write_file(path, "the last one", hint="")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InfraError, match="No space left on device") as refused:
        write_file(path, "new", hint="elsewhere")
    assert refused.value.hint == "elsewhere"
    assert path.read_text(encoding="utf-8") == "the last one"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "version", ["0.24.0+commit.ecf4854429", "0.20.1rc1.dev12+g363ffa145", "dev"]
)
def test_a_run_of_what_is_no_release_has_reports_and_no_diff(tmp_path: Path, version: str) -> None:
    made = replace(report(DIED), folder=tmp_path, vllm_version=version)
    assert write_diffs(made) == []
    assert tmp_path / "report.json" in write_reports(made)
