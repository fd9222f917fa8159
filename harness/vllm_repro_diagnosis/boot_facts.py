"""Facts that a server's log states: boot, scheduler dump at a death, observations of our plugins.

They prove triggers: graphs were captured (only then is the workspace locked), the attention backend
in use, whether the step that died resumed a prompt. This module knows the wordings of all releases
from 0.19 on.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.log_text import Line


@dataclass(frozen=True, kw_only=True)
class BootFacts:
    """Facts that a log states about a boot. One that it does not state keeps its default."""

    # as the server prints it, nightlies with their commit (`0.20.2rc1.dev35+g4845aee6b`)
    vllm_version: str | None = None
    attention_backend: str | None = None
    # capacity of the KV cache
    kv_cache_tokens: int | None = None
    # the capture finished, so the workspace was locked after it
    graphs_captured: bool = False
    # `NONE`, `FULL_AND_PIECEWISE`, …
    cudagraph_mode: str | None = None
    enforce_eager: bool | None = None
    # this and the next: as EngineCore uses them, whatever the API server printed before
    chunked_prefill: bool | None = None
    prefix_caching: bool | None = None
    # largest chunk of a prompt in one step
    max_num_batched_tokens: int | None = None
    # bytes, as VLLM_DEBUG_WORKSPACE=1 prints them; the largest of several workspaces
    workspace_locked: int | None = None
    # a backend reserved room in the workspace before the first request
    workspace_reserved: bool = False
    # blocks that the simple CPU offload connector holds
    offload_blocks: int | None = None
    # the name of the architecture is one of a mixture of experts
    experts: bool = False
    # the "non-default args" line as Python values
    args: Mapping[str, object] = field(default_factory=dict)
    ready: bool = False


@dataclass(frozen=True)
class ScheduledChunk:
    """One request of the step in which an engine crashed, from the dump in its log."""

    # tokens before the step; 0 if not printed
    computed: int
    # tokens in the step; 0 if not printed
    scheduled: int
    # the request's first step, so `computed` came from the prefix cache
    new: bool = False
    # the request's first step after a preemption
    resumed: bool = False


@dataclass(frozen=True)
class Observation:
    """One observation that our plugin printed inside the engine."""

    # such as "store"
    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SharedStep:
    """One step of several prompts, or chunks of prompts, from vLLM's log of iterations."""

    prompts: int
    # of all prompts together
    tokens: int


_VERSION = r"v?(\d+\.\d+[\w.+-]*\w)"
_VERSIONS = (
    re.compile(rf"Initializing an? (?:V[01] )?LLM engine \({_VERSION}\)"),
    re.compile(rf"Dumping input data for V1 LLM engine \({_VERSION}\)"),
    re.compile(rf"Launching vLLM \({_VERSION}\)"),
    re.compile(rf"^[ ▄▀█]*version {_VERSION}$"),
    re.compile(rf"vLLM API server version {_VERSION}"),
)
_STATED = re.compile(rf"\bvLLM(?: version)?\s*: {_VERSION}", re.IGNORECASE)
"""The release in the output of `collect_env`, or in a reporter's prose."""
_NAMED = re.compile(
    r"(?:\bvllm(?:-openai)?(?: version| release)?[ :=(]{0,3}(?:v|(?<=[ :=(]))|(?<![\w./:-])v)"
    r"([01]\.\d{1,2}\.\d{1,2}(?:[\w+-]|\.(?=\w))*)",
    re.IGNORECASE,
)
"""A release in a sentence, a requirement or an image: `vLLM 0.25.1`, `v0.25.1`, `vllm==0.25.1`."""
_OTHER_RELEASE = re.compile(
    r"(?i)\b(?:works?|worked|working|fine|ok|downgrad\w*|roll\w* back|before|until|previous\w*"
    r"|earlier|older|unaffected|fixed|not in|no longer|(?:upgrad|updat|switch|mov)\w* from"
    r"|(?:not|n't) (?:happen|occur|reproduc|crash|fail|die|hang|affect)\w*)\b"
)
"""Words beside a release that is not the reporter's, or that lives."""
_CHUNKED = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
_IN_FORCE = re.compile(r"\benable_(chunked_prefill|prefix_caching)=(True|False)\b")


def _last_group(match: re.Match[str]) -> str:
    """Return the group that matched, of a pattern with one group for each wording."""
    return match[match.lastindex or 0]


_FACTS: tuple[tuple[str, re.Pattern[str], str, Callable[[re.Match[str]], object]], ...] = (
    (
        "backend",
        re.compile(
            r"Using (\w+) attention backend|KV cache layout for (\w+) backend"
            r"|Using (Flash Attention|Triton|FlashInfer) backend"
        ),
        "attention_backend",
        _last_group,
    ),
    (
        "KV cache size",
        re.compile(r"KV cache size\s*[:=] ?(\d[\d,]*) tokens"),
        "kv_cache_tokens",
        lambda match: int(match[1].replace(",", "")),
    ),
    (
        "cudagraph_mode",
        re.compile(r"'cudagraph_mode': (?:<CUDAGraphMode\.(\w+)|'(\w+)')"),
        "cudagraph_mode",
        _last_group,
    ),
    (
        "WORKSPACE DEBUG",
        re.compile(r"Workspace locked\. Current sizes: \[([\d., e+-]*)\]"),
        "workspace_locked",
        lambda match: _locked_bytes(match[1]),
    ),
    (
        "WORKSPACE DEBUG",
        re.compile(":_reserve_workspace'"),
        "workspace_reserved",
        lambda _: True,
    ),
    (
        "SimpleCPUOffload",
        re.compile(r"SimpleCPUOffloadScheduler: Allocating (\d+) (?:CPU|offload) blocks"),
        "offload_blocks",
        lambda match: int(match[1]),
    ),
    (
        "Resolved architecture",
        re.compile(
            r"Resolved architecture: \w*(?:Moe|MoE|MOE|Mixtral|Deepseek(?:V[2-9]|MTP)|GptOss|Llama4"
            r"|MiniMaxM|KimiK|Qwen3Next|Dbrx)"
        ),
        "experts",
        lambda _: True,
    ),
)
"""A fixed word in the line, the pattern to search then, the fact, and its value."""
_STATEMENTS: tuple[tuple[str, str, bool], ...] = (
    ("Graph capturing finished", "graphs_captured", True),
    ("Enforce eager set", "enforce_eager", True),
    ("enforce_eager=True", "enforce_eager", True),
    ("enforce_eager=False", "enforce_eager", False),
    ("Application startup complete", "ready", True),
)
"""A text in the line, the fact, and its value."""
_ARGS = re.compile(r"non-default args: (\{.*\})\s*$")
_DEVICE = re.compile(r"\bLLM engine \(v.*?\bdevice_config=(\w+)")
_DEVICES = {"cpu": Evidence.CPU, "cuda": Evidence.GPU}
_SIMULATED = {
    "REHEARSAL engine of vllm-repro": Evidence.REHEARSAL,
    "SCHEDULER ONLY: vllm_repro_lab": Evidence.SCHEDULER,
    "LAB: vllm_repro_lab": Evidence.LAB,
    "LAB observed ": Evidence.LAB,
}
_MARKS = tuple(_SIMULATED)
EVIDENCE_WORDS = {
    **_SIMULATED,
    **{f"device_config={device}": evidence for device, evidence in _DEVICES.items()},
}
"""Words in the lines that show a server's kind of evidence."""


def _locked_bytes(sizes_mb: str) -> int:
    """Return the bytes of the largest workspace in a comma-separated list of sizes in MB."""
    sizes = [float(size) for size in sizes_mb.split(",") if size.strip()]
    return round(max(sizes, default=0.0) * 1024 * 1024)


class BootReader:
    """Collector of `BootFacts` from lines.

    The first statement of a fact counts: other processes repeat it. Of chunked prefill, prefix
    caching and `max_num_batched_tokens` the last statement of what is in force counts.
    """

    def __init__(self) -> None:
        # kind of evidence that the lines so far show
        self.evidence = Evidence.UNKNOWN
        self._facts: dict[str, object] = {}
        self._stated: str | None = None

    def feed(self, line: Line) -> None:
        """Take one line, and note the facts and the kind of evidence that it states."""
        text = line.text
        if (
            text.startswith(_MARKS) and self.evidence is not Evidence.SCHEDULER
        ):  # which observes as the lab does
            self.evidence = next(
                evidence for mark, evidence in _SIMULATED.items() if text.startswith(mark)
            )
        # Test for a fixed word before each search: nearly every line of a long log has none.
        if "vllm_version" not in self._facts and ("LLM" in text or "ersion" in text):
            printed = next(filter(None, (version.search(text) for version in _VERSIONS)), None)
            self._set("vllm_version", printed and printed[1])
        prose = not line.level and not line.process
        if prose and self._stated is None and ("LLM" in text or "v0." in text or "vllm" in text):
            other = _OTHER_RELEASE.search(text) is not None
            stated = _STATED.search(text) or (None if other else _NAMED.search(text))
            self._stated = stated and stated[1]
        for word, pattern, name, value_of in _FACTS:
            if word in text and (match := pattern.search(text)):
                self._set(name, value_of(match))
        for words, name, value in _STATEMENTS:
            if words in text:
                self._set(name, value)
        if "Chunked prefill" in text and (match := _CHUNKED.search(text)):
            self._set("chunked_prefill", True)
            self._facts["max_num_batched_tokens"] = int(
                match[1]
            )  # in force, whatever the arguments asked for
        if "LLM engine" in text:
            # The CPU platform turns both off for some models, after the API server printed that
            # chunks are on.
            self._facts.update((match[1], match[2] == "True") for match in _IN_FORCE.finditer(text))
            if self.evidence is Evidence.UNKNOWN and (match := _DEVICE.search(text)):
                self.evidence = _DEVICES.get(match[1], Evidence.UNKNOWN)
        if (
            (at := text.find("non-default args: ")) >= 0
            and (match := _ARGS.match(text, at))
            and (args := _args_in(match[1]))
        ):
            self._set("args", args)
            if isinstance(batched := args.get("max_num_batched_tokens"), int):
                self._set("max_num_batched_tokens", batched)
            if isinstance(eager := args.get("enforce_eager"), bool):
                self._set("enforce_eager", eager)

    def _set(self, name: str, value: object) -> None:
        """Note a fact, unless an earlier line stated it or `value` is None."""
        if value is not None:
            self._facts.setdefault(name, value)

    def facts(self) -> BootFacts:
        """Return the facts so far; the release from prose only if no line of vLLM states it."""
        facts = {"vllm_version": self._stated, **self._facts}
        return BootFacts(**facts)  # type: ignore[arg-type]  # `feed` sets values of these types


def _args_in(text: str) -> dict[str, object]:
    """Return the dict that vLLM printed after `non-default args:`; empty if it is unreadable."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return {}  # newer releases print objects among the values
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _read(lines: Iterable[Line]) -> BootReader:
    """Return a reader that has taken the lines."""
    reader = BootReader()
    for line in lines:
        reader.feed(line)
    return reader


def boot_facts(lines: Iterable[Line]) -> BootFacts:
    """Return the boot facts in a log."""
    return _read(lines).facts()


def evidence_in(lines: Iterable[Line]) -> Evidence:
    """Return the kind of evidence that this log's server gives; unknown if no line shows it."""
    return _read(lines).evidence


_DUMP = "SchedulerOutput("
_TOTAL = re.compile(r"total_num_scheduled_tokens\s*=\s*(\d+)")
_IDS = re.compile(r"req_ids=\[([^\]]*)\]")
_RESUMED = re.compile(r"resumed_req_ids=\{([^}]*)\}")
_COMPUTED = re.compile(r"num_computed_tokens=\[([\d,\s]*)\]")
_SCHEDULED = re.compile(r"num_scheduled_tokens=\{([^}]*)\}")
_NEW = re.compile(r"NewRequestData\(req_id=([^,\s)]+)")
_NEW_COMPUTED = re.compile(r"num_computed_tokens=(\d+)")
_MAX_WRAPPED = 200


def scheduler_dump(lines: Iterable[Line]) -> tuple[ScheduledChunk, ...]:
    """Return the requests of the first scheduler step that the log dumps.

    Empty without a dump, and for one that is cut off. Other ranks may repeat the dump. Lines of a
    dump that was wrapped when it was pasted are joined.
    """
    lines = iter(lines)
    for line in lines:
        at = line.text.find(_DUMP)
        if at < 0:
            continue
        text = line.text[at:]
        for _ in range(_MAX_WRAPPED):
            if _TOTAL.search(text):
                return _requests(text)
            following = next(lines, None)
            if following is None:
                break
            text += " " + following.text
    return ()


def _requests(text: str) -> tuple[ScheduledChunk, ...]:
    """Return the requests in the text of a dumped `SchedulerOutput(...)`, new ones last."""
    scheduled: dict[str, int] = {}
    for match in _SCHEDULED.finditer(text):
        for item in match[1].split(","):
            request, _, tokens = item.strip().rpartition(":")
            if tokens.strip().isdigit():
                scheduled[_unquoted(request)] = int(tokens)
    head, mark, tail = text.partition("CachedRequestData(")
    computed = _COMPUTED.search(tail if mark else text)
    numbers = (
        [int(number) for number in computed[1].split(",") if number.strip()] if computed else []
    )
    ids = _IDS.search(tail)
    names = [_unquoted(name) for name in ids[1].split(",") if name.strip()] if ids else []
    resumed = {_unquoted(name) for match in _RESUMED.finditer(tail) for name in match[1].split(",")}
    requests = [
        ScheduledChunk(before or 0, scheduled.get(name, 0), resumed=name in resumed)
        for name, before in zip_longest(names, numbers[: len(names)])
    ]
    parts = _NEW.split(head)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        first = _NEW_COMPUTED.search(body)
        requests.append(
            ScheduledChunk(int(first[1]) if first else 0, scheduled.get(name, 0), new=True)
        )
    return tuple(requests)


def _unquoted(name: str) -> str:
    """Return a request id without the blanks and quotation marks around it."""
    return name.strip().strip("'\"")


_OBSERVED = re.compile(r"(?:LAB|REPRO) observed (\w+) (\{.*\})\s*$")
_MOST_OBSERVED = 10_000


def observed(lines: Iterable[Line]) -> tuple[Observation, ...]:
    """Return the first 10,000 observations that our plugins printed into a log, in order.

    They are lines such as `LAB observed store {"event": 3, "blocks": 80}` and
    `REPRO observed imported {"file": "…", "pid": 4711}`.
    """
    observations: list[Observation] = []
    for line in lines:
        if " observed " not in line.text or not (match := _OBSERVED.search(line.text)):
            continue
        try:
            observations.append(Observation(match[1], json.loads(match[2])))
        except ValueError:
            continue  # cut off when the engine ended
        if len(observations) == _MOST_OBSERVED:
            break
    return tuple(observations)


def imported(lines: Iterable[Line]) -> tuple[str, ...]:
    """Return the patched files that vLLM's processes reported to have imported, each once."""
    return tuple(
        dict.fromkeys(
            str(each.values["file"]) for each in observed(lines) if each.kind == "imported"
        )
    )


_ITERATION = re.compile(r"\bIteration\(\d+\): (\d+) context requests, (\d+) context tokens,")


def shared_steps(lines: Iterable[Line]) -> tuple[SharedStep, ...] | None:
    """Return the first 10,000 engine steps that computed several prompts together.

    Empty if none did. None if the log has no steps, as without
    --enable-logging-iteration-details.
    """
    steps: list[SharedStep] | None = None
    for line in lines:
        if "Iteration(" not in line.text or not (match := _ITERATION.search(line.text)):
            continue
        steps = [] if steps is None else steps
        if int(match[1]) > 1:
            steps.append(SharedStep(int(match[1]), int(match[2])))
        if len(steps) == _MOST_OBSERVED:
            break
    return None if steps is None else tuple(steps)
