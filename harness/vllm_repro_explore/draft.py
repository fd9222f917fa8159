"""Scenario file of a finding, which sends the same workload to a real server in the lab. Pure."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_repro.releases.sources import WITH
from vllm_repro.scenario.writer import ScenarioWriter, Source, command_text, one_a_line
from vllm_repro_explore.case import Case, Request, Setup, beyond_scheduler, true_texts
from vllm_repro_explore.finding import Finding, FindingKind, known
from vllm_repro_explore.search import Found

KV_BYTES = 256
"""Bytes of one token in one layer of the lab's model.

Keys and values, 2 heads, 32 numbers, 2 bytes each.
"""

_CONNECTORS = ("", "SimpleCPUOffloadConnector", "OffloadingConnector")
"""Connectors that the lab has copies for."""
_POSITIONS = 1_048_576
_SHOWS = {FindingKind.DEATH: "dies", FindingKind.STUCK: "hangs", FindingKind.RESTLESS: "spins"}
"""Word of the scenario file for each finding that a server shows.

The others are invisible from outside.
"""


def unlike_live(case: Case) -> tuple[str, ...]:
    """Return why the lab's server cannot run this case; empty if it can."""
    setup, asks = case.setup, case.asks
    simple = setup.connector == "SimpleCPUOffloadConnector"
    beyond = beyond_scheduler(case.as_json())
    reasons = {
        **{f"no scenario is drafted with {feature}": True for feature in beyond},
        f"the lab has no copies for {setup.connector}": setup.connector not in _CONNECTORS,
        "the lab has no asynchronous scheduling beside SimpleCPUOffloadConnector": (
            simple and setup.asynchronous
        ),
        "the CPU has only the first model runner": setup.runner != 1,
        "in the lab a store takes one step and a load none": (
            simple and (setup.store_polls, setup.load_polls) != (1, 0)
        ),
        "a workload cannot send requests a number of steps apart": any(ask.after for ask in asks),
        "a workload times clients that leave in seconds, not in steps": any(
            ask.abort >= 0 for ask in asks
        ),
    }
    return true_texts(reasons)


def draft_id(finding: Finding, version: str) -> str:
    """Return the scenario id, for example `explored-popleft-n-0-20-2`."""
    name = (
        finding.frames[-1] if finding.kind is FindingKind.DEATH and finding.frames else finding.site
    )
    return re.sub(r"[^a-z0-9]+", "-", f"explored {name} {version}".lower()).strip("-")


def draft(hit: Found, version: str) -> str:
    """Return the text of a finding's scenario file; its status names only the searched release.

    Raises `KeyError` for a kind of finding that a server does not show: any but `DEATH`, `STUCK`
    and `RESTLESS`.
    """
    finding, setup = hit.finding, hit.shrunk.setup
    release = version.partition(WITH)[0]  # a status names no exchanged packages
    file, issue = ScenarioWriter(), re.search(r"vllm-project/vllm#\d+", known(hit.finding))
    sizes = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "layers": len(setup.layers),
        "vocab_size": 4096,
        "block_size": setup.block,
        "max_position": _POSITIONS,
    }
    why = "the bug is in the scheduler, which reads no weights"
    rest = [file.call("rest", within=30)] if finding.kind is FindingKind.RESTLESS else []
    eager = "boots in seconds, because nothing is compiled"
    changes = (
        file.call("with_flags", "--enforce-eager", why=eager),
        file.call("with_flags", "--dtype bfloat16", why="the CPU attention needs it"),
    )
    lab = {
        "mechanism": _mechanism(setup),
        "layers": setup.layers,
        **({"window": setup.window} if "sliding" in setup.layers else {}),
        "why": "the layers of the shrunk case",
        "changes": one_a_line(changes),
    }
    fields = {
        "id": draft_id(finding, version),
        "issue": issue[0] if issue else "vllm-project/vllm#0",
        **({} if issue else {"filed": False}),
        "title": _sentence(finding),
        "command": command_text(_command(setup)),
        "model": file.block("Model", "tiny", **sizes, why=why),
        "needs": file.call("Needs", memory_gb=6),
        "status": file.call("Status", bad=f"=={release}"),
        "try_with": release,
        "workload": one_a_line([*_workload(file, hit.shrunk.waves), *rest]),
        "trigger": file.call("sent_with", "ignore_eos"),
        **_signature(file, finding),
        "arms": [file.call("arm", "reported", file.word(_SHOWS[finding.kind]))],
        "lab": file.block("Lab", **lab),
    }
    for name, value in fields.items():
        file.put(name, value)
    return file.text(
        f"{_sentence(finding)}\n\nFound by a search of vLLM {version} (seed {hit.seed}), then"
        " shrunk.\n"
    )


def _mechanism(setup: Setup) -> str:
    """Return the part of the lab's plugin that this server needs, as in `Lab(mechanism=…)`.

    With `scheduler` vLLM chooses asynchronous scheduling, unless a flag forbids it.
    """
    if setup.connector == "OffloadingConnector":
        return "scheduler"
    return "async" if setup.asynchronous else "offload"


def _sentence(finding: Finding) -> str:
    """Return the scenario's title: what the finding is, in at most 100 characters."""
    text = finding.site if finding.kind is FindingKind.DEATH else f"{finding}"
    text = " ".join(text.replace('"', "'").replace("\\", "/").split())
    return text[:100].rstrip(" .:")


def _command(setup: Setup) -> str:
    """Return the `vllm serve` command with the flags of the setup."""
    asynchronous = setup.asynchronous or _mechanism(setup) != "scheduler"
    draft, transfer = (
        speculative_config(setup.draft),
        transfer_config(setup.connector, _extra(setup)),
    )
    words = {
        "vllm serve tiny": True,
        f"--max-model-len {setup.max_len}": True,
        f"--block-size {setup.block}": True,
        f"--num-gpu-blocks-override {setup.blocks}": True,
        "--enable-chunked-prefill": True,
        f"--max-num-batched-tokens {setup.chunk}": True,
        f"--max-num-seqs {setup.seqs}": True,
        f"--{'' if setup.caching else 'no-'}enable-prefix-caching": True,
        f"--{'no-' if setup.hybrid else ''}disable-hybrid-kv-cache-manager": True,
        "--no-async-scheduling": not asynchronous,
        f"--speculative-config '{json.dumps(draft)}'": setup.draft,
        f"--kv-transfer-config '{json.dumps(transfer)}'": setup.connector,
    }
    return "\n".join(true_texts(words))


def speculative_config(tokens: int) -> dict[str, Any]:
    """Return the value of `--speculative-config` for n-gram drafts of `tokens` tokens."""
    return {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 4}


def transfer_config(connector: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of `--kv-transfer-config`."""
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _extra(setup: Setup) -> dict[str, Any]:
    """Return the `kv_connector_extra_config` of the setup's KV connector."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": setup.cpu_blocks * setup.block * KV_BYTES}
    if setup.lazy and setup.connector == "SimpleCPUOffloadConnector":
        extra["lazy_offload"] = True
    if setup.connector == "OffloadingConnector":
        extra |= {"store_polls": setup.store_polls, "load_polls": setup.load_polls}
    return extra


def _workload(file: ScenarioWriter, waves: Sequence[Sequence[Request]]) -> Iterator[Source]:
    """Yield the scenario's workload: for each wave a request, or a group sent together."""
    numbers = itertools.count(1)
    for wave in waves:
        calls = []
        for ask in wave:
            shared = {"shared": ask.shared} if ask.shared else {}
            size = {"prompt": ask.prompt, **shared, "max_tokens": ask.answer, "ignore_eos": True}
            calls.append(file.call("completion", **size, name=f"request {next(numbers)}"))
        yield calls[0] if len(calls) == 1 else file.block("together", *calls)


def _signature(file: ScenarioWriter, finding: Finding) -> dict[str, Source]:
    """Return the `signature` field of a crash; an empty dict for another kind of finding."""
    if finding.kind is not FindingKind.DEATH:
        return {}
    message = finding.message.replace("{", "{{").replace("}", "}}")
    fields = {
        "phase": "request",
        "exception": finding.exception,
        "message": message,
        **({"source": finding.source} if finding.source and not message else {}),
        "frames": [frame for frame in finding.frames if frame.isidentifier()],
    }
    return {"signature": file.block("signature", **fields)}
