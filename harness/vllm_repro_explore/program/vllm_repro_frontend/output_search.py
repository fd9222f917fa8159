"""Search for a request whose output depends on how many tokens a step of the engine returns."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists

from .limit import HungError, failure_of, limited
from .smallest import smallest
from .tokenizer import make

_WORDS = (
    "Hello",
    "END",
    " END",
    "EN",
    "D of",
    " it",
    ".",
    "St",
    "op",
    "a",
    "\n\n",
    "🙂",
    "é",
    "</s>",
)
_STOPS = ("END", "\n\n", "Stop", "op", "D o", "🙂", "a", "</s>", "é")
_TOKENIZER = make(_WORDS)
_STEPS = "other steps, form or number of outputs"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request with the tokens that the engine generates for it."""

    tokens: list[int]
    # sampling parameters
    params: dict[str, Any]
    # reason for which the engine finishes it, if no stop string does: length, stop, or token for a
    # stop token
    ends: str
    # tokens that each step returns
    steps: list[int]
    output_kind: RequestOutputKind
    stream_interval: int
    # True if the client takes outputs at the end alone, so that they are merged
    slow: bool
    # number of answers, each with these tokens
    n: int
    # id by which it is aborted: client, engine, or none
    aborted_by: str
    # tokens after which it is aborted
    aborts_at: int


def draw(rng: Random) -> Request:
    """Return a random request."""
    words = rng.choices(_WORDS, k=rng.randrange(2, 9))
    tokens = [token for word in words for token in _TOKENIZER.encode(word)]
    if rng.random() < 0.2:  # single bytes of characters
        tokens = [rng.choice([*tokens, *range(128, 140)]) for _ in tokens]
    params = {
        "stop": rng.sample(_STOPS, rng.randrange(4)) or None,
        "include_stop_str_in_output": rng.random() < 0.4,
        "min_tokens": rng.choice([0, 0, 1, 3]),
        "skip_special_tokens": rng.random() < 0.5,
        "logprobs": rng.choice([None, 0, 1]),
        "max_tokens": len(tokens) + 3,
    }
    steps: list[int] = []
    while sum(steps) < len(tokens):
        steps.append(min(rng.choice([1, 1, 2, 3, 9]), len(tokens) - sum(steps)))
    return Request(
        tokens=tokens,
        params=params,
        ends=rng.choice(["length", "stop", "token"]),
        steps=steps,
        output_kind=rng.choice(list(RequestOutputKind)),
        stream_interval=rng.choice([1, 1, 3]),
        slow=rng.random() < 0.5,
        n=rng.choice([1, 1, 1, 2, 3]),
        aborted_by=rng.choice(["", "", "", "client", "engine"]),
        # a step ends here, so that each number of tokens a step is aborted at the same token
        aborts_at=sum(steps[: rng.randrange(len(steps))]),
    )


def play(request: Request) -> dict[str, Any]:
    """Return what the client receives in all, and the state that the processor keeps."""
    processor = OutputProcessor(
        _TOKENIZER, log_stats=False, stream_interval=request.stream_interval
    )
    params = SamplingParams(**request.params, n=request.n, output_kind=request.output_kind)
    queue = RequestOutputCollector(request.output_kind, "client")
    _add(processor, params, queue)
    received: list[dict[str, Any]] = [
        {"text": "", "tokens": [], "logprobs": []} for _ in range(request.n)
    ]
    at = 0
    for number, size in enumerate(request.steps, 1):
        if request.aborted_by and at == request.aborts_at:
            processor.abort_requests([request.aborted_by], internal=request.aborted_by == "engine")
        else:
            last = number == len(request.steps)
            names = list(processor.request_states)
            processor.process_outputs([_step(request, name, at, size, last) for name in names])
        at += size
        ends = not processor.request_states
        if ends or not request.slow:
            _receive(received, queue.get_nowait(), request.output_kind)
        if ends:
            break
    kept = (processor.request_states, processor.external_req_ids, processor.parent_requests)
    alike = all(answer == received[0] for answer in received)
    others = {} if alike else {"answers": received}
    return received[0] | {"left": sum(map(len, kept))} | others


def _add(processor: OutputProcessor, params: SamplingParams, queue: RequestOutputCollector) -> None:
    """Add a request to the processor as `AsyncLLM` does: `n` answers are requests of their own."""
    request = EngineCoreRequest(
        request_id="engine",
        external_req_id="client",
        prompt_token_ids=_TOKENIZER.encode("a"),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    if params.n == 1:
        processor.add_request(request, "a", None, 0, queue)
        return
    parent = ParentRequest(request)
    for index in range(params.n):
        child = copy(request)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        processor.add_request(child, "a", parent, index, queue)


def _step(request: Request, name: str, at: int, size: int, last: bool) -> EngineCoreOutput:
    """Return the output of a step of the engine: `size` tokens from `at` on.

    name: the engine's id of the request, or of one of its answers.
    """
    tokens = request.tokens[at : at + size]
    output = EngineCoreOutput(name, list(tokens))
    if (logprobs := request.params["logprobs"]) is not None:
        width = logprobs + 1
        output.new_logprobs = LogprobsLists(
            np.array([[token, *[1] * logprobs] for token in tokens]),
            np.array([[-0.5 * (at + index + 1)] * width for index in range(size)]),
            np.array([1] * size),
        )
    if last:
        length = request.ends == "length"
        output.finish_reason = FinishReason.LENGTH if length else FinishReason.STOP
        output.stop_reason = tokens[-1] if request.ends == "token" else None
    return output


def _receive(received: list[dict[str, Any]], output: Any, kind: RequestOutputKind) -> None:
    """Add an output of the processor to what a client received, by answer."""
    for completion in output.outputs if output else ():
        answer = received[completion.index]
        answer["finished"] = output.finished
        logprobs = [
            sorted((token, round(float(value.logprob), 3)) for token, value in position.items())
            for position in completion.logprobs or ()
        ]
        if kind is RequestOutputKind.DELTA:
            answer["text"] += completion.text
            answer["tokens"] += completion.token_ids
            answer["logprobs"] += logprobs
        else:
            answer["text"] = completion.text
            answer["tokens"] = list(completion.token_ids)
            answer["logprobs"] = logprobs
        if completion.finish_reason:
            answer["finish"] = completion.finish_reason
            answer["stop"] = completion.stop_reason


def one_by_one(request: Request) -> Request:
    """Return the request with one answer, a token a step, and one output at its end.

    What it receives is right by definition: all other ways to send it are compared with it.
    """
    return replace(
        request,
        steps=[1] * len(request.tokens),
        output_kind=RequestOutputKind.FINAL_ONLY,
        stream_interval=1,
        slow=False,
        n=1,
    )


def received_of(request: Request) -> dict[str, Any]:
    """Return what the client receives; only `failure` if vLLM's code raises or hangs."""
    try:
        with limited():
            return play(request)
    except (Exception, HungError) as error:
        return {"failure": failure_of(error)}


def wrong(request: Request) -> str:
    """Return what differs from one answer with a token a step, or is left; empty if nothing."""
    expected, received = received_of(one_by_one(request)) | {"left": 0}, received_of(request)
    failure: str = received.get("failure") or expected.get("failure") or ""
    names = (name for name in received if received[name] != expected.get(name))
    return failure or next(names, "")


class OutputSearch:
    """Search with requests to the output processor. Its attributes are those of `ParserSearch`."""

    modules = frozenset(
        f"vllm.v1.engine.{name}"
        for name in ("detokenizer", "logprobs", "output_processor", "parallel_sampling")
    )

    def __init__(self) -> None:
        self.counts = {"answers": 0, "judged": 0, "failed": 0}
        self.outcomes: dict[int, dict[str, str] | None] = {}

    def play(self, seed: int) -> Iterator[dict[str, Any]]:
        """Draw a request, and yield what goes wrong with it."""
        request = draw(Random(seed))
        self.counts["answers"] += 1
        self.counts["judged"] += 1
        if differs := wrong(request):
            self.counts["failed"] += 1
            self.outcomes[seed] = {"0": f"{_STEPS}: {differs}"}
            yield {
                "tool_parser": None,
                "reasoning_parser": None,
                "split": _STEPS,
                "wrong": differs,
                "request": request,
            }

    def shrink(self, finding: dict[str, Any]) -> dict[str, Any]:
        """Return the finding with the smallest request that fails in the same way."""
        differs = finding["wrong"]
        request = smallest(
            finding["request"], _simpler, lambda candidate: wrong(candidate) == differs
        )
        params = {name: value for name, value in request.params.items() if value is not None}
        fields = asdict(request) | {"output_kind": request.output_kind.name, "params": params}
        return finding | {
            "request": fields,
            "answer": _TOKENIZER.decode(request.tokens),
            "words": _WORDS,
            "whole": received_of(one_by_one(request)),
            "streamed": received_of(request),
        }


def _simpler(request: Request) -> Iterator[Request]:
    """Yield requests with less in them."""
    yield from (
        replace(request, **change)
        for change in (
            {"slow": False},
            {"stream_interval": 1},
            {"ends": "length"},
            {"aborted_by": ""},
            {"n": request.n - 1 or 1},
        )
        if asdict(request) | change != asdict(request)
    )
    for name in ("logprobs", "min_tokens", "include_stop_str_in_output", "skip_special_tokens"):
        if request.params[name]:
            default = None if name == "logprobs" else type(request.params[name])()
            yield replace(request, params=request.params | {name: default})
    for stop in request.params["stop"] or ():
        stops = [other for other in request.params["stop"] if other != stop]
        yield replace(request, params=request.params | {"stop": stops or None})
    at = 0
    for index, size in enumerate(request.steps):
        for token in range(at, at + size):
            steps = [*request.steps[:index], size - 1, *request.steps[index + 1 :]]
            tokens = [*request.tokens[:token], *request.tokens[token + 1 :]]
            if tokens:
                aborts_at = request.aborts_at - (token < request.aborts_at)
                steps = [step for step in steps if step]
                yield replace(request, tokens=tokens, steps=steps, aborts_at=aborts_at)
        at += size
