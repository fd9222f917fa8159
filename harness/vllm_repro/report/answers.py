"""What the client received in each trial: HTTP results, and the result of the output check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec

from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.output import Checks, OutputComparison, OutputSample, ServedWeights, compare_output

__all__ = [
    "TrialId",
    "answer_word",
    "answers",
    "compare_outputs",
    "output_words",
    "refused_statuses",
    "trial_id",
]

_JUDGED = (ServedWeights.REAL, ServedWeights.IMITATED, ServedWeights.MADE)

TrialId = tuple[str, int]
"""The name of an arm and the number of its trial."""


def trial_id(entry: Entry) -> TrialId:
    return entry["arm"], entry["trial"]


def answers(recording: Recording) -> dict[TrialId, tuple[str, ...]]:
    """Return each trial's HTTP results in the order of arrival, with runs of equal ones folded: `("200 x 2", "500")`."""
    words: dict[TrialId, list[str]] = {}
    sent: dict[TrialId, int] = {}
    for entry in recording.of("answer"):
        words.setdefault(trial_id(entry), []).append(answer_word(entry))
    for entry in recording.of("request-sent"):
        sent[trial_id(entry)] = sent.get(trial_id(entry), 0) + 1
    for trial, count in sent.items():
        received = words.setdefault(trial, [])
        received += ["none"] * (count - len(received))
    return {trial: tuple(_folded(received)) for trial, received in words.items()}


def refused_statuses(recording: Recording) -> dict[TrialId, tuple[int, ...]]:
    """Return the 4xx statuses of each trial, in the order of arrival."""
    found: dict[TrialId, list[int]] = {}
    for entry in recording.of("answer"):
        if entry["status"] is not None and 400 <= entry["status"] < 500:
            found.setdefault(trial_id(entry), []).append(entry["status"])
    return {trial: tuple(statuses) for trial, statuses in found.items()}


def answer_word(entry: Entry) -> str:
    """Return the result of one request: `200`, `200 (cut off)`, `none`."""
    status = entry["status"]
    if status is None:
        return "none"
    if status == 200 and entry["error"] is not None:
        return "200 (error event)"
    if status == 200 and entry["finish_reason"] is None:
        return "200 (cut off)"
    return f"{status}"


def _folded(words: Sequence[str]) -> list[str]:
    runs = [(word, sum(1 for _ in run)) for word, run in groupby(words)]
    return [word if times == 1 else f"{word} x {times}" for word, times in runs]


def compare_outputs(recording: Recording) -> dict[TrialId, OutputComparison]:
    """Return, for each trial whose engine lived, the comparison of its greedy output with the baseline arm's."""
    if (checks := _checks(recording)) is None:
        return {}
    said, weights = _said(recording), _weights(recording)
    baseline = [outputs for (arm, _), outputs in said.items() if arm == checks.baseline and outputs]
    return {trial: compare_output(checks, outputs, baseline, weights[trial]) for trial, outputs in said.items()}


def output_words(recording: Recording, compared: Mapping[TrialId, OutputComparison]) -> dict[TrialId, str]:
    """Return a word or two on the output of each checked trial. compared: the result of `compare_outputs`."""
    if (checks := _checks(recording)) is None:
        return {}
    said, weights = _said(recording), _weights(recording)
    words: dict[TrialId, str] = {}
    for entry in recording.of("trial-ended"):
        trial, result = trial_id(entry), compared.get(trial_id(entry))
        if (result is not None and result.wrong) or entry["outcome"] == Outcome.WRONG_OUTPUT:
            words[trial] = "wrong"
        elif result is None:
            continue
        elif (
            not said[trial]
            or weights[trial] not in _JUDGED
            or (result.unknown and weights[trial] is ServedWeights.MADE)
        ):
            words[trial] = "not judged"
        else:
            words[trial] = "plausible" if result.unknown or trial[0] == checks.baseline else f"as {checks.baseline}"
    return words


def _checks(recording: Recording) -> Checks | None:
    started = recording.first("run-started")
    return msgspec.convert(started.get("output") if started is not None else None, Checks | None)


def _weights(recording: Recording) -> dict[TrialId, ServedWeights | None]:
    """Return the weights of the trials whose engine lived."""
    alive = [entry for entry in recording.of("trial-ended") if Outcome(entry["outcome"]).facts.alive]
    return {trial_id(entry): ServedWeights(entry["weights"]) if entry.get("weights") else None for entry in alive}


def _said(recording: Recording) -> dict[TrialId, list[OutputSample]]:
    """Return the outputs of the trials whose engine lived."""
    said: dict[TrialId, list[OutputSample]] = {trial: [] for trial in _weights(recording)}
    for entry in recording.of("output"):
        if trial_id(entry) in said:
            said[trial_id(entry)].append(msgspec.convert(entry["said"], OutputSample))
    return said
