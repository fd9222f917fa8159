"""`vllm-repro explore`: a seeded search of vLLM's EngineCore for the smallest workload that fails."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TextIO

from vllm_repro.cli.common import add_common, duration, number, print_json
from vllm_repro.cli.source_option import source
from vllm_repro.errors import INTERRUPTED, UsageError
from vllm_repro.journal.redact import Redactor
from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.known import NEWEST
from vllm_repro.releases.overlay import make_overlay
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro.report.files import write_file
from vllm_repro.running.folders import default_out, private_folders, stamped_folder
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.catalogue import find, find_arms, folder_words
from vllm_repro.scenario.patch import read_diff
from vllm_repro_diagnosis.boot_facts import imported
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_explore.case import Case
from vllm_repro_explore.compare import Comparison, PatchTally, Play, compare
from vllm_repro_explore.draft import draft, draft_id, unlike_live
from vllm_repro_explore.draw import MIXES, draw
from vllm_repro_explore.driver import Driver, driver_model
from vllm_repro_explore.finding import FindingKind
from vllm_repro_explore.record import read_record
from vllm_repro_explore.scenario_setup import draw_for, setup_from
from vllm_repro_explore.scheduler_test import finding_test
from vllm_repro_explore.search import Found, Tally, search
from vllm_repro_explore.summary import SearchSummary, as_json, heading, page, searched, terminal

_EPILOG = """

exit status:
  0  nothing was found in the cases that were played
  1  something was found; see which of it is known (with --go-on: something new)
  2  undecided: the release cannot be explored, or no case could be played
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted
With --patch: 0 if one patch fixes every failing case and breaks none, 1 if none does, 2 if no case fails as released, or if
no patched file is loaded.

Neither a server nor a model runs: vLLM's own EngineCore takes steps, with its scheduler, KV-cache manager and connectors,
over a worker that computes each token from what lies in the blocks: a block mix-up is a wrong token.

Each finding is shrunk and written to OUT/explore/<time>-<id>/findings.jsonl at once. explore.md there is one page, which
has what earlier searches in OUT did not find first. A finding that the scheduler alone shows also gets a scenario file,
which sends the same workload to a real server in the lab, and a pytest file for vLLM's own tests/v1/core, which imports
nothing of this package."""


def add(parser: argparse.ArgumentParser) -> None:
    add_common(
        parser,
        example="vllm-repro explore --engine --mix sco-long --vllm 0.20.2 --seeds 500",
        prints="the content of explore.json",
        more=_EPILOG,
    )
    parser.add_argument(
        "scenario",
        nargs="?",
        metavar="SCENARIO",
        help="search workloads for this scenario's server in the lab",
    )
    parser.add_argument(
        "--engine",
        action="store_true",
        help="instead of a scenario: draw the server too, from all mixes, or those of --mix",
    )
    parser.add_argument(
        "--mix",
        metavar="M,...",
        help=f"the features of --engine to draw from, in turn: {', '.join(MIXES)} (default: all)",
    )
    parser.add_argument("--arm", metavar="A", help="the arm of the scenario (default: its first)")
    parser.add_argument(
        "--vllm",
        type=source,
        metavar="SOURCE",
        help=f"the vLLM, as in `run` (default: the scenario's release, or {NEWEST})",
    )
    parser.add_argument(
        "--patch",
        type=Path,
        action="append",
        metavar="FILE",
        help=(
            "a unified diff of vLLM; play the cases as released and with it; given again, it"
            " compares several"
        ),
    )
    parser.add_argument(
        "--seeds",
        type=_count,
        metavar="N",
        help="how many cases (default: 300, or as many as --for allows)",
    )
    parser.add_argument(
        "--from", dest="first", type=_count, metavar="K", help="the first seed (default: 1)"
    )
    parser.add_argument(
        "--go-on",
        action="store_true",
        help=(
            "begin after the last seed of the same searches in OUT; exit with 1 only for a finding"
            " that none of them has"
        ),
    )
    parser.add_argument(
        "--for", dest="most", type=duration, metavar="TIME", help="stop after so long: 10m, 2h"
    )
    parser.add_argument(
        "--jobs",
        type=_jobs,
        default=1,
        metavar="N",
        help="processes that play; one shrinks while the others go on (default: 1)",
    )
    parser.add_argument(
        "--boot",
        action="store_true",
        help="then run each finding that has a scenario file on a server in the lab",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where searches are written (default: reports)"
    )


def _count(text: str) -> int:
    return number(text, least=1, most=10**9, what="number of cases")


def _jobs(text: str) -> int:
    return number(text, least=1, most=256, what="number of processes")


@dataclass(kw_only=True)
class _Exploring:
    """One search."""

    source: Source
    start: str
    case: Callable[[int], Case]
    arguments: argparse.Namespace
    # The part of its command that makes it this one.
    words: list[str]
    mixes: tuple[str, ...] = ()
    progress: Progress = field(default_factory=Progress)

    @property
    def version(self) -> str:
        """The vLLM as `--vllm` names it."""
        return str(self.source)

    def run(self) -> tuple[SearchSummary, Path]:
        arguments = self.arguments
        release_ = provision(self.source, self.progress.line)
        out = arguments.out or default_out()
        record = read_record(out, self.version, searched(self.start, self.mixes))
        if arguments.go_on:
            arguments.first = record.last + 1
        folder = stamped_folder(out, Path("explore"))
        started = time.monotonic()
        tally, interrupted = Tally(), False
        with ExitStack() as running:
            logs = [
                folder / f"driver{'' if number == 1 else f'-{number}'}.log"
                for number in range(1, arguments.jobs + 1)
            ]
            drivers = [running.enter_context(Driver(release_, driver_model(), log)) for log in logs]

            def keep(found: Found) -> None:
                with (folder / "findings.jsonl").open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(found.as_json()) + "\n")
                self.progress.line(
                    f"  seed {found.seed}: {found.finding}, shrunk in {found.tried} cases"
                )

            def progress(now: Tally) -> None:
                self.progress.notify(
                    f"{now.trials} cases, {len(now.found)} kinds of findings,"
                    f" {time.monotonic() - started:.0f} s"
                )

            try:
                search(
                    [driver.play for driver in drivers],
                    self._cases(),
                    go_on=lambda: (
                        arguments.most is None or time.monotonic() - started < arguments.most
                    ),
                    keep=keep,
                    progress=progress,
                    on_runner=[partial(driver.play, worker="runner") for driver in drivers],
                    tally=tally,
                )
            except KeyboardInterrupt:
                interrupted = True
        self.progress.close()
        live = [self._draft(found, folder) for found in tally.findings]
        tests = [self._test(found, folder) for found in tally.findings]
        summary = SearchSummary(
            version=self.version,
            start=self.start,
            mixes=self.mixes,
            tally=tally,
            live=live,
            tests=tests,
            duration_s=time.monotonic() - started,
            again=self.again,
            interrupted=interrupted,
            record=record,
        )
        write_file(
            folder / "explore.md", page(summary), hint="free some space, or name another --out"
        )
        text = json.dumps(as_json(summary), indent=2, ensure_ascii=False) + "\n"
        write_file(folder / "explore.json", text, hint="free some space, or name another --out")
        return summary, folder

    @property
    def again(self) -> str:
        """The command that repeats the search."""
        arguments = self.arguments
        seeds = ["--seeds", f"{arguments.seeds}"] if arguments.seeds else []
        most = ["--for", f"{arguments.most:g}s"] if arguments.most else []
        first = ["--from", f"{arguments.first}"] if arguments.first not in (None, 1) else []
        patches = [word for path in arguments.patch or () for word in ("--patch", str(path))]
        words = [
            "vllm-repro",
            "explore",
            *self.words,
            "--vllm",
            self.version,
            *patches,
            *seeds,
            *first,
            *most,
        ]
        return Redactor(private_folders()).command(shlex.join(words))

    def compare(self) -> tuple[Comparison, bool, float, Path]:
        """Play the cases as released and with each patch.

        Return the counts, whether it was interrupted, seconds, and the folder.
        """
        arguments = self.arguments
        release = provision(self.source, self.progress.line)
        changed = {
            str(path): make_overlay(
                cache_root(), release.packages, read_diff(path), self.progress.line
            )
            for path in arguments.patch
        }
        folder = stamped_folder(arguments.out or default_out(), Path("explore"))
        started = time.monotonic()
        comparison, interrupted = (
            Comparison(patches=[PatchTally(name=name) for name in changed]),
            False,
        )
        logs = {name: folder / f"driver-{number}.log" for number, name in enumerate(changed, 1)}
        with ExitStack() as drivers:

            def player(packages: Path, log: Path, patched: Collection[str] = ()) -> Play:
                changed = replace(release, packages=packages)
                return drivers.enter_context(
                    Driver(changed, driver_model(), log, patched=patched)
                ).play

            def progress(now: Comparison) -> None:
                self.progress.notify(f"{now.trials} cases, {now.failing} fail as released")

            try:
                compare(
                    self._cases(),
                    player(release.packages, folder / "driver.log"),
                    {
                        name: player(one.folder, logs[name], one.digests)
                        for name, one in changed.items()
                    },
                    go_on=lambda: (
                        arguments.most is None or time.monotonic() - started < arguments.most
                    ),
                    progress=progress,
                    comparison=comparison,
                )
            except KeyboardInterrupt:
                interrupted = True
        for one in comparison.patches if comparison.trials else ():
            files = changed[one.name].digests.keys()
            one.unloaded = sorted(files - set(imported(read_lines(logs[one.name].read_bytes()))))
            one.tested = len(one.unloaded) < len(files)
        self.progress.close()
        return comparison, interrupted, time.monotonic() - started, folder

    def _cases(self) -> Iterator[tuple[int, Case]]:
        first, many = self.arguments.first or 1, self.arguments.seeds
        if many is None and self.arguments.most is None:
            many = 300
        for seed in count(first) if many is None else range(first, first + many):
            yield seed, self.case(seed)

    def _test(self, found: Found, folder: Path) -> str | None:
        """Write the finding's pytest file; return its path, None if no such test shows the finding."""
        path = folder / f"test_{draft_id(found.finding, self.version).replace('-', '_')}.py"
        with contextlib.suppress(UsageError):
            write_file(
                path,
                finding_test(found.as_json(), self.version),
                hint="free some space, or name another --out",
            )
            return str(path)
        return None

    def _draft(self, found: Found, folder: Path) -> str:
        """Write the finding's scenario file; return the command that runs it, or why there is none."""
        if reasons := unlike_live(found.shrunk):
            return f"none: {'; '.join(reasons)}"
        if found.finding.kind in (FindingKind.CORRUPTED, FindingKind.LEAK):
            return "none: a server would live and not show it"
        name = draft_id(found.finding, self.version).replace("-", "_") + ".py"
        write_file(
            folder / name, draft(found, self.version), hint="free some space, or name another --out"
        )
        hang = " --answer-stall 60" if found.finding.kind is FindingKind.STUCK else ""
        return (
            f"vllm-repro run {shlex.quote(str(folder / name))} --server lab --vllm"
            f" {self.version}{hang}"
        )


def run(arguments: argparse.Namespace) -> int:
    if len(set(arguments.patch or ())) < len(arguments.patch or ()):
        raise UsageError("the same --patch is given twice", hint="name each file once")
    if arguments.boot and (arguments.patch or arguments.json):
        raise UsageError(
            "--boot is for a search without --patch and --json", hint="leave one of them out"
        )
    if arguments.patch and arguments.jobs > 1:
        raise UsageError("--jobs is for a search without --patch", hint="leave one of them out")
    if bool(arguments.scenario) is arguments.engine:
        raise UsageError(
            "name a SCENARIO or --engine to explore", hint="vllm-repro explore --engine --for 10m"
        )
    if arguments.go_on and (arguments.first or arguments.patch):
        raise UsageError(
            "--go-on is for a search without --from and --patch", hint="leave one of them out"
        )
    if arguments.mix and not arguments.engine:
        raise UsageError("--mix needs --engine", hint="vllm-repro explore --engine --mix plain,off")
    if arguments.arm and not arguments.scenario:
        raise UsageError("--arm needs a SCENARIO", hint="vllm-repro explore SCENARIO --arm A")
    exploring = _for_scenario(arguments) if arguments.scenario else _general(arguments)
    stream = sys.stderr if arguments.json else sys.stdout
    if arguments.patch:
        return _compared(exploring, stream)
    summary, folder = exploring.run()
    print(("" if arguments.json else "\n") + terminal(summary), file=stream)
    print(f"folder:  {folder}   page: explore.md", file=stream)
    if arguments.json:
        print_json(as_json(summary))
    if summary.interrupted:
        return INTERRUPTED
    if arguments.boot:
        _boot(summary.live, arguments.out)
    if summary.tally.trials == summary.tally.invalid:
        return 2
    return 1 if (summary.new if arguments.go_on else summary.tally.found) else 0


def _boot(live: Sequence[str], out: Path | None) -> None:
    """Run the commands that boot a server."""
    from vllm_repro.cli import main  # it imports the commands

    for command in live:
        if not command.startswith("none: "):
            print(f"\n$ {command}", flush=True)
            main([*shlex.split(command)[1:], *(["--out", str(out)] if out else [])])


def _compared(exploring: _Exploring, stream: TextIO) -> int:
    comparison, interrupted, duration_s, folder = exploring.compare()
    found = {
        "schema": 1,
        "vllm_version": exploring.version,
        **searched(exploring.start, exploring.mixes),
        **comparison.as_json(),
        "interrupted": interrupted,
        "duration_s": round(duration_s, 3),
        "reproduce": exploring.again,
    }
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    write_file(folder / "explore.json", text, hint="free some space, or name another --out")
    head = heading(exploring.version, exploring.start, exploring.mixes)
    lines = [
        f"{head}: patches compared",
        "",
        *comparison.lines(),
        "",
        f"again:   {exploring.again}",
        f"folder:  {folder}",
    ]
    print("\n".join(lines), file=stream)
    if exploring.arguments.json:
        print_json(found)
    return INTERRUPTED if interrupted else comparison.exit_status


def _general(arguments: argparse.Namespace) -> _Exploring:
    mixes, words = tuple(MIXES), ["--engine"]
    if arguments.mix:
        mixes, words = tuple(arguments.mix.split(",")), ["--engine", "--mix", arguments.mix]
    if unknown := [name for name in mixes if name not in MIXES]:
        raise UsageError(
            f"no mix is called {', '.join(unknown)}", hint=f"--mix takes {', '.join(MIXES)}"
        )
    return _Exploring(
        source=arguments.vllm or Source(release=NEWEST),
        start="general",
        mixes=mixes,
        case=lambda seed: draw(seed, mixes[seed % len(mixes)]),
        arguments=arguments,
        words=words,
    )


def _for_scenario(arguments: argparse.Namespace) -> _Exploring:
    scenario = find(arguments.scenario)
    arm, *_ = find_arms(scenario, [arguments.arm] if arguments.arm else None)
    setup = setup_from(scenario, arm)
    words = [arguments.scenario, *folder_words(), *(["--arm", arm.name] if arguments.arm else [])]
    return _Exploring(
        source=arguments.vllm or Source(release=scenario.try_with),
        start=f"{scenario.id}, arm {arm.name}" if arguments.arm else scenario.id,
        case=lambda seed: draw_for(setup, seed),
        arguments=arguments,
        words=words,
    )
