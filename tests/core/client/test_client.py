from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.web import httpx
from vllm_repro.client.answer import DEAD_MESSAGES, Answer
from vllm_repro.client.client import Client, release_of
from vllm_repro.client.metrics import Counted, counted_between, steps_between, total
from vllm_repro.client.prompts import PromptError, build_chat, build_completion, fit
from vllm_repro.running.death_signs import Channel, sign_of_answer
from vllm_repro_diagnosis.metrics import MetricsReading, read_metrics

Result = TypeVar("Result")
DEAD = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}


def with_client(
    handle: Callable[[httpx.Request], httpx.Response], use: Callable[[Client], Awaitable[Result]]
) -> Result:
    """Return what `use` gets from a client whose requests `handle` answers."""

    async def run() -> Result:
        async with Client("http://server") as client:
            transport = httpx.MockTransport(handle)
            client._http = httpx.AsyncClient(transport=transport, base_url="http://server")
            return await use(client)

    return asyncio.run(run())


def ask(
    response: httpx.Response | Exception,
    *,
    stream: bool,
    path: str = "/v1/completions",
    **fields: object,
) -> Answer:
    def handle(_: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    body = {"stream": stream, "max_tokens": 8, **fields}
    return with_client(handle, lambda client: client.ask(path, body))


def sign_of(answer: Answer) -> tuple[Channel, bool] | None:
    """Return the channel of the sign of death in an answer, and whether it is decisive."""
    sign = sign_of_answer(answer)
    return (sign.channel, sign.decisive) if sign else None


def events(items: Iterable[object], *, done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(item)}\n\n" for item in items] + (
        ["data: [DONE]\n\n"] if done else []
    )
    return httpx.Response(200, content="".join(lines).encode())


def chunk(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 3},
    },
}


RESPONSE: dict[str, object] = {
    "status": "completed",
    "error": None,
    "output": [],
    "usage": {"input_tokens": 5, "output_tokens": 2},
}


@pytest.mark.parametrize(
    ("response", "tokens"),
    [
        (httpx.Response(200, json=RESPONSE), 5),
        (
            httpx.Response(
                200, json={"data": [[0.5]], "usage": {"prompt_tokens": 7, "completion_tokens": 0}}
            ),
            7,
        ),
        (httpx.Response(200, json=[0.5]), None),
        (httpx.Response(200), None),
        (
            events(
                [{"type": "created", "response": {"usage": None}}, {"response": RESPONSE}],
                done=False,
            ),
            5,
        ),
    ],
)
def test_a_whole_answer_without_choices_is_a_success(
    response: httpx.Response, tokens: int | None
) -> None:
    stream = b"data" in response.content[:4]
    answer = ask(response, stream=stream, path="/v1/responses", max_tokens="many", n=None)
    assert (answer.ok, sign_of(answer)) == (True, None)
    assert (answer.usage.prompt_tokens if answer.usage else None) == tokens
    assert not ask(response, stream=stream).ok, "a completion needs choices"


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(500, json={"detail": "no"}),
        httpx.Response(200, json={"error": {"message": "no"}}),
        httpx.ReadError("reset"),
        events([{"type": "error", "error": {"message": "no"}}], done=False),
        events([], done=False),
    ],
)
def test_an_answer_without_choices_can_fail_too(response: httpx.Response | Exception) -> None:
    answer = ask(response, stream=True, path="/v1/responses")
    assert not answer.ok
    assert sign_of(answer) or answer.error == "no"


def test_a_stream_that_ends_well() -> None:
    call = {"id": "call-1", "function": {"name": "f", "arguments": "{}"}}
    called = [{"index": 0, "delta": {"content": None, "tool_calls": [call]}}]
    pieces = [chunk("a"), {"choices": called}, chunk("b", "length"), USAGE]
    answer = ask(events(pieces), stream=True)
    assert (answer.ok, answer.done, sign_of(answer)) == (True, True, None)
    assert (answer.text, answer.finish_reason, len(answer.token_times)) == ("af{}b", "length", 3)
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (7, 3)


BROKEN = {"error": {"message": "Internal server error"}}
NO_TOKENS = USAGE | {"usage": {"prompt_tokens": 7, "completion_tokens": 0}}
REFUSAL = {"error": {"message": "stop_token_ids out of range", "code": 400}}


@pytest.mark.parametrize(
    ("response", "stream", "status", "sign", "shown"),
    [
        # A dead engine: a 500, or a 200 with an error event.
        (events([chunk("a"), DEAD]), True, 200, (Channel.STREAM, True), "EngineCore encountered"),
        (
            httpx.Response(500, json=DEAD),
            False,
            500,
            (Channel.ANSWER, True),
            "HTTP 500: EngineCore encountered an issue.",
        ),
        # These do not decide alone.
        (events([chunk("a")]), True, 200, (Channel.STREAM, False), ""),  # though [DONE] came
        (events([chunk("a")], done=False), True, 200, (Channel.STREAM, False), ""),
        (events([NO_TOKENS]), True, 200, (Channel.EMPTY, False), ""),
        (events([BROKEN]), True, 200, (Channel.STREAM, False), "Internal server error"),
        (httpx.Response(500, json=BROKEN), False, 500, (Channel.ANSWER, False), "HTTP 500"),
        (httpx.Response(502, text="bad gateway"), False, 502, (Channel.ANSWER, False), "502"),
        (httpx.ReadError("reset"), False, None, (Channel.ANSWER, False), "reset"),
        (httpx.RemoteProtocolError("cut"), True, None, (Channel.STREAM, False), "cut"),
        # A refusal is no sign. Within a stream its event has the status.
        *(
            (httpx.Response(status, json=REFUSAL), False, status, None, "out of range")
            for status in (400, 401, 404)
        ),
        (events([REFUSAL]), True, 400, None, "stop_token_ids out of range"),
    ],
)
def test_what_an_answer_shows_of_a_death(
    response: httpx.Response | Exception,
    stream: bool,
    status: int | None,
    sign: tuple[Channel, bool] | None,
    shown: str,
) -> None:
    answer = ask(response, stream=stream)
    seen = sign_of_answer(answer)
    assert (answer.ok, answer.status, sign_of(answer)) == (False, status, sign)
    assert shown in f"{seen.detail if seen else answer.error}"


async def endless(piece: bytes) -> AsyncIterator[bytes]:
    while True:
        yield piece


@pytest.mark.parametrize(
    ("piece", "stream", "error"),
    [
        (b"x" * 65_536, False, "response is larger than 4 MiB"),
        (b"x" * 65_536, True, "response is larger than 4 MiB"),
        (b": ping\n" * 9_000, True, "response is larger than 4 MiB"),
        (b'data: {"choices": [{"text": "a"}]}\n\n', True, "the stream goes on after 108 events"),
    ],
)
def test_an_answer_that_never_stops_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, piece: bytes, stream: bool, error: str
) -> None:
    monkeypatch.setattr("vllm_repro.client.received.MOST_BYTES", 4 << 20)
    answer = ask(httpx.Response(200, content=endless(piece)), stream=stream)
    assert (answer.status, answer.error_kind, answer.ok) == (200, "transport", False)
    assert answer.error == f"EndlessAnswerError: {error}"


@pytest.mark.parametrize(
    ("schema", "fields"),
    [
        ({"$ref": "#/components/schemas/A"}, {"a"}),
        ({"anyOf": [{"$ref": "#/components/schemas/A"}, {"properties": {"b": {}}}]}, {"a", "b"}),
        ({"$ref": "#/components/schemas/Again"}, None),
        ({"$ref": "#/components/schemas/Missing"}, None),
        ([], None),
    ],
)
def test_the_fields_that_a_release_reads_are_those_of_its_schema(
    schema: object, fields: set[str] | None
) -> None:
    models = {
        "A": {"properties": {"a": {}}},
        "Again": {"allOf": [{"$ref": "#/components/schemas/Again"}]},
    }
    body = {"content": {"application/json": {"schema": schema}}}
    page = {"paths": {"/v1/x": {"post": {"requestBody": body}}}, "components": {"schemas": models}}

    known = with_client(lambda _: httpx.Response(200, json=page), Client.known_fields)
    assert known == ({} if fields is None else {"/v1/x": fields})


def test_a_release_is_what_looks_like_one() -> None:
    assert (
        release_of(httpx.Response(200, json={"version": "0.20.1rc1.dev12+g363ffa145"}))
        == "0.20.1rc1.dev12+g363ffa145"
    )
    for version in ("\x1b[31m0.23.0", "0.23.0\n# heading", "![](//x)", "@somebody", "", "1" * 81):
        with pytest.raises(ValueError, match="is not a release"):
            release_of(httpx.Response(200, json={"version": version}))
    with pytest.raises(TypeError):
        release_of(httpx.Response(200, json={"version": None}))


@pytest.mark.parametrize(
    ("status", "kind", "named"),
    [
        (500, "body", True),
        (503, "body", True),
        (200, "event", True),
        (400, "body", False),
        (400, "event", False),
    ],
)
@pytest.mark.parametrize("message", DEAD_MESSAGES)
def test_only_a_failure_of_the_server_names_a_dead_engine(
    message: str, status: int, kind: str, named: bool
) -> None:
    """A 400 may quote the prompt that it refuses."""
    answer = Answer(
        sent=1.0, ended=2.0, status=status, error=f"bad prompt: {message}", error_kind=kind
    )
    assert answer.names_dead_engine is named


TOP = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -2.0}]


@pytest.mark.parametrize(
    ("logprobs", "margins"),
    [
        ({"top_logprobs": [{"a": -0.5, "b": -2.0}, {"a": -3.0, "b": -1.0, "c": -9.0}]}, (1.5, 2.0)),
        (
            {
                "content": [
                    {"logprob": -0.5, "top_logprobs": TOP},
                    {"logprob": -2.0, "top_logprobs": TOP[::-1]},
                ]
            },
            (1.5, 1.5),
        ),
        (None, ()),
        ({}, ()),
        ({"content": None}, ()),
        ({"content": [{"logprob": -0.5, "top_logprobs": TOP[:1]}]}, ()),
        ({"top_logprobs": [None]}, ()),
        ({"top_logprobs": [{"a": "x", "b": "y"}]}, ()),
    ],
)
def test_margins_of_text_and_chat_completions(logprobs: object, margins: tuple[float, ...]) -> None:
    choice = {"index": 0, "text": "a", "finish_reason": "length", "logprobs": logprobs}
    assert ask(httpx.Response(200, json={"choices": [choice]}), stream=False).margins == margins


@pytest.mark.parametrize("turns", range(12))
def test_a_cancelled_request_closes_connections_ended_before(
    turns: int,
) -> None:
    async def play() -> None:
        opened: list[asyncio.Future[None]] = []

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            closed = asyncio.get_running_loop().create_future()
            opened.append(closed)
            try:
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(0.02)  # so that none can be used again
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                await asyncio.sleep(0.02)
                writer.write_eof()
                await reader.read()
                closed.set_result(None)
            except asyncio.IncompleteReadError:
                pass  # the request was cancelled before it was sent
            finally:
                writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            async with Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
                await asyncio.gather(*(client.get("/health") for _ in range(5)))
                await asyncio.sleep(0.04)  # the server ends what the client keeps
                last = asyncio.create_task(client.get("/health"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                last.cancel()
                await asyncio.gather(last, return_exceptions=True)
            async with asyncio.timeout(5):
                await asyncio.gather(*opened[:5])

    uvloop.run(play())


def test_a_connection_that_is_closed_at_once_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def closed(*_: object) -> httpx.Response:
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    async def asked() -> Answer:
        async with Client("http://127.0.0.1:9") as client:
            with pytest.raises(httpx.ConnectError, match="closed as it was opened"):
                await client.get("/metrics")
            return await client.ask("/v1/completions", {"prompt": "x"})

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", closed)
    answer = asyncio.run(asked())
    assert (answer.status, answer.error_kind) == (None, "transport")


class Counter:
    """Tokenizer stub that counts a text within a template. `cost`: tokens per piece."""

    def __init__(self, cost: int, overhead: int, merges: bool) -> None:
        self.cost = cost
        self.overhead = overhead
        self.merges = merges
        self.calls = 0

    async def __call__(self, text: str) -> int:
        self.calls += 1
        pieces = re.findall(r" ?\w+|\s+|[^\w\s]", text)
        if self.merges:  # the same piece twice in a row is one token: boundaries do not add up
            pieces = [
                piece for i, piece in enumerate(pieces) if i == 0 or pieces[i - 1] != piece or i % 2
            ]
        return self.overhead + sum(self.cost if len(piece) > 3 else 1 for piece in pieces)


@pytest.mark.parametrize("tokens", [64, 100, 4225, 7593, 90_000])
def test_an_ordinary_vocabulary_takes_two_calls(tokens: int) -> None:
    count = Counter(1, 11, False)
    text, calls = asyncio.run(fit(count, tokens, "seed"))
    assert (asyncio.run(count(text)), calls <= 2) == (tokens, True)


@given(st.integers(40, 5000), st.integers(1, 4), st.integers(0, 20), st.booleans())
@settings(max_examples=80)
def test_any_vocabulary_gives_the_exact_length(
    tokens: int, cost: int, overhead: int, merges: bool
) -> None:
    count = Counter(cost, overhead, merges)
    text, calls = asyncio.run(fit(count, tokens, "seed"))
    assert asyncio.run(count(text)) == tokens
    assert calls <= 40


def test_a_seed_gives_one_prompt_and_another_another_head() -> None:
    def make(seed: str) -> str:
        return asyncio.run(fit(Counter(1, 11, False), 500, seed))[0]

    assert make("1/a") == make("1/a")
    assert make("1/a").split()[0] != make("1/b").split()[0]


def test_a_prompt_shorter_than_the_template_is_refused() -> None:
    with pytest.raises(PromptError, match="chat template alone takes 30 tokens"):
        asyncio.run(fit(Counter(1, 30, False), 20, "seed"))


class Tokenizer:
    """`/tokenize` with one token per word. vocabulary: number of tokens."""

    def __init__(self, vocabulary: int = 2**32) -> None:
        self._vocabulary = vocabulary

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        assert path == "/tokenize"
        messages = body.get("messages")
        text = (
            str(body["prompt"])
            if messages is None
            else " ".join(str(message["content"]) for message in messages)
        )
        ids = [zlib.crc32(word.encode()) % self._vocabulary for word in text.split()]
        overhead = 0 if messages is None else 3 * len(messages) + 5 * len(body.get("tools", ()))
        content = {"tokens": ids, "count": len(ids) + overhead}
        return httpx.Response(
            200, json=content, request=httpx.Request("POST", "http://server/tokenize")
        )


def completed(tokens: int, seed: str, shared: int = 0, vocabulary: int = 2**32) -> list[int]:
    client = cast("Client", Tokenizer(vocabulary))
    made = asyncio.run(
        build_completion(client, "m", tokens, seed, shared=shared, shared_seed="head")
    )
    return list(made.body["prompt"])


@given(st.integers(0, 60), st.integers(1, 60))
def test_completions_differ_right_after_their_shared_head(shared: int, rest: int) -> None:
    one, other = (completed(shared + rest, seed, shared) for seed in ("1/a", "1/b"))
    assert len(one) == len(other) == shared + rest
    assert one[:shared] == other[:shared]
    assert one[shared] != other[shared]


@given(st.integers(1, 60), st.integers(8, 60), st.text(max_size=4))
def test_no_more_is_shared_than_was_asked_for(shared: int, rest: int, seed: str) -> None:
    whole = completed(shared + 1, "", shared + 1, vocabulary=3)
    made = completed(shared + rest, seed, shared, vocabulary=3)
    assert (len(made), made[:shared]) == (shared + rest, whole[:shared])
    assert made[shared] != whole[shared]


def test_a_chat_counts_earlier_messages_and_its_tools() -> None:
    before = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "yes"}]
    opening = {"role": "tool", "tool_call_id": "call_1"}
    made = asyncio.run(
        build_chat(
            cast("Client", Tokenizer()),
            "m",
            200,
            "1/a",
            before=before,
            message=opening,
            fields={"tools": [{"type": "function"}], "min_tokens": 3},
        )
    )
    *first, last = made.body["messages"]
    assert (first, last["role"], last["tool_call_id"]) == (before, "tool", "call_1")
    assert len(" ".join(message["content"] for message in (*first, last)).split()) + 9 + 5 == 200


PAGES = Path(__file__).parents[2] / "data" / "metrics"


@pytest.mark.parametrize("name", ["v0.20.2-metrics.txt", "v0.32.0-metrics.txt"])
def test_pages_of_real_servers(name: str) -> None:
    reading = read_metrics((PAGES / name).read_text(encoding="utf-8"))
    assert reading.started
    assert min(reading.prompt_tokens, reading.generation_tokens, reading.step_count) > 0
    assert (reading.steps[float("inf")], reading.preemptions) == (reading.step_count, 0.0)
    cache = (reading.cache_hits, reading.cache_queries, reading.kv_most)
    assert cache == (0.0, reading.prompt_tokens, 0.0)
    assert (reading.draft_tokens, reading.accepted_tokens) == (None, None)  # served without drafts


def test_steps_between_two_scrapes_are_counted_by_size() -> None:
    before = MetricsReading(steps={1.0: 5, 8.0: 5, 4096.0: 5, float("inf"): 5})
    after = MetricsReading(steps={1.0: 12, 8.0: 12, 4096.0: 14, float("inf"): 15})
    assert steps_between(before, after) == (
        "1 step of over 4,096 tokens",
        "2 steps of 9 to 4,096 tokens",
        "7 steps of 1 token",
    )
    assert steps_between(after, after) == ()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e300"])
def test_a_value_that_is_no_count_is_left_out(value: str) -> None:
    names = (
        "num_requests_running",
        "prompt_tokens_total",
        'iteration_tokens_total_bucket{le="8.0"}',
        "prefix_cache_hits_total",
    )
    page = (
        "".join(f"vllm:{name} {value}\n" for name in names)
        + f"process_start_time_seconds {value}\n"
    )
    assert read_metrics(page) == MetricsReading()
    assert steps_between(
        MetricsReading(), read_metrics('vllm:iteration_tokens_total_bucket{le="-Inf"} 3')
    ) == ("3 steps of over -1 tokens",)


def test_a_page_that_is_no_metrics_is_an_empty_reading() -> None:
    assert (read_metrics("<html>proxy</html>"), read_metrics("")) == (
        MetricsReading(),
        MetricsReading(),
    )


PAGE = """process_start_time_seconds 1000.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.2
vllm:kv_cache_usage_perc{{engine="1"}} 0.6
vllm:prompt_tokens_total {prompt}
vllm:generation_tokens_total {output}
vllm:prefix_cache_hits_total 5.0
vllm:prefix_cache_queries_total {prompt}
vllm:num_preemptions_total 2.0
"""
DRAFTS = """vllm:spec_decode_num_draft_tokens_total 30.0
vllm:spec_decode_num_accepted_tokens_total 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 12.0
"""


def test_what_a_server_counts_in_a_phase() -> None:
    before = read_metrics(PAGE.format(prompt=10, output=20))
    after = read_metrics(PAGE.format(prompt=17, output=50) + DRAFTS)
    found = counted_between(before, after, after.kv_most)
    assert found == Counted(
        prompt_tokens=7,
        generation_tokens=30,
        kv_most=0.6,
        cache_hits=0,
        cache_queries=7,
        preemptions=0,
        draft_tokens=30,
        accepted_tokens=12,
    )
    assert after.kv_usage == pytest.approx(0.8)
    other = Counted(prompt_tokens=1, generation_tokens=2, kv_most=0.7, preemptions=3)
    assert total([found, other]) == Counted(
        prompt_tokens=8,
        generation_tokens=32,
        kv_most=0.7,
        cache_hits=0,
        cache_queries=7,
        preemptions=3,
        draft_tokens=30,
        accepted_tokens=12,
    )


def test_no_counts_are_shown_without_counters_or_on_restart() -> None:
    page = read_metrics(PAGE.format(prompt=10, output=20))
    assert counted_between(page, MetricsReading(started=1000.0), None) is None
    assert counted_between(MetricsReading(started=999.0), page, None) is None
