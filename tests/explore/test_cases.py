"""Cases: drawn, written, sent to the driver, shrunk; and the reference."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden_files import missing
from vllm_repro.errors import UsageError
from vllm_repro.scenario.catalogue import find
from vllm_repro_explore.case import Case, Request, Setup, least_blocks
from vllm_repro_explore.draw import MIXES, draw
from vllm_repro_explore.scenario_setup import draw_for, setup_from
from vllm_repro_explore.shrink import shrink
from vllm_repro_explore.summary import case_lines

PAGE = Path(__file__).parents[2] / "docs" / "explore.md"
SEEDS = st.integers(min_value=1, max_value=10**6)
MIX = st.sampled_from(sorted(MIXES))


@given(SEEDS, MIX)
def test_a_seed_and_a_mix_are_one_case_that_fits_a_server(seed: int, mix: str) -> None:
    case = draw(seed, mix)
    assert case == draw(seed, mix)
    setup = case.setup
    assert setup.blocks >= least_blocks(setup) + setup.draft
    assert setup.chunk >= setup.seqs * (setup.draft + 1)  # vLLM refuses less
    for ask in case.asks:
        assert min(ask.prompt, ask.answer) >= 1
        assert 0 <= ask.shared <= ask.prompt
        assert ask.prompt + ask.answer <= setup.max_len
        assert not (ask.segments and ask.grammar)
    if "mamba" in setup.layers:
        assert setup.hybrid  # vLLM refuses one group of layers


@pytest.mark.parametrize(
    "feature",
    [
        "salt",
        "lora",
        "eos",
        "abort",
        "grammar",
        "reset",
        "draft",
        "threshold",
        "stream",
        "mamba",
        "v2",
    ],
)
@given(seed=SEEDS)
def test_one_feature_more_leaves_the_other_draws_as_they_are(feature: str, seed: int) -> None:
    owned: dict[str, set[str]] = {
        "eos": {"stops"},
        "abort": {"mid"},
        "lora": {"loras"},
        "reset": {"ops"},
    }
    # A session has neither of these, and room for its further parts.
    owned["stream"] = {
        "segments",
        "shared",
        "lora",
        "salt",
        "eos",
        "stops",
        "max_len",
        "blocks",
        "cpu_blocks",
    }
    owned["draft"] = {"chunk", "blocks", "cpu_blocks"}  # a step and the pool have room for drafts
    owned["v2"] = {"runner"}
    owned["mamba"] = {"layers", "hybrid", "blocks", "cpu_blocks"}
    own = owned.get(feature, set()) | {feature}
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for chance in (0.0, 1.0):
            patch.setitem(MIXES, "plain", {"share": 0.6, feature: chance})
            found.append(draw(seed, "plain"))
    without, with_it = found
    pairs: list[tuple[Any, Any]] = [
        (without.setup, with_it.setup),
        *zip(without.asks, with_it.asks, strict=True),
    ]
    for one, other in pairs:
        changed = {name for name, value in asdict(one).items() if value != asdict(other)[name]}
        assert changed <= own


@given(SEEDS, MIX)
def test_shrinking_drops_features_and_keeps_room(seed: int, mix: str) -> None:
    played: list[Case] = []

    def fails(candidate: Case) -> bool:
        played.append(candidate)
        return True

    small = shrink(draw(seed, mix), fails, budget=2000).case
    assert all(one.setup.blocks >= least_blocks(one.setup) + one.setup.draft for one in played)
    setup, (ask,) = small.setup, small.asks
    assert (setup.ops, setup.loras, setup.priority, setup.asynchronous, setup.draft) == (
        (),
        0,
        False,
        False,
        0,
    )
    plain = Request(ask.prompt, ask.answer, number=ask.number, family=ask.family)
    assert ask == plain


def test_a_case_is_written_with_what_it_has_of_features() -> None:
    case = draw(1, "plain")
    ask = replace(
        case.asks[0],
        grammar="json",
        priority=2,
        abort=3,
        mid=True,
        segments=(4, 9),
        fetch=True,
        fails=True,
        images=((0, 4, 1),),
        refused=True,
    )
    setup = replace(
        case.setup, ops=((7, "reset-running"),), loras=1, priority=True, load_failures="recompute"
    )
    text = "\n".join(case_lines(Case(setup, ((ask,),), 1)))
    for words in (
        "priorities",
        "1 LoRA adapters at once",
        "reset-running at step 7",
        "grammar json",
        "priority 2",
    ):
        assert words in text
    assert (
        missing(
            text,
            "a session with more after 4, 9 steps",
            "a failed load: recompute",
            "from a prefill server, which fails",
            "images: 1 of 4 tokens at 0, refused after them",
            "gone within the step after 3",
        )
        == []
    )


@pytest.mark.parametrize(
    ("mix", "connector"),
    [("plain", ""), ("sco-long", "SimpleCPUOffloadConnector"), ("off", "OffloadingConnector")],
)
def test_a_mix_draws_its_connector(mix: str, connector: str) -> None:
    assert {draw(seed, mix).setup.connector for seed in range(1, 6)} == {connector}


def reference() -> Any:
    """Import the reference. It imports numba, for which each worker would wait."""
    from vllm_repro_explore.program.vllm_repro_driver import reference

    return reference


TOKENS = st.deferred(lambda: st.lists(st.sampled_from(reference().TEXT), min_size=1, max_size=80))


@given(TOKENS, st.integers(1, 9), st.data())
def test_a_mamba_layer_hashes_all_tokens_through_one_number(
    tokens: list[int], key: int, data: Any
) -> None:
    whole = reference().states(tokens, key, [0, 0])
    cut = data.draw(st.integers(0, len(tokens)))
    before: list[Any] = [0, 0]
    for start, part in (0, tokens[:cut]), (cut, tokens[cut:]):
        if part:
            values = reference().embed(part, start, key)
            for layer in range(2):
                values, kept = reference().recur(values, before[layer], start, layer)
                before[layer] = kept[-1]
            assert (values == whole[start : start + len(part)]).all()


@given(
    TOKENS,
    st.lists(st.sampled_from([0, 5, 16]), min_size=1, max_size=3),
    st.integers(1, 9),
    st.data(),
)
def test_steps_over_a_cache_compute_what_one_pass_computes(
    tokens: list[int], windows: list[int], key: int, data: Any
) -> None:
    whole = reference().states(tokens, key, windows)
    kept = [reference().np.zeros(len(tokens), dtype="uint64") for _ in windows]
    at = 0
    while at < len(tokens):
        count = data.draw(st.integers(1, len(tokens) - at))
        values = reference().embed(tokens[at : at + count], at, key)
        for layer, window in enumerate(windows):
            kept[layer][at : at + count] = values
            first = max(0, at - window + 1) if window else 0
            values = reference().attend(
                values, kept[layer][first : at + count], first, at, window, layer
            )
        assert (values == whole[at : at + count]).all()
        at += count


@given(TOKENS, st.data())
def test_one_other_token_anywhere_in_reach_is_another_answer(tokens: list[int], data: Any) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    assert reference().states(tokens, 1, [0])[-1] != reference().states(other, 1, [0])[-1]
    assert reference().states(tokens, 1, [0])[-1] != reference().states(tokens, 2, [0])[-1]
    assert reference().pick(reference().states(tokens, 1, [0])[-1]) in reference().TEXT


def test_the_docs_name_every_mix() -> None:
    table = re.findall(r"^\| (`.*?) \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert MIXES.keys() <= {*re.findall(r"`([\w-]+)`", " ".join(table))}


SEEDS = st.integers(min_value=1, max_value=10**6)


def test_the_server_of_a_scenario_is_the_setup() -> None:
    scenario = find("sco-hybrid")
    setup = setup_from(scenario, scenario.arms[0])
    assert (setup.layers, setup.window, setup.block, setup.blocks) == (
        ("full", "sliding"),
        128,
        32,
        330,
    )
    assert (setup.chunk, setup.seqs, setup.max_len) == (2048, 8, 7600)
    assert (setup.connector, setup.lazy, setup.hybrid, setup.cpu_blocks) == (
        "SimpleCPUOffloadConnector",
        False,
        True,
        1320,
    )
    arms = {arm.name: setup_from(scenario, arm) for arm in scenario.arms}
    assert arms["small-cpu-pool"].cpu_blocks == 160
    assert arms["lazy"].lazy
    assert arms["sco-off"].connector == ""
    assert not arms["hybrid-off"].hybrid


def test_unsupported_flags_and_prefill_servers_are_refused() -> None:
    waits = find("sco-window-loads-wait")
    with pytest.raises(UsageError, match="not played: --prefix-cache-retention-interval"):
        setup_from(waits, next(arm for arm in waits.arms if arm.name == "all-kept"))
    fetches = find("nixl-failed-fetch-reserves")
    with pytest.raises(UsageError, match="not played: kv_load_failure_policy"):
        setup_from(fetches, fetches.arms[0])
    readmitted = {
        arm.name: setup_from(find("offloading-readmitted"), arm)
        for arm in find("offloading-readmitted").arms
    }
    assert [readmitted[name].asynchronous for name in ("reported", "synchronous")] == [True, False]
    assert readmitted["reported"].store_polls == 8
    urgent = setup_from(
        find("priority-uncomputed-blocks"), find("priority-uncomputed-blocks").arms[0]
    )
    assert (urgent.priority, urgent.threshold) == (True, 512)
    assert len({ask.priority for seed in range(9) for ask in draw_for(urgent, seed).asks}) == 4


@given(SEEDS)
def test_workloads_for_a_server_fit_it(seed: int) -> None:
    setup = Setup(max_len=300, connector="SimpleCPUOffloadConnector")
    case = draw_for(setup, seed)
    assert case.setup == setup
    for ask in case.asks:
        assert 1 <= ask.prompt <= ask.prompt + ask.answer <= setup.max_len
        assert 0 <= ask.shared <= ask.prompt


@given(SEEDS, st.integers(min_value=8, max_value=400))
def test_shrinking_ends_at_a_smaller_case_that_fails(seed: int, length: int) -> None:
    case = draw(seed, "sco")

    def fails(candidate: Case) -> bool:
        return any(ask.prompt >= length for ask in candidate.asks)

    if not fails(case):
        return
    small = shrink(case, fails, budget=2000)
    assert fails(small.case)
    assert len(small.case.asks) == 1
    assert small.case.asks[0].prompt == length  # the smallest number that still fails, exactly
    assert (small.case.asks[0].answer, small.case.asks[0].abort, small.case.setup.draft) == (
        1,
        -1,
        0,
    )
    assert small.case.setup.max_len == length + 1


def test_what_a_failure_needs_is_kept() -> None:
    waves = ((Request(100, 8, 50), Request(90, 4)), (Request(100, 8, 50),))
    case = Case(Setup(layers=("sliding", "full"), asynchronous=True, runner=2, draft=0), waves, 1)

    def fails(candidate: Case) -> bool:
        shares = sum(ask.shared >= 20 for ask in candidate.asks)
        return (
            candidate.setup.asynchronous and candidate.setup.layers[0] == "sliding" and shares >= 2
        )

    small = shrink(case, fails).case
    assert small.setup.asynchronous
    assert (small.setup.layers, small.setup.runner) == (("sliding", "full"), 1)
    assert [ask.shared for ask in small.asks] == [20, 20]
    assert [ask.prompt for ask in small.asks] == [
        20,
        20,
    ], "no prompt is shorter than what it shares"


@given(SEEDS, st.integers(min_value=8, max_value=400))
def test_every_case_on_the_way_could_be_served(seed: int, length: int) -> None:
    case = draw(seed, "sco")
    blocks, prompt = min(4, case.setup.blocks), min(8, *(ask.prompt for ask in case.asks))
    played: list[Case] = []

    def fails(candidate: Case) -> bool:
        played.append(candidate)
        return any(ask.prompt + ask.shared >= length for ask in candidate.asks)

    shrink(case, fails)
    for candidate in played:
        assert candidate.setup.blocks >= blocks
        for ask in candidate.asks:
            assert ask.prompt >= prompt
            assert 0 <= ask.shared <= ask.prompt
            assert 1 <= ask.answer <= candidate.setup.max_len - ask.prompt


def test_the_budget_is_the_most_that_is_played() -> None:
    played = []

    def fails(candidate: Case) -> bool:
        played.append(candidate)
        return True

    assert shrink(draw(3, "plain"), fails, budget=5).tried == 5 == len(played)


def test_requests_are_sent_in_turn_where_together_is_not_needed() -> None:
    case = Case(Setup(), ((Request(100, 8), Request(90, 8)), (Request(80, 8), Request(70, 8))), 1)
    assert [len(wave) for wave in shrink(case, lambda one: len(one.asks) >= 4).case.waves] == [
        1,
        1,
        1,
        1,
    ]
    beside = shrink(
        case, lambda one: any(len(wave) > 1 for wave in one.waves) and len(one.asks) >= 3
    ).case
    assert sorted(len(wave) for wave in beside.waves) == [1, 2]
