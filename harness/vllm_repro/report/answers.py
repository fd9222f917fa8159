"""HTTP results and output check of each trial, as the client received them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_repro.client.sdk import SdkView
from vllm_repro.conversion import convert
from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.format import runs
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.output import (
    Checks,
    OutputComparison,
    OutputSample,
    Probe,
    ServedWeights,
    compare_alone,
    compare_output,
)

_JUDGED = (ServedWeights.REAL, ServedWeights.IMITATED, ServedWeights.MADE)

TrialId = tuple[str, int]
"""The name of an arm and the number of its trial."""


@dataclass(frozen=True, kw_only=True)
class ClientView:
    """Answers of one trial, as the client received them."""

    # HTTP results in the order of arrival, equal neighbours folded: `("200 x 2", "500")`
    answers: tuple[str, ...] = ()
    # 4xx status and error text of each refusal, in that order
    refused: tuple[tuple[int, str], ...] = ()
    # names of the requests without a complete answer
    failed: tuple[str, ...] = ()
    # comparison of the output check; empty without one
    compared: OutputComparison
    # result of the output check in a word or two
    output: str = ""
    # after a crash
    sdk: SdkView | None = None


def trial_id(entry: Entry) -> TrialId:
    """Return the name of the arm and the number of the trial that a journal entry belongs to."""
    return entry["arm"], entry["trial"]


def client_views(recording: Recording, *, judged: bool = True) -> dict[TrialId, ClientView]:
    """Return what the client received in each trial that ended or sent a request.

    judged: True if the bug is a wrong answer: then an output that cannot be judged makes the trial
    undecided. False: empty `ClientView.compared.unknown`.
    """
    by_trial: dict[TrialId, dict[str, list[Entry]]] = {}
    for entry in recording.entries:
        if entry.event in ("request-sent", "answer", "client-left", "client-saw", "trial-ended"):
            by_trial.setdefault(trial_id(entry), {}).setdefault(entry.event, []).append(entry)
    outputs = _outputs(recording)
    return {
        trial: _view(entries, *outputs.get(trial, (None, "")), judged=judged)
        for trial, entries in by_trial.items()
    }


def _view(
    entries: Mapping[str, Sequence[Entry]],
    compared: OutputComparison | None,
    output: str,
    *,
    judged: bool,
) -> ClientView:
    """Return what the client received in one trial, from its journal entries by event.

    compared, output: the pair of `_outputs`. judged: as for `client_views`.
    """
    sent, received, left = (
        entries.get(event, ()) for event in ("request-sent", "answer", "client-left")
    )
    words = [*map(answer_word, received), *("left" for _ in left)]
    words += ["none"] * (len(sent) - len(words))
    complete = [entry for entry in received if answer_word(entry) == "200"]
    names, done = (Counter(entry["name"] for entry in part) for part in (sent, [*complete, *left]))
    comparison = compared or OutputComparison()
    return ClientView(
        answers=tuple(word if times == 1 else f"{word} x {times}" for word, times in runs(words)),
        refused=tuple(
            (entry["status"], entry["error"] or "")
            for entry in received
            if 400 <= (entry["status"] or 0) < 500
        ),
        failed=tuple(names - done),
        compared=comparison if judged else replace(comparison, unknown=""),
        output=output,
        sdk=next((convert(entry.fields, SdkView) for entry in entries.get("client-saw", ())), None),
    )


def answer_word(entry: Entry) -> str:
    """Return the HTTP result in an `answer` entry in words: `200`, `200 (cut off)`, `none`."""
    status = entry["status"]
    if status is None:
        return "none"
    if status == 200 and entry["error"] is not None:
        return "200 (error event)"
    if status == 200 and entry["finish_reason"] is None:
        return "200 (cut off)"
    return f"{status}"


def _outputs(recording: Recording) -> dict[TrialId, tuple[OutputComparison | None, str]]:
    """Return {trial: (comparison, result)} of the output check, for trials whose engine lived.

    The result is `wrong`, `alike`, `plausible`, `not judged`, `as ARM` or `as alone`. If the
    scenario declares checks, the comparison is None only for a trial that the journal has as
    `wrong-output`. If it declares none, the comparison is always None, and besides such trials
    only those with answers to prompts sent alone are returned.
    """
    started = recording.first("run-started")
    checks = convert(started.get("output") if started is not None else None, Checks | None)
    ended = {trial_id(entry): entry for entry in recording.of("trial-ended")}
    weights = {
        trial: convert(entry.get("weights") or None, ServedWeights | None)
        for trial, entry in ended.items()
        if Outcome(entry["outcome"]).facts.alive
    }
    samples: dict[TrialId, list[OutputSample]] = {trial: [] for trial in weights}
    for entry in recording.of("output"):
        if trial_id(entry) in weights:
            samples[trial_id(entry)].append(convert(entry["said"], OutputSample))
    compared: dict[TrialId, tuple[OutputComparison | None, str]] = {
        trial: (None, "wrong")
        for trial, entry in ended.items()
        if entry["outcome"] == Outcome.WRONG_OUTPUT
    }
    if checks is None:
        return compared | {
            trial: (None, _word_alone(compare_alone(outputs, weights[trial])))
            for trial, outputs in samples.items()
            if any(sample.probe is Probe.ALONE for sample in outputs)
        }
    baseline = [
        outputs for (arm, _), outputs in samples.items() if arm == checks.baseline and outputs
    ]
    for trial, outputs in samples.items():
        comparison = compare_output(checks, outputs, baseline, weights[trial])
        unjudged = not outputs or weights[trial] not in _JUDGED
        random = bool(comparison.unknown) and weights[trial] is ServedWeights.MADE
        if comparison.wrong:
            word = "wrong"
        elif not checks.asks:
            word = "not judged" if comparison.unknown else "alike"
        elif unjudged or random:
            word = "not judged"
        elif comparison.unknown or trial[0] == checks.baseline:
            word = "plausible"
        else:
            word = f"as {checks.baseline}"
        compared[trial] = comparison, word
    return compared


def _word_alone(comparison: OutputComparison) -> str:
    """Return `wrong`, `not judged` or `as alone`. comparison: the result of `compare_alone`."""
    return "wrong" if comparison.wrong else "not judged" if comparison.unknown else "as alone"
