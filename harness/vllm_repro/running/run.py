"""A run: the trials of one scenario's arms, their journal, and the report at the end.

Trials are interleaved (A B B A), so that a machine that slows down or warms up does not favour an arm. The folder, the journal's first line
and the link `latest` exist before the first server is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from vllm_repro import __version__
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.history.store import remember
from vllm_repro.host.host_id import hosted_by
from vllm_repro.host.machine import Machine, look
from vllm_repro.journal.journal import SCHEMA, Journal, json_of
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.report.build import build
from vllm_repro.report.files import write_reports
from vllm_repro.report.model import RunReport
from vllm_repro.report.wording import simulated
from vllm_repro.running.assess import Conclusion
from vllm_repro.running.boots import more
from vllm_repro.running.options import Wishes
from vllm_repro.running.resume import Left
from vllm_repro.running.trial import Trial, run_trial
from vllm_repro.running.watch import Patience
from vllm_repro.scenario.scenario import Arm, Edit, Scenario
from vllm_repro.servers.site import Site
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.statistics import lower_bound
from vllm_repro.verdict.verdict import Expect, Expected, Record, arm_result, is_other, same_release

__all__ = [
    "Plan",
    "as_needed",
    "default_out",
    "new_folder",
    "on_record",
    "order",
    "private_folders",
    "private_hosts",
    "run",
    "stamped_folder",
]


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Ctrl-\\ too: servers have sessions of their own, so what ends only this process leaves them running."""


@dataclass(frozen=True)
class Plan:
    """What a run is to do. `site` knows where servers come from; `reproduce` is the command that repeats the run.

    trials: boots of each arm; None for as many as decide its claim (`vllm_repro.running.boots`).
    """

    scenario: Scenario
    arms: Sequence[Arm]
    trials: int | None
    site: Site
    expect: Expect
    patience: Patience
    seed: int
    out: Path
    reproduce: str
    version: str | None = None
    api_key: str | None = None
    wishes: Wishes = field(default_factory=Wishes)


def order(arms: Sequence[Arm], trials: int) -> list[tuple[int, Arm]]:
    """(trial, arm) in the order of boots: forwards in odd trials, backwards in even ones."""
    return [(n, arm) for n in range(1, trials + 1) for arm in (arms if n % 2 else list(reversed(arms)))]


def as_needed(arms: Sequence[Arm], undecided: Callable[[], Sequence[str]]) -> Iterator[tuple[int, Arm]]:
    """As `order`, with the arms in each round that `undecided` names before it, until it names none."""
    for n in count(1):
        names = undecided()
        if not names:
            return
        yield from ((n, arm) for arm in (arms if n % 2 else reversed(arms)) if arm.name in names)


def new_folder(out: Path, scenario: str) -> Path:
    """Makes `out/scenario/<UTC>-<6 hex>/` with `logs/` in it, and points `latest` there. Raises `UsageError`."""
    return stamped_folder(out, Path(scenario), holding="logs")


def stamped_folder(out: Path, below: Path, holding: str = "") -> Path:
    """Makes `out/below/<UTC>-<6 hex>/`, with the folder `holding` in it, and points `out/below/latest` there. Raises `UsageError`."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = out / below / f"{stamp}-{secrets.token_hex(3)}"
    try:
        (folder / holding).mkdir(parents=True)
        link = folder.parent / "latest"
        fresh = folder.parent / f".latest-{secrets.token_hex(4)}"
        fresh.symlink_to(folder.name)
        fresh.replace(link)  # in one step: a reader never finds the link missing
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}", hint="name another folder with --out") from error
    return folder


def run(
    plan: Plan,
    say: Callable[[str], None],
    done: Callable[[Arm, int, Conclusion], None],
    record: Record | None,
    left: Left | None = None,
) -> RunReport:
    """Runs the plan to its end, or to the signal that interrupts it, and writes every report.

    `say` gets lines of progress; `done` each trial's conclusion. An interrupted run has a report too, marked so. `left`: what a run that
    was cut has left to do, which is then done in its folder. Raises `UsageError` where the plan is not that run's.
    """
    arms = _attachable(plan)  # before there is a folder: a run that cannot be is none, and `latest` stays where it is
    machine = look()
    header = _header(plan, machine, record)
    redactor = Redactor(secrets=known_secrets(os.environ), names=False)
    if left is not None:
        left.refuse_other(redactor.deep(json_of(header)))
    folder = left.folder if left is not None else new_folder(plan.out, plan.scenario.id)
    with (
        Journal(folder / "journal.jsonl", redactor) as journal,
        Journal(folder / "requests.jsonl", redactor) as requests,
    ):
        journal.write("run-resumed" if left is not None else "run-started", **header)
        interrupted = _Interrupted()
        try:
            with _handlers_kept():
                asyncio.run(_trials(plan, arms, folder, journal, requests, say, done, interrupted, record, left))
        except (KeyboardInterrupt, asyncio.CancelledError):
            interrupted.by = interrupted.by or "SIGINT"
        finally:
            journal.write("run-ended", interrupted=interrupted.by)
    report = build(folder)
    try:
        write_reports(report)
    except InfraError as error:  # the journal holds it all, and what hours of boots came to has to be said
        verdict = f"{report.verdict.verdict}{simulated(report.evidence)}"
        raise InfraError(f"the verdict is {verdict}, and {error}", hint=error.hint) from error
    if lost := remember(report, folder.parent.parent):
        print(f"vllm-repro: {lost}", file=sys.stderr)
    return report


def _header(plan: Plan, machine: Machine, record: Record | None) -> dict[str, Any]:
    scenario = plan.scenario
    return {
        "schema": SCHEMA,
        "harness_version": __version__,
        "scenario": scenario.id,
        "issue": scenario.issue,
        "filed": scenario.filed,
        "related": scenario.related,
        "title": scenario.title,
        "status": {"bad": scenario.status.bad, "good": scenario.status.good},
        "trigger": str(scenario.trigger),
        "expect": plan.expect,
        "evidence": plan.site.evidence,
        "server": plan.site.kind,
        "trials": plan.trials,
        "seed": plan.seed,
        "wishes": plan.wishes,
        "loads": scenario.loads,
        "output": scenario.output,
        "errs": any(arm.expected is Expected.ERRS for arm in scenario.arms),
        "version": plan.version,
        "arms": [
            {
                "name": arm.name,
                "expected": arm.expected,
                "why": arm.why,
                "edits": [str(edit) for edit in (*_edits(plan, arm), *arm.patches)],
                "patches": arm.patches,
                "bad": arm.bad,
            }
            for arm in plan.arms
        ],
        "reproduce": plan.reproduce,
        "record": record,
        "machine": machine,
        "host": hosted_by(asdict(machine)),
        "docker": plan.site.engine_version,
        "folders": private_folders(),
        "hosts": private_hosts(scenario),
        "imitated": plan.site.imitates(scenario),
    }


def _edits(plan: Plan, arm: Arm) -> list[Edit]:
    """What is changed for an arm where it runs: the lab has changes of its own for some."""
    in_lab = plan.site.kind.facts.in_lab
    return [(edit.in_lab if in_lab else None) or edit for edit in arm.edits]


def private_folders() -> list[tuple[str, str]]:
    """The folders whose names a report must not carry, and what stands for them: words that a shell understands.

    Raises `UsageError` where the first of them, the working folder, has been removed."""
    try:
        here = str(Path.cwd())
    except FileNotFoundError as error:
        raise UsageError("the working folder is gone", hint="change into one that is there: cd ~") from error
    folders = [(here, "."), (str(Path.home()), "$HOME")]
    if temporary := os.environ.get("TMPDIR"):
        folders.append((temporary.rstrip("/"), "$TMPDIR"))
    return sorted(folders, key=lambda pair: -len(pair[0]))


def private_hosts(scenario: Scenario) -> list[str]:
    """The names of this machine. One that the scenario itself has in it (a host called `vllm`) says nothing, and would tear up the text."""
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    public = f"{scenario.id} {scenario.title} {scenario.command} {scenario.model.name} localhost"
    return sorted((name for name in names if name and name not in public), key=len, reverse=True)


@dataclass
class _Interrupted:
    by: str | None = None


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Gives the signals back to whom they belonged: a loop that closes leaves them at the system's default, which ends a process
    in the middle of a report, or of an install for the next run."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(ValueError, TypeError):  # not in the main thread, or not set from Python
                signal.signal(number, handler)


async def _trials(
    plan: Plan,
    arms: Sequence[Arm],
    folder: Path,
    journal: Journal,
    requests: Journal,
    say: Callable[[str], None],
    done: Callable[[Arm, int, Conclusion], None],
    interrupted: _Interrupted,
    record: Record | None,
    left: Left | None,
) -> None:
    current = asyncio.current_task()
    assert current is not None
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        # Once is enough: a second Ctrl-C must not tear down the tear-down, or it would leave a server behind.
        if interrupted.by is None:
            interrupted.by = number.name
            say(f"{number.name}: ending the server; what was seen so far is kept")
            current.cancel()

    for number in _SIGNALS:
        if number in (signal.SIGHUP, signal.SIGQUIT) and signal.getsignal(number) is signal.SIG_IGN:
            continue  # under nohup a run is meant to outlive its terminal, and a script's job what is typed there
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread: then the caller has the signals
            loop.add_signal_handler(number, stop, number)
    outcomes = {arm.name: list(left.outcomes.get(arm.name, ())) if left else list[Outcome]() for arm in arms}
    strange = Counter(left.strange if left else {})
    numbers = Counter(left.last if left else {})
    version = plan.version
    patched = all(arm.patches for arm in arms)

    def undecided() -> list[str]:
        results = [arm_result(arm.name, arm.expected, outcomes[arm.name], strange=strange[arm.name]) for arm in arms]
        return more(results, record, version, patched=patched)

    boots: Iterable[tuple[int, Arm]] = as_needed(arms, undecided)
    if plan.trials is not None:
        whole = order(arms, plan.trials)
        boots = left.boots(whole) if left is not None else whole
    for _, arm in boots:
        numbers[arm.name] += 1
        number_of_trial = numbers[arm.name]
        log = folder / "logs" / f"{arm.name}-{number_of_trial}.log"
        launch, server = plan.site.server(plan.scenario, arm, number_of_trial, log, folder.name)

        def tell(text: str, arm: Arm = arm) -> None:
            say(f"{arm.name}: {text}")

        trial = Trial(
            plan.scenario,
            arm,
            number_of_trial,
            launch,
            server,
            log,
            plan.patience,
            plan.seed,
            journal,
            requests,
            tell,
            plan.api_key,
            plan.wishes,
        )
        conclusion = await run_trial(trial)
        outcomes[arm.name].append(conclusion.outcome)
        crossed = conclusion.trigger.crossed
        strange[arm.name] += is_other(arm.expected, conclusion.outcome, conclusion.during, crossed=crossed)
        version = conclusion.version or version
        done(arm, number_of_trial, conclusion)
        # An arm whose patch does not fit, or that needs another kind of server, says nothing of the other arms.
        if plan.site.ends_after(conclusion.outcome, launched=conclusion.launched) and not arm.patches:
            break


def _attachable(plan: Plan) -> list[Arm]:
    """An attached server has one command, so only arms without edits can be run, those that should live first."""
    if plan.site.kind.facts.started:
        return list(plan.arms)
    arms = [arm for arm in plan.arms if not arm.edits]
    if not arms:
        raise UsageError(
            f"the arm {plan.arms[0].name} changes the server's flags, which a running server does not",
            hint="start the server with those flags and attach with the arm `reported`",
        )
    return sorted(arms, key=lambda arm: arm.expected.has_bug)


def on_record(
    out: Path, scenario: Scenario, evidence: str, arms: Sequence[Arm], version: str | None = None
) -> Record | None:
    """The strongest run in `out` in which the first of `arms` that is to die did, with the same kind of evidence.

    version: what `arms` run on. Where they patch it, a run of that release is stronger than any other. `verdict.verdict` weighs it.
    """
    found: list[Record] = []
    leading = next((arm for arm in arms if arm.expected.has_bug), None)
    if leading is None:
        return None
    over = version if leading.patches else None
    for path in (out / scenario.id).glob("*/report.json"):
        if path.parent.is_symlink():
            continue
        # A report that was cut, or is of another release of the harness, says nothing.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            report = json.loads(path.read_text(encoding="utf-8"))
            arm = next(arm for arm in (*report["arms"], {}) if not arm or arm["name"] == leading.name)
            patched = bool(arm and arm["server"].get("patched"))  # such a death says nothing about the release
            if arm and arm["k"] and report["evidence"] == evidence and not patched:
                died = str(arm["server"]["vllm_version"])
                found.append(
                    Record(crashed=arm["k"], boots=arm["n"], run=path.parent.name, version=died, arm=leading.name)
                )

    def strength(record: Record) -> tuple[bool, float, str]:
        return same_release(record.version, over), lower_bound(record.crashed, record.boots), record.run

    return max(found, key=strength, default=None)


def default_out() -> Path:
    """`reports/` of the working directory, or of `$VLLM_REPRO_REPORTS`."""
    return Path(os.environ.get("VLLM_REPRO_REPORTS", "reports"))
