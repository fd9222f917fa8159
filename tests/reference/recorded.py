"""What the recordings hold, as the harness would have it of a trial."""

from __future__ import annotations

from functools import cache

from reference.servers import arm_of
from reference.table import Boot, Recording, Shown, read
from reference.tables import TABLES

from vllm_repro.scenario.catalogue import find
from vllm_repro.trigger.trigger import Asked, AttentionShape, TriggerFacts


@cache
def recording(scenario: str) -> Recording:
    return read(TABLES[scenario].path)


def facts(scenario_id: str, boot: Boot, shown: Shown, number: int) -> TriggerFacts:
    """What the harness knows of the prompt `number` alone, of the flags and of the boot log, without the death's own words."""
    scenario = find(scenario_id)
    assert scenario.lab is not None
    command = scenario.command_in_lab(arm_of(scenario, boot))
    shape = scenario.lab.shape(scenario.model)
    prompt, answer = boot.prompts[number], shown.answers[number]
    earlier = zip(boot.prompts[:number], shown.answers, strict=False)
    head = max((one.shared for one, said in earlier if said.status == 200), default=0)
    asked = Asked(
        f"prompt {number}",
        prompt.tokens,
        cached_tokens=answer.cached,
        repeats=min(prompt.shared, head),
        status=answer.status,
        died=answer.status == 500,
        answer_tokens=prompt.answer,
    )
    return TriggerFacts(
        (asked,),
        command.number("--max-num-batched-tokens"),
        command.enabled("--enable-chunked-prefill"),
        command=command,
        shape=AttentionShape(
            shape.heads, shape.kv_heads, shape.head_dim, scenario.model.block_size, shape.kinds, shape.window
        ),
        locked=locked(shown),
        reserved=any(":_reserve_workspace" in line for line in shown.workspace),
    )


def locked(shown: Shown) -> int | None:
    """Bytes, exact; None where the workspace was never locked."""
    found = [line.removeprefix("locked ") for line in shown.workspace if line.startswith("locked ")]
    return round(float(found[0]) * 2**20) if found else None
