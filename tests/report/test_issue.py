from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import report_examples as examples
from tests.github_markdown import Rendered, render
from tests.report.journal_fields import TEXT_FIELDS, Field, planted, text_fields
from tests.report_examples import EXAMPLES, report
from vllm_repro.journal.log_excerpts import LogExcerpts, read_excerpts
from vllm_repro.journal.redact import Redactor
from vllm_repro.report.files import make_draft
from vllm_repro.report.issue import draft, duplicates
from vllm_repro.report.model import PatchedFile
from vllm_repro.report.source_changes import diff_of, how_to_apply
from vllm_repro.report.text import LIMIT, printable
from vllm_repro.running.terminal import summary
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.scenario.patch import Patch
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, Verdict, VerdictReport, arm_result

DIED = report(examples.DIED)
RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"
SECRETIVE = Redactor()

HOSTILE = [
    "```",
    "````````````````````````````````````",
    "`" * 40_000,
    "~~~\n~~~",
    "</details></details>\n\n# out",
    "<!-- swallowed",
    "<script>alert(1)</script> <img src=x onerror=y> <b>bold</b>",
    "@vllm-project/maintainers and @user, see #123, vllm-project/vllm#1, GH-12",
    "https://github.com/vllm-project/vllm/issues/1 http://x.y/z www.github.com",
    "[a](https://evil.example) ![b](https://evil.example/c.png) [d]: https://evil.example",
    "a | b | c\n|---|---|",
    "\x1b[31mred\x1b[0m \x00 \ud800 \u202eevil\u2066 \r\n\r x \x85 \u2028 y",
    "$$x$$ **bold** _it_ ~~gone~~ &amp; &#64;user \\@user",
    "- list\n1. one\n> quote\n# head\n===\n---\n    code",
    "x" * 1_000_000,
    "语言模型" * 30_000,
    "`@user` ``#1`` `<b>`",
]


def logs_of(text: str, tmp_path: Path) -> list[LogExcerpts]:
    (tmp_path / "server.log").write_bytes(text.encode("utf-8", "replace"))
    log = read_excerpts(tmp_path, "server.log", SECRETIVE, "AssertionError")
    assert log is not None
    return [log]


def assert_sound(body: str, meant: list[str]) -> Rendered:
    """Check that `body` fits, mentions nobody, and links only to the intended issues."""
    assert len(body) <= LIMIT
    assert len(body.encode("utf-8")) <= LIMIT
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
    made = report(next(folder for folder in EXAMPLES if folder.name.startswith("sco-window-loads-wait")))
    turned = replace(made, arms=made.arms[::-1])
    body = make_draft(turned).body
    assert "Boundary crossed in `reported`" in body
    assert "\n\n`0 requests running, 4 of ours in flight" in body
    assert "(hung in 1 of 1) |" in body
    assert "With this change the engine lived (`patched`, hung in 0 of 1 boots). Apply it by hand: " in body
    assert "May be the same, check before sending" in body
    assert "0 requests running, 4 of ours in flight" in summary(turned)


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_a_draft_is_read_in_half_a_minute(folder: Path) -> None:
    """Its prose, that is: 165 words, without code, tables, requests and what is folded; 60 more name the cause where nobody knows of it."""
    made = report(folder)
    body = make_draft(made).body
    unfolded = re.sub(
        r"<!--.*?-->|<details>.*?</details>|^\d+\. .*?$|```.*?```|^[|-].*?$|`[^`\n]*`|\(http\S*\)",
        "",
        body,
        flags=re.DOTALL | re.MULTILINE,
    )
    assert len(re.findall(r"[A-Za-z][\w'-]*", unfolded)) <= (165 if made.filed else 225)


def test_a_comment_and_a_new_issue() -> None:
    comment = draft(DIED)
    path = Path("a folder/issue.md")
    assert comment.title == ""
    assert comment.command(path) == "gh issue comment 41726 --repo vllm-project/vllm --body-file 'a folder/issue.md'"
    new = draft(replace(DIED, filed=False, issue="vllm-project/vllm#44053", title="It's -- @you <b>"))
    assert new.title == "[Bug]: It's -- @you <b>"
    assert new.command(path) == (
        "gh issue create --repo vllm-project/vllm --title '[Bug]: It'\"'\"'s -- @you <b>' --body-file 'a folder/issue.md'"
    )
    page = assert_sound(new.body, ["vllm-project/vllm#44053"])
    assert len(page.comments) == 1
    assert "A new issue" in page.comments[0]
    assert "No report of this was found" in new.body


def test_a_rehearsals_draft_says_so_in_its_first_line() -> None:
    for filed in (True, False):
        body = draft(replace(report(examples.REHEARSAL), filed=filed)).body
        assert body.splitlines()[0].startswith("**Reproduces on vLLM 0.23.0 (REHEARSAL)**")


def test_a_new_issue_out_of_the_lab_shows_what_anybody_can_run_and_the_change_that_helps() -> None:
    """A maintainer needs flags, requests and the change, not the command of the lab."""
    patch = Patch("vllm/v1/attention/backends/a.py", was="x = 1\n", now="x = 2\n", why="it is two")
    arm = DIED.arms[0]
    cured = replace(arm, result=arm_result("patched", Expected.LIVES, [Outcome.CLEAN]), trials=(), patches=(patch,))
    made = replace(DIED, filed=False, arms=(arm, cured), issue="vllm-project/vllm#44053")
    body = draft(made, flags="vllm serve some/model \\\n  --flag 1", why="Two are\nasked for, @all.").body
    assert "Two are asked for, " in body
    assert "With this change the engine lived (`patched`, died in 0 of 1 boots). Apply it by hand: " in body
    assert_sound(body, [made.issue])
    assert "With this change" not in draft(replace(made, arms=(replace(arm, trials=()), cured))).body, (
        "of what nobody saw"
    )
    assert "source changed" not in body, "it died of vLLM as released"
    comment = draft(replace(made, filed=True), flags="vllm serve some/model", why="Two are asked for.").body
    assert "some/model" not in comment
    assert "Two are" not in comment
    assert "source changed" in comment


def test_a_patch_that_did_not_run_is_no_help() -> None:
    """Neither the diff nor a comparison may suggest that it helps."""
    patch = Patch("vllm/v1/attention/backends/a.py", was="x = 1\n", now="x = 2\n")
    arm = DIED.arms[0]
    for unseen in ({"imported": False}, {"untried": ("kernel",)}):
        server = replace(arm.server, patched=(PatchedFile(file=patch.file, sha256="0", **unseen),))
        cured = replace(
            arm, result=arm_result("patched", Expected.LIVES, [Outcome.CLEAN]), patches=(patch,), server=server
        )
        body = draft(replace(DIED, filed=False, arms=(arm, cured))).body
        assert "With this change the engine lived" not in body
        assert "so its change was not tried" in body or "so that change was not tried" in body


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
        ["git", "apply", "--unidiff-zero", "-"], cwd=tmp_path, input=diff_of(arm) + "\n", text=True, check=True
    )
    assert source.read_text(encoding="utf-8") == "zero\none\nTWO\n2\nthree\nfour\n5\n"
    assert how_to_apply(replace(arm, patches=(replace(patches[0], lines=False),))).startswith("Apply it by hand")


@pytest.mark.parametrize("expected", [True, False, None])
@pytest.mark.parametrize("verdict", Verdict)
def test_the_first_line_is_the_verdict(verdict: Verdict, expected: bool | None) -> None:
    body = draft(replace(DIED, verdict=VerdictReport(verdict=verdict, expected=expected, because="because"))).body
    first = body.splitlines()[0]
    assert first.startswith(f"**{verdict.capitalize()} on vLLM 0.23.0 (LAB)**: because.")
    assert ("Declared was something else" in first) is (expected is False)


def test_a_run_that_was_cut_and_one_without_a_trial_say_so() -> None:
    assert "Interrupted by SIGINT." in draft(replace(DIED, interrupted="SIGINT")).body
    body = draft(replace(DIED, arms=())).body
    assert "Trials: none" in body
    assert_sound(body, [DIED.issue])


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_log_breaks_out_of_its_block(text: str, tmp_path: Path) -> None:
    log = f"INFO begin\n{text}\nERROR first\n{text}\nAssertionError: {text}\n" + f"{text}\nlast line\n"
    page = assert_sound(draft(DIED, logs_of(log, tmp_path)).body, [DIED.issue])
    shown = [code for code in page.code if "ERROR first" in code]
    assert len(shown) == 1
    assert "last line" in shown[0]
    assert all("ERROR first" not in words for words in page.text)


def filled(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([*HOSTILE, "ERROR x", "\n", "AssertionError: y", "ordinary"]), max_size=8), st.booleans()
)
def test_whatever_a_log_holds(tmp_path_factory: pytest.TempPathFactory, parts: list[str], newlines: bool) -> None:
    text = ("\n" if newlines else " ").join(parts)
    page = assert_sound(draft(DIED, logs_of(text, tmp_path_factory.mktemp("log"))).body, [DIED.issue])
    if newlines and 0 < len(text) < 5_000 and "`" * 17 not in text and "\x1b" not in text:
        # Of a short log nothing is left out: it stands in one block, letter by letter, but for empty lines between its pieces.
        whole = printable(SECRETIVE.text(text.encode("utf-8", "replace").decode())).strip("\n").rstrip()
        assert not whole or filled(whole) in [filled(code) for code in page.code]


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


@pytest.mark.parametrize(
    "name", ["v0.20.2-workspace.log", "v0.28.0-min-tokens.log", "v0.32.0-oom.log", "v0.32.0-killed-inflight.log"]
)
def test_real_logs_keep_their_first_error_and_their_end(name: str) -> None:
    raw = (RECORDINGS / name).read_text(encoding="utf-8", errors="replace")
    log = read_excerpts(RECORDINGS, name, SECRETIVE, None)
    assert log is not None
    page = assert_sound(draft(DIED, [log]).body, [DIED.issue])
    lines = [line for line in printable(raw).splitlines() if line.strip()]
    first = next(line for line in lines if re.search(r"\bERROR\b|\bCRITICAL\b|Traceback|^[\w.]*Error: ", line))
    shown = page.code[-1]
    assert first[:200] in shown
    assert lines[-1][:200] in shown


def test_a_huge_run_fits_and_says_what_is_missing() -> None:
    trial = DIED.arms[0].trials[0]
    arm = replace(
        DIED.arms[0],
        trials=tuple(replace(trial, number=n, outcome=outcome) for n in range(40) for outcome in Outcome),
        differences=("d" * 3_000,) * 200,
        requests=("r" * 3_000,) * 300,
        edits=("e" * 3_000,) * 300,
        command="vllm serve \\\n" + "  --flag 语 \\\n" * 20_000,
    )
    body = draft(replace(DIED, arms=(arm,) * 60)).body
    assert_sound(body, [DIED.issue])
    assert "bytes left out" in body
    assert "more" in body
    assert "Made by vllm-repro" in body


@example("#1")
@example("@a")
@settings(max_examples=20)
@given(st.text(max_size=60))
def test_a_new_issues_title_calls_nobody(title: str) -> None:
    assert_sound(draft(replace(DIED, filed=False, title=title)).body, [DIED.issue])


TQ, FIX, CHUNKED = "tq-prefix-hit-unreserved", "vllm-project/vllm#44053", "vllm-project/vllm#41726"


def test_duplicates_are_what_the_scenario_names() -> None:
    found = duplicates(DIED, all_scenarios())
    assert found == ["vllm-project/vllm#43357", "vllm-project/vllm#46767", "vllm-project/vllm#41565"]
    assert duplicates(report(examples.LIVED), all_scenarios()) == [], "nothing died"


def test_a_death_of_another_scenario_is_a_duplicate_unless_that_is_fixed() -> None:
    other = replace(DIED, scenario=TQ, issue=FIX, related=(), filed=False)
    assert CHUNKED in duplicates(other, all_scenarios())
    assert duplicates(replace(other, version="0.32.0"), all_scenarios()) == []


def test_duplicates_of_a_scenario_that_is_not_in_the_catalogue() -> None:
    stranger = replace(DIED, scenario="stranger", issue="o/r#1", related=("o/r#2",))
    assert duplicates(stranger, all_scenarios()) == [CHUNKED, "o/r#2"]
    assert duplicates(replace(stranger, arms=()), all_scenarios()) == []
