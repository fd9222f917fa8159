"""What happened in each trial, in seconds from its launch: its boot, its requests, the signs on each channel. Pure.

Signs carry no trial: the boots of a run follow each other, so each belongs to the trial that was open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.answered import Trial, answer_word, trial_of
from vllm_repro.trigger.trigger import chunks_of

__all__ = ["Asked", "Moment", "Span", "Timeline", "timelines"]


@dataclass(frozen=True)
class Span:
    """Something that took its time. ok: whether it ended well; None where it has no end on record."""

    start_s: float
    end_s: float
    name: str
    result: str
    ok: bool | None


@dataclass(frozen=True)
class Moment:
    """One thing seen. lane: the channel of a sign, or what kind of thing it is. sign: whether it tells of a death."""

    at_s: float
    lane: str
    text: str
    sign: bool = False
    decisive: bool = False


@dataclass(frozen=True)
class Asked:
    """A prompt as the engine was given it. chunks: in tokens, as the batch size cuts a lone prompt; cached: what was not computed again."""

    name: str
    tokens: int
    cached: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """Of one trial. ready_s: None where it never was. end_s: of the last thing on record. ended: whether its conclusion is on record.
    batch: tokens that a step takes, None where its boot did not say; asked: the prompts whose length is known."""

    ready_s: float | None
    end_s: float
    spans: tuple[Span, ...]
    moments: tuple[Moment, ...]
    ended: bool
    batch: int | None = None
    asked: tuple[Asked, ...] = ()

    @property
    def told(self) -> list[tuple[float, str, str]]:
        """All of it in the order of time: when, what, in words."""
        found = [(moment.at_s, moment.lane, moment.text) for moment in self.moments]
        for span in self.spans:
            found.append((span.start_s, span.name, "begins"))
            if span.ok is not None:
                found.append((span.end_s, span.name, f"{span.result}, after {span.end_s - span.start_s:.3f} s"))
        return sorted(found, key=lambda one: one[0])

    @property
    def death_s(self) -> float | None:
        """When the first decisive sign was seen."""
        return min((moment.at_s for moment in self.moments if moment.decisive), default=None)


def timelines(recording: Recording, outcomes: Mapping[Trial, str] | None = None) -> dict[Trial, Timeline]:
    """By trial, in the order of their starts; also of one that a cut run did not end.

    outcomes: as the report has them, where a look at the other arms' answers says another one than the trial's end.
    """
    words = outcomes or {}
    return {trial: _timeline(entries, words.get(trial)) for trial, entries in _trials(recording.entries)}


def _trials(entries: Sequence[Entry]) -> Iterator[tuple[Trial, list[Entry]]]:
    own: list[Entry] = []
    for entry in entries:
        if entry.event == "trial-started":
            if own:
                yield trial_of(own[0]), own
            own = [entry]
        elif own:
            own.append(entry)
            if entry.event == "trial-ended":
                yield trial_of(own[0]), own
                own = []
    if own:
        yield trial_of(own[0]), own


def _timeline(entries: list[Entry], outcome: str | None) -> Timeline:
    began = entries[0].t
    last = entries[-1]
    ended = last.event == "trial-ended"
    end = (last.t if ended else max(entry.t for entry in entries)) - began
    ready = next((entry.t - began for entry in entries if entry.event == "ready"), None)
    moments = sorted(_moments(entries, began, outcome), key=lambda moment: moment.at_s)
    batch = (last.get("boot") or {}).get("max_num_batched_tokens") if ended else None
    return Timeline(
        ready,
        max(end, 0.001),
        tuple(_spans(entries, began, max(end, 0.001))),
        tuple(moments),
        ended,
        batch,
        tuple(_asked(entries, batch)) if batch else (),
    )


def _spans(entries: list[Entry], began: float, end: float) -> Iterator[Span]:
    """Each request, and the measuring after them."""
    open_: dict[str, list[float]] = {}
    for entry in entries:
        at = entry.t - began
        if entry.event == "request-sent":
            open_.setdefault(entry["name"], []).append(at)
        elif entry.event == "answer":
            sent = open_.get(entry["name"])
            # Requests of one name may overtake each other; how long each took is on record.
            start = sent.pop(0) if sent else at
            if (took := entry.get("took_s")) is not None:
                start = at - took
            word = answer_word(entry)
            tokens = (entry.get("usage") or {}).get("completion_tokens")
            said = f"{word}, {tokens} token{'' if tokens == 1 else 's'}" if tokens else word
            yield Span(start, at, entry["name"], said, word == "200")
    for name, starts in open_.items():
        for start in starts:
            yield Span(start, end, name, "no answer on record", None)
    for event, name in (("throughput-round", "throughput"), ("soak", "soak")):
        times = [entry.t - began for entry in entries if entry.event == event]
        if times:
            yield Span(times[0], times[-1], name, f"{len(times)} on record", True)


def _moments(entries: list[Entry], began: float, outcome: str | None) -> Iterator[Moment]:
    for entry in entries:
        at, event = entry.t - began, entry.event
        if event == "ready":
            version = f", vLLM {entry['version']}" if entry.get("version") else ""
            yield Moment(at, "ready", f"/health answers 200{version}")
        elif event == "sign":
            yield Moment(entry.get("at", entry.t) - began, entry["channel"], entry["detail"], True, entry["decisive"])
        elif event == "canary":
            said = "answers" if entry["ok"] else f"fails: {entry['status']}, {entry['error']}"
            yield Moment(at, "canary", f"a one-token completion {said}")
        elif event == "exited":
            asked = ", as we asked" if entry.get("asked") else ""
            yield Moment(at, "exit", f"{entry['detail']}{asked}")
        elif event == "rank-exited":
            yield Moment(at, "exit", f"rank {entry['rank']}: {entry['detail']}")
        elif event in ("hung", "channel-broken"):
            yield Moment(at, event, entry["detail"])
        elif event == "boot-stalled":
            yield Moment(at, "stalled", f"nothing moved for {entry['seconds']:.0f} s; last line: {entry['last_line']}")
        elif event == "measure-stopped":
            yield Moment(at, "measuring", f"{entry['doing']} stopped: {entry['why']}")
        elif event == "trial-ended":
            yield Moment(at, "end", outcome or entry["outcome"])


def _asked(entries: list[Entry], batch: int) -> Iterator[Asked]:
    """Each prompt once, however often it was sent; its length by the answer's usage, else by what was asked for."""
    lengths: dict[str, int] = {}
    cached: dict[str, int] = {}
    for entry in entries:
        if entry.event == "request-sent" and entry.get("prompt_tokens"):
            lengths.setdefault(entry["name"], entry["prompt_tokens"])
        elif entry.event == "answer" and entry.get("usage"):
            lengths[entry["name"]] = entry["usage"]["prompt_tokens"]
            cached[entry["name"]] = entry["usage"].get("cached_tokens") or 0
        elif entry.event == "steps" and entry.get("cached_tokens"):
            cached[entry["name"]] = entry["cached_tokens"]
    for name, tokens in lengths.items():
        kept = min(max(cached.get(name, 0), 0), tokens)
        yield Asked(name, tokens, kept, chunks_of(tokens - kept, batch))
