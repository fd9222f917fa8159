"""DeepSeek-V4's workspace: sizes compared with the lab and the report, and the trigger."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.command.parse import parse
from vllm_repro.scenario.catalogue import find
from vllm_repro.trigger.sparse_prefill import (
    Shapes,
    Sizes,
    indexer_bytes,
    lone_bytes,
    longest_that_fits,
    prefill_bytes,
    sparse_prefill_outgrown,
)
from vllm_repro.trigger.trigger import AttentionShape, SentRequest, TriggerFacts, TriggerResult
from vllm_repro_diagnosis.boot_facts import Observation, ScheduledChunk

REPORTED = Sizes(max_model_len=16384, batch=8192, heads=32)
FLAGS = "--max-model-len 16384 --max-num-batched-tokens 8192 -tp 2"
OUTGROWN = sparse_prefill_outgrown()

sizes = st.builds(
    Sizes,
    max_model_len=st.sampled_from([4096, 8192, 16384, 65536]),
    batch=st.integers(128, 16384),
    heads=st.sampled_from([1, 8, 32, 64]),
)
prompts = st.lists(st.integers(1, 4096), min_size=1, max_size=8)
every_shapes = st.sampled_from(Shapes)


def facts(*prompts: int, flags: str = FLAGS, **more: Any) -> TriggerFacts:
    command = parse(f"vllm serve m {flags}")
    asked = tuple(SentRequest(f"chat {number}", tokens) for number, tokens in enumerate(prompts))
    shape = more.pop("shape", AttentionShape(64, 1, 512, 256))
    batch = more.pop("batch", command.number("--max-num-batched-tokens"))
    return TriggerFacts(
        requests=asked, batch=batch, chunked=True, command=command, shape=shape, **more
    )


def prefill(
    tokens: int, asked: int, *, ratio: int = 4, prompts: tuple[int, ...] = ()
) -> Observation:
    sizes = {"bytes": asked, "prompts": list(prompts or (tokens,)), "tokens": tokens}
    return Observation("prefill", {**sizes, "ratio": ratio, "locked": True})


def bars(found: TriggerResult) -> list[tuple[str, list[float]]]:
    return [(one.unit, [amount for _, amount in one.bars]) for one in found.amounts]


@pytest.mark.parametrize(("length", "locked"), [(16384, 22_675_456), (8192, 11_862_016)])
def test_the_indexer_locks_what_the_report_says(length: int, locked: int) -> None:
    assert indexer_bytes(length) == locked


def test_the_branch_asks_for_the_numbers_of_the_report() -> None:
    """A layer without compression needs 21.80 MB for 1,304 tokens and 24.89 MB for 2,007."""
    first = Sizes(16384, 8192, 32, kinds=("sliding",))
    assert prefill_bytes(Shapes.BRANCH, first, [1304]) == 22_856_960
    assert round(prefill_bytes(Shapes.BRANCH, first, [2007]) / 2**20, 2) == 24.89


@pytest.mark.parametrize(
    ("shapes", "given", "fits"),
    [
        (Shapes.RELEASE, REPORTED, 1306),
        (Shapes.BRANCH, REPORTED, 759),
        # a smaller batch needs fewer indices, and hides the bug
        (Shapes.RELEASE, Sizes(16384, 4096, 32), 16384),
        # indices for a batch are more than the indexer's share already
        (Shapes.RELEASE, Sizes(8192, 8192, 32), 1),
        # the second chunk gathers what the first one has compressed
        (Shapes.RELEASE, Sizes(4096, 1574, 32), 3047),
        (Shapes.BRANCH, Sizes(16384, 512, 32), 2023),
    ],
)
def test_the_longest_prompt_that_fits(shapes: Shapes, given: Sizes, fits: int) -> None:
    assert longest_that_fits(shapes, given) == fits


@given(every_shapes, sizes, prompts, st.integers(0, 4095))
def test_a_longer_prompt_never_asks_for_less_alone(
    shapes: Shapes, given: Sizes, some: list[int], more: int
) -> None:
    assert prefill_bytes(shapes, given, [some[0] + more]) >= prefill_bytes(shapes, given, some[:1])


@given(every_shapes, sizes)
def test_the_longest_that_fits_is_the_last_that_does(shapes: Shapes, given: Sizes) -> None:
    fits, locked = longest_that_fits(shapes, given), indexer_bytes(given.max_model_len)
    assert 0 <= fits <= given.max_model_len
    assert fits == 0 or lone_bytes(shapes, given, fits) <= locked
    assert fits == given.max_model_len or lone_bytes(shapes, given, fits + 1) > locked


@pytest.mark.parametrize(
    ("found", "crossed"),
    [
        # Without the lab it is computed for the branch.
        (facts(759), False),
        (facts(760), True),
        # a longer context locks more
        (facts(1304, flags=FLAGS.replace("16384", "65536")), False),
        # cut into pieces that fit
        (facts(2023, flags=FLAGS.replace("8192", "512")), False),
        # the last of which gathers all that is compressed
        (facts(2024, flags=FLAGS.replace("8192", "512")), True),
        # What is not known proves nothing.
        (facts(5000, shape=None), False),
        (facts(5000, flags="--max-num-batched-tokens 8192"), False),
        (facts(5000, flags="--max-model-len 16384", batch=None), False),
        (facts(), False),
    ],
)
def test_the_prefills_that_outgrow_the_workspace(found: TriggerFacts, crossed: bool) -> None:
    assert OUTGROWN.find(found).crossed is crossed


def test_prompts_that_died_in_one_step_are_taken_together() -> None:
    step = tuple(ScheduledChunk(0, 500, new=True) for _ in range(3))
    assert not OUTGROWN.find(facts(500)).crossed
    found = OUTGROWN.find(facts(500, dump=step))
    assert found.crossed == (
        prefill_bytes(Shapes.BRANCH, REPORTED, [500] * 3) > indexer_bytes(16384)
    )
    assert found.evidence[0].startswith("a prefill of 500 and 500 and 500 tokens in one step needs")
    assert OUTGROWN.find(facts()).brief == "no request"


def test_the_lab_has_the_first_word() -> None:
    found = OUTGROWN.find(
        facts(
            1304,
            1307,
            observed=(prefill(20, 21_029_888), prefill(1307, 22_676_480)),
            locked=71_860_224,
        )
    )
    assert (found.crossed, found.brief) == (True, "needs 21.63 MB, 21.62 MB locked")
    assert found.evidence == (
        (
            "seen: a prefill of 1307 tokens requested 22,676,480 bytes in a layer of ratio 4, as"
            " computed from the flags for the shapes of the release: a lone prompt fits up to 1306"
            " tokens"
        ),
        "the indexer alone locks 21.62 MB by --max-model-len 16384",
        "the log reports 68.53 MB locked",
    )
    assert bars(found) == [("MB", [21.63, 21.62, 68.53])]
    assert not OUTGROWN.find(facts(1304, observed=(prefill(1306, 22_675_456),))).crossed


@pytest.mark.parametrize(
    ("step", "end"),
    [
        (prefill(1307, 22_676_736), "the flags give another size for all known shapes"),
        (
            prefill(7, 22_676_736, prompts=(1307,)),
            "7 of them new; the flags give another size for all known shapes",
        ),
        (prefill(7, 22_676_736, prompts=(1307, 1200)), "in a layer of ratio 4, 7 of them new"),
    ],
)
def test_a_size_that_the_flags_do_not_give_is_said_to_be_so(step: Observation, end: str) -> None:
    assert OUTGROWN.find(facts(1307, observed=(step,))).evidence[0].endswith(end)


def test_the_death_says_it_itself() -> None:
    found = OUTGROWN.find(
        facts(
            1304,
            captured={"asked": "21.80", "locked": "21.62"},
            observed=(prefill(1304, 22_856_960, ratio=1),),
        )
    )
    assert (found.crossed, found.brief) == (True, "needs 21.80 MB, 21.62 MB locked")
    assert bars(found) == [("MB", [21.8, 21.62])]
    assert "for the shapes of the branch: a lone prompt fits up to 759 tokens" in found.evidence[1]


def test_the_prompts_of_the_scenario_follow_its_flags() -> None:
    """Near misses are written as numbers there, and would go stale with a flag."""
    scenario = find("dsv4-tp2")
    command = scenario.reported()
    heads = scenario.model.heads // (command.number("--tensor-parallel-size") or 1)
    given = Sizes(
        command.number("--max-model-len") or 0,
        command.number("--max-num-batched-tokens") or 0,
        heads,
    )
    fits = longest_that_fits(Shapes.BRANCH, given)
    sent = {
        arm.name: [getattr(step, "prompt", None) for step in scenario.workload_of(arm)]
        for arm in scenario.arms
    }
    assert (sent["near-miss-759"], sent["near-miss-760"]) == ([fits], [fits + 1])
    fits = longest_that_fits(Shapes.RELEASE, given)
    assert sent["unreserved"][1:] == [fits, fits + 1]
