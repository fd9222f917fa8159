"""Every sentence that the conditions give, as one reviewed table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from tests.golden_files import assert_golden
from vllm_repro.command.command import ServeCommand
from vllm_repro.command.parse import parse
from vllm_repro.trigger.conditions import (
    answered,
    attention_backend,
    chunked_prefill,
    continuation_over,
    drafting,
    graphs_captured,
    left_waiting,
    preempted,
    prefill_over,
    prefilled_together,
    prefix_hit,
    sent_with,
    unstated,
)
from vllm_repro.trigger.trigger import AttentionShape, Condition, SentRequest, TriggerFacts
from vllm_repro_diagnosis.boot_facts import (
    BootFacts,
    Observation,
    ScheduledChunk,
    SharedStep,
)

SHAPE = AttentionShape(heads=16, kv_heads=8, head_dim=128, block_size=100)
CHUNK, FIRST, TOKEN = (
    ScheduledChunk(4096, 3497),
    ScheduledChunk(0, 4096, new=True),
    ScheduledChunk(500, 1),
)
HIT = ScheduledChunk(256, 129, new=True)
KNOWN = frozenset(["min_tokens", "n"])


def chat(tokens: int | None = 7593, **given: Any) -> SentRequest:
    return SentRequest("chat", tokens, **given)


def served(*requests: SentRequest, **given: Any) -> TriggerFacts:
    return TriggerFacts(requests=requests, **{"batch": 4096, "chunked": True} | given)


def sent(number: int | None = 1, **given: object) -> SentRequest:
    return chat(2, **{"fields": {"min_tokens": number}, "known": KNOWN} | given)


def long(span: tuple[float, float | None] = (0.0, None)) -> SentRequest:
    return SentRequest("long", 500, span=span)


again = chat(385, counted_by="tokenize", repeats=256, status=None, died=True)
PROMPTS = (
    served(batch=None),
    served(),
    *(
        served(chat(tokens))
        for tokens in (None, 128, 129, 759, 760, 4096, 4224, 4225, 8192, 8193, 12288, 20000)
    ),
    served(chat(), batch=None),
    served(chat(), batch=None, chunked=None),
    served(chat(), chunked=False),
    served(chat(), chunked=None),
    served(chat(status=400)),
    served(chat(status=500, died=True, counted_by="tokenize", steps=("4096.0", "3497.0"))),
    served(chat(cached_tokens=4096)),
    served(chat(385, cached_tokens=0, repeats=256)),
    served(chat(385, repeats=256), batch=100),
    served(again),
    served(chat(256, repeats=256, status=None, died=True)),
    served(chat(257, repeats=257, status=None, died=True)),
    served(again, shape=SHAPE),
    served(again, shape=SHAPE, command=parse("vllm serve m --block-size 200")),
    served(
        again, shape=SHAPE, args={"block_size": 250}, command=parse("vllm serve m --block-size 200")
    ),
    served(again, command=parse("vllm serve m --no-enable-prefix-caching")),
    served(again, boot=BootFacts(prefix_caching=False)),
    served(again, boot=BootFacts(prefix_caching=True)),
    served(chat(), command=parse("vllm serve m --long-prefill-token-threshold 3000")),
    served(chat(), args={"long_prefill_token_threshold": 1}),
    served(chat(None), chat(100), chat(), chat(100)),
    served(chat(), chat(100)),
    served(chat(100), chat(None)),
    served(chat(385, cached_tokens=256), chat(900, cached_tokens=16), chat(5000, cached_tokens=0)),
    *(
        served(dump=dump)
        for dump in ((CHUNK,), (FIRST,), (TOKEN,), (HIT,), (TOKEN, FIRST), (FIRST, CHUNK))
    ),
    served(dump=(ScheduledChunk(500, 2),)),
    served(chat(100), chat(100, cached_tokens=0)),
    served(chat(4 * 4096)),
    served(chat(status=None, left=True)),
    served(chat(status=None)),
)
FIELDS = (
    served(),
    served(chat()),
    *(served(sent(number)) for number in (0, 1, 9, None)),
    served(sent(status=None)),
    served(sent(status=None, died=True)),
    served(sent(status=None, hung=True)),
    served(sent(known=None)),
    served(sent(known=frozenset())),
    served(sent(fields={"min_tokens": 1, "n": 2}, known=frozenset())),
    served(sent(fields={"min_tokens": 1, "n": 2})),
    *(served(sent(status=status, refusal="min_tokens must be")) for status in (400, 422, 500)),
    served(sent(status=400, refusal="too long")),
    served(sent(status=404, may_fail=(404,))),
    served(sent(), sent(9)),
    served(sent(), sent(9, status=400)),
    served(sent(), sent(9, status=400, died=True)),
    served(sent(9, hung=True), sent()),
)
WAITING = (
    served(),
    served(chat()),
    *(served(chat(left=True, waiting=count)) for count in (None, 0, 2)),
    served(long(), chat(left=True, waiting=1)),
)
REFUSALS = (
    served(),
    *(served(long((1.0, 9.0)), chat(status=status, span=(2.0, 3.0))) for status in (200, 400, 404)),
    served(chat(status=None)),
    served(chat(), chat(status=400)),
    *(
        served(long(around), chat(status=400, span=answer))
        for around, answer in (
            ((1.0, None), (2.0, 3.0)),
            ((2.0, 3.0), (2.0, 3.0)),
            ((2.1, 9.0), (2.0, 3.0)),
            ((1.0, 2.9), (2.0, 3.0)),
            ((1.0, 9.0), (2.0, None)),
        )
    ),
)
PAIRS = (
    served(long(), chat(100)),
    *(
        served(long(), chat(100), steps=(SharedStep(prompts, tokens),))
        for prompts, tokens in ((2, 600), (2, 599), (3, 600))
    ),
    served(long(), chat(None), steps=()),
)
CAPTURE = Observation("capture", {"captures": 2, "checked": 190, "refused": 1})
MTP = """vllm serve m --speculative-config '{"method":"mtp"}'"""
SERVERS = (
    served(),
    *(served(backend=backend) for backend in ("TURBOQUANT", "FLASH_ATTN")),
    served(command=parse(MTP)),
    served(command=parse(MTP), args={"max_num_seqs": 1}),
    served(args={"speculative_config": {"method": "mtp"}}),
    *(served(boot=BootFacts(cudagraph_mode=mode)) for mode in ("NONE", "FULL")),
    *(
        served(boot=BootFacts(cudagraph_mode="FULL", graphs_captured=captured, ready=True))
        for captured in (False, True)
    ),
    served(
        boot=BootFacts(cudagraph_mode="FULL", graphs_captured=True),
        observed=(Observation("store", {}), CAPTURE),
    ),
)


def groups() -> Iterator[tuple[Sequence[TriggerFacts], tuple[Condition, ...]]]:
    """Yield facts and the conditions to apply to them.

    A mutation test sees only what is made in a test, so these are.
    """
    yield PROMPTS, (chunked_prefill(), continuation_over(128), prefill_over(759))
    yield PROMPTS[18:], (prefix_hit(),)
    yield PROMPTS[7:14], (chunked_prefill(chunks=3),)
    yield FIELDS, (sent_with("min_tokens"), sent_with(min_tokens=9))
    yield FIELDS[9:13], (sent_with("min_tokens", "n"),)
    yield FIELDS[:3], (sent_with("min_tokens", name="chat"), sent_with("min_tokens", name="long"))
    yield WAITING, (left_waiting("chat"),)
    yield REFUSALS, (answered("chat", 400), answered("chat", 400, 404, during="long"))
    yield PAIRS, (prefilled_together("long", "chat"),)
    yield PROMPTS[:2], (unstated(),)
    yield SERVERS[:3], (attention_backend("TURBOQUANT"),)
    yield SERVERS[2:6], (drafting(),)
    yield SERVERS[5:], (graphs_captured(),)
    twice = tuple(Observation("preempted", {"requests": count}) for count in (2, 1))
    logged = (served(observed=twice[:count]) for count in (1, 2))
    back = served(preemptions=0, dump=(ScheduledChunk(0, 32, resumed=True),))
    yield (
        (served(), *logged, *(served(preemptions=count) for count in (0, 3)), back),
        (preempted(),),
    )
    both = (
        chunked_prefill() & sent_with("min_tokens"),
        sent_with(min_tokens=9) | chunked_prefill(),
    )
    yield (served(chat()), served(sent(9)), served(chat(), sent(9)), served()), both


def shown(record: Any, usual: Any) -> str:
    """Return the fields of a record that differ from those of a usual one."""
    values = [
        (one.name, getattr(record, one.name), getattr(usual, one.name)) for one in fields(record)
    ]
    return ", ".join(f"{name}={_text(value)}" for name, value, other in values if value != other)


def _text(value: object) -> str:
    match value:
        case SentRequest():
            return f"[{shown(value, chat())}]"
        case BootFacts():
            return f"[{shown(value, BootFacts())}]"
        case ServeCommand():
            return " ".join(value.argv())
        case AttentionShape():
            return f"[block_size={value.block_size}]"
        case tuple():
            return " ".join(map(_text, value))
        case frozenset():
            return str(sorted(value))
    return str(value)


def rows(condition: Condition, facts: Sequence[TriggerFacts]) -> Iterator[str]:
    yield f"{condition}{f' wants {condition.wanted}' if condition.wanted else ''}"
    for one in facts:
        found = condition.find(one)
        yield f"  {shown(one, served())}"
        crossed = {True: "crossed", False: "not crossed"}[found.crossed]
        yield f"    {crossed}, {found.brief or '-'}: {' | '.join(found.evidence)}"


def test_the_table_of_conditions() -> None:
    lines = [
        line for facts, conditions in groups() for one in conditions for line in rows(one, facts)
    ]
    assert_golden("conditions.txt", "\n".join(lines) + "\n")
