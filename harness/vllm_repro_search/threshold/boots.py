"""Search of the shortest prompt that crashes: a run for each boot, and the record on disk after each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Entry, Recording, read
from vllm_repro.running.job import Job
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.scenario.workload import Request, Size, requests_of, resolve
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions, edited_command
from vllm_repro.trigger.boundary import shortest_prompt
from vllm_repro.trigger.trigger import AttentionShape, TriggerFacts
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected
from vllm_repro_search.boot_search import BootSearch
from vllm_repro_search.threshold.plan import Answer, Probe
from vllm_repro_search.threshold.record import Boot, Threshold, answer, markdown, threshold_dict

__all__ = ["Lengths", "ThresholdSearch", "lengths_of", "probes_of"]

_SHORTEST = 32
"""Tokens of the first prompt if the workload has none below the boundary: chat templates alone take up to twenty."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Range of a search. request: the one to send with other lengths. low, high, guess: see `Search`."""

    request: Request
    low: int
    high: int
    guess: int


def lengths_of(scenario: Scenario, arm: Arm, kind: ServerKind, options: ServerOptions, run: str) -> Lengths:
    """Return what to search with `arm` on servers of `kind`. Raises `UsageError` if the boundary is not a prompt length.

    run: the command that runs the arm's own workload.
    """
    again = f"to see what this arm does: {run}"
    if arm.expected is not Expected.DIES or scenario.signature is None or scenario.phase == "boot":
        raise UsageError(f"no prompt crashes the arm {arm.name} of {scenario.id}", hint=again)
    in_lab = kind.facts.in_lab
    command, tiny_model, _ = edited_command(scenario, arm, kind, options)
    requests = [one for one in requests_of(scenario.workload_of(arm)) if isinstance(one.prompt, int | Size)]
    sizes = [resolve(one.prompt, command, in_lab=in_lab) for one in requests if isinstance(one.prompt, int | Size)]
    model = scenario.model
    facts = TriggerFacts(
        batch=command.number("--max-num-batched-tokens"),
        chunked=command.enabled("--enable-chunked-prefill"),
        command=command,
        shape=AttentionShape(model.heads, model.kv_heads, model.head_dim, model.block_size)
        if tiny_model is None
        else AttentionShape(
            tiny_model.heads,
            tiny_model.kv_heads,
            tiny_model.head_dim,
            kinds=tiny_model.kinds,
            window=tiny_model.window,
        ),
    )
    guess = None
    if requests:
        longest = max(sizes)
        request = requests[sizes.index(longest)]
        most = command.number("--max-model-len") or model.max_position
        most -= resolve(request.max_tokens, command, in_lab=in_lab)
        guess = shortest_prompt(arm.trigger or scenario.trigger, facts, most)
    if guess is None:
        raise UsageError(
            f"the boundary of {scenario.id} is not the length of one prompt: {arm.trigger or scenario.trigger}",
            hint=again,
        )
    if any(one.shared or one.conversation for one in requests):
        raise UsageError(f"the arm {arm.name} of {scenario.id} also needs a prefix in the cache", hint=again)
    low = min((size for size in sizes if size < guess), default=_SHORTEST)
    if low >= guess:
        raise UsageError(f"every prompt crosses the boundary of {scenario.id}, which is {guess} tokens", hint=again)
    return Lengths(request=request, low=low, high=min(max(2 * guess, longest), most), guess=guess)


def probes_of(recording: Recording) -> tuple[Outcome, str, tuple[Probe, ...]]:
    """Return the outcome of the last trial of a run, its reason, and what each of its prompts did.

    Only a complete answer to a prompt of the exact length is quiet. If the engine did not live, its last prompt is not quiet. It is a crash
    if the engine died of this bug and had answered every prompt before. A last prompt that the host spoiled is left out: it is sent again.
    """
    (*_, ended) = recording.of("trial-ended")
    outcome = Outcome(ended["outcome"])
    number = ended["trial"]
    answers = {one["name"]: one for one in recording.of("answer") if one["trial"] == number}
    sent = [one["name"] for one in recording.of("request-sent") if one["trial"] == number]
    probes: list[Probe] = []
    answered = True
    for place, name in enumerate(sent):
        length, got, last = int(name.split()[0]), answers.get(name), place == len(sent) - 1
        quiet = got is not None and _is_quiet(got, length)
        if quiet and (outcome.facts.alive or not last):
            probes.append(Probe(length, Answer.QUIET, first=place == 0))
        elif last and outcome is Outcome.CRASH and answered and not quiet and not _is_refused(got):
            probes.append(Probe(length, Answer.CRASH, first=place == 0))
        elif not last or outcome.facts.tested:
            probes.append(Probe(length, Answer.SKIP, first=place == 0))
        answered = answered and (quiet or _is_refused(got))
    return outcome, str(ended["why"]), tuple(probes)


def _is_quiet(got: Entry, length: int) -> bool:
    counted = (got["usage"] or {}).get("prompt_tokens")
    return bool(got["status"] == 200 and not got["error"] and got["finish_reason"] and counted == length)


def _is_refused(got: Entry | None) -> bool:
    return got is not None and got["status"] is not None and 400 <= got["status"] < 500


class ThresholdSearch(BootSearch[Threshold, Sequence[int]]):
    """Search of the shortest prompt that crashes. request: sent with each length."""

    verb, file = "threshold", "threshold"
    as_dict, as_markdown = staticmethod(threshold_dict), staticmethod(markdown)

    def __init__(self, job: Job, found: Threshold, request: Request) -> None:
        super().__init__(job, found)
        self._request = request

    def _next(self) -> Sequence[int] | None:
        return self.found.search.plan() or None

    def _answered(self) -> list[bool]:
        return [any(probe.answer is not Answer.SKIP for probe in boot.probes) for boot in self.found.boots]

    def _boot(self, chosen: Sequence[int]) -> str | None:
        began = time.monotonic()
        several = f"up to {len(chosen)} prompts of {chosen[0]:,} to {chosen[-1]:,}"
        what = several if len(chosen) > 1 else f"a prompt of {chosen[0]:,}"
        self._progress.line(f"boot {len(self.found.boots) + 1}: {what} tokens")
        workload = tuple(
            replace(self._request, name=f"{one} tokens", prompt=one, shared=0, conversation="", may_fail=())
            for one in chosen
        )
        (arm,) = self.job.arms
        report = self._boot_arm(replace(arm, workload=workload))
        if report.interrupted:
            return report.interrupted
        outcome, why, probes = probes_of(read(report.folder / "journal.jsonl"))
        boot = Boot(
            probes=probes,
            outcome=outcome,
            why=why,
            run=report.folder.name,
            duration_s=round(time.monotonic() - began, 1),
        )
        self.found = replace(
            self.found, boots=(*self.found.boots, boot), version=report.vllm_version or self.found.version
        )
        self._progress.line(f"  {answer(self.found)}")
        return None
