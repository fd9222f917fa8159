"""`vllm-repro threshold`: the shortest prompt that crashes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, ClassVar

from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Entry, Recording, read
from vllm_repro.report.model import RunReport
from vllm_repro.running.folders import with_out
from vllm_repro.running.job import Job, repeat_command
from vllm_repro.running.state import MeasureOptions
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.scenario.workload import Request, Size, requests_of, resolve
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions, edited_command
from vllm_repro.trigger.boundary import shortest_prompt
from vllm_repro.trigger.trigger import AttentionShape, TriggerFacts
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected
from vllm_repro_search.boot_search import (
    ArmSearch,
    add_search,
    common_fields,
    job_of_one_arm,
    run_search,
    with_resumed,
)
from vllm_repro_search.plan import SearchState
from vllm_repro_search.record import ArmBoot, ReleaseSearchRecord
from vllm_repro_search.threshold.plan import PromptResult, PromptSent, ThresholdPlan

_EPILOG = """

exit status:
  0  the answer is known: a length, or that none or all of the prompts sent
     crash
  1  a surprise: a longer prompt does not crash, or the crash needs the
     prompts before it
  2  undecided: a limit was reached, or what is left gave no answer
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

A boot gets prompts until one crashes it. The first ones lie around the length that the scenario's
trigger computes. In the end the answer is sent alone to a fresh server, and two longer prompts.
threshold.json and threshold.md in OUT/SCENARIO/threshold/ are rewritten after each boot; --resume
continues them. vllm_repro_search/docs/smaller.md"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-repro threshold`."""
    add_search(
        parser,
        example="vllm-repro threshold tq-chunked-prefill --server lab --vllm 0.23.0",
        prints="the content of threshold.json",
        more=_EPILOG,
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `vllm-repro threshold`: search the shortest crashing prompt; return the exit status."""
    arguments, unfinished = with_resumed(arguments, Threshold)
    job = job_of_one_arm(arguments, "threshold")
    unmeasured = replace(job, measure=MeasureOptions(throughput=None))
    shown = with_out(
        repeat_command("run", unmeasured, job.choice.kind, ("--vllm", job.options.vllm)), job.out
    )
    plan, request = lengths_of(job.scenario, job.arms[0], job.choice.kind, job.options, shown)
    record = Threshold(
        **common_fields(job, job.reproduce),
        arm=job.arms[0].name,
        low=plan.low,
        high=plan.high,
        guess=plan.guess,
    )
    return run_search(arguments, ThresholdSearch(job, record, request), unfinished)


class ThresholdBoot(ArmBoot, frozen=True, kw_only=True):
    """One boot, and the result of each prompt sent to it."""

    # the prompts that gave an answer or a skip, in order
    probes: tuple[PromptSent, ...]

    @property
    def tested(self) -> bool:
        """Return True if at least one prompt has a result, even a skip."""
        return bool(self.probes)


class Threshold(ReleaseSearchRecord, frozen=True, kw_only=True):
    """A search of the shortest crashing prompt among the lengths `low` to `high`, in tokens."""

    verb: ClassVar[str] = "threshold"
    file: ClassVar[str] = "threshold"
    fixed: ClassVar[tuple[str, ...]] = ("low", "high", "guess")

    low: int
    high: int
    # the shortest crashing prompt by the scenario's formula
    guess: int
    boots: tuple[ThresholdBoot, ...] = ()

    @property
    def plan(self) -> ThresholdPlan:
        """Return the plan after the prompts so far."""
        probes = (probe for boot in self.boots for probe in boot.probes)
        return ThresholdPlan(low=self.low, high=self.high, guess=self.guess).after(*probes)

    def answered(self) -> list[bool]:
        """Return for each boot whether a prompt of it gave an answer."""
        return [
            any(probe.answer is not PromptResult.SKIP for probe in boot.probes)
            for boot in self.boots
        ]

    def derived(self) -> dict[str, Any]:
        """Return what threshold.json has beside the fields, such as the answer."""
        plan = self.plan
        return {
            "state": plan.state,
            "answer": plan.shortest_crash if plan.state is SearchState.FOUND else None,
            "shortest_crash": plan.shortest_crash,
            "longest_quiet": plan.longest_quiet,
        }


_SHORTEST = 32
"""Tokens of the first prompt if the workload has none below the boundary.

A chat template alone takes up to 20.
"""


def lengths_of(
    scenario: Scenario, arm: Arm, kind: ServerKind, options: ServerOptions, run: str
) -> tuple[ThresholdPlan, Request]:
    """Return the plan of the prompt lengths to try with an arm, and the request to send.

    run: the command that runs the arm's own workload, for hints. Raises `UsageError` if no prompt
    crashes the arm, or if its boundary is not the length of one prompt.
    """
    again = f"to see what this arm does: {run}"
    if arm.expected is not Expected.DIES or scenario.signature is None or scenario.phase == "boot":
        raise UsageError(f"no prompt crashes the arm {arm.name} of {scenario.id}", hint=again)
    in_lab = kind.facts.in_lab
    command, tiny_model, _ = edited_command(scenario, arm, kind, options)
    sized = [
        (resolve(request.prompt, command, in_lab=in_lab), request)
        for request in requests_of(scenario.workload_of(arm))
        if isinstance(request.prompt, int | Size)
    ]
    model = scenario.model
    facts = TriggerFacts(
        batch=command.number("--max-num-batched-tokens"),
        chunked=command.enabled("--enable-chunked-prefill"),
        command=command,
        shape=(
            AttentionShape(model.heads, model.kv_heads, model.head_dim, model.block_size)
            if tiny_model is None
            else AttentionShape(
                tiny_model.heads,
                tiny_model.kv_heads,
                tiny_model.head_dim,
                kinds=tiny_model.kinds,
                window=tiny_model.window,
            )
        ),
    )
    guess = None
    if sized:
        longest, request = max(sized, key=itemgetter(0))
        most = command.number("--max-model-len") or model.max_position
        most -= resolve(request.max_tokens, command, in_lab=in_lab)
        guess = shortest_prompt(arm.trigger or scenario.trigger, facts, most)
    if guess is None:
        raise UsageError(
            f"the boundary of {scenario.id} is not the length of one prompt:"
            f" {arm.trigger or scenario.trigger}",
            hint=again,
        )
    if any(sent.shared or sent.conversation for _, sent in sized):
        raise UsageError(
            f"the arm {arm.name} of {scenario.id} also needs a prefix in the cache", hint=again
        )
    low = min((size for size, _ in sized if size < guess), default=_SHORTEST)
    if low >= guess:
        raise UsageError(
            f"every prompt crosses the boundary of {scenario.id}, which is {guess} tokens",
            hint=again,
        )
    high = min(max(2 * guess, longest), most)
    return ThresholdPlan(low=low, high=high, guess=guess), request


def probes_of(recording: Recording) -> tuple[PromptSent, ...]:
    """Return the result of each prompt of the last trial of a run.

    QUIET: the answer is complete and the prompt has exactly the stated length; after the last
    prompt the engine must live, too. CRASH: the last prompt, if the engine died of this bug and had
    answered (also with a refusal, 4xx) every prompt before. SKIP: any other. If the trial tested no
    engine, a last prompt that is not quiet is left out: it is sent again.
    """
    *_, ended = recording.of("trial-ended")
    outcome = Outcome(ended["outcome"])
    number = ended["trial"]
    answers = {entry["name"]: entry for entry in recording.of("answer") if entry["trial"] == number}
    sent = [entry["name"] for entry in recording.of("request-sent") if entry["trial"] == number]
    probes: list[PromptSent] = []
    answered = True
    for name in sent:
        length, answer, last = int(name.split()[0]), answers.get(name), name == sent[-1]
        quiet = answer is not None and _answered_whole(answer, length)
        result = PromptResult.SKIP
        if quiet and (outcome.facts.alive or not last):
            result = PromptResult.QUIET
        elif (
            last and outcome is Outcome.CRASH and answered and not quiet and not _is_refused(answer)
        ):
            result = PromptResult.CRASH
        elif last and not outcome.facts.tested:
            break
        probes.append(PromptSent(length, result, first=not probes))
        answered = answered and (quiet or _is_refused(answer))
    return tuple(probes)


def _answered_whole(answer: Entry, length: int) -> bool:
    """Return True for a complete 200 to a prompt of exactly `length` tokens."""
    complete = answer["status"] == 200 and not answer["error"] and bool(answer["finish_reason"])
    return complete and (answer["usage"] or {}).get("prompt_tokens") == length


def _is_refused(answer: Entry | None) -> bool:
    """Return True if the server answered with a status of 400 to 499."""
    return answer is not None and answer["status"] is not None and 400 <= answer["status"] < 500


class ThresholdSearch(ArmSearch[Threshold, tuple[int, ...]]):
    """Search of the shortest prompt that crashes. request: sent with each length."""

    def __init__(self, job: Job, record: Threshold, request: Request) -> None:
        super().__init__(job, record)
        self._request = request

    def describe(self, item: tuple[int, ...], number: int) -> str:
        """Return the progress line of a boot, which names its prompts' lengths."""
        several = f"up to {len(item)} prompts of {item[0]:,} to {item[-1]:,}"
        return f"boot {number}: {several if len(item) > 1 else f'a prompt of {item[0]:,}'} tokens"

    def changed_arm(self, item: tuple[int, ...]) -> Arm:
        """Return the arm with prompts of these lengths as its workload."""
        fields: dict[str, Any] = {"shared": 0, "conversation": "", "may_fail": ()}
        workload = tuple(
            replace(self._request, name=f"{length} tokens", prompt=length, **fields)
            for length in item
        )
        (arm,) = self.job.arms
        return replace(arm, workload=workload)

    def boot_of(
        self, item: tuple[int, ...], report: RunReport, common: Mapping[str, Any]
    ) -> ThresholdBoot:
        """Return the boot, with the result of each prompt from the run's journal."""
        return ThresholdBoot(probes=probes_of(read(report.folder / "journal.jsonl")), **common)
