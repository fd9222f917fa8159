"""Drawn cases, and the reference."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden_files import missing
from vllm_repro_explore.case import Case, Request, least_blocks
from vllm_repro_explore.draw import MIXES, draw
from vllm_repro_explore.shrink import shrink
from vllm_repro_explore.summary import case_lines

PAGE = Path(__file__).parents[2] / "docs" / "explore.md"
SEEDS = st.integers(min_value=1, max_value=10**6)
MIX = st.sampled_from(sorted(MIXES))


@given(SEEDS, MIX)
def test_a_seed_and_a_mix_are_one_case_which_a_server_could_serve(seed: int, mix: str) -> None:
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
def test_shrinking_drops_features_and_keeps_room_for_the_longest_request(
    seed: int, mix: str
) -> None:
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
