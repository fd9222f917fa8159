"""Cases: drawn, written, sent to the driver, shrunk; and the reference."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.explore.driver_faults import FAULTS, SECOND, plant
from tests.golden_files import missing
from vllm_repro.errors import UsageError
from vllm_repro.scenario.catalogue import find
from vllm_repro_explore import driver
from vllm_repro_explore.case import Case, Request, Setup, least_blocks
from vllm_repro_explore.draw import MIXES, draw
from vllm_repro_explore.scenario_setup import draw_for, setup_from
from vllm_repro_explore.shrink import shrink
from vllm_repro_explore.summary import case_lines

PAGE = driver.PROGRAM.parent / "docs" / "explore.md"
SEEDS = st.integers(min_value=1, max_value=10**6)
MIX = st.sampled_from(sorted(MIXES))


def assert_fits(case: Case) -> None:
    for ask in case.asks:
        assert min(ask.prompt, ask.answer) >= 1
        assert 0 <= ask.shared <= ask.prompt
        most = 1 if case.setup.cut else ask.answer
        assert ask.prompt + most <= case.setup.max_len
        assert ask.follows < ask.number or ask.follows == -1


@given(SEEDS, MIX)
def test_a_seed_and_a_mix_are_one_case_that_fits_a_server(seed: int, mix: str) -> None:
    case = draw(seed, mix)
    assert case == draw(seed, mix)
    assert_fits(case)
    setup = case.setup
    assert setup.blocks >= least_blocks(setup) + setup.draft
    assert setup.chunk >= setup.seqs * (setup.draft + 1)  # vLLM refuses less
    assert not any(ask.segments and ask.grammar for ask in case.asks)
    assert setup.hybrid or "mamba" not in setup.layers  # vLLM refuses one group of layers


MORE_ROOM = {"blocks", "cpu_blocks"}
CHANGED = {
    **{name: {name} for name in ("salt", "grammar", "threshold")},
    "lora": {"lora", "loras"},
    "eos": {"eos", "stops"},
    "repeats": {"eos"},
    "abort": {"abort", "mid"},
    "reset": {"ops"},
    # a step and the pool have room for drafts
    "draft": {"draft", "chunk", *MORE_ROOM},
    # a session has none of the first five, and room for its further parts
    "stream": {"shared", "lora", "salt", "eos", "stops", "segments", "max_len", *MORE_ROOM},
    "mamba": {"layers", "hybrid", *MORE_ROOM},
    "v2": {"runner"},
    "eagle": {"eagle"},
    "stats": {"stats"},
    "chunks": {"chunk_blocks", "cpu_blocks"},
    "cut": {"cut", "max_len", *MORE_ROOM},
    # a chat has its earlier requests' salt, adapter and images
    "chat": {"prompt", "shared", "follows", "max_len", *MORE_ROOM},
}
"""Fields that a feature of a mix may change."""


@pytest.mark.parametrize("feature", CHANGED)
@given(seed=SEEDS)
def test_one_feature_more_leaves_the_other_draws_as_they_are(feature: str, seed: int) -> None:
    cases = []
    with pytest.MonkeyPatch.context() as patch:
        for chance in (0.0, 1.0):
            patch.setitem(MIXES, "plain", {"share": 0.6, feature: chance})
            cases.append(draw(seed, "plain"))
    parts = [[asdict(case.setup), *map(asdict, case.asks)] for case in cases]
    for without, with_it in zip(*parts, strict=True):
        assert {name for name in without if without[name] != with_it[name]} <= CHANGED[feature]


def noting(played: list[Case], condition: Callable[[Case], bool]) -> Callable[[Case], bool]:
    """Return `condition`, which adds each case to `played`."""

    def fails(candidate: Case) -> bool:
        played.append(candidate)
        return condition(candidate)

    return fails


@given(SEEDS, MIX)
def test_shrinking_drops_features_and_keeps_room(seed: int, mix: str) -> None:
    played: list[Case] = []
    small = shrink(draw(seed, mix), noting(played, lambda _: True), budget=2000).case
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
        follows=case.asks[0].number,
        least=3,
    )
    setup = replace(
        case.setup,
        ops=((7, "reset-running"),),
        loras=1,
        priority=True,
        load_failures="recompute",
        cut=True,
        chunk_blocks=2,
        draft=2,
        eagle=True,
        stats=True,
    )
    text = "\n".join(case_lines(Case(setup, ((ask,),), 1)))
    words = (
        "priorities",
        "1 LoRA adapters at once",
        "reset-running at step 7",
        "grammar json",
        "priority 2",
        "a session with more after 4, 9 steps",
        "a failed load: recompute",
        "from a prefill server, which fails",
        "images: 1 of 4 tokens at 0, refused after them",
        "gone within the step after 3",
        "goes on from request 1",
        "least 3",
        "answers may end at that length",
        "offloaded chunks of 2 blocks",
        "2 draft tokens of EAGLE",
        "statistics",
    )
    assert missing(text, *words) == []


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


@pytest.mark.parametrize(
    ("answer", "least", "due"),
    [
        ([900, 2, 901], 0, 2),
        ([900, 20, 901], 0, 2),
        ([900, 901, 902, 901], 0, 0),
        ([900, 901, 901, 901, 901], 0, 4),
        ([900, 901, 901, 901, 901], 5, 5),
        ([900, 901, 900, 901, 900], 0, 0),
        ([900, 901, 900, 901, 900, 901], 0, 6),
    ],
)
def test_after_which_token_an_answer_ends(answer: list[int], least: int, due: int) -> None:
    assert reference().ended(answer, least, stops=True, repeats=True) == due


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


@given(SEEDS)
def test_a_chat_goes_on_from_an_earlier_answer_of_its_kind(seed: int) -> None:
    case = draw(seed, "chat")
    asks = {ask.number: ask for ask in case.asks}
    for ask in (ask for ask in case.asks if ask.follows >= 0):
        before = asks[ask.follows]
        assert before.number < ask.number
        assert (before.salt, before.lora, before.images) == (ask.salt, ask.lora, ask.images)
        assert ask.prompt >= before.prompt
    renumbered = Case.numbered(case.setup, case.waves, 1)
    pairs = zip(case.asks, renumbered.asks, strict=True)
    assert all(
        (old.follows, new.follows) == (-1, -1) or new.follows == old.follows + 1
        for old, new in pairs
    )


@given(SEEDS)
def test_equal_texts_have_other_images_of_the_same_sizes(seed: int) -> None:
    places: dict[tuple[int, int], set[int]] = {}
    for ask in draw(seed, "images-same").asks:
        for offset, tokens, number in ask.images:
            places.setdefault((ask.family, offset), set()).add(tokens)
            assert number < 3 * 4
    assert all(len(sizes) == 1 for sizes in places.values())


def test_the_docs_name_every_mix() -> None:
    table = re.findall(r"^\| (`.*?) \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert MIXES.keys() <= {*re.findall(r"`([\w-]+)`", " ".join(table))}


def test_the_server_of_a_scenario_is_the_setup() -> None:
    scenario = find("sco-hybrid")
    arms = {arm.name: setup_from(scenario, arm) for arm in scenario.arms}
    reported = {
        "layers": ("full", "sliding"),
        "window": 128,
        "block": 32,
        "blocks": 330,
        "chunk": 2048,
        "seqs": 8,
        "max_len": 7600,
        "connector": "SimpleCPUOffloadConnector",
        "lazy": False,
        "hybrid": True,
        "cpu_blocks": 1320,
    }
    setup = asdict(arms["reported"])
    assert {name: setup[name] for name in reported} == reported
    changed = (
        arms["small-cpu-pool"].cpu_blocks,
        arms["lazy"].lazy,
        arms["sco-off"].connector,
        arms["hybrid-off"].hybrid,
    )
    assert changed == (160, True, "", False)


def setups(scenario: str) -> dict[str, Setup]:
    return {arm.name: setup_from(find(scenario), arm) for arm in find(scenario).arms}


@pytest.mark.parametrize(
    ("scenario", "flag"),
    [
        ("sco-window-loads-wait", "--prefix-cache-retention-interval"),
        ("nixl-failed-fetch-reserves", "kv_load_failure_policy"),
    ],
)
def test_unsupported_flags_and_prefill_servers_are_refused(scenario: str, flag: str) -> None:
    with pytest.raises(UsageError, match=f"not played: {flag}"):
        setups(scenario)


def test_options_of_a_scenario_are_played() -> None:
    readmitted = setups("offloading-readmitted")
    assert [readmitted[name].asynchronous for name in ("reported", "synchronous")] == [True, False]
    assert readmitted["reported"].store_polls == 8
    urgent = setups("priority-uncomputed-blocks")["reported"]
    assert (urgent.priority, urgent.threshold) == (True, 512)
    assert len({ask.priority for seed in range(9) for ask in draw_for(urgent, seed).asks}) == 4


@given(SEEDS)
def test_workloads_for_a_server_fit_it(seed: int) -> None:
    setup = Setup(max_len=300, connector="SimpleCPUOffloadConnector")
    case = draw_for(setup, seed)
    assert case.setup == setup
    assert_fits(case)


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
    setup = small.setup
    assert (setup.asynchronous, setup.layers, setup.runner) == (True, ("sliding", "full"), 1)
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
    shrink(case, noting(played, lambda one: any(a.prompt + a.shared >= length for a in one.asks)))
    for candidate in played:
        assert_fits(candidate)
        assert candidate.setup.blocks >= blocks
        assert all(ask.prompt >= prompt for ask in candidate.asks)


def test_the_budget_is_the_most_that_is_played() -> None:
    played: list[Case] = []
    assert shrink(draw(3, "plain"), noting(played, lambda _: True), budget=5).tried == 5
    assert len(played) == 5


def test_a_number_is_lowered_in_one_go() -> None:
    case = Case(Setup(max_len=1100), ((Request(1000, 1),),), 1)
    small = shrink(case, lambda candidate: candidate.asks[0].prompt >= 137, budget=40)
    assert [ask.prompt for ask in small.case.asks] == [137]


def test_waves_before_and_after_the_failing_one_are_dropped() -> None:
    case = Case(Setup(), tuple((Request(prompt, 8),) for prompt in (10, 20, 30, 40)), 1)
    small = shrink(case, lambda candidate: any(ask.prompt >= 30 for ask in candidate.asks)).case
    assert [ask.prompt for ask in small.asks] == [30]


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


@pytest.mark.parametrize("fault", [*FAULTS.values(), *SECOND.values()], ids=[*FAULTS, *SECOND])
def test_each_planted_fault_has_its_line(fault: tuple[str, str, str], tmp_path: Path) -> None:
    program = shutil.copytree(driver.PROGRAM, tmp_path / "program") / "vllm_repro_driver"
    assert plant(program, *fault) in MIXES
