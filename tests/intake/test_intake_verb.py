"""`vllm-repro intake`: files, standard input, GitHub through gh, and what it prints."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import Harness
from tests.golden_files import assert_refused, missing
from tests.intake.texts import ISSUES, SERVE
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.reader import read

URL = "https://github.com/vllm-project/vllm/issues/41726"
ISSUE = ISSUES / "41726.txt"


def test_a_file_becomes_a_scenario_that_check_accepts(harness: Harness, tmp_path: Path) -> None:
    path = tmp_path / "new_bug.py"
    done = harness("intake", str(ISSUE), "-o", str(path))
    assert (done.status, done.out) == (0, "")
    assert read(path)[1] == []
    assert 'id="new-bug"' in path.read_text(encoding="utf-8")
    assert (
        missing(
            done.err,
            "gap: no public name of the served model",
            "known: the death has the signature of tq-chunked-prefill:"
            " vllm-repro run tq-chunked-prefill\n",
            f"vllm-repro check {path} && vllm-repro run {path}\n",
        )
        == []
    )
    assert list(tmp_path.iterdir()) == [path]
    assert_refused(harness("intake", str(ISSUE), "-o", str(path)), "is already there")


def test_the_draft_reproduces_in_the_rehearsal(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_repro_intake.intake_verb.server_flags", lambda _: None)
    path = tmp_path / "my_bug.py"
    assert harness("intake", str(ISSUE), "-o", str(path), "--vllm", "0.23.0").status == 0
    assert harness("check", str(path)).status == 0
    done = harness("run", str(path), "--server", "rehearsal")
    assert (done.status, done.report["verdict"]) == (0, "reproduces"), done.err


def test_what_is_not_stated_decides_nothing(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_repro_intake.intake_verb.server_flags", lambda _: None)
    path = tmp_path / "my_bug.py"
    text = f"# [Bug]: it dies in a while\n\nvLLM 0.23.0\n\n{SERVE}"
    drafted = harness("intake", "-", "-o", str(path), stdin=text)
    assert f"{path} --server process --weights dummy --vllm 0.23.0" in drafted.err
    made = path.read_text(encoding="utf-8")
    assert missing(made, "issue=unstated(),", "trigger=unstated(),", "vocab_size=unstated(),") == []
    done = harness("check", str(path))
    assert (done.status, "gap: no boundary of the bug was read" in done.out) == (0, True)
    path.write_text(re.sub(r"(?m)^ *# GAP: .*\n", "", made), encoding="utf-8")
    assert harness("check", str(path)).err == "1 file, 0 problems, 8 gaps\n"
    done = harness("run", str(path), "--server", "rehearsal")
    (arm,) = done.report["arms"]
    assert [trial["outcome"] for trial in arm["trials"]] == ["untriggered"], done.err
    assert done.report["verdict"] == "inconclusive"
    assert_refused(
        harness("draft", str(done.run)),
        "the scenario does not state its issue",
        "next: vllm-repro check FILE lists",
    )


@pytest.mark.parametrize("words", [[str(ISSUE)], ["-"], [str(ISSUE), "--json"], ["a b.md"]])
def test_without_a_file_it_prints_the_draft(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = ISSUE.read_text(encoding="utf-8")
    Path("a b.md").write_text(text, encoding="utf-8")
    done = harness("intake", *words, stdin=text)
    (command,) = re.findall(r"To keep it: vllm-repro (.*)", done.err)
    named = shlex.split(command)
    assert (done.status, "vllm-repro check" in done.err, "vllm-repro run my" in done.err) == (
        0,
        False,
        False,
    )
    assert harness(*named, stdin=text).status == 0
    assert Path(named[-1]).is_file()


def test_the_draft_has_the_number_of_its_issue(harness: Harness) -> None:
    done = harness("intake", str(ISSUE))
    assert done.out.startswith('"""TurboQuant KV cache crashes')
    assert 'id="issue-41726"' in done.out
    assert "issue_41726.py\n" in done.err


def test_json_holds_draft_gaps_and_guesses(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Source] = []

    def flags(source: Source) -> frozenset[str]:
        asked.append(source)
        return frozenset({"--max-model-len"})

    monkeypatch.setattr("vllm_repro_intake.intake_verb.server_flags", flags)
    done = harness("intake", str(ISSUE), "--json", "--vllm", "0.23.0")
    shown = json.loads(done.out)
    assert {"draft", "file", "gaps", "guesses", "matches", "problems", "scenario"} == set(shown)
    assert (shown["problems"], shown["matches"], shown["file"]) == (
        [],
        ["tq-chunked-prefill"],
        None,
    )
    assert 'try_with="0.23.0"' in shown["draft"]
    assert asked == [Source(release="0.23.0")]
    unknown = [
        guess.partition(" ")[0]
        for guess in shown["guesses"]
        if "is not a flag of this release" in guess
    ]
    assert "--kv-cache-dtype" in unknown
    assert "--max-model-len" not in unknown


def test_standard_input(harness: Harness) -> None:
    assert "--max-num-batched-tokens 4096" in harness("intake", "-", stdin=SERVE).out
    assert_refused(harness("intake", "-"), "no vLLM command was read")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.md"], "cannot read missing.md"),
        ([""], "no text is named"),
        ([str(ISSUE), "-o", "My Bug.py"], "no name of a scenario file"),
        ([str(ISSUE), "-o", "my_bug.txt"], "no name of a scenario file"),
        ([str(ISSUE), "-o", "/nowhere/my_bug.py"], "cannot write"),
        (["https://example.org/vllm-project/vllm/issues/1"], "is no issue on GitHub"),
        ([f"{URL};touch x"], "is no issue on GitHub"),
        (["https://github.com/vllm-project/vllm/pull/41726"], "is no issue on GitHub"),
    ],
)
def test_wrong_usage(harness: Harness, words: list[str], message: str) -> None:
    assert_refused(harness("intake", *words), message, "next: ")


def test_a_long_text_is_refused(harness: Harness, tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_bytes(b"x" * ((16 << 20) + 1))
    assert_refused(harness("intake", str(path)), "longer than 16 MiB")


def gh(folder: Path, script: str) -> None:
    """Put a program named gh first on PATH."""
    program = folder / "gh"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)


def test_a_github_issue_is_read_through_gh(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {
        "title": "[Bug]: dies",
        "body": SERVE,
        "comments": [
            {"body": "With --enforce-eager it works."},
            {"body": "vllm serve org/other --enforce-eager"},
        ],
    }
    (tmp_path / "answer.json").write_text(json.dumps(shown), encoding="utf-8")
    gh(tmp_path, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/answer.json')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = harness("intake", f"{URL}#issuecomment-1")
    assert done.status == 0, done.err
    asked = (tmp_path / "asked").read_text(encoding="utf-8")
    assert asked == "issue view 41726 --repo vllm-project/vllm --json title,body,comments\n"
    assert (
        missing(
            done.out,
            'issue="vllm-project/vllm#41726"',
            'arm("enforce-eager", lives, with_flags("--enforce-eager"))',
        )
        == []
    )
    assert "org/other" not in done.out  # the issue's own command counts


@pytest.mark.parametrize(
    ("script", "message"),
    [("echo 'not found' >&2; exit 1", "not found"), ("echo []", "it prints no issue")],
)
def test_a_failure_of_gh_says_what_to_do(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    gh(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert_refused(
        harness("intake", URL),
        f"gh cannot read {URL}: {message}",
        "paste the issue's text into a file",
        status=2,
    )


def test_without_gh_it_says_what_to_do(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_refused(
        harness("intake", URL), "next: paste the issue's text into a file: vllm-repro intake FILE\n"
    )


def test_secrets_of_the_environment_are_not_printed(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "plain-words-value")
    text = tmp_path / "issue.md"
    text.write_text(f"{SERVE} --served-model-name plain-words-value", encoding="utf-8")
    done = harness("intake", str(text), "--json")
    assert done.status == 0
    assert "plain-words-value" not in done.out + done.err
