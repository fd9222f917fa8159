from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

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
# parametrized
def test_every_scenario_links_its_issue_and_has_a_control(scenario) -> None:  # type: ignore[no-untyped-def]
    assert any(arm.expected is not Expected.DIES for arm in scenario.arms)
    assert scenario.status.standing(scenario.try_with) is Standing.BAD


@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        (
            "chunked_prefill(chunks=2)",
            "chuncked_prefill(chunks=2)",
            "& (chunked_prefill",
            "did you mean 'chunked_prefill'?",
        ),
        (
            "try_with=",
            "try_wiht=",
            "try_with=",
            "Scenario has no argument 'try_wiht'; did you mean 'try_with'?",
        ),
        ('try_with="0.23.0"', 'try_with="0.24.0"', "try_with=", "is not among the bad releases"),
        ('issue="vllm-project/vllm#41726"', 'issue="#41726"', "issue=", "is not an upstream issue"),
        ('id="tq-chunked-prefill"', 'id="tq-chunked"', "id=", "does not match the file's name"),
        ('bad=">=0.21.0,<0.24.0"', 'bad="0.21"', "status=", "is no version specifier"),
        (
            "--kv-cache-dtype turboquant_4bit_nc",
            "--kv-cache-dtyp turboquant_4bit_nc",
            "command=",
            "--kv-cache-dtyp",
        ),
        (
            "'{\"enable_thinking\": true}'",
            '\'{"enable_thinking": true}',
            "--default-chat",
            "command:",
        ),
        ("dies)", "dyes)", 'arm("reported"', "did you mean 'dies'?"),
        (
            "max_tokens=",
            "max_tokns=",
            "max_tokens=",
            "chat has no argument 'max_tokns'; did you mean 'max_tokens'?",
        ),
        (
            'arm("eager"',
            'arm("reported"',
            'arm("eager"',
            "two arms are named 'reported'",
        ),
        (
            'arm("eager"',
            'arm("Eager!"',
            'arm("eager"',
            "lower-case words",
        ),
        ("heads=16", 'heads="16"', "heads=16", "heads='16' must be a whole number"),
        (
            "continuation_over(128)",
            "continuation_over()",
            "& continuation_over",
            "continuation_over: missing 'tokens'",
        ),
        ('flag("--max', 'flag("max', "BATCH = flag", "as it is written on the command line"),
        (
            'phase="request"',
            'phase="serving"',
            "phase=",
            "phase='serving' must be 'boot' or 'warmup' or 'request'",
        ),
        ("prompt=100", "prompt=0", "prompt=100", "a prompt of 0 tokens cannot be sent"),
        ("prompt=100", "prompt=[7]", "prompt=100", "must be a whole number or a size or a string"),
        ("prompt=100", "prompt=[7] * 2_000_000", "prompt=100", "too large: a number"),
        (
            "prompt=100",
            "promt=100",
            "prompt=100",
            "chat has no argument 'promt'; did you mean 'prompt'?",
        ),
    ],
)
def test_each_mistake_is_found_with_its_line(old: str, new: str, line: str, text: str) -> None:
    found = broken(old, new)
    assert found
    assert any(text in problem for _, problem in found), found
    assert line_of(line) in {number for number, problem in found if text in problem}, found


@pytest.mark.parametrize(
    ("old", "new", "line", "shown"),
    [
        (
            "workspace_outgrown(),",
            "workspace_outgrown,",
            "& workspace",
            "needs parentheses: write workspace_outgrown()",
        ),
        (
            "continuation_over(128)",
            "continuation_over",
            "& continuation_over",
            "write continuation_over(…)",
        ),
        (
            "& workspace_outgrown(),",
            '& "workspace_outgrown",',
            "trigger=",
            "a condition and a string cannot be combined here",
        ),
        (
            "| prefix_hit()",
            "| 3",
            "& (chunked_prefill",
            "a condition and a whole number cannot be combined here",
        ),
        (
            'id="tq-chunked-prefill"',
            'id="a" * 3000000000',
            "id=",
            "a string and a whole number cannot be combined",
        ),
        ("CONTEXT = 2048 ", "CONTEXT = 10**9 ", "CONTEXT = 2048", "only + - * for sizes"),
        (
            "CONTEXT = 2048 ",
            f"CONTEXT = {'9' * 10} * {'9' * 10} ",
            "CONTEXT = 2048",
            "too large: a number is at most",
        ),
        (
            "CONTEXT = 2048 ",
            f"CONTEXT = {'-' * 1500}2048 ",
            "CONTEXT = 2048",
            "CONTEXT is nested too deep",
        ),
        (
            '"type": "function"',
            '{"a": 1}: "function"',
            "READ_FILE =",
            "a key must be a string or a number",
        ),
    ],
)
def test_what_does_not_go_together_is_told_once_with_its_line(
    old: str, new: str, line: str, shown: str
) -> None:
    assert [number for number, problem in broken(old, new) if shown in problem] == [
        line_of(line)
    ], broken(old, new)


@pytest.mark.parametrize(
    ("old", "new", "line", "shown"),
    [
        (
            "    needs=Needs(gpus=1",
            "    needs=Needs(),\n    needs=Needs(gpus=1",
            "needs=",
            "Scenario: needs= is given twice",
        ),
        ("gpus=1,", "**READ_FILE,", "needs=", "** is not supported"),
        (
            "frames=[",
            'not_in_message="negative", frames=[',
            "frames=[",
            "not_in_message='negative' must be a list: write a list, with brackets",
        ),
        (
            'arms=["reported", "eager"]',
            'arms="reported"',
            'arms=["reported", "eager"]',
            "Lab: arms='reported' must be a list: write a list, with brackets",
        ),
    ],
)
def test_each_argument_is_written_once_and_lists_are_lists(
    old: str, new: str, line: str, shown: str
) -> None:
    (found,) = [(number, text) for number, text in broken(old, new) if shown in text]
    assert found[0] - new.count("\n") - line_of(line) in (-1, 0, 1)


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


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "tq_chunked_prefill.py"
    path.write_text(text_of(), encoding="utf-8-sig")
    assert read(path)[1] == []


@pytest.mark.parametrize("strange", [b"\nx = '\xff'\n", b"\nx = '\0'\n"])
def test_bytes_that_are_no_text_are_told(tmp_path: Path, strange: bytes) -> None:
    path = tmp_path / "tq_chunked_prefill.py"
    path.write_bytes(text_of().encode("utf-8") + strange)
    (found,) = read(path)[1]
    assert found.text.startswith(("not Python: ", "cannot be read: "))


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


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ('why="the lazy mode', 'bad="<1", why="the lazy mode', "bad= is only for an arm that"),
        (
            'bad=">=0.20.0,<0.24.0"',
            'bad=">=0.20.0"',
            "arm 'small-cpu-pool': 0.24.0 is both bad and good",
        ),
        ('bad=">=0.20.0,<0.24.0"', 'bad="0.20"', "is no version specifier"),
        ("lab=5_693)", "lab=0)", "takes two numbers of tokens"),
        (
            'layers=["full", "sliding"]',
            'layers=["full", "local"]',
            "must be a whole number or a list",
        ),
        ("        window=128,\n", "", "window=… goes with sliding layers"),
        ('family="deepseek_v4"', 'family="deepseek"', "family='deepseek' must be"),
        ('"compressed", "sparse"]', '"full"]', "dummy: deepseek_v4 has no full layers"),
        (
            'why="an eleventh of the reported 128 GiB: the same number of blocks"',
            'why=""',
            "has no why=: add the reason",
        ),
        ('"--num-gpu-blocks-override 7283"', '"7283"', "dummy, arm 'reported': "),
    ],
)
def test_mistakes_of_the_offload_scenario_are_found(old: str, new: str, shown: str) -> None:
    text = text_of("sco_hybrid.py")
    assert old in text
    found = problems(text.replace(old, new, 1), "sco_hybrid.py")
    assert any(shown in problem for _, problem in found), found


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("gpus=1", "gpus=-2", "needs are counts and sizes"),
        ("prompt=100", 'prompt="90k"', "a size in tokens is a number without quotes"),
        ('good=">=0.24.0"', 'good=">=0.22.0"', "0.22.0 is both bad and good"),
        (
            'flag("--max-num-batched-tokens")',
            'flag("--max-num-batched-tokns")',
            "is sized by --max-num-batched-tokns",
        ),
    ],
)
def test_what_is_well_formed_and_wrong(old: str, new: str, text: str) -> None:
    found = [problem for _, problem in broken(old, new) if text in problem]
    assert len(found) == 1, "named, and named once"


@pytest.mark.parametrize(
    ("old", "new", "shown", "name"),
    [
        (
            'try_with="0.23.0"',
            'try_with="latest"',
            "try_with 'latest' is not a release number: write it like '0.23.0'",
            TQ,
        ),
        (
            'try_with="0.23.0"',
            'try_with="v0.23.0"',
            "try_with 'v0.23.0': write it as '0.23.0', without the v",
            TQ,
        ),
        ('try_with="0.23.0"', 'try_with=" 0.23.0"', "try_with ' 0.23.0': write it as '0.23.0'", TQ),
        (
            "        layers=1,\n        arms=",
            '        vllm="v0.23.0",\n        layers=1,\n        arms=',
            "lab: vllm 'v0.23.0': write",
            TQ,
        ),
        (
            'added",\n                "0.20.2"',
            'added",\n                "v0.20.2"',
            "release 'v0.20.2': write it",
            "sco_hybrid.py",
        ),
    ],
)
def test_a_release_is_written_as_tags_and_pins_are_made_of_it(
    old: str, new: str, shown: str, name: str
) -> None:
    found = broken(old, new, name)
    assert len(found) == 1, found
    assert shown in found[0][1]


@pytest.mark.parametrize(
    ("old", "new", "line", "shown"),
    [
        (
            'with_flags("--enforce-eager")',
            'with_flags("--enforce-eagr")',
            'arm("eager"',
            "arm 'eager': --enforce-eagr: probably a typo",
        ),
        (
            'with_flags("--enforce-eager")',
            'with_flags("--scheduling-policy")',
            'arm("eager"',
            "--scheduling-policy: has no value",
        ),
        (
            'with_flags("--enforce-eager")',
            'with_flags("--enforce-eager", lab="--dtyp half")',
            'arm("eager"',
            "lab, arm 'eager': --dtyp",
        ),
        (
            "--max-num-seqs 1\n",
            "--max-num-seqs\n",
            "command=",
            "command: --max-num-seqs: has no value",
        ),
        (
            "vllm serve /",
            "LD_PRELOAD=x vllm serve /",
            "command=",
            "command: LD_PRELOAD is not a variable of vLLM",
        ),
        (
            'with_flags("--dtype bfloat16"',
            'with_flags("--dtyp bfloat16"',
            "lab=Lab(",
            "lab, arm 'reported': --dtyp: probably a typo",
        ),
    ],
)
def test_a_mistyped_flag_is_told_once_where_it_stands(
    old: str, new: str, line: str, shown: str
) -> None:
    found = broken(old, new)
    assert len(found) == 1, found
    number, problem = found[0]
    assert number == line_of(line)
    assert shown in problem


@pytest.mark.parametrize(
    ("old", "new", "line", "shown"),
    [
        (
            'sent_with("min_tokens"',
            'sent_with("min_token"',
            "trigger=",
            "can never be met; did you mean 'min_tokens'?",
        ),
        (
            '"min_tokens", "stop_token_ids"',
            "min_tokens=0",
            "trigger=",
            "no request has min_tokens with these values, so",
        ),
        (
            'sent_with("min',
            'sent_with("stop_token_ids") | sent_with("priorty", "min',
            "trigger=",
            "no request has 'priorty'",
        ),
        (
            'why="the check of',
            'trigger=sent_with("priorty"), why="the check of',
            'arm("patched"',
            "arm 'patched'",
        ),
        (
            "untriggered,\n            workload",
            'untriggered,\n            trigger=sent_with("x"),\n            workload',
            'arm("near',
            "'x'",
        ),
        (
            'ids")',
            'ids", name="ordinary completion")',
            "trigger=",
            "no request named 'ordinary completion' has 'min_tokens', so",
        ),
        (
            'ids")',
            'ids", name="ordinary")',
            "trigger=",
            "no request is named 'ordinary', so its trigger can never be met",
        ),
    ],
)
def test_what_no_request_carries_was_never_sent(old: str, new: str, line: str, shown: str) -> None:
    text = text_of(MIN_TOKENS).replace(old, new, 1)
    found = problems(text, MIN_TOKENS)
    assert len(found) == 1, found
    assert shown in found[0][1]
    assert found[0][0] == text[: text.index(line)].count("\n") + 1


def test_a_near_miss_may_leave_out_what_its_trigger_wants() -> None:
    near_miss = 'untriggered,\n            trigger=sent_with("min_tokens"),\n            w'
    assert broken("untriggered,\n            w", near_miss, MIN_TOKENS) == []


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


@pytest.mark.parametrize(
    ("old", "new", "line", "shown"),
    [
        (
            'arm("reported", dies)',
            'arm("report", dies)',
            'arm("reported"',
            "the first arm is named 'report': rename it",
        ),
        ("heads=16", "heads=-1", "model=Model(", "Model: heads=-1: sizes of a model count from 1"),
        (
            "kv_heads=4",
            "kv_heads=3",
            "model=Model(",
            "Model: 16 heads cannot share 3 key-value heads evenly",
        ),
        (
            "--max-num-seqs 1\n",
            "--limit-mm-per-prompt '{\"image\": 2'\n",
            "--max-num-seqs 1",
            "--limit-mm-per-prompt is not JSON",
        ),
        (
            "BATCH + 3497, max_tokens=8",
            "BATCH + 98_305, max_tokens=8",
            "workload=[",
            "an answer of 8 tokens exceed --max-model-len 102400",
        ),
        (
            "BATCH + 3497, max_tokens=8",
            '"Hi", max_tokens=102_400',
            "workload=[",
            "of 'Hi' and an answer of 102400 tokens exceed",
        ),
        (
            "BATCH + 128, max_tokens=8",
            "BATCH + 128, max_tokens=200_000",
            'arm("near-miss-128"',
            "arm 'near-miss-128': chat",
        ),
        (
            'with_flags("--dtype bfloat16"',
            'with_flags("--max-model-len 7600"',
            "lab=Lab(",
            "lab, arm 'reported': long chat of",
        ),
    ],
)
def test_what_vllm_would_refuse_is_told_once(old: str, new: str, line: str, shown: str) -> None:
    found = broken(old, new)
    assert len([problem for _, problem in found if shown in problem]) == 1, found
    assert {number for number, _ in found} == {
        text_of()[: text_of().index(line)].count("\n") + 1
    }, found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("BATCH + 3497, max_tokens=8", "BATCH + 98_296, max_tokens=8"),
        ("BATCH + 3497, max_tokens=8", "BATCH + 98_305, max_tokens=8, truncate_prompt_tokens=100"),
        ("--max-model-len 102400", "--max-model-len auto"),
        ("--max-num-seqs 1\n", "--max-num-seqs 1 --limit-mm-per-prompt image=2\n"),
        ('arm("reported", dies)', 'arm("reported", errs)'),
    ],
)
def test_what_vllm_takes_is_no_mistake(old: str, new: str) -> None:
    assert broken(old, new) == []


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


def test_a_signature_without_frames_is_refused() -> None:
    text = text_of()
    start = text.index("frames=[")
    end = text.index("]", start)
    assert any(
        "without frames" in problem
        for _, problem in problems(text[:start] + "frames=[" + text[end:])
    )


@pytest.mark.parametrize(
    ("declared", "shown"),
    [
        (
            'throughput=throughput(prompt=8, output=8, baseline="eagre"),',
            "the baseline 'eagre' is not an arm; did you mean",
        ),
        (
            'throughput=throughput(prompt=8, output=8, baseline="near-miss-129"),',
            "has the same server as an earlier arm",
        ),
        (
            'throughput=throughput(prompt=8, output=1, baseline="eager"),',
            "throughput: a load needs prompts of",
        ),
        (
            (
                'throughput=[throughput(prompt=8, output=8, baseline="eager"), throughput(prompt=8,'
                ' output=8, baseline="eager")],'
            ),
            "is given twice",
        ),
        (
            (
                'throughput=[throughput(prompt=8, output=8, baseline="eager"), throughput(prompt=9,'
                ' output=8, baseline="graphs-off")],'
            ),
            "the same baseline, not eager and graphs-off",
        ),
        ("throughput=8,", "throughput=8 must be throughput(…) or a list"),
        ("output=checks(),", "checks() needs at least one of"),
        ('output=checks(same=8, baseline="nobody"),', "the baseline 'nobody' is not an arm"),
        ('output=checks(alike=[("again",)]),', "two names of requests or more"),
        ('output=checks(alike=[("first", "again")]),', "alike: no arm sends all of first, again"),
    ],
)
def test_mistakes_in_what_is_measured_are_found(declared: str, shown: str) -> None:
    text = text_of()
    text = text.replace(
        '    throughput=throughput(prompt=1024, output=256, baseline="eager"),\n', "", 1
    )
    found = problems(
        text.replace("    related=[", f"    {declared}\n    related=["), "tq_chunked_prefill.py"
    )
    assert len(found) == 1, found
    line, problem = found[0]
    assert shown in problem
    assert line > 100


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


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        (
            'prompt="hello"',
            "prompt=[7] * 8192",
            "of 8192 token ids and an answer of 4 tokens exceed --max-model-len 8192",
        ),
        (
            "vocab_size=151936",
            "vocab_size=200",
            "model: a byte-level tokenizer needs at least 265 tokens, not 200",
        ),
        (
            "layers=28",
            "layers=28, full_attention_interval=4",
            "model: tiny_will_do=True serves a Qwen3ForCausalLM or",
        ),
        (
            "layers=28",
            'layers=28, architecture="X"',
            "of full attention alone: declare dummy=Dummy(…) instead",
        ),
    ],
)
def test_what_a_tiny_model_cannot_do_is_told(old: str, new: str, shown: str) -> None:
    (found,) = broken(old, new, MIN_TOKENS)
    assert shown in found[1]


def test_a_request_that_may_be_refused_may_be_too_long() -> None:
    assert broken('prompt="hello"', "prompt=9000, may_fail=[400]", MIN_TOKENS) == []
