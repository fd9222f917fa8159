"""From a run's journal to its `RunReport`. A report can be made again at any time, also from a journal that is cut."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_repro.diagnosis.signature import How
from vllm_repro.host.host_id import host_id
from vllm_repro.journal.journal import Entry, Recording, head_of, legible, read
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.report.answered import Trial, answers, held, output_words, refused, trial_of
from vllm_repro.report.measured import measured
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, counting
from vllm_repro.report.timeline import timelines
from vllm_repro.report.wording import CUT, NOT_RUN, refused_words, unrun_word
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.scenario import Status
from vllm_repro.trigger.trigger import Finding
from vllm_repro.verdict.outcome import Death, Outcome, Outlasted
from vllm_repro.verdict.output import OutputComparison
from vllm_repro.verdict.verdict import (
    Expect,
    Expected,
    Record,
    Standing,
    Verdict,
    VerdictReport,
    arm_result,
    comparisons,
    decide,
    is_strange,
    is_unproved,
)

__all__ = ["build", "build_again", "report_of"]


@dataclass(frozen=True)
class _Said:
    """By trial. held: what only the other arms could tell of its answers. answers, output: as in `TrialReport`."""

    held: Mapping[Trial, OutputComparison]
    refused: Mapping[Trial, tuple[int, ...]]
    answers: Mapping[Trial, tuple[str, ...]]
    output: Mapping[Trial, str]


def build(folder: Path) -> RunReport:
    """The report of the run in `folder`. Raises `UsageError` where there is no journal, or an empty one."""
    if folder.is_file():
        folder = folder.parent
    return report_of(read(folder / "journal.jsonl"), folder, known_secrets(os.environ))


def build_again(folder: Path) -> RunReport:
    """As `build`, of a journal that another release may have written, or a hand changed: what it lacks is wrong usage, no fault of ours."""
    with legible(folder):
        return build(folder)


def report_of(recording: Recording, folder: Path, secrets: Mapping[str, str] | None = None) -> RunReport:
    """The report of a recording; pure. Raises `UsageError` where it is not that of one run, from its start.

    secrets: values that must not show, each with its name (`known_secrets`).
    """
    started = head_of(recording, folder, hint="name another run's folder")
    # As folders and hosts were where the run was made, so that a report reads the same wherever it is rendered.
    # A run that was gone on with has had two heads, and perhaps two hosts.
    heads = [started, *recording.of("run-resumed")]
    folders = dict(pair for head in heads for pair in head.get("folders") or ())
    hosts = dict.fromkeys(host for head in heads for host in head.get("hosts") or ())
    redactor = Redactor(sorted(folders.items(), key=lambda pair: -len(pair[0])), tuple(hosts), secrets or {})
    again = redactor.command(started["reproduce"])
    # Before anything is made of it: a rendering can only show what is in here.
    recording = replace(recording, entries=tuple(_redacted(entry, redactor) for entry in recording.entries))
    started = _redacted(started, redactor)
    version = _version(recording)
    standing = Status(started["status"]["bad"], started["status"]["good"]).standing(version)
    good = started["status"]["good"]
    found = held(recording)
    said = _Said(found, refused(recording), answers(recording), output_words(recording, found))
    if not started.get("errs"):
        # Beside another bug a wrong answer is a surprise; that none can be judged takes nothing from an engine's having lived.
        said = replace(said, held={trial: replace(one, unknown="") for trial, one in found.items()})
    arms = tuple(
        _arm(recording, declared, _own_standing(declared, good, version), said) for declared in started["arms"]
    )
    ended = recording.end
    interrupted = ended["interrupted"] if ended is not None else None
    ran = [arm.result for arm in arms if arm.trials]
    imitated = bool(started.get("imitated", True))
    verdict = _verdict(started, ended, arms, standing, version, imitated=imitated)
    machine = started["machine"]
    return RunReport(
        folder,
        started["scenario"],
        started["issue"],
        started["title"],
        f"bad {started['status']['bad']}"
        + (f", good {started['status']['good']}" if started["status"]["good"] else ", open"),
        started["trigger"],
        verdict,
        started["evidence"],
        started["harness_version"],
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started.t)),
        round(_spent(recording), 3),
        {
            "os": machine["os"],
            "python": machine["python"],
            "cpus": machine["cpus"],
            "memory_gb": machine["memory_gb"],
            "docker": started["docker"],
            "gpus": machine["gpus"],
            "driver": machine["gpus"][0]["driver"] if machine["gpus"] else None,
        },
        arms,
        tuple(trial.why for arm in arms for trial in arm.trials if trial.outcome is Outcome.INFRA),
        again,
        version,
        interrupted,
        recording.cut or recording.damaged > 0,
        imitated,
        measured(recording),
        comparisons(ran),
        bool(started.get("filed", True)),
        tuple(started.get("related") or ()),
        timelines(recording, {(arm.name, trial.number): trial.outcome for arm in arms for trial in arm.trials}),
        started.get("host") or host_id(machine),  # journals of before it was written
        standing,
        recording.cut,
        redactor,
    )


def _verdict(
    started: Entry,
    ended: Entry | None,
    arms: Sequence[ArmReport],
    standing: Standing,
    version: str | None,
    *,
    imitated: bool,
) -> VerdictReport:
    """What the arms decide, and then what takes that from them: an engine that has not the bug, a change that did not run, an early end."""
    ran = [arm.result for arm in arms if arm.trials]
    verdict = decide(
        ran,
        standing=standing,
        expect=Expect(started["expect"]),
        record=Record(**started["record"]) if started.get("record") else None,
        version=version,
        patched=bool(arms) and all(arm.patches for arm in arms if arm.trials),
    )
    quiet = verdict.verdict in (Verdict.QUIET, Verdict.FIXED)
    if not imitated and (quiet or (ran and all(result.alive for result in ran))):
        text = f"the rehearsal engine does not imitate {started['issue']}, so its survival says nothing"
        verdict = VerdictReport(verdict=Verdict.INCONCLUSIVE, expected=None, because=text)
    if quiet and (idle := [arm.name for arm in arms if arm.idle]):
        text = f"{', '.join(idle)}: no process of the server imported a file that the patch changes, so it was not put to the test"
        # What another arm did that it should not is no less so.
        others = tuple(name for name in verdict.surprises if name not in idle)
        text += f"; {verdict.because}" if others else ""
        verdict = VerdictReport(
            verdict=Verdict.INCONCLUSIVE, expected=False if others else None, because=text, surprises=others
        )
    if ended is not None and not ended["interrupted"]:
        return verdict
    missing = [arm for arm in arms if not arm.trials]
    # However it ended: a kill leaves no end of the boot that it cut, an interrupt leaves one that says so.
    cut = [
        arm.name
        for arm in arms
        if unrun_word(arm) == CUT or [t.outcome for t in arm.trials[-1:]] == [Outcome.CANCELLED]
    ]
    never = [arm.name for arm in missing if arm.name not in cut]
    rest = "".join(f"; {word}: {', '.join(names)}" for word, names in ((CUT, cut), (NOT_RUN, never)) if names)
    undecided = verdict.expected and (ended is None or missing)
    return replace(
        verdict,
        expected=None if undecided else verdict.expected,
        because=verdict.because + (rest or ("; the run was cut short" if undecided else "")),
    )


def _spent(recording: Recording) -> float:
    """Seconds from the start to the last entry, without the time between the parts of a run that was gone on with."""
    entries = recording.entries
    away = sum(after.t - before.t for before, after in pairwise(entries) if after.event == "run-resumed")
    return entries[-1].t - entries[0].t - away


def _redacted(entry: Entry, redactor: Redactor) -> Entry:
    return replace(entry, fields=redactor.deep(entry.fields))


def _version(recording: Recording) -> str | None:
    """The version that the server itself reported; what was asked for only where no server got so far."""
    for entry in recording.of("trial-ended"):
        if entry.get("version"):
            return str(entry["version"])
    started = recording.first("run-started")
    return started.get("version") if started else None


def _own_standing(declared: Mapping[str, Any], good: str, version: str | None) -> Standing | None:
    """What an arm's own bad releases say of this one; None where the scenario's status holds for it."""
    return Status(declared["bad"], good).standing(version) if declared.get("bad") else None


def _arm(
    recording: Recording,
    declared: Mapping[str, Any],
    standing: Standing | None,
    said: _Said,
) -> ArmReport:
    name = declared["name"]
    ended = [entry for entry in recording.of("trial-ended") if entry["arm"] == name]
    begun = next((entry for entry in recording.of("trial-started") if entry["arm"] == name), None)
    server = next((entry for entry in recording.of("server-started") if entry["arm"] == name), None)
    # What only a booted server could tell; it has all that its start had.
    server = next((entry for entry in recording.of("server-booted") if entry["arm"] == name), server)
    trials = tuple(_trial(entry, said) for entry in ended)
    expected = Expected(declared["expected"])
    counted = counting(trials)
    strange = [is_strange(expected, trial.outcome, trial.during) for trial in counted]
    unproved = [is_unproved(expected, trial.outcome, crossed=trial.trigger.crossed) for trial in counted]
    result = arm_result(
        name,
        expected,
        [trial.outcome for trial in counted],
        unexplained=sum(trial.death is not None and trial.death.signature is None for trial in trials),
        standing=standing,
        strange=sum(strange),
        unproved=sum(one and not other for one, other in zip(unproved, strange, strict=True)),
    )
    return ArmReport(
        result,
        begun["command"] if begun else "",
        tuple(begun["differences"]) if begun else (),
        _with_imports(_server(begun, server, trials), ended),
        trials,
        declared.get("why", ""),
        tuple(declared.get("edits") or ()),
        _requests(recording, name),
        tuple(Patch(**patch) for patch in declared.get("patches") or ()),
    )


def _requests(recording: Recording, arm: str) -> tuple[str, ...]:
    """What the first trial of an arm sent that was not cut, else the first that sent anything; a sentence a request."""
    own = [entry for entry in recording.of("trial-ended") if entry["arm"] == arm]
    whole = {entry["trial"] for entry in own if entry["outcome"] != Outcome.CANCELLED}
    senders = dict.fromkeys(entry["trial"] for entry in recording.of("request-sent") if entry["arm"] == arm)
    first = next((trial for trial in senders if trial in whole), next(iter(senders), None))
    sent: list[str] = []
    for entry in recording.of("request-sent"):
        if entry["arm"] == arm and entry["trial"] == first:
            body = json.dumps(entry.get("body", {}), ensure_ascii=False)
            sent.append(f"{entry['name']}: POST {entry.get('endpoint', '')} {body}")
    return tuple(sent)


def _server(begun: Entry | None, server: Entry | None, trials: tuple[TrialReport, ...]) -> Mapping[str, Any]:
    facts = server["facts"] if server is not None else {}
    return {
        "kind": begun["server"] if begun is not None else None,
        "image": facts.get("image"),
        "digest": facts.get("digest"),
        "weights": (begun.get("weights") or None) if begun is not None else None,
        "vllm_version": next((trial.version for trial in trials if trial.version), None),
        "argv": facts.get("argv") or [],
        "env": facts.get("env") or {},
        "replaced": facts.get("replaced") or [],
        "patched": facts.get("patched") or [],
    }


def _with_imports(server: Mapping[str, Any], ended: Sequence[Entry]) -> Mapping[str, Any]:
    """`server` with the word, for each changed file, whether a process of it imported that file, as far as the journal knows."""
    told = [files for entry in ended if (files := entry.get("imported")) is not None]
    if not told:
        return server
    files = {file for one in told for file in one}
    return {**server, "patched": [{**one, "imported": one["file"] in files} for one in server["patched"]]}


def _boot_line(boot: Mapping[str, Any]) -> str:
    """What the boot log says of the things that decide these bugs."""
    parts = []
    if boot.get("attention_backend"):
        parts.append(f"attention backend {boot['attention_backend']}")
    if boot.get("enforce_eager"):
        parts.append("eager")
    elif boot.get("graphs_captured"):
        # A CPU platform has wiped the mode by the time that its log names it.
        mode = boot.get("cudagraph_mode") or "NONE"
        parts.append("graphs captured" + (f" ({mode})" if mode != "NONE" else ""))
    if boot.get("max_num_batched_tokens"):
        parts.append(f"chunks of {boot['max_num_batched_tokens']}")
    if boot.get("kv_cache_tokens"):
        parts.append(f"KV cache of {boot['kv_cache_tokens']:,} tokens")
    return ", ".join(parts)


def _trial(entry: Entry, said: _Said) -> TrialReport:
    death, trial, outcome = entry["death"], trial_of(entry), Outcome(entry["outcome"])
    answer = said.held.get(trial, OutputComparison())
    if answer.wrong:
        outcome = Outcome.WRONG_OUTPUT
    elif answer.unknown and outcome is Outcome.CLEAN:
        outcome = Outcome.UNTRIGGERED
    elif answer.unknown:
        answer = OutputComparison()
    why, not_taken = answer.wrong or answer.unknown or entry["why"], said.refused.get(trial, ())
    if outcome.facts.alive and not_taken:
        # The rest of the workload crossed the boundary, or did not; that some of it was never run has to be said.
        why += f"; {refused_words(not_taken, entry['requests']['sent'])}"
    return TrialReport(
        entry["trial"],
        outcome,
        entry["phase"],
        Finding(
            entry["trigger"]["crossed"],
            tuple(entry["trigger"]["evidence"]),
            entry["trigger"].get("brief", ""),
        ),
        death
        and Death(
            detected_by=death["detected_by"],
            latency_s=death["latency_s"],
            exception=death["exception"],
            message=death["message"],
            frames=tuple(death["frames"]),
            signature=How(death["signature"]) if death["signature"] else None,
            channels=tuple(death["channels"]),
            ranks=tuple(death.get("ranks") or ()),
        ),
        entry["boot_s"],
        entry["duration_s"],
        entry["requests"],
        entry["log"],
        why,
        entry.get("captured") or {},
        entry.get("version"),
        _boot_line(entry.get("boot") or {}),
        entry.get("during", ""),
        said.answers.get(trial, ()),
        said.output.get(trial, ""),
        tuple(entry.get("rank_logs") or ()),
        tuple(Outlasted(**one) for one in entry.get("outlasted") or ()),
        not_taken,
    )
