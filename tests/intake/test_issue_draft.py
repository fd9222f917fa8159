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
from typing import Any

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
from vllm_repro.report.build import build
from vllm_repro.report.json_report import PatchedFile
from vllm_repro.report.model import RunReport, arm_fields, verdict_fields
from vllm_repro.report.source_changes import diff_of, how_to_apply, whole_diff
from vllm_repro.report.summary import summary
from vllm_repro.scenario.catalogue import all_scenarios, find
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.scenario import Status
from vllm_repro.servers.base import Replaced
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
    related = find(made.scenario).related
    assert_sound(text, [made.issue, *related, *duplicates(made, all_scenarios())])


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
            "The scheduler is not changed.",
            "<summary>Unit test</summary>",
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
    fixed = made.status.good.startswith(">=") and "," not in made.status.good
    assert body.startswith("**Fixed**") == (fixed and not made.rehearsal)
    assert "(/" not in body
    assert "reports/" not in body


def test_a_comment_and_a_new_issue() -> None:
    comment = draft(DIED)
    path = Path("a folder/issue.md")
    assert (comment.title, comment.command(path)) == (
        "",
        "gh issue comment 41726 --repo vllm-project/vllm --body-file 'a folder/issue.md'",
    )
    assert "###" not in comment.body
    new = draft(
        replace(DIED, filed=False, issue="vllm-project/vllm#44053", title="It's -- @you <b>")
    )
    assert new.title == "[Bug]: It's -- @you <b>"
    assert (
        new.command(path)
        == "gh issue create --repo vllm-project/vllm --title '[Bug]: It'\"'\"'s -- @you <b>'"
        " --body-file 'a folder/issue.md'"
    )
    assert_sound(new.body, ["vllm-project/vllm#44053", *DIED.related])
    assert "- Related, not this bug: [#44053](https://github.com/" in new.body
    assert new.body.startswith("### \N{BUG} Describe the bug\n")
    assert "### Your current environment\n" in new.body


PATCH = Patch("vllm/v1/attention/backends/a.py", was="x = 1\n", now="x = 2\n", why="it is two")
ARM = DIED.arms[0]
CURED = replace(
    ARM,
    **arm_fields(arm_result("patched", Expected.LIVES, [Outcome.CLEAN])),
    trials=(),
    patches=(PATCH,),
)


def test_a_new_issue_from_the_lab_shows_flags_and_the_change() -> None:
    """A maintainer needs flags, script and the change, not the command of the lab."""
    made = replace(DIED, filed=False, arms=(ARM, CURED), issue="vllm-project/vllm#44053")
    flags = "vllm serve some/model \\\n  --flag 1"
    body = draft(
        made, flags=flags, why="Two of `a_b`\nare asked for, @all.", script="import os"
    ).body
    assert (
        missing(
            body,
            "\n**Flags:** `vllm serve some/model --flag 1`",
            "Two of `a_b` are asked for, ",
            "- **Not seen with:** `patched` (`a.py` changed) died in 0 of 1 boots",
            "Apply it by hand: ",
            "```python\nimport os\n```",
        )
        == []
    )
    assert ARM.command not in body
    assert body.index("Two of `a_b`") < body.index("Apply it") < body.index("**Flags:**")
    assert_sound(body, [made.issue, *made.related])
    whole = draft(made, diffs={"patched": "--- a/vllm/v1/attention/backends/a.py\n"}).body
    assert "The change in patched, for git apply" in whole
    assert "Apply it by hand" not in whole


def test_a_crash_of_a_changed_source_does_not_reproduce() -> None:
    result = arm_result("reported", Expected.DIES, [Outcome.CLEAN])
    lived = replace(ARM, **arm_fields(result), trials=())
    broken = replace(ARM, name="broken", patches=(PATCH,))
    body = draft(replace(DIED, arms=(lived, broken)), script="import os").body
    assert body.startswith(
        "**Fixed**: vLLM >=0.24.0 is declared to be without this bug.\n\n"
        "**Did not reproduce on unchanged vLLM 0.23.0 (LAB)**: `reported` died in 0 of 1 boots. "
        "With vLLM's source changed: `broken` (`a.py` changed) died in 1 of 1 boots."
    )
    assert "import os" not in body, "it lives"
    body = draft(replace(DIED, arms=(broken,))).body
    assert "**Not tried on unchanged vLLM 0.23.0 (LAB).**" in body


def test_a_replaced_part_that_decides_what_is_scheduled_is_named() -> None:
    queue = Replaced(
        name="vllm.v1.engine.core.EngineCoreProc._process_input_queue",
        file="",
        sha256="",
        why="",
        effect="it waits for more requests",
    )
    arm = replace(ARM, server=replace(ARM.server, replaced=(queue,), compiled="0.22.0"))
    body = draft(replace(DIED, arms=(arm,))).body
    assert (
        missing(
            body,
            "`EngineCoreProc._process_input_queue`: it waits for more requests.",
            "on vLLM 0.23.0 (its Python over the compiled parts of 0.22.0) (LAB)**",
            "vLLM Version: 0.23.0 (its Python over the compiled parts of 0.22.0)",
        )
        == []
    )


@pytest.mark.parametrize("unseen", [{"imported": False}, {"untried": ("kernel",)}])
def test_a_patch_that_did_not_run_is_no_help(unseen: dict[str, Any]) -> None:
    server = replace(ARM.server, patched=(PatchedFile(file=PATCH.file, sha256="0", **unseen),))
    cured = replace(CURED, trials=ARM.trials, server=server)
    body = draft(replace(DIED, filed=False, arms=(ARM, cured))).body
    assert "**Not seen with:**" not in body
    assert re.search("so (its|that) change was not tried", body)


def test_whole_files_become_a_diff_that_git_applies(tmp_path: Path) -> None:
    before = {"a.py": "".join(f"line {n}\n" for n in range(40)), "b.py": "one\n"}
    changed = before["a.py"].replace("line 7\n", "seven\n").replace("line 30\n", "")
    after = {"a.py": changed, "b.py": "1\n"}
    for file, text in before.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    git_apply(tmp_path, whole_diff(before, after))
    assert {file: (tmp_path / file).read_text(encoding="utf-8") for file in after} == after


def git_apply(folder: Path, diff: str, *options: str) -> None:
    subprocess.run(["git", "apply", *options, "-"], cwd=folder, input=diff, text=True, check=True)


def test_git_applies_a_diff_of_whole_lines(tmp_path: Path) -> None:
    """The line numbers of the diff are wrong, and it has two hunks of one file."""
    source = tmp_path / "vllm" / "a.py"
    source.parent.mkdir()
    source.write_text("zero\none\ntwo\nthree\nfour\nfive\n", encoding="utf-8")
    patches = (
        Patch("vllm/a.py", "two\n", "TWO\n2\n", lines=True),
        Patch("vllm/a.py", "four\nfive\n", "four\n5\n", lines=True),
    )
    arm = replace(ARM, patches=patches)
    assert how_to_apply(arm).startswith("Apply it with `git apply --unidiff-zero`")
    git_apply(tmp_path, diff_of(arm) + "\n", "--unidiff-zero")
    assert source.read_text(encoding="utf-8") == "zero\none\nTWO\n2\nthree\nfour\n5\n"
    by_hand = replace(arm, patches=(replace(patches[0], lines=False),))
    assert how_to_apply(by_hand).startswith("Apply it by hand")


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


def test_a_rehearsals_draft_says_so_in_its_first_line() -> None:
    for filed in (True, False):
        body = draft(replace(report(examples.REHEARSAL), filed=filed)).body
        assert body.splitlines()[0].startswith("**Reproduces on vLLM 0.23.0 (REHEARSAL)**")


def test_a_draft_of_no_trial_is_sound() -> None:
    assert_sound(draft(replace(DIED, arms=())).body, [DIED.issue])


@settings(max_examples=40)
@given(TEXT_FIELDS, st.sampled_from(HOSTILE), st.booleans())
def test_no_field_of_a_journal_breaks_a_draft(field: Field, text: str, instead: bool) -> None:
    made = planted(*field, lambda was: text if instead else f"{was} {text}")
    assert_sound(draft(made).body, [made.issue, *made.related])


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


CUT = f"{ARM.trials[0].why}; the run was interrupted before the trial came to its end"
CUT_ARM = replace(
    ARM,
    trials=(replace(ARM.trials[0], outcome=Outcome.CANCELLED, why=CUT),),
    result=arm_result(ARM.name, ARM.expected, [Outcome.CANCELLED]),
)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (with_refused_requests(), " eager: refused: 2 of 2 requests (400 x 2): too long."),
        (without_a_tested_boundary(), "Boundary not tested"),
        # the trial counts as interrupted, and the draft still has its crash
        (replace(DIED, arms=(CUT_ARM,)), CUT),
        (replace(DIED, interrupted="SIGINT"), "Interrupted by SIGINT."),
        (replace(DIED, arms=()), "What was run"),
    ],
)
def test_what_limits_a_run_is_named(run: RunReport, text: str) -> None:
    assert text in unescape(make_draft(run).body)


def test_a_huge_run_fits_and_says_what_is_missing() -> None:
    trial = ARM.trials[0]
    arm = replace(
        ARM,
        trials=tuple(
            replace(trial, number=n, outcome=outcome) for n in range(40) for outcome in Outcome
        ),
        differences=("d" * 3_000,) * 200,
        requests=("r" * 3_000,) * 300,
        edits=("e" * 3_000,) * 300,
        command="vllm serve \\\n" + "  --flag 语 \\\n" * 20_000,
    )
    made = draft(replace(DIED, arms=(arm,) * 60), script="x" * 40_000)
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
    new = replace(DIED, filed=False, title=title, related=())
    assert_sound(draft(new).body, [DIED.issue])


TQ, FIX, CHUNKED = "tq-prefix-hit-unreserved", "vllm-project/vllm#44053", "vllm-project/vllm#41726"


OTHER = replace(DIED, scenario=TQ, issue=FIX, related=(), filed=False)
STRANGER = replace(DIED, scenario="stranger", issue="o/r#1", related=("o/r#2",))


@pytest.mark.parametrize(
    ("run", "issues"),
    [
        # those that the scenario names
        (DIED, [f"vllm-project/vllm#{number}" for number in (43357, 46767, 41565)]),
        # nothing died
        (report(examples.LIVED), []),
        (replace(OTHER, vllm_version="0.32.0"), []),
        # a scenario that is not in the catalogue
        (STRANGER, [CHUNKED, "o/r#2"]),
        (replace(STRANGER, arms=()), []),
    ],
)
def test_duplicates(run: RunReport, issues: list[str]) -> None:
    assert duplicates(run, all_scenarios()) == issues
    assert CHUNKED in duplicates(OTHER, all_scenarios()), "a crash of another open scenario"


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
    unfixed = [
        replace(scenario, status=replace(scenario.status, good="")) for scenario in all_scenarios()
    ]
    monkeypatch.setattr("vllm_repro_intake.run_draft.all_scenarios", lambda **_: unfixed)
    monkeypatch.setattr("vllm_repro_intake.issue_draft.MOST", 12_000)
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
            "how the command differs from the reported one: see report.md",
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


@pytest.mark.parametrize("outcome", ["unsupported", "infra", "cancelled"])
def test_a_run_that_tested_nothing_has_no_draft(
    harness: Harness, tmp_path: Path, outcome: str
) -> None:
    run = run_of(examples.DIED, tmp_path)
    journal = run / "journal.jsonl"
    text = re.sub(r'"outcome": "\w+"', f'"outcome": "{outcome}"', journal.read_text("utf-8"))
    journal.write_text(text, encoding="utf-8")
    assert_refused(harness("draft", str(run)), "no boot tested vLLM", "next: vllm-repro doctor")
    assert "draft:" not in summary(build(run))


def test_a_journal_of_a_newer_release_is_wrong_usage(harness: Harness, tmp_path: Path) -> None:
    journal = run_of(examples.REHEARSAL, tmp_path) / "journal.jsonl"
    text = journal.read_text(encoding="utf-8")
    journal.write_text(text.replace('"schema": 1', '"schema": 99'), encoding="utf-8")
    assert_refused(
        harness("draft", str(journal.parent)), "has schema 99, and this release reads schema 1"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [str(examples.REHEARSAL.parent / "bisect" / "tq-chunked-prefill")],
            "is a bisection, not a run",
        ),
        ([str(examples.REHEARSAL), "-o", "/proc/nowrite/x"], "cannot write /proc/nowrite/x"),
        (["."], "next:"),
    ],
)
def test_what_cannot_be_drafted_is_named(
    harness: Harness,
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(harness("draft", *words), message)
