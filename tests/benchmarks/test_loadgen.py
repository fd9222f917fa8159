"""The rig of the load generators: what its server records is what a client receives, and each fault breaks what it should."""

from __future__ import annotations

import pytest
from benchmarks.loadgen.clients import Shape, driven
from benchmarks.loadgen.faults import SHAPE
from benchmarks.loadgen.rig import run
from benchmarks.loadgen.server import KILL_AT

FAST = {"ttft": 20, "itl": 2}


@pytest.mark.parametrize("client", ["ours", "bare"])
def test_a_client_receives_the_tokens_of_the_record_after_they_were_sent(client: str) -> None:
    ran = run(driven(client), Shape(streams=4, requests=12, tokens=20), server=FAST)

    pairs = list(ran.matched())
    assert (ran.status, len(ran.record), len(pairs)) == (0, 12, 12)
    assert len({id(true) for _, true in pairs}) == 12
    for done, true in pairs:
        assert done["sent"] <= true["got"]
        assert len(done["times"]) == len(true["times"]) == 20
        assert all(sent <= received for sent, received in zip(true["times"], done["times"], strict=True))
        assert all(sent >= true["got"] + 0.020 + 0.002 * place for place, sent in enumerate(true["times"]))


def test_unlimited_answers_are_whole() -> None:
    ran = run(driven("ours"), Shape(streams=4, requests=20, tokens=35), server={"burst": 16})

    assert ran.done is not None
    assert [len(one["times"]) for one in ran.done] == [35] * 20
    assert not any(one["error"] for one in ran.done)


@pytest.mark.parametrize("fault", ["cut", "error", "fin", "503"])
def test_our_client_counts_every_answer_that_is_not_whole_as_failed(fault: str) -> None:
    ran = run(driven("ours"), SHAPE, server={**FAST, "fault": fault})

    assert ran.done is not None
    assert ran.status == 1
    assert sum(bool(one["error"]) for one in ran.done) == 6
    assert sum(one["fault"] == fault for one in ran.record) == 6


def test_a_killed_server_leaves_its_record() -> None:
    ran = run(driven("ours"), SHAPE, server={**FAST, "fault": "killed"})

    assert ran.died is not None
    assert ran.died < ran.ended
    assert ran.tokens == KILL_AT


def test_a_stream_that_stalls_never_ends() -> None:
    ran = run(driven("ours"), SHAPE, limit=3, server={**FAST, "fault": "stall"})

    assert ran.status is None
    assert [one["sent"] for one in ran.record if one["fault"]] == [50]
