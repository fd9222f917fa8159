"""The rig of the load generators: what its server records is what a client receives."""

from __future__ import annotations

import pytest
from benchmarks.loadgen.rig import Shape, driven, run


@pytest.mark.parametrize("client", ["ours", "bare"])
def test_a_client_receives_the_recorded_tokens(client: str) -> None:
    ran = run(driven(client), Shape(streams=4, requests=12, tokens=20), ttft=0.02, itl=0.002)

    pairs = list(ran.matched())
    assert (len(ran.record), len(pairs)) == (12, 12)
    assert len({id(true) for _, true in pairs}) == 12
    for done, true in pairs:
        assert done["sent"] <= true["got"]
        assert len(done["times"]) == len(true["times"]) == 20
        assert all(
            sent <= received for sent, received in zip(true["times"], done["times"], strict=True)
        )
        assert all(
            sent >= true["got"] + 0.020 + 0.002 * place for place, sent in enumerate(true["times"])
        )
    assert len(ran.ttft_errors()) == 12
    assert len(ran.itl_errors()) == 12 * 19
    assert ran.cpu_s > 0
