"""Draft issues of runs, and `vllm-repro draft`."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import report_examples as examples
from tests.conftest import Harness
from tests.core.report.hostile_logs import HOSTILE
from tests.core.report.journal_fields import TEXT_FIELDS, Field, planted, text_fields
from tests.core.report.test_files import with_refused_requests, without_a_tested_boundary
from tests.github_markdown import Rendered, render
from tests.golden_files import assert_refused, missing
from tests.report_examples import EXAMPLES, replace, report
from vllm_repro.report.json_report import PatchedFile
from vllm_repro.report.model import arm_fields, verdict_fields
from vllm_repro.report.source_changes import diff_of, how_to_apply, whole_diff
from vllm_repro.report.summary import summary
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.scenario import Status
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, Verdict, VerdictReport, arm_result
from vllm_repro_intake.issue_draft import MOST, draft, duplicates
from vllm_repro_intake.run_draft import make_draft

DIED = report(examples.DIED)


def assert_sound(body: str, meant: list[str]) -> Rendered:
    """Check that `body` fits, mentions nobody, and links only to the intended issues."""
    assert len(body) <= MOST
    assert len(body.encode("utf-8")) <= MOST
    page = render(body)
    assert page.calls() == []
    known = {f"https://github.com/{issue.replace('#', '/issues/')}" for issue in meant}
    assert set(page.links) <= known
    assert not {"script", "img", "b", "h1", "h2"} & set(page.tags)
    assert page.deepest <= 1
    return page


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_examples_are_what_their_journals_draft(folder: Path) -> None:
    path = folder / "issue.md"
    made = report(folder)
    text = make_draft(made).body
    if os.environ.get("UPDATE_GOLDEN") and not os.environ.get("CI"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
    assert_sound(text, [made.issue, *duplicates(made, all_scenarios())])


def test_a_bug_that_is_no_death_is_told_like_one() -> None:
    """The control comes first in the file and is not what the draft describes."""
    made = report(
        next(folder for folder in EXAMPLES if folder.name.startswith("sco-window-loads-wait"))
    )
    turned = replace(made, arms=made.arms[::-1])
    body = make_draft(turned).body
    assert (
        missing(
            body,
            "**Reproduces on vLLM 0.32.0 (LAB)**: hung in 1 of 1 boots.",
            "- **What:** `0 requests running, 4 of ours in flight",
            "- `reported` hung in 1 of 1 boots. Outcome: hang. Boundary crossed: ",
            "`patched` (`single_type_kv_cache_manager.py` changed) hung in 0 of 1 boots",
            "a GPU's engine schedules the same",
        )
        == []
    )
    assert "0 requests running, 4 of ours in flight" in summary(turned)


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_a_draft_is_read_in_half_a_minute(folder: Path) -> None:
    """Before the script: 12 lines, and 165 words of prose besides the cause."""
    body = make_draft(report(folder)).body
    first = [
        line
        for line in re.split(r"^(?:`repro\.py`|<details>|The engine dies)", body, flags=re.M)[
            0
        ].splitlines()
        if line
    ]
    assert len(first) <= 12
    prose = re.sub(
        r"`[^`]*`|\(http\S*\)",
        "",
        "\n".join(line for line in first if not line.startswith("- **Cause")),
    )
    assert len(re.findall(r"[A-Za-z][\w'-]*", prose)) <= 165


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_what_is_said_of_the_unchanged_release_is_what_it_did(folder: Path) -> None:
    made = report(folder)
    body = make_draft(made).body
    died = [arm for arm in made.arms if arm.expected.has_bug and arm.k]
    unchanged = [arm for arm in died if not arm.patches]
    assert ("**Reproduces on " in body) == bool(unchanged)
    assert ("**Did not reproduce on unchanged " in body) == (bool(died) and not unchanged)
    assert ("```python\n# pip install openai" in body) == (
        bool(unchanged or not died) and "dies while it boots" not in body
    )
    for script in re.findall(r"```python\n(.*?)\n```", body, re.S):
        ast.parse(script)
    assert body.startswith("**Fixed**") == (bool(made.status.good) and not made.rehearsal)
    assert "(/" not in body
    assert "reports/" not in body


def test_a_comment_and_a_new_issue() -> None:
    comment = draft(DIED)
    path = Path("a folder/issue.md")
    assert comment.title == ""
    assert (
        comment.command(path)
        == "gh issue comment 41726 --repo vllm-project/vllm --body-file 'a folder/issue.md'"
    )
    new = draft(
        replace(DIED, filed=False, issue="vllm-project/vllm#44053", title="It's -- @you <b>")
    )
    assert new.title == "[Bug]: It's -- @you <b>"
    assert (
        new.command(path)
        == "gh issue create --repo vllm-project/vllm --title '[Bug]: It'\"'\"'s -- @you <b>'"
        " --body-file 'a folder/issue.md'"
    )
    assert_sound(new.body, ["vllm-project/vllm#44053"])
    assert new.body.startswith("### \N{BUG} Describe the bug\n")
    assert "### Your current environment\n" in new.body
    assert "###" not in comment.body


def test_a_rehearsals_draft_says_so_in_its_first_line() -> None:
    for filed in (True, False):
        body = draft(replace(report(examples.REHEARSAL), filed=filed)).body
        assert body.splitlines()[0].startswith("**Reproduces on vLLM 0.23.0 (REHEARSAL)**")


def test_a_new_issue_from_the_lab_shows_flags_and_the_change() -> None:
    """A maintainer needs flags, script and the change, not the command of the lab."""
    patch = Patch("vllm/v1/attention/backends/a.py", was="x = 1\n", now="x = 2\n", why="it is two")
    arm = DIED.arms[0]
    cured = replace(
        arm,
        **arm_fields(arm_result("patched", Expected.LIVES, [Outcome.CLEAN])),
        trials=(),
        patches=(patch,),
    )
    made = replace(DIED, filed=False, arms=(arm, cured), issue="vllm-project/vllm#44053")
    given = {
        "flags": "vllm serve some/model \\\n  --flag 1",
        "why": "Two are\nasked for, @all.",
        "script": "import os",
    }
    body = draft(made, **given).body  # type: ignore[arg-type]  # fields by name
    assert (
        missing(
            body,
            "- **Flags:** `vllm serve some/model --flag 1`",
            "Two are asked for, ",
            "- **Avoided by:** `patched` (`a.py` changed) died in 0 of 1 boots",
            "Apply it by hand: ",
            "```python\nimport os\n```",
        )
        == []
    )
    assert arm.command not in body
    assert_sound(body, [made.issue])
    whole = draft(made, diffs={"patched": "--- a/vllm/v1/attention/backends/a.py\n"}).body
    assert "The change in patched, for git apply" in whole
    assert "Apply it by hand" not in whole


def test_a_crash_of_a_changed_source_does_not_reproduce() -> None:
    patch = Patch("vllm/v1/attention/backends/a.py", was="x = 1\n", now="x = 2\n")
    arm = DIED.arms[0]
    lived = replace(
        arm, **arm_fields(arm_result("reported", Expected.DIES, [Outcome.CLEAN])), trials=()
    )
    broken = replace(arm, name="broken", patches=(patch,))
    body = draft(replace(DIED, arms=(lived, broken)), script="import os").body
    assert body.startswith(
        "**Fixed**: vLLM >=0.24.0 is declared to be without this bug.\n\n"
        "**Did not reproduce on unchanged vLLM 0.23.0 (LAB)**: `reported` died in 0 of 1 boots. "
        "With vLLM's source changed: `broken` (`a.py` changed) died in 1 of 1 boots."
    )
    assert "import os" not in body, "it lives"
    assert (
        "**Not tried on unchanged vLLM 0.23.0 (LAB).**" in draft(replace(DIED, arms=(broken,))).body
    )


def test_a_patch_that_did_not_run_is_no_help() -> None:
    patch = Patch("vllm/v1/attention/backends/a.py", was="x = 1\n", now="x = 2\n")
    arm = DIED.arms[0]
    for unseen in ({"imported": False}, {"untried": ("kernel",)}):
        server = replace(arm.server, patched=(PatchedFile(file=patch.file, sha256="0", **unseen),))
        cured = replace(
            arm,
            **arm_fields(arm_result("patched", Expected.LIVES, [Outcome.CLEAN])),
            patches=(patch,),
            server=server,
        )
        body = draft(replace(DIED, filed=False, arms=(arm, cured))).body
        assert "**Avoided by:**" not in body
        assert "so its change was not tried" in body or "so that change was not tried" in body


def test_whole_files_become_a_diff_that_git_applies(tmp_path: Path) -> None:
    before = {"vllm/a.py": "".join(f"line {n}\n" for n in range(40)), "vllm/b.py": "one\n"}
    after = {
        "vllm/a.py": before["vllm/a.py"].replace("line 7\n", "seven\n").replace("line 30\n", ""),
        "vllm/b.py": "1\n",
    }
    (tmp_path / "vllm").mkdir()
    for file, text in before.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    subprocess.run(
        ["git", "apply", "-"], cwd=tmp_path, input=whole_diff(before, after), text=True, check=True
    )
    assert {file: (tmp_path / file).read_text(encoding="utf-8") for file in after} == after


def test_git_applies_a_diff_of_whole_lines(tmp_path: Path) -> None:
    """The line numbers of the diff are wrong, and it has two hunks of one file."""
    source = tmp_path / "vllm" / "a.py"
    source.parent.mkdir()
    source.write_text("zero\none\ntwo\nthree\nfour\nfive\n", encoding="utf-8")
    patches = (
        Patch("vllm/a.py", "two\n", "TWO\n2\n", lines=True),
        Patch("vllm/a.py", "four\nfive\n", "four\n5\n", lines=True),
    )
    arm = replace(DIED.arms[0], patches=patches)
    assert how_to_apply(arm).startswith("Apply it with `git apply --unidiff-zero`")
    subprocess.run(
        ["git", "apply", "--unidiff-zero", "-"],
        cwd=tmp_path,
        input=diff_of(arm) + "\n",
        text=True,
        check=True,
    )
    assert source.read_text(encoding="utf-8") == "zero\none\nTWO\n2\nthree\nfour\n5\n"
    assert how_to_apply(replace(arm, patches=(replace(patches[0], lines=False),))).startswith(
        "Apply it by hand"
    )


@pytest.mark.parametrize("expected", [True, False, None])
@pytest.mark.parametrize("verdict", Verdict)
def test_the_first_line_is_the_verdict(verdict: Verdict, expected: bool | None) -> None:
    known = VerdictReport(verdict=verdict, expected=expected, because="because")
    first = draft(
        replace(DIED, **verdict_fields(known), status=Status(DIED.status.bad))
    ).body.splitlines()[0]
    because = "died in 1 of 1 boots" if verdict is Verdict.REPRODUCES else "because"
    assert first.startswith(f"**{verdict.capitalize()} on vLLM 0.23.0 (LAB)**: {because}.")
    assert ("Declared was something else" in first) is (
        expected is False and verdict is not Verdict.REPRODUCES
    )


def test_a_run_that_was_cut_and_one_without_a_trial_say_so() -> None:
    assert "Interrupted by SIGINT." in draft(replace(DIED, interrupted="SIGINT")).body
    body = draft(replace(DIED, arms=())).body
    assert "What was run" in body
    assert_sound(body, [DIED.issue])


@settings(max_examples=40)
@given(TEXT_FIELDS, st.sampled_from(HOSTILE), st.booleans())
def test_no_field_of_a_journal_breaks_a_draft(field: Field, text: str, instead: bool) -> None:
    made = planted(*field, lambda was: text if instead else f"{was} {text}")
    assert_sound(draft(made).body, [made.issue])


def test_the_fields_are_all_that_a_journal_has() -> None:
    """Keep the tests above as wide as the journal."""
    kinds = {
        (recording.entries[place].event, way[-1] if isinstance(way[-1], str) else way[-2])
        for recording, place, way in text_fields()
    }
    expected = {
        "run-started": "title trigger reproduce os python edits why was now",
        "trial-started": "command differences",
        "server-started": "argv HF_HUB_OFFLINE",
        "trial-ended": "message exception frames why evidence brief attention_backend",
        "answer": "error",
        "sign": "detail",
        "exited": "detail",
    }
    assert {(event, key) for event, keys in expected.items() for key in keys.split()} <= kinds


def test_requests_that_were_refused_are_named() -> None:
    shown = "refused: 2 of 2 requests (400 x 2)"
    assert f" eager: {shown}." in make_draft(with_refused_requests()).body


def test_a_boundary_that_was_not_tested_is_named() -> None:
    assert "Boundary not tested" in make_draft(without_a_tested_boundary()).body


def test_a_crash_before_an_interrupt_is_named() -> None:
    """The trial counts as interrupted, and the draft still has its crash."""
    arm = DIED.arms[0]
    cut = f"{arm.trials[0].why}; the run was interrupted before the trial came to its end"
    trial = replace(arm.trials[0], outcome=Outcome.CANCELLED, why=cut)
    result = arm_result(arm.name, arm.expected, [Outcome.CANCELLED])
    body = make_draft(replace(DIED, arms=(replace(arm, trials=(trial,), result=result),))).body
    assert cut in unescape(body)


def test_a_huge_run_fits_and_says_what_is_missing() -> None:
    trial = DIED.arms[0].trials[0]
    arm = replace(
        DIED.arms[0],
        trials=tuple(
            replace(trial, number=n, outcome=outcome) for n in range(40) for outcome in Outcome
        ),
        differences=("d" * 3_000,) * 200,
        requests=("r" * 3_000,) * 300,
        edits=("e" * 3_000,) * 300,
        command="vllm serve \\\n" + "  --flag 语 \\\n" * 20_000,
    )
    made = draft(replace(DIED, arms=(arm,) * 60), script="x" * 20_000)
    assert_sound(made.body, [DIED.issue])
    assert "the script" in made.left_out
    assert "bytes left out" in made.body
    assert made.body.startswith("**Fixed**")
    assert missing(made.body, "more", "Made by vllm-repro") == []


@example("#1")
@example("@a")
@settings(max_examples=20)
@given(st.text(max_size=60))
def test_a_new_issues_title_calls_nobody(title: str) -> None:
    assert_sound(draft(replace(DIED, filed=False, title=title)).body, [DIED.issue])


TQ, FIX, CHUNKED = "tq-prefix-hit-unreserved", "vllm-project/vllm#44053", "vllm-project/vllm#41726"


def test_duplicates_are_what_the_scenario_names() -> None:
    found = duplicates(DIED, all_scenarios())
    assert found == [
        "vllm-project/vllm#43357",
        "vllm-project/vllm#46767",
        "vllm-project/vllm#41565",
    ]
    assert duplicates(report(examples.LIVED), all_scenarios()) == [], "nothing died"


def test_a_crash_of_another_open_scenario_is_a_duplicate() -> None:
    other = replace(DIED, scenario=TQ, issue=FIX, related=(), filed=False)
    assert CHUNKED in duplicates(other, all_scenarios())
    assert duplicates(replace(other, vllm_version="0.32.0"), all_scenarios()) == []


def test_duplicates_of_a_scenario_that_is_not_in_the_catalogue() -> None:
    stranger = replace(DIED, scenario="stranger", issue="o/r#1", related=("o/r#2",))
    assert duplicates(stranger, all_scenarios()) == [CHUNKED, "o/r#2"]
    assert duplicates(replace(stranger, arms=()), all_scenarios()) == []


def run_of(example: Path, folder: Path) -> Path:
    run = folder / "run"
    run.mkdir()
    shutil.copy(example / "journal.jsonl", run)
    return run


def test_a_draft_is_a_file_and_a_command_and_nothing_more(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(examples.DIED, tmp_path)
    (run / "logs").mkdir()
    (run / "logs" / "reported-1.log").write_text(
        "INFO\nERROR boom for HF_TOKEN=abcdef\nend\n", encoding="utf-8"
    )
    (tmp_path / "bin").mkdir()
    gh = tmp_path / "bin" / "gh"
    gh.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n", encoding="utf-8")
    gh.chmod(0o755)
    env = {"PATH": f"{gh.parent}:/usr/bin:/bin"}
    fixed = harness("draft", str(run), env=env)
    assert (fixed.status, "gh issue" in fixed.out) == (0, False)
    assert "No command: the bug is declared fixed in >=0.24.0" in fixed.out
    unfixed = [replace(one, status=replace(one.status, good="")) for one in all_scenarios()]
    monkeypatch.setattr("vllm_repro_intake.run_draft.all_scenarios", lambda **_: unfixed)
    done = harness("draft", str(run), env=env)
    assert done.status == 0, done.err
    (command,) = [line for line in done.out.splitlines() if line.startswith("gh ")]
    assert shlex.split(command)[:3] == ["gh", "issue", "comment"]
    assert Path(shlex.split(command)[-1]) == run / "issue.md"
    body = (run / "issue.md").read_text(encoding="utf-8")
    assert "ERROR boom" not in body
    assert (
        missing(
            done.err,
            "the draft has no log; attach logs/reported-1.log",
            "no room for how the command differs from the reported one",
        )
        == []
    )
    assert done.err.count("may be the same as https://github.com/") == 3
    assert not (tmp_path / "called").exists()
    printed = harness("report", str(run), "--format", "issue")
    assert printed.out == body


def test_a_rehearsal_is_not_for_upstream(harness: Harness, tmp_path: Path) -> None:
    done = harness(
        "draft", str(run_of(examples.REHEARSAL, tmp_path)), "-o", str(tmp_path / "there.md")
    )
    assert done.status == 0
    assert "a REHEARSAL says nothing about vLLM" in done.err
    assert "gh issue" not in done.out + done.err
    assert "(REHEARSAL)" in (tmp_path / "there.md").read_text(encoding="utf-8").splitlines()[0]


def test_a_bug_that_the_run_did_not_see_is_no_new_issue(harness: Harness, tmp_path: Path) -> None:
    run = run_of(
        next(folder for folder in EXAMPLES if folder.name == "sco-window-loads-wait-lab-0.32.0"),
        tmp_path,
    )
    assert "gh issue create" in harness("draft", str(run)).out
    cause = "vLLM subtracts the length of the request's block"
    assert cause in (run / "issue.md").read_text(encoding="utf-8")
    journal = run / "journal.jsonl"
    short = journal.read_text(encoding="utf-8").replace('"crossed": true', '"crossed": false')
    journal.write_text(short, encoding="utf-8")
    done = harness("draft", str(run))
    assert (done.status, "gh issue" in done.out) == (0, False)
    assert "the bug was not seen in this run" in done.out
    assert "the run decided nothing" in done.err
    assert cause not in (run / "issue.md").read_text(encoding="utf-8"), (
        "it would explain what nobody saw"
    )


def test_a_journal_of_a_newer_release_is_wrong_usage(harness: Harness, tmp_path: Path) -> None:
    journal = run_of(examples.REHEARSAL, tmp_path) / "journal.jsonl"
    journal.write_text(
        journal.read_text(encoding="utf-8").replace('"schema": 1', '"schema": 99'), encoding="utf-8"
    )
    assert_refused(
        harness("draft", str(journal.parent)), "has schema 99, and this release reads schema 1"
    )


def test_a_folder_of_several_runs_is_named(harness: Harness) -> None:
    assert_refused(
        harness("draft", str(examples.REHEARSAL.parent / "bisect" / "tq-chunked-prefill")),
        "is a bisection, not a run",
    )


def test_a_draft_that_cannot_be_written_is_named(harness: Harness) -> None:
    assert_refused(
        harness("draft", str(examples.REHEARSAL), "-o", "/proc/nowrite/x"),
        "cannot write /proc/nowrite/x",
    )


def test_where_there_is_no_run(harness: Harness, tmp_path: Path) -> None:
    assert harness("draft", str(tmp_path)).status == 64
