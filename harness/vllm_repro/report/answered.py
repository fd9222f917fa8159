"""What the client got of each trial: its answers over HTTP, and what the output check made of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.output import Checks, OutputComparison, OutputSample, Probe, ServedWeights, compare_output

__all__ = ["Trial", "answer_word", "answers", "held", "output_words", "refused", "trial_of"]

JUDGED = (ServedWeights.REAL, ServedWeights.IMITATED, ServedWeights.MADE)

Trial = tuple[str, int]
"""An arm's name and the number of its trial."""


def trial_of(entry: Entry) -> Trial:
    return entry["arm"], entry["trial"]


def answers(recording: Recording) -> dict[Trial, tuple[str, ...]]:
    """The HTTP results of each trial's workload in the order of arrival, equal ones in a row as one: `("200 x 2", "500")`."""
    words: dict[Trial, list[str]] = {}
    for entry in recording.of("answer"):
        words.setdefault(trial_of(entry), []).append(answer_word(entry))
    for trial, sent in _count(recording, "request-sent").items():
        got = words.setdefault(trial, [])
        got += ["none"] * (sent - len(got))
    return {trial: tuple(_folded(those)) for trial, those in words.items()}


def refused(recording: Recording) -> dict[Trial, tuple[int, ...]]:
    """The statuses of each trial's requests that the server would not take (4xx), in the order of arrival."""
    found: dict[Trial, list[int]] = {}
    for entry in recording.of("answer"):
        if entry["status"] is not None and 400 <= entry["status"] < 500:
            found.setdefault(trial_of(entry), []).append(entry["status"])
    return {trial: tuple(statuses) for trial, statuses in found.items()}


def answer_word(entry: Entry) -> str:
    """`200`, `200 (cut off)`, `none`: what came back of one request."""
    status = entry["status"]
    if status is None:
        return "none"
    if status == 200 and entry["error"] is not None:
        return "200 (error event)"
    if status == 200 and entry["finish_reason"] is None:
        return "200 (cut off)"
    return f"{status}"


def _count(recording: Recording, event: str) -> dict[Trial, int]:
    found: dict[Trial, int] = {}
    for entry in recording.of(event):
        found[trial_of(entry)] = found.get(trial_of(entry), 0) + 1
    return found


def _folded(words: Sequence[str]) -> list[str]:
    runs = [(word, sum(1 for _ in run)) for word, run in groupby(words)]
    return [word if times == 1 else f"{word} x {times}" for word, times in runs]


# ── the output check ──────────────────────────────────────────────────────────────────────────────────────────────────────


def held(recording: Recording) -> dict[Trial, OutputComparison]:
    """The trials that lived, each with what its greedy answer shows when it is held against the baseline arm's."""
    if (checks := _checks(recording)) is None:
        return {}
    said, weights = _said(recording), _weights(recording)
    # Boots that said the same are one: thousands are not compared with thousands.
    right = list(
        {_shown(those): those for (arm, _), those in said.items() if arm == checks.baseline and those}.values()
    )
    return {trial: compare_output(checks, those, right, weights[trial]) for trial, those in said.items()}


def _shown(those: Sequence[OutputSample]) -> tuple[tuple[Probe, tuple[int | str, ...]], ...]:
    return tuple((one.probe, one.first) for one in those)


def output_words(recording: Recording, found: Mapping[Trial, OutputComparison]) -> dict[Trial, str]:
    """A word or two on the answers of each trial whose output was checked; `found` is what `held` found."""
    if (checks := _checks(recording)) is None:
        return {}
    said, weights = _said(recording), _weights(recording)
    words: dict[Trial, str] = {}
    for entry in recording.of("trial-ended"):
        trial, one = trial_of(entry), found.get(trial_of(entry))
        if (one is not None and one.wrong) or entry["outcome"] == Outcome.WRONG_OUTPUT:
            words[trial] = "wrong"
        elif one is None:
            continue
        elif not said[trial] or weights[trial] not in JUDGED or (one.unknown and weights[trial] is ServedWeights.MADE):
            words[trial] = "not judged"
        else:
            words[trial] = "plausible" if one.unknown or trial[0] == checks.baseline else f"as {checks.baseline}"
    return words


def _checks(recording: Recording) -> Checks | None:
    started = recording.first("run-started")
    declared = started.get("output") if started is not None else None
    return Checks(**declared) if declared else None


def _weights(recording: Recording) -> dict[Trial, ServedWeights | None]:
    """Those of the trials that lived."""
    alive = [entry for entry in recording.of("trial-ended") if Outcome(entry["outcome"]).facts.alive]
    return {trial_of(entry): ServedWeights(entry["weights"]) if entry.get("weights") else None for entry in alive}


def _said(recording: Recording) -> dict[Trial, list[OutputSample]]:
    """The answers of the trials that lived."""
    said: dict[Trial, list[OutputSample]] = {trial: [] for trial in _weights(recording)}
    for entry in recording.of("output"):
        if trial_of(entry) in said:
            said[trial_of(entry)].append(_of(entry["said"]))
    return said


def _of(fields: Mapping[str, Any]) -> OutputSample:
    return OutputSample(
        **{
            **fields,
            "probe": Probe(fields["probe"]),
            "first": tuple(fields["first"]),
            "margins": tuple(fields.get("margins", ())),
        }
    )
