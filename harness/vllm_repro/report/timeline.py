"""Events of each trial, in seconds from the launch: requests, answers, signs of a crash.

Signs name no trial in the journal. Trials of a run do not overlap, so a sign belongs to the trial
that was open.
"""

from __future__ import annotations

from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.answers import TrialId, answer_word, trial_id

__all__ = ["Event", "timelines"]

Event = tuple[float, str, str]
"""Seconds, what, detail."""

_COUNTED = {"throughput-round": "throughput"}


def timelines(recording: Recording) -> dict[TrialId, list[Event]]:
    """Return the events of each trial in the order of time, with the unfinished trials."""
    entries: dict[TrialId, list[Entry]] = {}
    own: list[Entry] | None = None
    for entry in recording.entries:
        if entry.event == "trial-started":
            entries[trial_id(entry)] = own = []
        if own is not None:
            own.append(entry)
            if entry.event == "trial-ended":
                own = None
    return {trial: _events(own) for trial, own in entries.items()}


def _events(entries: list[Entry]) -> list[Event]:
    began = entries[0].t
    shown = {entry["detail"] for entry in entries if entry.event == "sign"}
    found: list[Event] = []
    for entry in entries:
        # The exit of a process is a sign as well: show it once.
        if (words := _words(entry)) is not None and not (words[0] == "exit" and words[1] in shown):
            at = entry.get("at", entry.t) if entry.event == "sign" else entry.t
            found.append((at - began, *words))
    for event, name in _COUNTED.items():
        if times := [entry.t - began for entry in entries if entry.event == event]:
            found.append(
                (times[-1], name, f"{len(times)} on record, the first at {times[0]:.3f} s")
            )
    return sorted(found, key=lambda event: event[0])


def _words(entry: Entry) -> tuple[str, str] | None:
    """Return what an entry observed, and its detail; None for events that are not shown."""
    match entry.event:
        case "sign":
            return entry["channel"] + (" (decisive)" if entry["decisive"] else ""), entry["detail"]
        case "ready":
            return "ready", "/health answers 200" + (
                f", vLLM {entry['version']}" if entry.get("version") else ""
            )
        case "request-sent":
            return entry["name"], "sent"
        case "answer":
            tokens = (entry.get("usage") or {}).get("completion_tokens")
            result = answer_word(entry) + (
                f", {tokens} token{'' if tokens == 1 else 's'}" if tokens else ""
            )
            took = entry.get("took_s")
            return entry["name"], result + (f", after {took:.3f} s" if took is not None else "")
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
            return (
                "stalled",
                f"no progress for {entry['seconds']:.0f} s; last line: {entry['last_line']}",
            )
        case "measure-stopped":
            return "measuring", f"{entry['doing']} stopped: {entry['why']}"
        case "trial-ended":
            return "end", "of the trial"
        case _:
            return None
