from __future__ import annotations

import pytest

from vllm_repro.command.parse import parse
from vllm_repro.diagnosis.boot_facts import BootFacts, Observed, boot_facts
from vllm_repro.diagnosis.log_text import read_lines
from vllm_repro.trigger.offload_store import offload_outgrown
from vllm_repro.trigger.trigger import SentRequest, TriggerFacts, TriggerResult

COMMAND = parse("vllm serve m --block-size 32 --num-gpu-blocks-override 31")


def find(
    tokens: list[int], boot: BootFacts, *, flags: bool = True, observed: tuple[Observed, ...] = ()
) -> TriggerResult:
    asked = tuple(SentRequest(f"request {number}", one, cached_tokens=0) for number, one in enumerate(tokens))
    facts = TriggerFacts(
        requests=asked, batch=256, chunked=True, command=COMMAND if flags else None, boot=boot, observed=observed
    )
    return offload_outgrown().find(facts)


@pytest.mark.parametrize(
    ("tokens", "room", "crossed"),
    [
        ([400, 400], 16, False),  # 24 blocks: what stands first in line has never been used
        ([320, 320, 320], 16, True),  # exactly 30 blocks
        ([320, 320, 319], 16, False),  # a block that is not full is not copied
        ([400, 400, 400], 30, True),
        ([400, 400, 400], 31, False),  # room for all that the GPU keeps
    ],
)
def test_the_threshold(tokens: list[int], room: int, crossed: bool) -> None:
    assert find(tokens, BootFacts(offload_blocks=room)).crossed is crossed


def test_what_was_cached_filled_nothing_new() -> None:
    asked = (SentRequest("again", 4000, cached_tokens=3968),)
    facts = TriggerFacts(requests=asked, batch=256, chunked=True, command=COMMAND, boot=BootFacts(offload_blocks=16))
    assert not offload_outgrown().find(facts).crossed


def test_the_pool_may_be_known_from_the_log_alone() -> None:
    said = BootFacts(offload_blocks=16, kv_cache_tokens=31 * 16)
    assert find([400, 400], said, flags=False).crossed  # blocks of 16 tokens, unless a flag says otherwise
    unknown = find([400, 400, 400], BootFacts(offload_blocks=16), flags=False)
    assert not unknown.crossed
    assert "how many blocks the GPU's cache has" in unknown.evidence[0]
    assert find([400, 400, 400], BootFacts()).brief == "no connector"


def test_what_the_lab_saw_is_evidence() -> None:
    stores = tuple(Observed("store", {"event": n, "blocks": 5, "distinct": 5, "twice": []}) for n in range(40))
    found = find([400, 400, 400], BootFacts(offload_blocks=16), observed=stores)
    assert found.evidence[-1] == "seen: 40 store events, 200 blocks in all"


@pytest.mark.parametrize(("words", "room"), [("CPU blocks (1.00 GB, mode=lazy)", 12), ("offload blocks (1.00 GB", 12)])
def test_the_room_is_read_from_the_boot_line_of_each_release(words: str, room: int) -> None:
    line = f"INFO 11-22 07:00:00 [manager.py:194] SimpleCPUOffloadScheduler: Allocating 12 {words}\n"
    assert boot_facts(read_lines(line)).offload_blocks == room
