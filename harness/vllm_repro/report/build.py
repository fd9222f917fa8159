"""From a run's journal to its `RunReport`.

The journal may be incomplete, and the report can be built again at any time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise
from operator import gt
from pathlib import Path
from typing import Any

from msgspec import structs

from vllm_repro.conversion import convert
from vllm_repro.errors import UsageError
from vllm_repro.host.host_id import host_id
from vllm_repro.host.machine import Machine
from vllm_repro.journal.journal import Entry, Recording, head_of, legible, read
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.report.answers import ClientView, TrialId, client_views, trial_id
from vllm_repro.report.json_report import (
    CountersJson,
    Environment,
    ServerReport,
    TriggerJson,
    counters_of,
    load_of,
    throughput_of,
    trial_throughput,
)
from vllm_repro.report.measurements import (
    MeasureReport,
    measurements,
    phase_counters,
    why_no_throughput,
)
from vllm_repro.report.model import (
    ArmReport,
    RunReport,
    TrialReport,
    arm_fields,
    counted_trials,
    verdict_fields,
)
from vllm_repro.report.patches import compared_patches
from vllm_repro.report.timeline import timelines
from vllm_repro.report.wording import INTERRUPTED, NOT_RUN, not_run_word, refused_words
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.scenario import Status
from vllm_repro.servers.launch import WHY_FIRST_RUNNER
from vllm_repro.trigger.trigger import TriggerResult
from vllm_repro.trigger.turboquant_workspace import crash_amounts
from vllm_repro.verdict.outcome import Death, Outcome, Outlasted, is_unexplained
from vllm_repro.verdict.verdict import (
    Expect,
    Expected,
    Record,
    Result,
    Standing,
    Verdict,
    VerdictReport,
    arm_result,
    comparisons,
    decide,
    is_strange,
    is_unproved,
)
from vllm_repro_diagnosis.evidence import Evidence


def build(folder: Path) -> RunReport:
    """Return the report of a run. folder: the run's folder, or the journal in it.

    Raises `UsageError` if there is no journal, or one that does not hold exactly one run of this
    schema.
    """
    if folder.is_file():
        folder = folder.parent
    return report_of(read(folder / "journal.jsonl"), folder, known_secrets(os.environ))


_UNTRUE_REASON = "the reported release used the first model runner"
"""Reason that older journals give for the lab's model runner, whatever the release used."""
_OTHERS = {
    "bisection.md": "a bisection",
    "threshold.md": "a search of the shortest prompt",
    "minimize.md": "a reduction of a command",
    "versions.md": "a version map",
}
"""Folders of several runs, by the text that each holds."""


def build_foreign(folder: Path) -> RunReport:
    """Return the report of a run like `build`; the journal may be in another format.

    Raises `UsageError` if the journal lacks a field, because another release wrote it or somebody
    edited it, and for a folder of several runs, such as that of a bisection.
    """
    for name, what in _OTHERS.items():
        text = (folder.parent if folder.is_file() else folder) / name
        if text.is_file():
            raise UsageError(
                f"{text.parent} is {what}, not a run", hint=f"read {text}; it names its runs"
            )
    with legible(folder):
        return build(folder)


@lru_cache(2)
def _redactor(
    folders: tuple[tuple[str, str], ...],
    hosts: tuple[str, ...],
    secrets: tuple[tuple[str, str], ...],
    users: tuple[str, ...],
) -> Redactor:
    """Return the redactor of a machine's folders, hosts, secrets and users.

    All runs of the machine share it, because most of their texts are the same.
    """
    return Redactor(folders, hosts, dict(secrets), users)


def report_of(
    recording: Recording, folder: Path, secrets: Mapping[str, str] | None = None
) -> RunReport:
    """Return the report of a journal that was read. folder: that of the run.

    Secrets, private folders, hosts and users are redacted in all its texts. secrets: values that
    must not be shown, with their names (`known_secrets`). Raises `UsageError` if the journal does
    not hold exactly one run of this schema.
    """
    started = head_of(recording, folder, hint="name another run's folder")
    # A resumed run has several heads. The private names in all of them make a report the same
    # wherever it is rendered.
    heads = [started, *recording.of("run-resumed")]
    folders = dict(pair for head in heads for pair in head.get("folders") or ())
    hosts, users = (
        list(dict.fromkeys(name for head in heads for name in head.get(key) or ()))
        for key in ("hosts", "users")
    )
    redactor = _redactor(
        tuple(sorted(folders.items(), key=lambda pair: -len(pair[0]))),
        tuple(hosts),
        tuple((secrets or {}).items()),
        tuple(users),
    )
    reproduce = redactor.command(started["reproduce"])
    redacted = tuple(
        replace(entry, fields=redactor.deep(entry.fields)) for entry in recording.entries
    )
    recording = replace(recording, entries=redacted)
    started = next(recording.of("run-started"))
    version = _version(recording)
    status = Status(started["status"]["bad"], started["status"]["good"])
    standing = status.standing(version)
    views = client_views(recording, judged=bool(started.get("errs")))
    measured = measurements(recording)
    arms = tuple(
        _arm(recording, declared, status.good, views, version, measured)
        for declared in started["arms"]
    )
    ended = recording.end
    infra = (trial.why for arm in arms for trial in arm.trials if trial.outcome is Outcome.INFRA)
    return RunReport(
        folder=folder,
        scenario=started["scenario"],
        issue=started["issue"],
        title=started["title"],
        status=status,
        trigger=started["trigger"],
        **verdict_fields(_verdict(started, ended, arms, standing, version)),
        evidence=started["evidence"],
        rehearsal=started["evidence"] == Evidence.REHEARSAL,
        harness_version=started["harness_version"],
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started.t)),
        duration_s=round(_duration_s(recording), 3),
        environment=_environment(started),
        arms=arms,
        compared_patches=compared_patches(arms) if started.get("compared") else (),
        throughput=throughput_of(measured),
        throughput_withheld=why_no_throughput(started["evidence"], measured) or None,
        infra=tuple(dict.fromkeys(infra)),
        reproduce=reproduce,
        vllm_version=version,
        interrupted=ended["interrupted"] if ended is not None else None,
        journal_cut=recording.cut or recording.damaged > 0,
        # older journals do not name the host
        host=started.get("host") or host_id(started["machine"]),
        standing=standing,
        killed=recording.cut,
        imitated=bool(started.get("imitated", True)),
        measured=measured,
        comparisons=_comparisons(arms),
        filed=bool(started.get("filed", True)),
        related=tuple(started.get("related") or ()),
        timelines=timelines(recording),
        redactor=redactor,
    )


def _environment(started: Entry) -> Environment:
    """Return the machine of the run, as the first entry of its journal describes it."""
    machine = convert(started["machine"], Machine)
    return Environment(**vars(machine), docker=started["docker"], driver=machine.driver)


def _duration_s(recording: Recording) -> float:
    """Return the seconds from the first entry to the last, without pauses before a resume."""
    entries = recording.entries
    paused = sum(
        after.t - before.t for before, after in pairwise(entries) if after.event == "run-resumed"
    )
    return entries[-1].t - entries[0].t - paused


def _version(recording: Recording) -> str | None:
    """Return the first vLLM version that a server reported, else the requested one, or None."""
    reported = (entry.get("version") for entry in recording.of("trial-ended"))
    started = recording.first("run-started")
    return next(filter(None, reported), started.get("version") if started else None)


def _comparisons(arms: Sequence[ArmReport]) -> tuple[str, ...]:
    """Return sentences that compare the arm that has the bug with the arms that avoid it."""
    return comparisons(
        [
            arm.counted if arm.expected.has_bug else replace(arm.counted, name=arm.name_and_edits)
            for arm in arms
            if arm.trials
        ]
    )


# ── verdict
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def _verdict(
    started: Entry,
    ended: Entry | None,
    arms: Sequence[ArmReport],
    standing: Standing,
    version: str | None,
) -> VerdictReport:
    """Return the verdict on the scenario from the results of its arms.

    It is inconclusive if the rehearsal engine lived and does not imitate the bug. For a run that
    ended early see `_interrupted_verdict`. started, ended: the journal's `run-started` and
    `run-ended` entries; `ended` is None if the run was killed.
    """
    results = [arm.counted for arm in arms if arm.trials]
    verdict = decide(
        results,
        standing=standing,
        expect=Expect(started["expect"]),
        record=Record(**started["record"]) if started.get("record") else None,
        version=version,
        patched=bool(arms) and all(arm.patches for arm in arms if arm.trials),
    )
    quiet = verdict.verdict in (Verdict.QUIET, Verdict.FIXED)
    if not started.get("imitated", True) and (
        quiet or (results and all(result.alive for result in results))
    ):
        verdict = VerdictReport(
            verdict=Verdict.INCONCLUSIVE,
            expected=None,
            because=f"the rehearsal engine does not imitate {started['issue']}, so its survival"
            " says nothing",
        )
    return (
        verdict
        if ended is not None and not ended["interrupted"]
        else _interrupted_verdict(verdict, ended, arms)
    )


def _interrupted_verdict(
    verdict: VerdictReport, ended: Entry | None, arms: Sequence[ArmReport]
) -> VerdictReport:
    """Return the verdict of a run that ended early; its reason names the arms that are missing.

    An expected verdict becomes undecided if the run was killed or an arm has no trial. ended: the
    `run-ended` entry; None if the run was killed.
    """
    cut = [
        arm.name
        for arm in arms
        if not_run_word(arm) == INTERRUPTED
        or [t.outcome for t in arm.trials[-1:]] == [Outcome.CANCELLED]
    ]
    missing = [arm.name for arm in arms if not arm.trials]
    not_run = [name for name in missing if name not in cut]
    because = verdict.because + "".join(
        f"; {word}: {', '.join(names)}"
        for word, names in ((INTERRUPTED, cut), (NOT_RUN, not_run))
        if names
    )
    undecided = verdict.expected and (ended is None or missing)
    if undecided and because == verdict.because:
        because += "; the run was interrupted"
    return replace(verdict, expected=None if undecided else verdict.expected, because=because)


# ── arms and trials
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def _arm(
    recording: Recording,
    declared: Mapping[str, Any],
    good: str,
    views: Mapping[TrialId, ClientView],
    version: str | None,
    measured: MeasureReport | None,
) -> ArmReport:
    """Return the report of an arm.

    A quiet arm is inconclusive if no process imported its patched files. declared: the arm in the
    journal's first entry. good: releases that the scenario declares good. views: what the client
    received. version: the vLLM of the run, None if unknown.
    """
    name = declared["name"]

    def entries(event: str) -> list[Entry]:
        """Return this arm's entries of one event."""
        return [entry for entry in recording.of(event) if entry["arm"] == name]

    ended, begun = entries("trial-ended"), next(iter(entries("trial-started")), None)
    # A booted server has reported more than one that was only started.
    server = next(iter([*entries("server-booted"), *entries("server-started")]), None)
    counters = phase_counters(recording)
    trials = tuple(
        _trial(
            entry,
            views[trial_id(entry)],
            tuple(map(counters_of, counters.get(trial_id(entry), ()))),
            measured,
        )
        for entry in ended
    )
    expected = Expected(declared["expected"])
    counted = counted_trials(trials)
    strange = [is_strange(expected, trial.outcome, trial.during) for trial in counted]
    unproved = [
        is_unproved(expected, trial.outcome, crossed=trial.trigger.crossed) for trial in counted
    ]
    result = arm_result(
        name,
        expected,
        [trial.outcome for trial in counted],
        unexplained=sum(is_unexplained(trial.outcome, trial.death) for trial in counted),
        # None if the scenario's status holds for the arm.
        standing=Status(declared["bad"], good).standing(version) if declared.get("bad") else None,
        strange=sum(strange),
        unproved=sum(map(gt, unproved, strange)),  # strange ones are not counted again
    )
    server_report = _server(begun, server, trials, ended)
    patches = tuple(convert(patch, Patch) for patch in declared.get("patches") or ())
    report = ArmReport(
        **arm_fields(result),
        command=begun["command"] if begun else "",
        differences=tuple(
            text.replace(_UNTRUE_REASON, WHY_FIRST_RUNNER)
            for text in (begun["differences"] if begun else ())
        ),
        server=server_report,
        patched=bool(patches or server_report.patched),
        trials=trials,
        why=declared.get("why", ""),
        edits=tuple(declared.get("edits") or ()),
        requests=_requests(entries("request-sent"), ended),
        patches=patches,
        load=load_of(measured, name),
    )
    if report.patch_untried and result.result is Result.QUIET:
        return structs.replace(
            report,
            result=Result.INCONCLUSIVE,
            bound="no process of the server imported a patched file, so the patch was not tested",
        )
    return report


def _requests(sent: Sequence[Entry], ended: Sequence[Entry]) -> tuple[str, ...]:
    """Return the requests of one trial of an arm as `NAME: POST PATH BODY`.

    The trial is the first that sent requests and tested the engine, else the first that sent any.
    sent, ended: the arm's `request-sent` and `trial-ended` entries.
    """
    whole = {entry["trial"] for entry in ended if Outcome(entry["outcome"]).facts.tested}
    senders = dict.fromkeys(entry["trial"] for entry in sent)
    first = next((trial for trial in senders if trial in whole), next(iter(senders), None))
    return tuple(
        f"{entry['name']}: POST {entry.get('endpoint', '')}"
        f" {json.dumps(entry.get('body', {}), ensure_ascii=False)}"
        for entry in sent
        if entry["trial"] == first
    )


def _server(
    begun: Entry | None, server: Entry | None, trials: Sequence[TrialReport], ended: Sequence[Entry]
) -> ServerReport:
    """Return the facts of an arm's server: image, arguments, version, patched files.

    begun: the arm's first `trial-started` entry. server: its first `server-booted` entry, else its
    first `server-started`. Both are None if there is none. ended: its `trial-ended` entries, which
    name the imported files.
    """
    facts = dict(server["facts"]) if server is not None else {}
    known = {
        name: facts[name]
        for name in ("image", "digest", "source", "compiled", "argv", "env", "replaced")
        if facts.get(name)
    }
    patched = list(facts.get("patched") or ())
    imports = [files for entry in ended if (files := entry.get("imported")) is not None]
    if imports:
        imported = {*chain.from_iterable(imports)}
        patched = [{**file, "imported": file["file"] in imported} for file in patched]
    return convert(
        {
            **known,
            "kind": begun["server"] if begun is not None else None,
            "weights": (begun.get("weights") or None) if begun is not None else None,
            "vllm_version": next((trial.version for trial in trials if trial.version), None),
            "patched": patched,
        },
        ServerReport,
    )


def _boot_line(boot: Mapping[str, Any]) -> str:
    """Return the settings on which the bugs depend, from a boot's log: `eager, chunks of 2048`."""
    # A CPU platform resets the mode before it is logged.
    mode = boot.get("cudagraph_mode") or "NONE"
    captured = "graphs captured" + ("" if mode == "NONE" else f" ({mode})")
    graphs = captured if boot.get("graphs_captured") else ""
    words = {
        "attention_backend": "attention backend {}",
        "max_num_batched_tokens": "chunks of {}",
        "kv_cache_tokens": "KV cache of {:,} tokens",
    }
    backend, chunks, cache = (
        text.format(boot[name]) if boot.get(name) else "" for name, text in words.items()
    )
    return ", ".join(
        filter(None, (backend, "eager" if boot.get("enforce_eager") else graphs, chunks, cache))
    )


def _trial(
    entry: Entry,
    view: ClientView,
    counters: tuple[CountersJson, ...],
    measured: MeasureReport | None,
) -> TrialReport:
    """Return the report of one trial, from its `trial-ended` entry.

    The output comparison in `view` overrules the journal's outcome: a wrong answer makes the trial
    `wrong-output`, one that cannot be judged makes a clean trial `untriggered`.
    """
    outcome, why = Outcome(entry["outcome"]), entry["why"]
    trigger = convert(entry["trigger"], TriggerResult)
    # Older journals have the amounts of a crash alone.
    amounts = trigger.amounts or crash_amounts(entry.get("captured") or {})
    if view.compared.wrong:
        outcome, why = Outcome.WRONG_OUTPUT, view.compared.wrong
    elif view.compared.unknown and outcome is Outcome.CLEAN:
        outcome, why = Outcome.UNTRIGGERED, view.compared.unknown
    if outcome.facts.alive and view.refused:
        why += f"; {refused_words(view.refused, entry['requests']['sent'])}"
    return TrialReport(
        number=entry["trial"],
        outcome=outcome,
        phase=entry["phase"],
        trigger=TriggerJson(crossed=trigger.crossed, evidence=trigger.evidence, amounts=amounts),
        brief=trigger.brief,
        death=convert(entry["death"], Death | None),
        boot_s=entry["boot_s"],
        duration_s=entry["duration_s"],
        requests=entry["requests"],
        log=entry["log"],
        why=why,
        captured=entry.get("captured") or {},
        version=entry.get("version"),
        boot=_boot_line(entry.get("boot") or {}),
        during=entry.get("during", ""),
        answers=view.answers,
        output=view.output or None,
        throughput=trial_throughput(measured, *trial_id(entry)),
        rank_logs=tuple(entry.get("rank_logs") or ()),
        outlasted=convert(entry.get("outlasted") or (), tuple[Outlasted, ...]),
        refused=view.refused,
        client_saw=view.sdk,
        failed=view.failed,
        counters=counters,
    )
