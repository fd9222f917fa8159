"""What a vLLM server said about itself while it booted, and what its scheduler had in hand when it died.

Both are read for trigger proof: whether graphs were captured (only then is the workspace locked), whether the
    attention backend that a scenario is about was really chosen (the flag alone proves nothing), and whether
    the step that died resumed a prompt. The wordings of all releases from 0.19 on are known here and nowhere
    else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from vllm_repro.diagnosis.log_text import Line, read_lines

__all__ = ["BootFacts", "BootReader", "ScheduledRequest", "SchedulerDump", "boot_facts", "scheduler_dump"]


@dataclass(frozen=True)
class BootFacts:
    """Everything is None (or empty, or False) where the log does not say it.

    vllm_version: as the server names itself, nightlies with their commit (`0.20.2rc1.dev35+g4845aee6b`).
    tq_hybrid_layers: full-attention layers that TurboQuant found in a hybrid model.
    kv_cache_tokens: the pool's capacity. cudagraph_mode: `NONE`, `FULL_AND_PIECEWISE`, ….
    graphs_captured: the capture finished, so the workspace was locked after it.
    chunked_prefill, prefix_caching: as EngineCore has them, after a platform had its say.
    max_num_batched_tokens: largest chunk of a prompt in one step, in tokens.
    runner_note: vLLM's own sentence about which model runner it uses.
    workspace_locked: bytes, as VLLM_DEBUG_WORKSPACE=1 prints them; of several workspaces the largest.
    workspace_reserved: a backend asked for room there before anything ran.
    offload_blocks: for which the simple CPU offload connector has room.
    args: the "non-default args" line as Python values.
    """

    vllm_version: str | None = None
    attention_backend: str | None = None
    tq_hybrid_layers: tuple[int, ...] = ()
    kv_cache_tokens: int | None = None
    graphs_captured: bool = False
    cudagraph_mode: str | None = None
    enforce_eager: bool | None = None
    chunked_prefill: bool | None = None
    prefix_caching: bool | None = None
    max_num_batched_tokens: int | None = None
    runner_note: str | None = None
    workspace_locked: int | None = None
    workspace_reserved: bool = False
    offload_blocks: int | None = None
    args: Mapping[str, object] = field(default_factory=dict)
    ready: bool = False

    def as_fields(self) -> dict[str, object]:
        """Plain values for a journal; `args` stays out, it is the command line again."""
        return {
            "vllm_version": self.vllm_version,
            "attention_backend": self.attention_backend,
            "tq_hybrid_layers": list(self.tq_hybrid_layers),
            "kv_cache_tokens": self.kv_cache_tokens,
            "graphs_captured": self.graphs_captured,
            "cudagraph_mode": self.cudagraph_mode,
            "enforce_eager": self.enforce_eager,
            "chunked_prefill": self.chunked_prefill,
            "prefix_caching": self.prefix_caching,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "runner_note": self.runner_note,
            "workspace_locked": self.workspace_locked,
            "workspace_reserved": self.workspace_reserved,
            "offload_blocks": self.offload_blocks,
            "ready": self.ready,
        }


@dataclass(frozen=True)
class ScheduledRequest:
    """One request of a step. Tokens: `computed` before the step (None where it is not said), `scheduled` in
    it. `new`: its first step.
    """

    request_id: str
    computed: int | None
    scheduled: int | None
    new: bool


@dataclass(frozen=True)
class SchedulerDump:
    """The step that was running: vLLM's "Dumping scheduler output", or a `SchedulerOutput(…)` pasted into an
    issue.
    """

    requests: tuple[ScheduledRequest, ...]
    num_computed_tokens: tuple[int, ...]
    """Of the requests that were already running: the list as printed, zero for none."""
    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int | None
    line: int

    @property
    def computed(self) -> tuple[int, ...]:
        """Tokens computed before this step, one number a request, in the order of `requests`; 0 where not
        said.
        """
        return tuple(request.computed or 0 for request in self.requests)

    @property
    def scheduled(self) -> tuple[int, ...]:
        """Tokens scheduled in this step, one number a request, in the order of `requests`; 0 where not
        said.
        """
        return tuple(request.scheduled or 0 for request in self.requests)


_VERSION = r"v?(\d+\.\d+[\w.+-]*\w)"
_VERSIONS = (
    re.compile(rf"Initializing a V1 LLM engine \({_VERSION}\)"),
    re.compile(rf"Dumping input data for V1 LLM engine \({_VERSION}\)"),
    re.compile(rf"Launching vLLM \({_VERSION}\)"),
    re.compile(rf"^[ ▄▀█]*version {_VERSION}$"),
    re.compile(rf"vLLM API server version {_VERSION}"),
    re.compile(rf"\bvLLM(?: version)?\s*: {_VERSION}", re.IGNORECASE),
)
_BACKEND = re.compile(
    r"Using (\w+) attention backend|KV cache layout for (\w+) backend"
    r"|Using (Flash Attention|Triton|FlashInfer) backend"
)
_TQ_LAYERS = re.compile(r"TQ hybrid: full-attention layers \[([\d, ]*)\]")
_KV_TOKENS = re.compile(r"KV cache size\s*[:=] ?([\d,]+) tokens")
_CHUNKED = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
_IN_FORCE = re.compile(r"\benable_(chunked_prefill|prefix_caching)=(True|False)\b")
_GRAPH_MODE = re.compile(r"'cudagraph_mode': (?:<CUDAGraphMode\.(\w+)|'(\w+)')")
_RUNNER = re.compile(r"Model Runner V2\b|V2 model runner|V1 model runner")
_LOCKED = re.compile(r"Workspace locked\. Current sizes: \[([\d., e+-]*)\]")
_OFFLOAD = re.compile(r"SimpleCPUOffloadScheduler: Allocating (\d+) (?:CPU|offload) blocks")
_ARGS = re.compile(r"non-default args: (\{.*\})\s*$")


class BootReader:
    """Feeds on lines, gathers `BootFacts`. The first statement of a fact counts: later ones are echoes of
    other processes.
    """

    def __init__(self) -> None:
        self._facts: dict[str, object] = {}

    def feed(self, line: Line) -> None:
        text = line.text
        # The words that each pattern needs come first: nearly every line of a long log has none of them.
        if "vllm_version" not in self._facts and ("LLM" in text or "ersion" in text):
            found = next((match for rx in _VERSIONS if (match := rx.search(text))), None)
            self._say("vllm_version", found and found[1])
        if "backend" in text and (found := _BACKEND.search(text)):
            self._say("attention_backend", found[1] or found[2] or found[3])
        if "TQ hybrid" in text and (found := _TQ_LAYERS.search(text)):
            self._say("tq_hybrid_layers", tuple(int(layer) for layer in found[1].split(",") if layer.strip()))
        if "KV cache size" in text and (found := _KV_TOKENS.search(text)):
            digits = found[1].replace(",", "")
            self._say("kv_cache_tokens", int(digits) if digits else None)
        if "Chunked prefill" in text and (found := _CHUNKED.search(text)):
            self._say("chunked_prefill", True)
            self._facts["max_num_batched_tokens"] = int(found[1])  # what is in force, whatever was asked for
        if "LLM engine" in text:
            # The CPU platform turns both off for some models, after the API server has said that chunks are on.
            self._facts.update((found[1], found[2] == "True") for found in _IN_FORCE.finditer(text))
        if "cudagraph_mode" in text and (found := _GRAPH_MODE.search(text)):
            self._say("cudagraph_mode", found[1] or found[2])
        if "Graph capturing finished" in text:
            self._say("graphs_captured", True)
        if "Enforce eager set" in text or "enforce_eager=True" in text:
            self._say("enforce_eager", True)
        elif "enforce_eager=False" in text:
            self._say("enforce_eager", False)
        if "odel " in text and "unner" in text and _RUNNER.search(text):
            self._say("runner_note", text.strip())
        if "WORKSPACE DEBUG" in text:
            if found := _LOCKED.search(text):
                sizes = [float(size) for size in found[1].split(",") if size.strip()]
                self._say("workspace_locked", round(max(sizes, default=0.0) * 1024 * 1024))
            if ":_reserve_workspace'" in text:
                self._say("workspace_reserved", True)
        if "SimpleCPUOffload" in text and (found := _OFFLOAD.search(text)):
            self._say("offload_blocks", int(found[1]))
        if "Application startup complete" in text:
            self._say("ready", True)
        if "non-default args" in text and (found := _ARGS.search(text)) and (args := _literal(found[1])):
            self._say("args", args)
            if isinstance(batched := args.get("max_num_batched_tokens"), int):
                self._say("max_num_batched_tokens", batched)
            if isinstance(eager := args.get("enforce_eager"), bool):
                self._say("enforce_eager", eager)

    def _say(self, name: str, value: object) -> None:
        if value is not None:
            self._facts.setdefault(name, value)

    def facts(self) -> BootFacts:
        return BootFacts(**self._facts)  # type: ignore[arg-type]  # each name is set above with a value of its field's type


def _literal(text: str) -> dict[str, object]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}  # newer releases print objects among the values
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def boot_facts(source: str | bytes | Iterable[Line]) -> BootFacts:
    """Reads a log (or a paste) for what the server said about itself."""
    reader = BootReader()
    for line in _lines(source):
        reader.feed(line)
    return reader.facts()


_DUMP = "SchedulerOutput("
_TOTAL = re.compile(r"total_num_scheduled_tokens\s*=\s*(\d+)")
_CACHED = re.compile(r"CachedRequestData\(")
_IDS = re.compile(r"req_ids=\[([^\]]*)\]")
_COMPUTED = re.compile(r"num_computed_tokens=\[([\d,\s]*)\]")
_SCHEDULED = re.compile(r"num_scheduled_tokens=\{([^}]*)\}")
_NEW = re.compile(r"NewRequestData\(req_id=([^,\s)]+)")
_NEW_COMPUTED = re.compile(r"num_computed_tokens=(\d+)")
_MAX_WRAPPED = 200


def scheduler_dump(source: str | bytes | Iterable[Line]) -> SchedulerDump | None:
    """The first step dumped in a log or paste; None where there is none.

    The first, because each rank may repeat it. A dump that was wrapped over several lines by whatever it was
    pasted through is joined.
    """
    lines = iter(_lines(source))
    for line in lines:
        at = line.text.find(_DUMP)
        if at < 0:
            continue
        text = line.text[at:]
        for _ in range(_MAX_WRAPPED):
            if _TOTAL.search(text):
                return _dump(text, line.number)
            following = next(lines, None)
            if following is None:
                break
            text += " " + following.text
    return None


def _dump(text: str, line: int) -> SchedulerDump:
    total = _TOTAL.search(text)
    scheduled: dict[str, int] = {}
    for found in _SCHEDULED.finditer(text):
        for item in found[1].split(","):
            request, _, tokens = item.strip().rpartition(":")
            if tokens.strip().isdigit():
                scheduled[request.strip().strip("'\"")] = int(tokens)
    cached = _CACHED.search(text)
    head, tail = (text[: cached.start()], text[cached.start() :]) if cached else (text, "")
    ids = _IDS.search(tail)
    computed = _COMPUTED.search(tail or text)
    numbers = tuple(int(number) for number in computed[1].split(",") if number.strip()) if computed else ()
    names = tuple(name.strip().strip("'\"") for name in ids[1].split(",") if name.strip()) if ids else ()
    requests = [
        ScheduledRequest(name, numbers[at] if at < len(numbers) else None, scheduled.get(name), False)
        for at, name in enumerate(names)
    ]
    starts = list(_NEW.finditer(head))
    for at, start in enumerate(starts):
        part = head[start.start() : starts[at + 1].start() if at + 1 < len(starts) else len(head)]
        before = _NEW_COMPUTED.search(part)
        requests.append(ScheduledRequest(start[1], int(before[1]) if before else None, scheduled.get(start[1]), True))
    return SchedulerDump(tuple(requests), numbers, scheduled, int(total[1]) if total else None, line)


def _lines(source: str | bytes | Iterable[Line]) -> Iterator[Line]:
    return read_lines(source) if isinstance(source, str | bytes) else iter(source)
