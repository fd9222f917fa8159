"""Search for a request whose output depends on how many tokens a step of the engine returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
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
_STEPS = "other steps or form of output"


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
    )


def play(request: Request) -> dict[str, Any]:
    """Return what the client receives in all, and the state that the processor keeps."""
    processor = OutputProcessor(
        _TOKENIZER, log_stats=False, stream_interval=request.stream_interval
    )
    params = SamplingParams(**request.params, output_kind=request.output_kind)
    queue = RequestOutputCollector(request.output_kind, "client")
    engine_request = EngineCoreRequest(
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
    processor.add_request(engine_request, "a", None, 0, queue)
    received: dict[str, Any] = {"text": "", "tokens": [], "logprobs": []}
    at = 0
    for number, size in enumerate(request.steps, 1):
        processor.process_outputs([_step(request, at, size, number == len(request.steps))])
        at += size
        ends = not processor.request_states
        if ends or not request.slow:
            _receive(received, queue.get_nowait(), request.output_kind)
        if ends:
            break
    received["left"] = len(processor.request_states) + len(processor.external_req_ids)
    return received


def _step(request: Request, at: int, size: int, last: bool) -> EngineCoreOutput:
    """Return the output of a step of the engine: `size` tokens from `at` on."""
    tokens = request.tokens[at : at + size]
    output = EngineCoreOutput("engine", list(tokens))
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


def _receive(received: dict[str, Any], output: Any, kind: RequestOutputKind) -> None:
    """Add an output of the processor to what a client received."""
    if output is None:
        return
    completion = output.outputs[0]
    logprobs = [
        sorted((token, round(float(value.logprob), 3)) for token, value in position.items())
        for position in completion.logprobs or ()
    ]
    if kind is RequestOutputKind.DELTA:
        received["text"] += completion.text
        received["tokens"] += completion.token_ids
        received["logprobs"] += logprobs
    else:
        received |= {
            "text": completion.text,
            "tokens": list(completion.token_ids),
            "logprobs": logprobs,
        }
    if completion.finish_reason:
        received |= {"finish": completion.finish_reason, "stop": completion.stop_reason}


def one_by_one(request: Request) -> Request:
    """Return the request with a token a step and one output at its end."""
    return replace(
        request,
        steps=[1] * len(request.tokens),
        output_kind=RequestOutputKind.FINAL_ONLY,
        stream_interval=1,
        slow=False,
    )


def received_of(request: Request) -> dict[str, Any]:
    """Return what the client receives; only `failure` if vLLM's code raises or hangs."""
    try:
        with limited():
            return play(request)
    except (Exception, HungError) as error:
        return {"failure": failure_of(error)}


def wrong(request: Request) -> str:
    """Return what differs from a token a step, if anything."""
    expected, received = received_of(one_by_one(request)), received_of(request)
    failure: str = received.get("failure") or expected.get("failure") or ""
    names = (name for name in expected if received.get(name) != expected[name])
    return failure or next(names, "")


class OutputSearch:
    """Search with requests to the output processor. Its attributes are those of `ParserSearch`."""

    modules = frozenset(
        f"vllm.v1.engine.{name}" for name in ("detokenizer", "logprobs", "output_processor")
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
        for change in ({"slow": False}, {"stream_interval": 1}, {"ends": "length"})
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
                yield replace(request, tokens=tokens, steps=[step for step in steps if step])
        at += size
