"""Search of the front end without vLLM: answers, files, and the comparison of two trees."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fake_package import fake_release
from tests.golden_files import assert_golden
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.releases.provision import Release
from vllm_repro_explore.frontend import (
    FrontendSearch,
    play_frontend,
    script,
    script_name,
    summary_of,
)
from vllm_repro_explore.gate.change import Change, UnfitError
from vllm_repro_explore.gate.frontend import (
    FrontendScore,
    compare_frontend,
    is_frontend,
    score_of,
)
from vllm_repro_explore.program.vllm_repro_frontend.answer import draw, split_tags, tokens_of
from vllm_repro_explore.program.vllm_repro_frontend.formats import PAIRS, REASONING, TOOL_FORMATS

PARSER: dict[str, Any] = {
    "name": "tool xlam",
    "tool_parser": "xlam",
    "reasoning_parser": None,
    "split": "one token in a delta",
    "wrong": "arguments",
    "answer": '[{"name": "ping", "arguments": {}}]',
    "deltas": [['[{"'], ["name"], ['": "'], ["ping"], ['", "arguments": {}}]', "<eos>"]],
    "prompt": ["a"],
    "tokens": [],
    "eos": "<eos>",
    "tools": {"ping": {}},
    "whole": {"reasoning": "", "content": "", "calls": [["ping", "{}"]]},
    "streamed": {"reasoning": "", "content": "", "calls": [["ping", "{}{}"]]},
}
OUTPUT: dict[str, Any] = {
    "name": "output processor",
    "split": "several tokens in a step",
    "wrong": "tokens",
    "answer": " ENDSt",
    "words": ["END", "St"],
    "request": {
        "tokens": [258, 262],
        "params": {"stop": ["END"], "logprobs": 1},
        "ends": "token",
        "steps": [2],
        "output_kind": "DELTA",
        "stream_interval": 1,
        "slow": True,
        "n": 1,
        "aborted_by": "",
        "aborts_at": 0,
    },
    "whole": {"tokens": [258]},
    "streamed": {"tokens": [258, 262]},
}


@pytest.mark.parametrize("tool", [*TOOL_FORMATS, None])
def test_tokens_are_the_text_and_simpler_answers_are_less(tool: str | None) -> None:
    reasonings = [None, *(reasoning for pair, reasoning in PAIRS if pair == tool)]
    if tool is None:
        reasonings = [*REASONING]
    for seed in range(30):
        answer = draw(Random(seed), tool, reasonings[seed % len(reasonings)])
        tokens = tokens_of(answer.text)
        assert "".join(tokens) == answer.text == "".join(split_tags(tokens, []))
        assert split_tags(tokens, tokens) == tokens
        for simpler in answer.simpler():
            assert simpler != answer
            assert len(simpler.text) <= len(answer.text) + len("Hi")


SEVERAL_ANSWERS = OUTPUT["request"] | {"params": {}, "n": 2, "aborted_by": "client"}
LEFT = OUTPUT | {"wrong": "left", "request": SEVERAL_ANSWERS}
RANKS: dict[str, Any] = {
    "name": "ranks",
    "seed": 47,
    "split": "two pauses at once",
    "wrong": "a rank waits for another for ever",
    "case": {"ranks": 2, "every": 3, "seed": 5},
    "answer": ["client 0: pause wait False", "client 1: sleep 1 keep"],
    "log": ["client 0: pause_generation('wait', False) to all", "rank 1: answers call 1"],
    "streamed": "rank 1 waits in sync_dp_state of the ranks' state",
    "whole": "all calls are answered",
}


def test_messages_of_ranks_are_told() -> None:
    assert_golden("frontend-ranks.txt", script(RANKS, "0.33.0"), "explore")
    assert script_name(RANKS).endswith("_a_rank_waits_for_another_for_ever.txt")


@pytest.mark.parametrize(
    ("name", "finding"), [("tool-xlam", PARSER), ("output-processor", OUTPUT), ("left", LEFT)]
)
def test_a_script_of_a_finding_is_short(name: str, finding: dict[str, Any]) -> None:
    text = script(finding, "0.33.0")
    ast.parse(text)
    assert len(text.splitlines()) <= 30
    assert_golden(f"frontend-{name}.txt", text, "explore")


def test_a_pair_does_not_repeat_what_its_parser_has_alone() -> None:
    pair = PARSER | {"name": "tool xlam and reasoning qwen3"}
    other = pair | {"wrong": "reasoning"}
    search = FrontendSearch(version="0.33.0", findings=[pair, other, PARSER])
    assert search.distinct == [PARSER, other]
    assert summary_of(PARSER) == (
        "tool xlam, one token in a delta: other arguments than without streaming"
    )


LINES: list[dict[str, Any]] = [
    {"left_out": "tool beam", "why": "ValueError: no template\nmore"},
    {"finding": PARSER},
    {"played": 100},
    {
        "counts": {"tool xlam": {"answers": 120, "judged": 110, "failed": 1}},
        "outcomes": {"tool xlam": {"7": {"0": "arguments"}, "9": None}},
        "ends": {"tool xlam": 121},
        "runs": {"0": 3},
    },
]


def release_of(tmp_path: Path, text: str) -> Release:
    """Return a release whose interpreter runs a shell script."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{text}", encoding="utf-8")
    python.chmod(0o755)
    return replace(fake_release("0.33.0", tmp_path), python=python)


def test_the_lines_of_the_program_become_a_search(tmp_path: Path) -> None:
    lines = "".join(f"{json.dumps(line)}\n" for line in LINES)
    (tmp_path / "lines").write_text(lines, encoding="utf-8")
    search = FrontendSearch(version="0.33.0", again="vllm-repro explore --frontend")
    release = release_of(tmp_path, f"cat {tmp_path}/lines; cp $3 {tmp_path}/options")
    notes: list[str] = []
    play_frontend(release, search, tmp_path / "log", notes.append, names=["xlam"])
    options = json.loads((tmp_path / "options").read_text(encoding="utf-8"))
    assert (options["names"], options["first"]) == (["xlam"], 1)
    assert search.outcomes == {"tool xlam": {7: {"0": "arguments"}, 9: None}}
    assert (search.drawn, search.ends, search.runs) == (120, {"tool xlam": 121}, {0: 3})
    assert notes[-1] == "120 answers, 1 kinds of findings"
    search.findings[0]["script"] = "frontend.py"
    assert_golden("frontend.txt", search.text("txt"), "explore")
    assert_golden("frontend.md", search.text("md"), "explore")


@pytest.mark.parametrize(
    ("script", "kind", "why"),
    [
        ('echo \'{"unfit": "ImportError: no parse_delta"}\'', Unsupported, "no parse_delta"),
        ("echo Killed >&2; exit 1", InfraError, "Killed"),
        ("printf '{\"pl'; echo Error >&2; kill -9 $$", InfraError, "SIGKILL killed it"),
    ],
)
def test_a_program_that_ends_early_is_an_error(
    tmp_path: Path, script: str, kind: type[Exception], why: str
) -> None:
    release = release_of(tmp_path, script)
    with pytest.raises(kind, match=why):
        play_frontend(release, FrontendSearch(version="0.24.0"), tmp_path / "log", print)


EACH, SEVERAL = "one token in a delta: text", "several tokens in a delta: text"


@pytest.mark.parametrize(
    ("before", "after", "broken", "fixed", "partly"),
    [
        ({}, {1: {"0": EACH}}, [f"tool a, {EACH}"], [], []),
        ({}, {1: None}, ["tool a, not read as written"], [], []),
        ({seed: {"1": SEVERAL} for seed in range(12)}, {}, [], [f"tool a, {SEVERAL}"], []),
        (
            {seed: {"1": SEVERAL} for seed in range(14)},
            {13: {"1": SEVERAL}},
            *([], [], [f"tool a, {SEVERAL}"]),
        ),
        ({1: None}, {1: {"0": EACH}}, [], [], []),
        ({1: {"0": "tool calls"}}, {1: {"0": EACH}}, [], [], []),
    ],
    ids=["new", "unread", "ends", "ends in part", "never judged", "another failure"],
)
def test_answers_are_compared_one_by_one(
    before: dict[int, Any],
    after: dict[int, Any],
    broken: list[str],
    fixed: list[str],
    partly: list[str],
) -> None:
    base, changed = (
        FrontendSearch(
            version="0.33.0",
            outcomes={"tool a": outcomes, name: {1: {"0": EACH}}},
            ends={"tool a": end, name: 20},
        )
        # what one tree alone played does not count
        for outcomes, end, name in ((before, 20, "tool b"), (after | {21: None}, 30, "tool c"))
    )
    score: FrontendScore = score_of(base, changed)
    assert (score.broken, score.fixed, score.partly) == (broken, fixed, partly)
    assert score.trials == 19 - (None in before.values())


LEFT_OUT = {"left_out": {"tool a": "NameError: b"}, "ends": {}}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (Unsupported("cannot be searched", hint="another"), "cannot be imported: NameError: c"),
        (LEFT_OUT, "tool a: NameError: b"),
    ],
)
def test_a_change_that_cannot_be_played_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Any, why: str
) -> None:
    ends = iter([{"counts": {"tool a": {}}}, changed])
    monkeypatch.setattr("vllm_repro_explore.gate.frontend.play_frontend", ending(ends))
    release = fake_release("0.33.0", tmp_path)
    change = Change(name="a.diff", base=release, changed=release, files=[])
    with pytest.raises(UnfitError, match=why) as error:
        compare_frontend(change, tmp_path, 300.0, print)
    assert error.value.broken


def test_a_base_without_parsers_is_played_on_the_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([Unsupported("no module vllm.parser", hint="another release")])
    monkeypatch.setattr("vllm_repro_explore.gate.frontend.play_frontend", ending(ends))
    release = fake_release("0.21.0", tmp_path)
    change = Change(name="a.diff", base=release, changed=release, files=[])
    score, *runs = compare_frontend(change, tmp_path, 300.0, print)
    assert (score.trials, score.unfit, runs) == (0, "NameError: c", [{}, {}])


def ending(ends: Iterator[Any]) -> Callable[..., None]:
    """Return a fake of `play_frontend` whose calls raise these errors, or set these attributes."""

    def play(_: Release, search: FrontendSearch, *__: object, **___: object) -> None:
        end = next(ends)
        if isinstance(end, Exception):
            search.unfit = "NameError: c"
            raise end
        for name, value in end.items():
            setattr(search, name, value)

    return play


def test_files_of_the_front_end() -> None:
    assert is_frontend("vllm/tool_parsers/hermes_tool_parser.py")
    assert not is_frontend("vllm/v1/core/sched/scheduler.py")
