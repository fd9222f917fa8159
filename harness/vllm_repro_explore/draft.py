"""Scenario file of a finding, which sends the same workload to a real server in the lab. Pure."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence

from vllm_repro.scenario.writer import ScenarioWriter, Source, command_text, one_a_line
from vllm_repro_explore.case import Case, Request, Setup, beyond_scheduler
from vllm_repro_explore.finding import Finding, FindingKind, known
from vllm_repro_explore.search import Found

__all__ = ["draft", "draft_id", "unlike_live"]

KV_BYTES = 256
"""Bytes of one token in one layer of the lab's model: keys and values, 2 heads, 32 numbers, 2 bytes each."""

_CONNECTORS = ("", "SimpleCPUOffloadConnector", "OffloadingConnector")
"""Connectors that the lab has copies for."""
_POSITIONS = 1_048_576
_SHOWS = {FindingKind.DEATH: "dies", FindingKind.STUCK: "hangs", FindingKind.RESTLESS: "spins"}
"""Word of the scenario file for each finding that a server shows.

The others are invisible from outside.
"""


def unlike_live(case: Case) -> tuple[str, ...]:
    """Return why the lab's server cannot run this case; empty if it can."""
    setup = case.setup
    reasons = {f"no scenario is drafted with {feature}": True for feature in beyond_scheduler(case.as_json())} | {
        f"the lab has no copies for {setup.connector}": setup.connector not in _CONNECTORS,
        "the lab has no asynchronous scheduling beside SimpleCPUOffloadConnector": (
            setup.asynchronous and setup.connector == "SimpleCPUOffloadConnector"
        ),
        "the CPU has only the first model runner": setup.runner != 1,
        "in the lab a store takes one step and a load none": (
            setup.connector == "SimpleCPUOffloadConnector" and (setup.store_polls, setup.load_polls) != (1, 0)
        ),
        "a workload cannot send requests a number of steps apart": any(ask.after for ask in case.asks),
        "a workload times clients that leave in seconds, not in steps": any(ask.abort >= 0 for ask in case.asks),
    }  # fmt: skip
    return tuple(reason for reason, holds in reasons.items() if holds)


def draft_id(finding: Finding, version: str) -> str:
    """Return the scenario id, for example `explored-popleft-n-0-20-2`."""
    name = (
        finding.frames[-1] if finding.kind is FindingKind.DEATH and finding.frames else finding.site
    )
    return re.sub(r"[^a-z0-9]+", "-", f"explored {name} {version}".lower()).strip("-")


def draft(found: Found, version: str) -> str:
    """Return the text of the scenario file. Its status names only the release that was searched."""
    case, finding = found.shrunk, found.finding
    file, setup = ScenarioWriter(), case.setup
    issue = re.search(r"vllm-project/vllm#\d+", known(finding))
    file.put("id", draft_id(finding, version))
    file.put("issue", issue[0] if issue else "vllm-project/vllm#0")
    if not issue:
        file.put("filed", False)
    file.put("title", _sentence(finding))
    file.put("command", command_text("\n".join(_command(setup))))
    sizes = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "layers": len(setup.layers),
        "vocab_size": 4096,
    }
    sizes |= {"block_size": setup.block, "max_position": _POSITIONS}
    why = "the bug is in the scheduler, which reads no weights"
    file.put("model", file.block("Model", "tiny", **sizes, why=why))
    file.put("needs", file.call("Needs", memory_gb=6))
    file.put("status", file.call("Status", bad=f"=={version}"))
    file.put("try_with", version)
    rest = [file.call("rest", within=30)] if finding.kind is FindingKind.RESTLESS else []
    file.put("workload", one_a_line([*_workload(file, case.waves), *rest]))
    file.put("trigger", file.call("sent_with", "ignore_eos"))
    if finding.kind is FindingKind.DEATH:
        file.put("signature", file.block("signature", **_signature(finding)))
    file.put("arms", [file.call("arm", "reported", file.word(_SHOWS[finding.kind]))])
    changes = (
        file.call(
            "with_flags", "--enforce-eager", why="boots in seconds, because nothing is compiled"
        ),
        file.call("with_flags", "--dtype bfloat16", why="the CPU attention needs it"),
    )
    window = {"window": setup.window} if "sliding" in setup.layers else {}
    layers = {"mechanism": _mechanism(setup), "layers": setup.layers, **window}
    file.put(
        "lab",
        file.block(
            "Lab", **layers, why="the layers of the shrunk case", changes=one_a_line(changes)
        ),
    )
    return file.text(
        f"{_sentence(finding)}\n\nFound by a search of vLLM {version} (seed {found.seed}), then"
        " shrunk.\n"
    )


def _mechanism(setup: Setup) -> str:
    """Return the mechanism of the lab.

    With `scheduler` vLLM chooses asynchronous scheduling, unless a flag forbids it.
    """
    if setup.connector == "OffloadingConnector":
        return "scheduler"
    return "async" if setup.asynchronous else "offload"


def _sentence(finding: Finding) -> str:
    text = re.sub(
        r"\s+",
        " ",
        finding.site if finding.kind is FindingKind.DEATH else f"{finding.kind}: {finding.site}",
    )
    return text.replace('"', "'").replace("\\", "/")[:100].rstrip(" .:")


def _command(setup: Setup) -> Iterator[str]:
    yield "vllm serve tiny"
    yield f"--max-model-len {setup.max_len}"
    yield f"--block-size {setup.block}"
    yield f"--num-gpu-blocks-override {setup.blocks}"
    yield "--enable-chunked-prefill"
    yield f"--max-num-batched-tokens {setup.chunk}"
    yield f"--max-num-seqs {setup.seqs}"
    yield "--enable-prefix-caching" if setup.caching else "--no-enable-prefix-caching"
    yield (
        "--no-disable-hybrid-kv-cache-manager"
        if setup.hybrid
        else "--disable-hybrid-kv-cache-manager"
    )
    if _mechanism(setup) == "scheduler" and not setup.asynchronous:
        yield "--no-async-scheduling"
    if setup.draft:
        config = {"method": "ngram", "num_speculative_tokens": setup.draft, "prompt_lookup_max": 4}
        yield f"--speculative-config '{json.dumps(config)}'"
    if setup.connector:
        extra: dict[str, object] = {"cpu_bytes_to_use": setup.cpu_blocks * setup.block * KV_BYTES}
        if setup.lazy and setup.connector == "SimpleCPUOffloadConnector":
            extra["lazy_offload"] = True
        if setup.connector == "OffloadingConnector":
            extra |= {"store_polls": setup.store_polls, "load_polls": setup.load_polls}
        config = {
            "kv_connector": setup.connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        yield f"--kv-transfer-config '{json.dumps(config)}'"


def _workload(file: ScenarioWriter, waves: Sequence[Sequence[Request]]) -> Iterator[Source]:
    numbers = itertools.count(1)
    for wave in waves:
        calls = []
        for ask in wave:
            size = {
                "prompt": ask.prompt,
                **({"shared": ask.shared} if ask.shared else {}),
                "max_tokens": ask.answer,
            }
            calls.append(
                file.call("completion", **size, ignore_eos=True, name=f"request {next(numbers)}")
            )
        yield calls[0] if len(calls) == 1 else file.block("together", *calls)


def _signature(finding: Finding) -> dict[str, object]:
    """Return the arguments of `signature`."""
    message = finding.message.replace("{", "{{").replace("}", "}}")
    source = {"source": finding.source} if finding.source and not message else {}
    frames = [frame for frame in finding.frames if frame.isidentifier()]
    return {
        "phase": "request",
        "exception": finding.exception,
        "message": message,
        **source,
        "frames": frames,
    }
