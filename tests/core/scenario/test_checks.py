from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import Harness
from tests.scenario_texts import TQ, broken, line_of, problems, text_of
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.scenario.reader import read

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
    found = [each for each in problems(text, MIN_TOKENS) if "a trigger waits" not in each[1]]
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


def at_line(text: str, words: str) -> int:
    return text[: text.index(words)].count("\n") + 1


_NAMES = 'name="ordinary completion"', 'name="completion with an unknown stop token"'
_ISSUE = 'issue="vllm-project/vllm#54195"'
_WAITS = ": a trigger waits for min_tokens and stop_token_ids: correct the misspelt one"


@pytest.mark.parametrize(
    ("old", "new", "line", "shown"),
    [
        (_NAMES[0], _NAMES[1], "workload=[", "two requests are named 'completion with an unknown"),
        (_NAMES[1], _NAMES[0], "workload=[", "two requests are named 'ordinary completion', so"),
        *(
            (old, new, new, f"{new.partition('=')[0]!r}{_WAITS}")
            for old, new in (
                ("min_tokens=1", "min_token=1"),
                ("min_tokens=1", "mintokens=1"),
                ("stop_token_ids=[BEYOND_ANY_VOCABULARY],\n        ),", "stop_tokens_id=[7],\n),"),
                ("min_tokens=1", "min_tokns=1"),
            )
        ),
        *(
            ('try_with="0.28.0"', f'try_with="{short}"', "try_with", "no whole release number")
            for short in ("0.28", "1", "0.28rc1", "0.28.dev3")
        ),
        (_ISSUE, 'issue="54195"', "issue=", "is not an upstream issue"),
        (_ISSUE, 'issue="https://gitlab.com/a/b/issues/1"', "issue=", "is not an upstream issue"),
    ],
)
def test_a_mistake_is_reported_at_its_word(old: str, new: str, line: str, shown: str) -> None:
    text = text_of(MIN_TOKENS)
    assert old in text
    text = text.replace(old, new, 1)
    found = [(at, problem) for at, problem in problems(text, MIN_TOKENS) if shown in problem]
    assert [at for at, _ in found] == [at_line(text, line.partition("\n")[0])], found


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
    path = tmp_path / MIN_TOKENS
    path.write_text(text_of(MIN_TOKENS).replace(_ISSUE, f'issue="{url}"'), encoding="utf-8")
    scenario, found = read(path)
    assert (scenario and scenario.issue, found) == ("vllm-project/vllm#54195", [])


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        (MIN_TOKENS, ("", "")),
        (MIN_TOKENS, ('"0.28.0"', '"0.27.0"')),
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
    at = at_line(text, "issue=")
    assert f"my_bug.py:{at}: gap: a copy of {known}, with its issue" in done.out
    assert (done.status, done.err) == (0, "1 file, 0 problems, 1 gap\n")
    path.write_text(re.sub(r"vllm#\d+", "vllm#99999", text), encoding="utf-8")
    assert harness("check", str(path)).err == "1 file, 0 problems\n"
