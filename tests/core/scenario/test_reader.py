from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Harness
from tests.scenario_texts import TQ, broken, line_of, problems, text_of
from vllm_repro.errors import ScenarioError, UsageError
from vllm_repro.scenario import vocabulary
from vllm_repro.scenario.catalogue import all_scenarios, find, scenario_files
from vllm_repro.scenario.reader import load_file, read
from vllm_repro.verdict.verdict import Expected, Standing


@pytest.mark.parametrize("path", scenario_files(), ids=lambda path: path.stem)
def test_the_scenarios_of_the_package_have_no_problem(path: Path) -> None:
    assert read(path)[1] == []


@pytest.mark.parametrize("path", scenario_files(), ids=lambda path: path.stem)
def test_a_scenario_read_is_the_scenario_imported(path: Path) -> None:
    loaded, imported = load_file(path), runpy.run_path(str(path))["scenario"]
    assert str(loaded.trigger) == str(imported.trigger)
    assert loaded.signature == imported.signature
    assert [arm.name for arm in loaded.arms] == [arm.name for arm in imported.arms]
    for arm, other in zip(loaded.arms, imported.arms, strict=True):
        assert loaded.command_of(arm) == imported.command_of(other)
        assert loaded.workload_of(arm) == imported.workload_of(other)


def test_words_may_be_imported_by_name() -> None:
    named = text_of().replace("import *\n", f"import {', '.join(vocabulary.__all__)}\n")
    assert problems(named) == []
    (problem,) = problems(named.replace("import Causes, ", "import "))
    assert "'Causes' is not imported" in problem[1]


@pytest.mark.parametrize("scenario", all_scenarios(), ids=lambda scenario: scenario.id)
def test_every_scenario_links_its_issue_and_has_a_control(scenario: vocabulary.Scenario) -> None:
    assert any(arm.expected is not Expected.DIES for arm in scenario.arms)
    assert scenario.status.standing(scenario.try_with) is Standing.BAD


MISTAKES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[2] / "data" / "mistakes.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row["new"][:40])
def test_a_mistake_is_told_once_where_it_stands(row: dict[str, Any]) -> None:
    name = row.get("file", TQ)
    text = text_of(name)
    assert row["old"] in text
    text = text.replace(row["old"], row["new"], 1)
    found = problems(text, name)
    told = [line for line, problem in found if row.get("shown", "no mistake") in problem]
    lines = [text.splitlines()[line - 1].strip().startswith(row["at"]) for line in told]
    assert lines == [True] * ("shown" in row), found
    assert len(found) - len(told) == row.get("others", 0), found


def test_what_is_wrong_in_a_list_makes_nothing_missing_elsewhere() -> None:
    text = (
        text_of()
        .replace('chat(name="short chat"', 'chat(nam="short chat"')
        .replace('"long chat"', '"long chat", nam="x"')
    )
    assert [problem for _, problem in problems(text)] == [
        "chat has no argument 'nam'; did you mean 'name'?"
    ] * 2
    named = re.sub(r"workload=\[.*?\n    \],", "workload=WORK,", text, count=1, flags=re.DOTALL)
    named = named.replace(
        "scenario = ", "WORK = [together(chat(prompt=0), chat(prompt=8))]\nscenario = "
    )
    assert [problem for _, problem in problems(named)] == [
        "chat: a prompt of 0 tokens cannot be sent"
    ]
    (frames,) = re.findall(r"frames=(\[.*?\])", text_of(), re.DOTALL)
    for whole in ("[128, 128, 256]", frames):
        assert [problem for _, problem in broken(whole, "[none]")] == ["unknown name 'none'"]
    arms = (
        text_of()
        .replace('arm("eager", lives', 'arm("eager", live')
        .replace('arm("reported", dies)', 'arm("reported", dyes)')
    )
    assert {line for line, _ in problems(arms)} == {
        line_of('arm("reported"'),
        line_of('arm("eager"'),
    }


CONDITION = re.compile(r"trigger=.*?workspace_outgrown\(\),", re.DOTALL)
DOUBLED = "\n".join(["LONG = 'ab'", *["LONG = LONG + LONG"] * 60, "scenario ="])


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        (
            CONDITION.sub("trigger=workspace_outgrown,", text_of()),
            line_of("trigger="),
            (
                "^Scenario: trigger=workspace_outgrown must be a condition: write"
                r" workspace_outgrown\(\)$"
            ),
        ),
        ("x = (", 1, r"^not Python: '\(' was never closed$"),
        ("x = " + "(" * 3000, 1, "^not Python: "),
        ("x = " + "-" * 100_000 + "1", 1, ""),
        ("x = '\0'", 1, ""),
        ('"""A bug."""\n', 1, r"no `scenario = Scenario\(\.\.\.\)`"),
        (text_of().replace("prompt=100", "promt=100"), line_of("prompt=100"), "mean 'prompt'"),
        (
            text_of().replace("vocab_size=248320", "vocab=248320"),
            line_of("vocab_size"),
            r"^Model has no argument 'vocab'; did you mean 'vocab_size'\?$",
        ),
    ],
)
def test_a_text_has_one_problem(text: str, line: int, shown: str) -> None:
    ((number, problem),) = problems(text)
    assert (number, bool(re.search(shown, problem))) == (line, True), problem


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (text_of().replace("scenario =", DOUBLED), "too large"),
        (text_of().replace("= 2048 ", f"= {'-' * 1500}2048 "), "CONTEXT is nested too deep"),
        ('"""A bug."""\nscenario = 3\n', "`scenario` is not a Scenario"),
        ("scenario = 3\n", "begin with a docstring"),
        (
            text_of("min_tokens_stop_ids.py").replace('prompt="hello"', "prompt=[]"),
            "send it with request(…)",
        ),
    ],
)
def test_a_text_has_a_problem(text: str, shown: str) -> None:
    assert any(shown in problem for _, problem in problems(text))


UNREADABLE = "(not Python|cannot be read): "


@pytest.mark.parametrize(
    ("head", "tail", "shown"),
    [
        (b"\xef\xbb\xbf", b"", "$"),  # a byte order mark
        (b"", b"\nx = '\xff'\n", UNREADABLE),
        (b"", b"\nx = '\0'\n", UNREADABLE),
    ],
)
def test_bytes_that_are_no_text_are_told(
    tmp_path: Path, head: bytes, tail: bytes, shown: str
) -> None:
    path = tmp_path / "tq_chunked_prefill.py"
    path.write_bytes(head + text_of().encode("utf-8") + tail)
    assert re.match(shown, "\n".join(problem.text for problem in read(path)[1]))


def test_mistakes_of_words_come_before_those_of_meaning() -> None:
    meaning = re.sub(r"title=\(.*?\n    \)", 'title=""', text_of(), flags=re.DOTALL)
    meaning = meaning.replace('id="tq-chunked-prefill"', 'id="tq"')
    meaning = meaning.replace('arm("eager"', 'arm("reported"')
    words = meaning.replace("        heads=16,\n", "").replace('ed", dies)', 'ed", dyes)')
    found = [text for _, text in problems(words)]
    assert ["missing 'heads'" in text or "'dyes'" in text for text in found] == [True, True]
    shown = " ".join(problem for _, problem in problems(meaning))
    for part in ("does not match the file's name", "two arms are named", "title is empty"):
        assert part in shown


def test_a_folder_without_scenarios_is_no_success(tmp_path: Path, harness: Harness) -> None:
    assert harness("check", str(tmp_path)).status == 64
    root = harness("check", str(Path(__file__).parents[3]))
    assert root.status == 0
    assert "0 problems" in root.err


def test_one_broken_file_does_not_blind_the_others(tmp_path: Path) -> None:
    for path in scenario_files():
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "broken.py").write_text("scenario = (", encoding="utf-8")
    shown: list[str] = []
    assert len(all_scenarios(tmp_path, warn=shown.append)) == len(scenario_files())
    assert len(shown) == 1
    assert "broken.py:1: not Python" in shown[0]
    with pytest.raises(ScenarioError):
        all_scenarios(tmp_path)


URL = "https://github.com/vllm-project/vllm/issues/41726"


@pytest.mark.parametrize(
    "name",
    [
        "41726",
        "#41726",
        "vllm-project/vllm#41726",
        URL,
        f"{URL}#issuecomment-1",
        URL.replace("issues", "pull"),
    ],
)
def test_a_scenario_is_found_by_its_issue(name: str) -> None:
    assert find(name).id == "tq-chunked-prefill"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (URL.replace("vllm-project", "somebody"), ""),
        ("tq-chunked-prefil", "did you mean tq-chunked-prefill"),
        ("nothing.py", ""),
    ],
)
def test_an_unknown_name_is_refused(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(name)
    assert hint in caught.value.hint


def test_two_scenarios_of_one_issue_are_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of("min_tokens_stop_ids.py").replace('id="min-tokens-stop-ids"', 'id="own-bug"')
    (tmp_path / "own_bug.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("VLLM_REPRO_SCENARIOS", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        find("#54195")
    assert "did you mean min-tokens-stop-ids or own-bug?" in caught.value.hint
    (tmp_path / "own_bug.py").unlink()
    own = text_of("min_tokens_stop_ids.py").replace("vLLM", "our vLLM", 1)
    (tmp_path / "min_tokens_stop_ids.py").write_text(own, encoding="utf-8")
    assert find("#54195") == find("min-tokens-stop-ids"), "a file of the folder replaces another"


def test_an_installed_package_adds_its_scenarios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, metadata = tmp_path / "our_bugs", tmp_path / "our_bugs-1.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text(
        "raise RuntimeError('it need not be imported')\n", encoding="utf-8"
    )
    text = text_of("min_tokens_stop_ids.py").replace('id="min-tokens-stop-ids"', 'id="our-bug"')
    (package / "our_bug.py").write_text(text, encoding="utf-8")
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: our-bugs\nVersion: 1\n", encoding="utf-8"
    )
    (metadata / "entry_points.txt").write_text(
        "[vllm_repro.scenarios]\nours = our_bugs\n", encoding="utf-8"
    )
    assert "our-bug" not in {one.id for one in all_scenarios()}
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "our-bug" in {one.id for one in all_scenarios()}
    assert find("our-bug").id == "our-bug"


def test_a_scenario_file_cannot_run_code(tmp_path: Path) -> None:
    target = tmp_path / "proof"
    for attack in (
        f"open({str(target)!r}, 'w')",
        f"__import__('os').system('touch {target}')",
        "().__class__",
        "[x for x in ()]",
    ):
        assert broken("title=(", f"title={attack}, _=(")
    assert not target.exists()
    assert problems("import os\n" + text_of())


def test_loading_a_wrong_file_names_every_problem(tmp_path: Path) -> None:
    path = tmp_path / "tq_chunked_prefill.py"
    path.write_text(
        text_of().replace("heads=16", "haeds=16").replace("dies)", "dyes)", 1), encoding="utf-8"
    )
    with pytest.raises(ScenarioError, match="haeds") as caught:
        load_file(path)
    assert "dyes" in str(caught.value)


def test_a_file_that_is_read_keeps_what_it_says_of_the_bug() -> None:
    scenario = find("tq-prefix-hit-unreserved")
    assert scenario.about.startswith("TurboQuant without chunked prefill: ")
    assert "only with chunked prefill on" in scenario.about.split("\n\n")[1]


MIN_TOKENS = "min_tokens_stop_ids.py"


def test_fields_that_come_in_two_requests_come_in_none_together() -> None:
    text = (
        text_of(MIN_TOKENS)
        .replace("min_tokens=1,\n", "")
        .replace("max_tokens=4),", "max_tokens=4, min_tokens=1),", 1)
    )
    assert [problem for _, problem in problems(text, MIN_TOKENS)] == [
        (
            "no request has min_tokens and stop_token_ids together, so sent_with(min_tokens,"
            " stop_token_ids) can never be met"
        )
    ]


def test_a_file_without_a_release_does_not_blind_the_others(
    tmp_path: Path, harness: Harness
) -> None:
    wrong = (
        text_of()
        .replace('try_with="0.23.0"', 'try_with="latest"')
        .replace("--max-num-seqs 1", "--max-num-sesq 1")
    )
    (tmp_path / "tq_chunked_prefill.py").write_text(wrong, encoding="utf-8")
    (tmp_path / "tq_second.py").write_text(
        text_of().replace('title="', 'title="" and "'), encoding="utf-8"
    )
    given = harness("check", str(tmp_path), "--json")
    assert given.status == 1
    found = {(Path(problem["file"]).name, problem["line"]) for problem in json.loads(given.out)}
    assert ("tq_chunked_prefill.py", line_of("try_with=")) in found
    assert (
        "tq_chunked_prefill.py",
        line_of("command="),
    ) in found, "the flags are looked at all the same"
    assert "tq_second.py" in {file for file, _ in found}
    shown: list[str] = []
    assert all_scenarios(tmp_path, warn=shown.append) == []
    assert len(shown) == 2


@pytest.mark.parametrize(
    ("again", "shown"),
    [
        ('completion(name="again", prompt="hello", max_tokens=4)', ""),
        (
            (
                'completion(name="again", prompt="hello", max_tokens=4,'
                ' kv_transfer_params={"do_remote_prefill": True})'
            ),
            "",
        ),
        (
            'completion(name="again", prompt="hello", max_tokens=5)',
            "'again' and 'first' are not equal",
        ),
        (
            'completion(name="again", prompt="hello", max_tokens=4, temperature=1)',
            "'again' is not greedy",
        ),
        ('completion(name="again", prompt=9, max_tokens=4)', "'again' has a new prompt each time"),
        ('completion(name="first", prompt="hello", max_tokens=4)', "'first' is sent twice"),
        (
            'request(name="again", path="/v1/completions", body={"prompt": "hello"})',
            "'again' is not greedy",
        ),
    ],
)
def test_requests_that_need_equal_answers_are_equal(again: str, shown: str) -> None:
    text = text_of(MIN_TOKENS)
    first = 'completion(name="first", prompt="hello", max_tokens=4)'
    text = text.replace(
        "    workload=[\n", f"    workload=[\n        {first},\n        {again},\n", 1
    )
    found = problems(
        text.replace(
            "    related=[", '    output=checks(alike=[("first", "again")]),\n    related=['
        ),
        MIN_TOKENS,
    )
    texts = [problem for _, problem in found]
    assert any(shown in one for one in texts) if shown else texts == []


STOP_IDS, ISSUE = "min_tokens_stop_ids.py", 'issue="vllm-project/vllm#54195"'


@pytest.mark.parametrize(
    "url",
    [
        "https://github.com/vllm-project/vllm/issues/54195",
        "http://www.github.com/vllm-project/vllm/issues/54195#issuecomment-1",
        "github.com/vllm-project/vllm/pull/54195/files",
        " https://github.com/vllm-project/vllm/issues/54195?timeline_page=1 ",
    ],
)
def test_an_issue_may_be_an_address(tmp_path: Path, url: str) -> None:
    path = tmp_path / STOP_IDS
    path.write_text(text_of(STOP_IDS).replace(ISSUE, f'issue="{url}"'), encoding="utf-8")
    scenario, found = read(path)
    assert (scenario and scenario.issue, found) == ("vllm-project/vllm#54195", [])


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        (STOP_IDS, ("", "")),
        (STOP_IDS, ('"0.28.0"', '"0.27.0"')),
        ("tq_chunked_prefill.py", ("prompt=100", "prompt=101")),
        ("sco_lazy_starves.py", ("", "")),
    ],
)
def test_a_copy_of_a_scenario_is_found(
    harness: Harness, tmp_path: Path, name: str, edit: tuple[str, str]
) -> None:
    path, known = tmp_path / "my_bug.py", name.removesuffix(".py").replace("_", "-")
    text = text_of(name).replace(f'id="{known}"', 'id="my-bug"').replace(*edit)
    path.write_text(text, encoding="utf-8")
    done = harness("check", str(path))
    at = text[: text.index("issue=")].count("\n") + 1
    assert f"my_bug.py:{at}: gap: a copy of {known}, with its issue" in done.out
    assert (done.status, done.err) == (0, "1 file, 0 problems, 1 gap\n")
    path.write_text(re.sub(r"vllm#\d+", "vllm#99999", text), encoding="utf-8")
    assert harness("check", str(path)).err == "1 file, 0 problems\n"
