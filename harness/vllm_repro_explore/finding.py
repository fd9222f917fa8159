"""Result of a played case, and when two findings are the same. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_repro_diagnosis.canonical import shorten, squeeze


class FindingKind(StrEnum):
    """Kind of failure that a case can show, worst first."""

    DEATH = "death"  # an exception that would have ended EngineCore
    STUCK = "stuck"  # requests wait and nothing progresses
    CORRUPTED = "corrupted"  # block accounting or KV content is wrong, and the engine goes on
    LEAK = "leak"  # no request runs, and blocks are still held
    RESTLESS = "restless"  # no request is left, and the engine goes on stepping
    HARNESS = "harness"  # the search itself failed: nothing about vLLM


_BY_KIND = list(FindingKind)
ENDLESS = "one step never ends"
_COUNTS = (
    "preempted",
    "hits",
    "stores",
    "loads",
    "resumed",
    "accepted",
    "masked",
    "aborted",
    "resets",
    "refused calls",
    "pauses",
    "fed",
    "refused requests",
    "errors",
)
_MILD = (
    *("store-listed-twice", "load-listed-twice"),
    *("events-missing", "events-early", "events-counted", "events-tokens"),
)
"""Invariants that harm less than others of their kind, or come with them; the worst first."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that went wrong while a case ran; kind and site identify it."""

    kind: FindingKind
    # identity of the finding: an invariant, or where the exception was raised
    site: str
    # what was observed in this case
    detail: str = field(default="", compare=False)
    exception: str = field(default="", compare=False)
    message: str = field(default="", compare=False)
    # source line that raised the exception
    source: str = field(default="", compare=False)
    # vLLM functions of the traceback, outermost first
    frames: tuple[str, ...] = field(default=(), compare=False)
    # file and line of vLLM where the exception was raised
    place: str = field(default="", compare=False)

    @property
    def rank(self) -> tuple[int, int]:
        """Return the sort key; smaller is worse."""
        mild = _MILD.index(self.site) + 1 if self.site in _MILD else 0
        return _BY_KIND.index(self.kind), mild

    def __str__(self) -> str:
        return f"{self.kind}: {self.site}"


@dataclass(frozen=True, kw_only=True)
class PlayResult:
    """Result of running one case: its findings, or why vLLM refused its flags."""

    findings: tuple[Finding, ...] = ()
    # why vLLM refuses to start with these flags; empty if it starts
    invalid: str = ""
    steps: int = 0
    # events that the case reached, such as `preempted`
    counts: Mapping[str, int] = field(default_factory=dict)
    # prompt tokens that new requests found in the prefix cache
    cached_tokens: int = 0
    # CPU time of vLLM's own code in the steps, in microseconds
    vllm_us: float = 0.0
    # how often each probe of `program/vllm_repro_driver/probe.py` was passed
    reached: Mapping[int, int] = field(default_factory=dict)

    @property
    def worst(self) -> Finding | None:
        """Return the worst finding; None if nothing went wrong."""
        return min(self.findings, key=lambda finding: finding.rank, default=None)


def result_from(answer: Mapping[str, Any]) -> PlayResult:
    """Return a case's result from the JSON object that the driver printed for it."""
    findings = [] if answer.get("death") is None else [_death(answer["death"])]
    for broken in answer.get("broken", ()):
        name = broken["invariant"]
        kind = FindingKind.LEAK if name.endswith("-leak") else FindingKind.CORRUPTED
        findings.append(Finding(kind=kind, site=name, detail=broken["detail"]))
    return PlayResult(
        findings=tuple(findings),
        invalid=answer.get("invalid", ""),
        steps=answer.get("steps", 0),
        counts={name: answer[name] for name in _COUNTS if name in answer},
        cached_tokens=answer.get("cached tokens", 0),
        vllm_us=answer.get("vllm_us", 0.0),
        reached={int(probe): count for probe, count in answer.get("reached", {}).items()},
    )


def _death(death: Mapping[str, Any]) -> Finding:
    """Return the finding of the driver's `death` object: an exception, or no progress."""
    kind = FindingKind(death["kind"])
    if kind in (FindingKind.RESTLESS, FindingKind.STUCK):
        restless = "no request is left, and the engine goes on"
        site = restless if kind is FindingKind.RESTLESS else f"requests stay {death['states']}"
        return Finding(kind=kind, site=site, detail=death["detail"])
    message = death["message"]
    where = f"{death['exception']} in {death['function']} ({death['file']})"
    return Finding(
        kind=kind,
        site=f"{where}: {template(message) or death['source']}",
        detail=f"{death['exception']}: {message or death['source']}",
        exception=death["exception"],
        message=message,
        source=death["source"],
        frames=tuple(death["frames"]),
        place=f"{death['file']}:{death['line']}" if death.get("line") else "",
    )


_KNOWN: Sequence[tuple[str, str]] = (
    (
        "store-listed-twice",
        (
            "vllm-project/vllm#42085: a store event lists a block twice; from 0.24.0 on it is freed"
            " once"
        ),
    ),
    (
        "popleft_n (vllm/v1/core/kv_cache_utils.py): assert curr_block is not None",
        "vllm-project/vllm#42085",
    ),
    (
        "append_n (vllm/v1/core/kv_cache_utils.py): prev_free_block",
        "vllm-project/vllm#42085, seen as vllm-project/vllm#42571",
    ),
    (
        "get_new_blocks (vllm/v1/core/block_pool.py): assert block.ref_cnt == 0",
        "vllm-project/vllm#42085",
    ),
    ('Rule "root" is defined multiple times', "vllm-project/vllm#43920"),
    *(
        (part, "vllm-project/vllm#43920, if a grammar passes the API server's check")
        for part in ('Rule "missing" is not defined', "Rule 'missing' not found")
    ),
    (
        (
            "update_state_after_alloc "
            "(vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py): "
            "num_locally_computed_tokens"
        ),
        "vllm-project/vllm#43884",
    ),
    ("assert not req_status.transfer_jobs", "vllm-project/vllm#46014"),
    ("KeyError in _remove_pending_job", "vllm-project/vllm#42761"),
    (
        "assert self._jobs[any_jid].is_store",
        "no report found; the scenario offloading-reset-running",
    ),
    ("assert num_new_tokens > 0", "vllm-project/vllm#44526, or vllm-project/vllm#53706 with NIXL"),
    (
        "assert request.num_output_placeholders >= 0",
        "vllm-project/vllm#35755; vllm-project/vllm#57562 has the same frames",
    ),
    (
        "in _update_from_kv_xfer_finished (vllm/v1/core/sched/scheduler.py): assert req_id in",
        "vllm-project/vllm#46240; the scenario kv-abort-reported-twice",
    ),
    ("after a rejected load", "vllm-project/vllm#49250"),
    ("events-tokens", "vllm-project/vllm#44451"),
    ("events-early", "vllm-project/vllm#55092; routers that count copies are right"),
    (
        "fetched without the first token of a window",
        "no report found; the scenario nixl-fetch-loses-token",
    ),
    ("Encoder cache miss", "no report found; the scenario image-resumed-without-data"),
    ("computes-asleep", "no report found; drafted in reports/evidence/sleep-gaps-cpu-0.33.0"),
    (
        "in reset_prefix_cache (vllm/v1/core/sched/scheduler.py): Failed to reset KV cache",
        "no report found; 0.32.0 answers the pause with an error",
    ),
    ("gpu-free-count", "vllm-project/vllm#42085 before the death"),
    (
        "requests stay WAITING, WAITING_FOR_REMOTE_KVS",
        (
            "the standstill of vllm-project/vllm#45388 and vllm-project/vllm#53868; with NIXL the "
            "scenario nixl-failed-fetch-waits"
        ),
    ),
)


def known(finding: Finding) -> str:
    """Return what is known of a finding: its upstream issue, or the scenario that has it.

    Return an empty text if nothing is known.
    """
    return next((what for part, what in _KNOWN if part in finding.site), "")


# Identifiers come before numbers, so that deepseek_v4_attention.py, fp8 and v1/worker keep their
# digits.
_MASKS = re.compile(
    r"(?P<place>(?P<file>[\w./\\-]{0,200}\w\.pyx?):\d+(?=:|\b))"
    r"|(?P<bytes>\bb(?:'(?:[^'\\]|\\.)*'?|\"(?:[^\"\\]|\\.)*\"?))"
    r"|(?P<memory>0x[0-9A-Fa-f]+)"
    r"|(?P<address>\b\d{1,3}(?:\.\d{1,3}){3}(?:\]?:\d+)?)"
    r"|(?P<request>\b(?:chatcmpl|cmpl|req)-[\w-]+)"
    r"|(?P<uuid>\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b)"
    r"|(?P<path>(?<![\w.}])/(?:[\w.+@-]{1,255}/){1,60}[\w.+@-]+)"
    r"|(?P<word>[^\W\d][\w]*(?:[./\\-]\w+){0,40})"
    r"|(?P<number>(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?"
    r"(?:\s?(?:[KMGT]i?B|[Bb]ytes?|%|ms|s)(?!\w))?)"
)
_DIGEST = re.compile(r"(?=[0-9a-f]*\d)[0-9a-f]{12,}")


_MASKED = {
    "bytes": "{bytes}",
    "memory": "{hex}",
    "address": "{address}",
    "request": "{request}",
    "uuid": "{id}",
}


def template(message: str) -> str:
    """Return the message with the parts masked that differ between two prints of one bug.

    These are numbers with their units, addresses, ids and line numbers. Paths are shortened.
    """
    return _MASKS.sub(_mask, squeeze(message))


def _mask(match: re.Match[str]) -> str:
    """Return the placeholder for a matched part of a message, or the part as it is."""
    kind, text = match.lastgroup or "", match[0]
    match kind:
        case "place":
            return f"{shorten(match['file'])}:{{line}}"
        case "path":
            return shorten(text)
        case "word":
            return "{hex}" if _DIGEST.fullmatch(text) else text
    return _MASKED.get(kind, "{n}")
