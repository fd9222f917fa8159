"""Events of each trial, in seconds from the launch: requests, answers, signs of a crash.

Signs name no trial in the journal. Trials of a run do not overlap, so a sign belongs to the trial
that was open.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.answers import TrialId, answer_word, trial_id
from vllm_repro.report.format import plural

Event = tuple[float, str, str]
"""Seconds from the start of the trial, label, detail."""

_COUNTED = {"throughput-round": "throughput"}


def timelines(recording: Recording) -> dict[TrialId, list[Event]]:
    """Return the events of each trial in the order of time, also of trials that did not end."""
    trials: dict[TrialId, list[Entry]] = {}
    trial: list[Entry] | None = None
    for entry in recording.entries:
        if entry.event == "trial-started":
            trials[trial_id(entry)] = trial = []
        if trial is not None:
            trial.append(entry)
            if entry.event == "trial-ended":
                trial = None
    return {name: _events(entries) for name, entries in trials.items()}


def _events(entries: list[Entry]) -> list[Event]:
    """Return one trial's journal entries as events, in seconds from the trial's start."""
    began = entries[0].t
    shown = {entry["detail"] for entry in entries if entry.event == "sign"}
    events: list[Event] = []
    for entry in entries:
        # The exit of a process is a sign as well: show it once.
        if (words := _words(entry)) is not None and not (words[0] == "exit" and words[1] in shown):
            at = entry.get("at", entry.t) if entry.event == "sign" else entry.t
            events.append((at - began, *words))
    for event, name in _COUNTED.items():
        if times := [entry.t - began for entry in entries if entry.event == event]:
            events.append(
                (times[-1], name, f"{len(times)} on record, the first at {times[0]:.3f} s")
            )
    return sorted(events, key=lambda event: event[0])


def _words(entry: Entry) -> tuple[str, str] | None:
    """Return (label, detail) of a journal entry; None for an event that is not shown."""
    words = _WORDS.get(entry.event)
    return words(entry) if words else None


def _answer(entry: Entry) -> tuple[str, str]:
    """Return (name of the request, its answer: status, tokens and seconds)."""
    tokens = (entry.get("usage") or {}).get("completion_tokens")
    result = answer_word(entry) + (f", {plural(tokens, 'token')}" if tokens else "")
    took_s = entry.get("took_s")
    return entry["name"], result + (f", after {took_s:.3f} s" if took_s is not None else "")


def _canary(entry: Entry) -> tuple[str, str]:
    """Return ("canary", result) of the one-token completion that tests if the engine answers."""
    result = "answers" if entry["ok"] else f"fails: {entry['status']}, {entry['error']}"
    return "canary", f"a one-token completion {result}"


_WORDS: dict[str, Callable[[Entry], tuple[str, str]]] = {
    "sign": lambda entry: (
        entry["channel"] + (" (decisive)" if entry["decisive"] else ""),
        entry["detail"],
    ),
    "ready": lambda entry: (
        "ready",
        "/health answers 200" + (f", vLLM {entry['version']}" if entry.get("version") else ""),
    ),
    "request-sent": lambda entry: (entry["name"], "sent"),
    "answer": _answer,
    "canary": _canary,
    "exited": lambda entry: (
        "exit",
        f"{entry['detail']}{', as we asked' if entry.get('asked') else ''}",
    ),
    "rank-exited": lambda entry: ("exit", f"rank {entry['rank']}: {entry['detail']}"),
    "hung": lambda entry: ("hung", entry["detail"]),
    "stands": lambda entry: (
        "stands",
        "\n".join([f"{entry['kind']}: {entry['why']}", *entry["stacks"]]),
    ),
    "channel-broken": lambda entry: ("channel-broken", entry["detail"]),
    "boot-stalled": lambda entry: (
        "stalled",
        f"no progress for {entry['seconds']:.0f} s; last line: {entry['last_line']}",
    ),
    "measure-stopped": lambda entry: ("measuring", f"{entry['doing']} stopped: {entry['why']}"),
    "trial-ended": lambda _: ("end", "of the trial"),
}
"""Label and detail of an event, by its name."""
