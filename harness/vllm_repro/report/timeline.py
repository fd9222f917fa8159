"""What happened in each trial, in seconds from its launch: boot, requests, and signs of a crash by channel.

Signs name no trial in the journal. Trials of a run do not overlap, so a sign belongs to the trial that was open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.answers import TrialId, answer_word, trial_id

__all__ = ["Moment", "Span", "Timeline", "timelines"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A request, or a measurement. ok: None if its end is not in the journal."""

    start_s: float
    end_s: float
    name: str
    result: str
    ok: bool | None


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One observation. lane: the channel of a sign, else the kind of observation. sign: a sign of a crash."""

    at_s: float
    lane: str
    text: str
    sign: bool = False
    decisive: bool = False


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One trial. ready_s: None if the server was never ready. ended: the journal has the trial's outcome."""

    ready_s: float | None
    end_s: float
    spans: tuple[Span, ...]
    moments: tuple[Moment, ...]
    ended: bool

    @property
    def events(self) -> list[tuple[float, str, str]]:
        """Return all of it in the order of time, as (seconds, name, text)."""
        found = [(moment.at_s, moment.lane, moment.text) for moment in self.moments]
        for span in self.spans:
            found.append((span.start_s, span.name, "begins"))
            if span.ok is not None:
                found.append((span.end_s, span.name, f"{span.result}, after {span.end_s - span.start_s:.3f} s"))
        return sorted(found, key=lambda event: event[0])

    @property
    def death_s(self) -> float | None:
        """Return the time of the first decisive sign."""
        return min((moment.at_s for moment in self.moments if moment.decisive), default=None)


def timelines(recording: Recording, outcomes: Mapping[TrialId, str] | None = None) -> dict[TrialId, Timeline]:
    """Return the timeline of each trial, in the order of their starts, with the unfinished ones.

    outcomes: the report's outcome of a trial, which replaces the one in the journal.
    """
    words = outcomes or {}
    return {trial: _timeline(entries, words.get(trial)) for trial, entries in _trials(recording.entries)}


def _trials(entries: Sequence[Entry]) -> Iterator[tuple[TrialId, list[Entry]]]:
    own: list[Entry] = []
    for entry in entries:
        if entry.event == "trial-started":
            if own:
                yield trial_id(own[0]), own
            own = [entry]
        elif own:
            own.append(entry)
            if entry.event == "trial-ended":
                yield trial_id(own[0]), own
                own = []
    if own:
        yield trial_id(own[0]), own


def _timeline(entries: list[Entry], outcome: str | None) -> Timeline:
    began = entries[0].t
    ended = entries[-1].event == "trial-ended"
    end_s = max((entries[-1].t if ended else max(entry.t for entry in entries)) - began, 0.001)
    moments = list(_moments(entries, began, outcome))
    signs = {moment.text for moment in moments if moment.sign}
    # The exit of a process is a sign as well: show it once.
    moments = [moment for moment in moments if moment.lane != "exit" or moment.text not in signs]
    return Timeline(
        ready_s=next((entry.t - began for entry in entries if entry.event == "ready"), None),
        end_s=end_s,
        spans=tuple(_spans(entries, began, end_s)),
        moments=tuple(sorted(moments, key=lambda moment: moment.at_s)),
        ended=ended,
    )


def _spans(entries: list[Entry], began: float, end_s: float) -> Iterator[Span]:
    unanswered: dict[str, list[float]] = {}
    for entry in entries:
        at_s = entry.t - began
        if entry.event == "request-sent":
            unanswered.setdefault(entry["name"], []).append(at_s)
        elif entry.event == "answer":
            name, word = entry["name"], answer_word(entry)
            sent = unanswered.get(name)
            # Requests of one name may overtake each other: the recorded duration decides.
            start_s = sent.pop(0) if sent else at_s
            if (took := entry.get("took_s")) is not None:
                start_s = at_s - took
            tokens = (entry.get("usage") or {}).get("completion_tokens")
            result = f"{word}, {tokens} token{'' if tokens == 1 else 's'}" if tokens else word
            yield Span(start_s=start_s, end_s=at_s, name=name, result=result, ok=word == "200")
    for name, starts in unanswered.items():
        for start_s in starts:
            yield Span(start_s=start_s, end_s=end_s, name=name, result="no answer on record", ok=None)
    for event, name in (("throughput-round", "throughput"), ("soak", "soak")):
        times = [entry.t - began for entry in entries if entry.event == event]
        if times:
            yield Span(start_s=times[0], end_s=times[-1], name=name, result=f"{len(times)} on record", ok=True)


def _moments(entries: list[Entry], began: float, outcome: str | None) -> Iterator[Moment]:
    for entry in entries:
        if entry.event == "sign":
            yield Moment(
                at_s=entry.get("at", entry.t) - began,
                lane=entry["channel"],
                text=entry["detail"],
                sign=True,
                decisive=entry["decisive"],
            )
        elif (observed := _observed(entry, outcome)) is not None:
            lane, text = observed
            yield Moment(at_s=entry.t - began, lane=lane, text=text)


def _observed(entry: Entry, outcome: str | None) -> tuple[str, str] | None:
    """Return lane and text of an entry that is no sign; None for events without a place on the timeline."""
    match entry.event:
        case "ready":
            return "ready", "/health answers 200" + (f", vLLM {entry['version']}" if entry.get("version") else "")
        case "canary":
            result = "answers" if entry["ok"] else f"fails: {entry['status']}, {entry['error']}"
            return "canary", f"a one-token completion {result}"
        case "exited":
            return "exit", f"{entry['detail']}{', as we asked' if entry.get('asked') else ''}"
        case "rank-exited":
            return "exit", f"rank {entry['rank']}: {entry['detail']}"
        case "hung" | "channel-broken":
            return entry.event, entry["detail"]
        case "boot-stalled":
            return "stalled", f"no progress for {entry['seconds']:.0f} s; last line: {entry['last_line']}"
        case "measure-stopped":
            return "measuring", f"{entry['doing']} stopped: {entry['why']}"
        case "trial-ended":
            return "end", outcome or entry["outcome"]
        case _:
            return None
