"""Search of the shortest prompt that crashes: a run for each boot, and the record on disk after each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Entry, Recording, read
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.report.files import write_file
from vllm_repro.report.threshold import Boot, Threshold, answer, markdown, threshold_dict
from vllm_repro.running.folders import private_folders, private_hosts, stamped_folder
from vllm_repro.running.job import Job, first_line
from vllm_repro.running.resume import UnfinishedThreshold
from vllm_repro.running.run import run_one
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.scenario.workload import Request, Size, requests_of, resolve
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions, weights_for
from vllm_repro.servers.site import Site
from vllm_repro.trigger.boundary import shortest_prompt
from vllm_repro.trigger.trigger import AttentionShape, TriggerFacts
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.threshold import Answer, Probe
from vllm_repro.verdict.verdict import Expected

__all__ = ["Lengths", "find_threshold", "lengths_of", "probes_of"]

_SHORTEST = 32
"""Tokens of the first prompt if the workload has none below the boundary: chat templates alone take up to twenty."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What to search. request: the one to send with other lengths. low, high, guess: see `Search`."""

    request: Request
    low: int
    high: int
    guess: int


def lengths_of(scenario: Scenario, arm: Arm, kind: ServerKind, options: ServerOptions) -> Lengths:
    """Return what to search with `arm` on servers of `kind`. Raises `UsageError` if the boundary is not a prompt length."""
    again = f"vllm-repro run {scenario.id} --arm {arm.name} shows what this arm does"
    if arm.expected is not Expected.DIES or scenario.signature is None or scenario.phase == "boot":
        raise UsageError(f"no prompt crashes the arm {arm.name} of {scenario.id}", hint=again)
    in_lab, tiny_model = kind.facts.in_lab, None
    if in_lab and scenario.lab is not None:
        command, tiny_model = scenario.command_in_lab(arm), scenario.lab.shape(scenario.model)
    elif kind.facts.runs_vllm and (tiny_model := weights_for(scenario, options).tiny_model):
        command = scenario.command_with_dummy(arm)
    else:
        command = scenario.command_of(arm)
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


def find_threshold(
    job: Job,
    threshold: Threshold,
    request: Request,
    announce: Callable[[str], None],
    *,
    most_boots: int | None = None,
    most_seconds: float | None = None,
    unfinished: UnfinishedThreshold | None = None,
) -> tuple[Threshold, Path]:
    """Boot until the answer is known, and return the record and its folder.

    request: sent with each length. announce: called once with the first output line. most_boots: also counts boots of an earlier call.
    unfinished: resumed in its folder. Raises `UsageError`, `InfraError` or `Unsupported` if no server can be had.
    """
    return _Threshold(job, threshold, request, announce, unfinished).run(most_boots, most_seconds)


class _Threshold:
    def __init__(
        self,
        job: Job,
        threshold: Threshold,
        request: Request,
        announce: Callable[[str], None],
        unfinished: UnfinishedThreshold | None,
    ) -> None:
        # Below the folder of this verb: `history` must not take these runs for runs of the scenario's own workload.
        self._out, self._request, self._announce = job.out, request, announce
        self._job = replace(job, out=job.out / job.scenario.id / "threshold")
        self._progress = Progress()
        self._redactor = Redactor(private_folders(), private_hosts(job.scenario), known_secrets(os.environ))
        self._found = replace(threshold, reproduce=self._redactor.command(threshold.reproduce))
        self._folder: Path | None = None
        self._announced = False
        if unfinished is not None:
            unfinished.refuse_changed(json.loads(self._record()))
            self._folder = unfinished.folder
            old = {name: unfinished.head[name] for name in ("evidence", "version", "started_at", "duration_s")}
            self._found = replace(self._found, boots=unfinished.boots(), **old)
        self._began = time.monotonic() - self._found.duration_s

    def run(self, most_boots: int | None, most_seconds: float | None) -> tuple[Threshold, Path]:
        began, stopped = time.monotonic(), None
        try:
            while stopped is None and (lengths := self._found.search.plan()):
                done = self._found.boots
                if most_boots is not None and len(done) >= most_boots:
                    stopped = f"--max-boots {most_boots}"
                elif most_seconds is not None and time.monotonic() - began >= most_seconds:
                    stopped = f"--max-time {most_seconds:g}s"
                elif len(done) > 1 and not any(boot.probes for boot in done[-2:]):
                    stopped = "two boots in a row without an answer"
                else:
                    stopped = self._boot(lengths)
                self._save(stopped)
        except KeyboardInterrupt as signal:
            # Between two runs, or in an install; a run takes the signals itself and reports what it saw.
            stopped = f"{signal}" or "SIGINT"
        self._save(stopped)
        assert self._folder is not None, "it was saved"
        return self._found, self._folder

    def _boot(self, lengths: Sequence[int]) -> str | None:
        """Boot, send prompts of these lengths and add the boot. Return the signal that interrupted its run; then there is no boot."""
        began = time.monotonic()
        several = f"up to {len(lengths)} prompts of {lengths[0]:,} to {lengths[-1]:,}"
        what = several if len(lengths) > 1 else f"a prompt of {lengths[0]:,}"
        self._progress.line(f"boot {len(self._found.boots) + 1}: {what} tokens")
        workload = tuple(
            replace(self._request, name=f"{one} tokens", prompt=one, shared=0, conversation="", may_fail=())
            for one in lengths
        )
        (arm,) = self._job.arms
        job = replace(self._job, arms=[replace(arm, workload=workload)], reproduce=self._found.reproduce)
        report = run_one(job, self._progress, self._chosen)
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
        self._found = replace(
            self._found, boots=(*self._found.boots, boot), version=report.version or self._found.version
        )
        self._progress.line(f"  {answer(self._found)}")
        return None

    def _chosen(self, site: Site, why: str) -> None:
        if not self._announced:
            self._announced = True
            self._found = replace(self._found, evidence=site.evidence.value)
            self._announce(first_line(site, why, None))

    def _save(self, stopped: str | None) -> None:
        duration = round(time.monotonic() - self._began, 1)
        self._found = replace(self._found, stopped=stopped, duration_s=duration)
        if self._folder is None:  # not before: a refused command must leave no folder
            self._folder = stamped_folder(self._out, Path(self._found.scenario) / "threshold")
        hint = "free some space, or name another --out"
        write_file(self._folder / "threshold.json", self._record(), hint=hint)
        write_file(self._folder / "threshold.md", self._redactor.text(markdown(self._found)), hint=hint)

    def _record(self) -> str:
        record = self._redactor.deep(threshold_dict(self._found))
        return json.dumps(record, indent=2, ensure_ascii=False) + "\n"
