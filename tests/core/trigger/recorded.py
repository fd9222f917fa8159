"""Results of real vLLM releases for combinations of flags and prompts (`fixtures/reference`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import convert

from vllm_repro.command.command import ServeCommand
from vllm_repro.scenario import catalogue
from vllm_repro.scenario.scenario import Arm
from vllm_repro.scenario.vocabulary import with_flags
from vllm_repro.trigger.trigger import AttentionShape, SentRequest, TriggerFacts
from vllm_repro.verdict.verdict import Expected

_FOLDER = Path(__file__).parents[3] / "fixtures" / "reference"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text completion.

    `shared` tokens at its head are those of every other prompt of its server that shares.
    """

    tokens: int
    shared: int = 0
    answer: int = 4
    beside: bool = False


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Bytes that DeepSeek-V4's attention requested in one layer; `ratio` is its compression."""

    prompts: tuple[int, ...]
    tokens: int
    ratio: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Server:
    """One server in the lab: its flags, its prompts until it died, and their results.

    `answers` holds status and cached tokens of each prompt. `step` holds tokens computed before the
    step that died and scheduled in it. `workspace` holds vLLM's lines about its size. `twice` and
    `lost` are as in `Pool`.
    """

    release: str
    flags: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    arm: str = ""
    outcome: str
    answers: tuple[tuple[int, int | None], ...] = ()
    phase: str | None = None
    exception: str | None = None
    message: str | None = None
    step: tuple[tuple[int, int], ...] = ()
    workspace: tuple[str, ...] = ()
    twice: int = 0
    lost: tuple[int, int, int] | None = None
    prefills: tuple[Prefill, ...] = ()

    @property
    def died(self) -> bool:
        return self.exception is not None

    @property
    def locked(self) -> int | None:
        """The bytes of workspace that were locked; None if it never was."""
        found = [
            line.removeprefix("locked ") for line in self.workspace if line.startswith("locked ")
        ]
        return round(float(found[0]) * 2**20) if found else None

    @property
    def reserved(self) -> bool:
        return any(":_reserve_workspace" in line for line in self.workspace)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Prompts in vLLM's scheduler alone: `prompts` holds tokens of each and of its answer.

    `groups` holds block size and window of each group of layers. `dies` is the request that killed,
    from 1, and `stuck` one that was never answered. `twice` holds the most blocks that one store
    event listed twice, by request. `lost` holds what the counter of free blocks said, what the list
    had, and what was asked for.
    """

    release: str
    blocks: int
    groups: tuple[tuple[int, int], ...]
    chunk: int
    cpu_blocks: int
    caching: bool
    prompts: tuple[tuple[int, int], ...]
    dies: int = 0
    stuck: int = 0
    message: str = ""
    twice: tuple[int, ...] = ()
    lost: tuple[int, int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Size:
    """A pool of DeepSeek-V4's layers, and what a release logs as its size.

    `pages` holds the bytes of a block of each group.
    """

    release: str
    ratios: tuple[int, ...]
    blocks: int
    longest: int
    batch: int
    tokens: int
    groups: tuple[tuple[int, int], ...]
    pages: tuple[int, ...]
    block_bytes: int


@cache
def servers(scenario: str) -> tuple[Server, ...]:
    """Return the recorded servers of a scenario."""
    rows = _rows(scenario)["servers"]
    for row in rows:
        row["answers"] = [(answer["status"], answer["cached"]) for answer in row.get("answers", ())]
    return convert(rows, tuple[Server, ...])


@cache
def pools() -> tuple[Pool, ...]:
    """Return the pools that vLLM's scheduler was given."""
    return convert(_rows("sco-hybrid")["pools"], tuple[Pool, ...])


def sizes() -> tuple[Size, ...]:
    """Return the sizes that releases log."""
    return convert(_rows("sco-hybrid")["sizes"], tuple[Size, ...])


def _rows(scenario: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_FOLDER / f"{scenario}.json").read_text(encoding="utf-8"))
    return found


find = cache(catalogue.find)


@cache
def command_of(scenario_id: str, server: Server) -> ServeCommand:
    """Return the command that the server was started with in the lab."""
    scenario = find(scenario_id)
    base = scenario.arm(server.arm) if server.arm else None
    edits = [edit.in_lab or edit for edit in base.edits] if base else []
    return scenario.command_in_lab(
        Arm("recorded", Expected.UNTRIGGERED, (*edits, with_flags(*server.flags)))
    )


def facts(scenario_id: str, server: Server, number: int) -> TriggerFacts:
    """Return the facts of prompt `number`, flags and boot log, without the message of the crash."""
    scenario, command = find(scenario_id), command_of(scenario_id, server)
    assert scenario.lab is not None
    shape = scenario.lab.shape(scenario.model)
    prompt, (status, cached) = server.prompts[number], server.answers[number]
    earlier = zip(server.prompts[:number], server.answers, strict=False)
    head = max((one.shared for one, (answered, _) in earlier if answered == 200), default=0)
    asked = SentRequest(
        f"prompt {number}",
        prompt.tokens,
        cached_tokens=cached,
        repeats=min(prompt.shared, head),
        status=status,
        died=status == 500,
        answer_tokens=prompt.answer,
    )
    return TriggerFacts(
        requests=(asked,),
        batch=command.number("--max-num-batched-tokens"),
        chunked=command.enabled("--enable-chunked-prefill"),
        command=command,
        shape=AttentionShape(
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            scenario.model.block_size,
            shape.kinds,
            shape.window,
        ),
        locked=server.locked,
        reserved=server.reserved,
    )
