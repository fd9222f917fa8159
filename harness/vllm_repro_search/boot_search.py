"""Shared part of the verbs that search: options, resume, and the runner.

The runner boots what the plan asks for, and writes the record after each boot.

A plan is a pure function of the boots so far, so a resumed search needs only their list. A death is
proof; a clean boot, or a complete answer to one prompt, is evidence; nothing else counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from msgspec import structs

from vllm_repro import __version__
from vllm_repro.cli.common import add_common, duration, number, print_json
from vllm_repro.cli.options import add_run_options, job_from, resumed
from vllm_repro.cli.server_options import add_server_options, server_options
from vllm_repro.conversion import convert
from vllm_repro.errors import INTERRUPTED, UsageError
from vllm_repro.journal.redact import Redactor
from vllm_repro.releases.sources import Source
from vllm_repro.report.files import write_file
from vllm_repro.report.model import RunReport
from vllm_repro.running.elsewhere import results
from vllm_repro.running.folders import private_sources, redactor, stamped_folder, with_out
from vllm_repro.running.job import Job, SiteFacts, choice_of, first_line, repeat_command
from vllm_repro.running.resume import Unfinished
from vllm_repro.running.run import run_one
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.catalogue import find, find_arms
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro_search.record import (
    ArmBoot,
    ReleaseSearchRecord,
    SearchRecord,
    markdown,
    terminal,
)

Record = TypeVar("Record", bound=SearchRecord)
ArmRecord = TypeVar("ArmRecord", bound=ReleaseSearchRecord)
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class UnfinishedSearch(Unfinished):
    """A search that was read from its folder, to be resumed."""

    what = "search"
    record: SearchRecord

    @staticmethod
    def _compared(head: Mapping[str, Any], name: str) -> Any:
        """Return a field that must not change between calls; of candidates, the sources."""
        # What else a candidate holds is for the reader, and differs between versions of the
        # harness.
        return (
            [candidate["source"] for candidate in head[name]]
            if name == "candidates"
            else head.get(name)
        )

    def fields(self) -> dict[str, Any]:
        """Return the fields that the resumed search takes over from the earlier call."""
        kept = {name: getattr(self.record, name) for name in self.record.resumed}
        return {**kept, "boots": self.record.kept()}


def read_search(folder: Path, kind: type[SearchRecord]) -> UnfinishedSearch:
    """Read the search of this kind in `folder`. Raises `UsageError` without one."""
    try:
        head = json.loads((folder / f"{kind.file}.json").read_text(encoding="utf-8"))
        # The command is redacted: it names folders by `$HOME` and relative to where it was called.
        words = shlex.split(os.path.expandvars(head["reproduce"]))
        return UnfinishedSearch(
            folder=folder.resolve(),
            words=tuple(words[words.index(kind.verb) :]),
            head=head,
            must_not_change=("status", "harness_version", *kind.fixed),
            record=convert(head, kind),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{folder} holds no search that can be read: {error}",
            hint=f"name a folder such as reports/SCENARIO/{kind.verb}/latest",
        ) from error


class BootSearch(ABC, Generic[Record, Item]):
    """Base of the searches that boot servers; the record is all that a search knows."""

    def __init__(self, job: Job, record: Record) -> None:
        self.job = job
        self.progress = Progress()
        self.redactor = redactor(job.scenario)
        self.record: Record = structs.replace(
            record, reproduce=self.redactor.command(record.reproduce)
        )
        self._folder: Path | None = None
        self._announce: Callable[[str], None] | None = None
        # boots of an earlier call
        self._resumed = 0
        self.most_boots: int | None = None
        # of the record and the folder: boots side by side are threads
        self._lock = threading.RLock()

    def next(self) -> Sequence[Item]:
        """Return what to boot next, several for side by side; empty if the search is over."""
        plan = self.record.plan
        item = None if plan is None else plan.next()
        return [] if item is None else [item]

    @abstractmethod
    def describe(self, item: Item, number: int) -> str:
        """Return the progress line of a boot that begins."""

    @abstractmethod
    def boot(self, item: Item) -> tuple[Any, str | None]:
        """Boot an item; return (entry for the record, signal that interrupted the boot).

        The entry is None if there is nothing to add.
        """

    def sources(self) -> Sequence[Source | None]:
        """Return the vLLM sources whose folders the Markdown file must not name."""
        return [self.job.options.vllm]

    def resume(self, unfinished: UnfinishedSearch) -> None:
        """Continue in the folder of `unfinished`. Raises `UsageError` if this is another search."""
        unfinished.refuse_changed(json.loads(self._json()))
        self._folder = unfinished.folder
        self.record = structs.replace(self.record, **unfinished.fields())
        self._resumed = len(self.record.boots)

    def run(
        self, most_boots: int | None, most_seconds: float | None, announce: Callable[[str], None]
    ) -> Path:
        """Boot until the search is over or stopped, write the record, and return its folder.

        A limit, a signal or two boots in a row without an answer stop it: `record.stopped` has the
        reason. most_boots: also counts boots of an earlier call. most_seconds: of this call.
        announce: called once with the first output line. Raises `UsageError`, `InfraError` or
        `Unsupported` if no server can be had.
        """
        self._announce, self.most_boots = announce, most_boots
        began, before, stopped = time.monotonic(), self.record.duration_s, None
        try:
            while stopped is None and (items := self.next()):
                if most_boots is not None and len(self.record.boots) >= most_boots:
                    stopped = f"--max-boots {most_boots}"
                elif most_seconds is not None and time.monotonic() - began >= most_seconds:
                    stopped = f"--max-time {most_seconds:g}s"
                elif self.record.answered()[self._resumed :][-2:] == [False, False]:
                    stopped = "two boots in a row without an answer"
                else:
                    stopped = self._boot_all(items)
                self.save(stopped, before + time.monotonic() - began)
        except KeyboardInterrupt as signal:
            # Between two runs, or in an install; a run takes the signals itself and reports what it
            # saw.
            stopped = f"{signal}" or "SIGINT"
        return self.save(stopped, before + time.monotonic() - began)

    def _boot_all(self, items: Sequence[Item]) -> str | None:
        """Boot the items; add each result to the record, write it, and print the answer so far.

        Return the signal that interrupted one; None if none was.
        """
        for place, item in enumerate(items, len(self.record.boots) + 1):
            self.progress.line(self.describe(item, place))
        interrupted = None
        for _, (boot, signal) in results(self.boot, items, self.job.elsewhere):
            interrupted = signal or interrupted
            if boot is None:
                continue
            with self._lock:
                self.record = self.record.after(boot)
                self.save(interrupted, self.record.duration_s)
            if line := self.answer_after(boot, several=len(items) > 1):
                self.progress.line(f"  {line}")
        return interrupted

    def answer_after(self, boot: Any, *, several: bool) -> str:
        """Return the line that is printed when a boot has finished: the answer so far.

        several: other boots run beside it.
        """
        return self.record.readings[0]

    def server_chosen(self, site: SiteFacts, why: str) -> None:
        """Print the first line when the first server is chosen, and record its evidence.

        Runs call this for each server; only the first call has an effect.
        """
        with self._lock:
            if self._announce is not None and not any(boot.run for boot in self.record.boots):
                self.record = structs.replace(self.record, evidence=site.evidence.value)
            self.announce(first_line(site, why, None))

    def announce(self, line: str) -> None:
        """Print the first output line, and write the record; later calls do nothing.

        So a search that is killed in its first boot can be resumed.
        """
        announce, self._announce = self._announce, None
        if announce is not None:
            announce(line)
            if self._folder is None:
                self.save(None, 0.0)

    def save(self, stopped: str | None, duration_s: float) -> Path:
        """Set the reason and the duration, write the JSON and Markdown files, return the folder.

        The first call makes the folder: a refused command must leave none.
        """
        with self._lock:
            record = self.record = structs.replace(
                self.record, stopped=stopped, duration_s=round(duration_s, 1)
            )
            if self._folder is None:
                self._folder = stamped_folder(self.job.out, Path(record.scenario) / record.verb)
            hint = "free some space, or name another --out"
            write_file(self._folder / f"{record.file}.json", self._json(), hint=hint)
            text = Redactor(private_sources(self.sources())).text(
                self.redactor.text(markdown(record))
            )
            write_file(self._folder / f"{record.file}.md", text, hint=hint)
            return self._folder

    def _json(self) -> str:
        """Return the redacted text of the record's JSON file."""
        return (
            json.dumps(self.redactor.deep(self.record.as_dict()), indent=2, ensure_ascii=False)
            + "\n"
        )


class ArmSearch(BootSearch[ArmRecord, Item]):
    """A search that boots changed copies of one arm."""

    @abstractmethod
    def changed_arm(self, item: Item) -> Arm:
        """Return the copy of the arm to boot."""

    @abstractmethod
    def boot_of(self, item: Item, report: RunReport, common: Mapping[str, Any]) -> ArmBoot:
        """Return the record of a finished boot. common: the fields of `ArmBoot`."""

    def boot(self, item: Item) -> tuple[ArmBoot | None, str | None]:
        """Run the changed arm, and return its boot and None, or None and the signal.

        Set the record's `version` and `compiled`. The run lies below the folder of this verb:
        `history` must not take it for a run of the scenario's workload.
        """
        out = self.job.out / self.job.scenario.id / self.record.verb
        arms = [self.changed_arm(item)]
        job = replace(self.job, out=out, arms=arms, reproduce=self.record.reproduce)
        began = time.monotonic()
        report = run_one(job, self.progress, self.server_chosen)
        self.record = structs.replace(
            self.record,
            version=report.vllm_version or self.record.version,
            compiled=report.compiled or self.record.compiled,
        )
        if report.interrupted:
            return None, report.interrupted
        trial = report.arms[0].trials[-1]
        common = {
            "outcome": trial.outcome,
            "why": trial.why,
            "run": report.folder.name,
            "duration_s": round(time.monotonic() - began, 1),
        }
        return self.boot_of(item, report, common), None


def add_search(parser: argparse.ArgumentParser, *, example: str, prints: str, more: str) -> None:
    """Add the options of a search that boots one arm of a scenario.

    example, prints, more: as in `add_common`.
    """
    add_common(parser, example=example, prints=prints, more=more)
    parser.add_argument(
        "scenario", nargs="?", metavar="SCENARIO", help="may be left out with --resume"
    )
    add_limits(parser)
    add_server_options(parser, names=("server", "image", "vllm", "model", "weights"))
    add_run_options(parser, arm="this arm instead of the first", trials=False)


def named_scenario(arguments: argparse.Namespace, verb: str) -> Scenario:
    """Return the scenario that a command line names. Raises `UsageError` if it names none."""
    if not arguments.scenario:
        raise UsageError(
            "no SCENARIO is named", hint=f"vllm-repro list names them; vllm-repro {verb} --help"
        )
    return find(arguments.scenario)


def job_of_one_arm(arguments: argparse.Namespace, verb: str) -> Job:
    """Return the job of a command line with `add_search`.

    Raises `UsageError` if several arms are named, or no scenario, or if the server cannot be had.
    """
    scenario = named_scenario(arguments, verb)
    arms = find_arms(scenario, arguments.arm or [scenario.arms[0].name])
    if len(arms) != 1:
        raise UsageError(
            f"{len(arms)} arms are named, and this follows one", hint="give --arm once"
        )
    options = server_options(arguments)
    choice = choice_of(scenario, options)
    # boots of different kinds of server are not comparable
    options = replace(options, server=choice.kind.value)
    job = job_from(
        arguments,
        name=arguments.scenario,
        scenario=scenario,
        options=options,
        choice=choice,
        arms=arms,
    )
    job = replace(job, named_arms=[arms[0].name])
    release = ("--vllm", options.vllm or job.version(choice.kind))
    return replace(job, reproduce=repeat_command(verb, job, choice.kind, release))


def common_fields(job: Job, reproduce: str) -> dict[str, Any]:
    """Return the fields of a `SearchRecord` for a search that has not begun."""
    scenario, kind = job.scenario, job.choice.kind
    return {
        "scenario": scenario.id,
        "issue": scenario.issue,
        "title": scenario.title,
        "status": scenario.status,
        "server": kind.value,
        "evidence": kind.facts.evidence,
        "harness_version": __version__,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "duration_s": 0.0,
        "reproduce": reproduce,
    }


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add `--max-boots`, `--max-time` and `--resume`."""
    parser.add_argument(
        "--max-boots", type=_boots, metavar="N", help="stop after so many boots, with what is known"
    )
    parser.add_argument(
        "--max-time",
        type=duration,
        metavar="TIME",
        help="start no boot after this time: 90s, 30m or 2h",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help=(
            "continue the search in this folder with its options: --max-boots and --max-time may be"
            " given anew"
        ),
    )


def with_resumed(
    arguments: argparse.Namespace,
    kind: type[SearchRecord],
    *,
    beside: Collection[str] = ("max_boots", "max_time"),
) -> tuple[argparse.Namespace, UnfinishedSearch | None]:
    """Return the arguments, and the unfinished search that `--resume` names; None without it.

    With `--resume` the arguments are those of the first call, except the options `beside`, `--json`
    and `--on`. Raises `UsageError` if there is no such search, or for any other option.
    """
    if not arguments.resume:
        return arguments, None
    unfinished = read_search(arguments.resume, kind)
    anew = {name: getattr(arguments, name) for name in beside if name in arguments}
    arguments = resumed(arguments, unfinished, beside=anew)
    vars(arguments).update(anew)
    return arguments, unfinished


def run_search(
    arguments: argparse.Namespace, search: BootSearch[Any, Any], unfinished: UnfinishedSearch | None
) -> int:
    """Run or resume a search, print its text, and return the exit status: 130 after a signal.

    With `--json`, print the record too.
    """
    if unfinished is not None:
        search.resume(unfinished)
    limits = (getattr(arguments, "max_boots", None), getattr(arguments, "max_time", None))
    folder = search.run(*limits, lambda line: print(line, file=stream_of(arguments), flush=True))
    record: SearchRecord = search.record
    script = ["--script", arguments.script] if getattr(arguments, "script", None) else []
    resume = shlex.join(["vllm-repro", record.verb, "--resume", str(folder), *script])
    shown = structs.replace(record, reproduce=with_out(record.reproduce, search.job.out))
    print(
        f"\n{terminal(shown, f'{folder / record.file}.md', resume)}",
        end="",
        file=stream_of(arguments),
    )
    if arguments.json:
        print_json(record.as_dict())
    return (
        INTERRUPTED if record.stopped and record.stopped.startswith("SIG") else record.exit_status
    )


def stream_of(arguments: argparse.Namespace) -> TextIO:
    """Return the stream for text: with `--json` standard error, as standard output is for JSON."""
    return sys.stderr if arguments.json else sys.stdout


def _boots(text: str) -> int:
    """Return the number of a `--max-boots` option, 1 to 1000; refuse anything else."""
    return number(text, least=1, most=1_000, what="number of boots")
