"""`vllm-repro explore`: seeded search of vLLM's EngineCore for the smallest failing workload."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from vllm_repro.cli.common import add_common, duration, number, print_json
from vllm_repro.cli.source_option import WITH_OPTION, exchanged, source
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
from vllm_repro_explore.frontend import (
    FrontendSearch,
    known_names,
    play_frontend,
    script,
    script_name,
)
from vllm_repro_explore.scenario_setup import draw_for, setup_from
from vllm_repro_explore.scheduler_test import finding_test
from vllm_repro_explore.search import Found, Tally, search
from vllm_repro_explore.summary import (
    Record,
    SearchSummary,
    as_json,
    heading,
    page,
    search_fields,
    terminal,
)
from vllm_repro_explore.vendor import vendor

_EPILOG = """

exit status:
  0  nothing was found in the cases that were played
  1  something was found; see which of it is known (with --go-on: something new)
  2  undecided: the release cannot be explored, or no case could be played
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

With --patch: 0 if one patch fixes every failing case and breaks none, 1 if none does, 2 if no case
fails as released, or if no patched file is loaded.

Neither a server nor a model runs: vLLM's own EngineCore takes steps, with its scheduler, KV-cache
manager and connectors, over a worker that computes each token from what lies in the blocks: a block
mix-up is a wrong token.

Each finding is shrunk and written to OUT/explore/<time>-<id>/findings.jsonl at once. explore.md
there is one page, which has what earlier searches in OUT did not find first. A finding that the
scheduler alone shows also gets a scenario file, which sends the same workload to a real server in
the lab, and a pytest file for vLLM's own tests/v1/core, which imports nothing of this package."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-repro explore`."""
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
    parser.add_argument(
        "--frontend",
        nargs="?",
        const="",
        metavar="PARSER,...",
        help=(
            "instead of an engine: vLLM's tool and reasoning parsers (all, or these), and its"
            " `output` processor; a message must not depend on how its tokens are split"
        ),
    )
    parser.add_argument("--arm", metavar="A", help="the arm of the scenario (default: its first)")
    parser.add_argument(
        "--vllm",
        type=source,
        metavar="SOURCE",
        help=f"the vLLM, as in `run` (default: the scenario's release, or {NEWEST})",
    )
    parser.add_argument("--with", **WITH_OPTION)
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
        type=partial(number, least=1, most=10**9, what="number of cases"),
        metavar="N",
        help="how many cases (default: 300, or as many as --for allows)",
    )
    parser.add_argument(
        "--from",
        dest="first",
        type=partial(number, least=1, most=10**9, what="number of cases"),
        metavar="K",
        help="the first seed (default: 1)",
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
        type=partial(number, least=1, most=256, what="number of processes"),
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
        "--vendor",
        type=Path,
        metavar="DIR",
        help=(
            "instead of a search: write it as a folder of tests, such as tests/v1/search in vLLM's"
            " repository, which needs vLLM and pytest alone"
        ),
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where searches are written (default: reports)"
    )


def _write(path: Path, text: str) -> Path:
    """Write a file of the search, and return its path.

    Raises `InfraError` if the disk is full, and `UsageError` for another error of the write.
    """
    write_file(path, text, hint="free some space, or name another --out")
    return path


@dataclass(kw_only=True)
class _Exploring:
    """One call of `vllm-repro explore`: its vLLM, its cases and its options."""

    source: Source
    # `general`, or the scenario whose server is searched, with its arm if one was named
    start: str
    # returns the case of a seed
    case: Callable[[int], Case]
    arguments: argparse.Namespace
    # arguments of the command that name what is searched: a scenario and arm, or mixes
    words: list[str]
    mixes: tuple[str, ...] = ()
    progress: Progress = field(default_factory=Progress)
    interrupted: bool = False
    # monotonic seconds
    started: float = 0.0
    duration_s: float = 0.0

    @property
    def version(self) -> str:
        """Return the vLLM as `--vllm` names it."""
        return str(self.source)

    @property
    def out(self) -> Path:
        """Return the folder below which searches are written: `--out`, or the default."""
        return self.arguments.out or default_out()

    @contextlib.contextmanager
    def _playing(self) -> Iterator[ExitStack]:
        """Yield an `ExitStack` that stops the entered drivers at the end; set `duration_s`.

        Ctrl-C ends the block, sets `interrupted`, and is not raised.
        """
        self.started = time.monotonic()
        try:
            with ExitStack() as drivers:
                yield drivers
        except KeyboardInterrupt:
            self.interrupted = True
        self.duration_s = time.monotonic() - self.started
        self.progress.close()

    def _time_left(self) -> bool:
        """Return True until the time of `--for` is over; always without that option."""
        most = self.arguments.most
        return most is None or time.monotonic() - self.started < most

    def run(self) -> tuple[SearchSummary, Path]:
        """Search: run cases on EngineCore, shrink findings, write files; return (summary, folder).

        `--go-on` sets `arguments.first` to the seed after the last one of earlier searches.
        """
        release, arguments = provision(self.source, self.progress.line), self.arguments
        record = _read_record(self.out, self.version, search_fields(self.start, self.mixes))
        if arguments.go_on:
            arguments.first = record.last + 1
        folder, tally = stamped_folder(self.out, Path("explore")), Tally()

        def keep(hit: Found) -> None:
            """Append a finding to findings.jsonl, and print it."""
            with (folder / "findings.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(hit.as_json()) + "\n")
            self.progress.line(f"  seed {hit.seed}: {hit.finding}, shrunk in {hit.tried} cases")

        def progress(tally: Tally) -> None:
            self.progress.notify(
                f"{tally.trials} cases, {len(tally.hits)} kinds of findings,"
                f" {time.monotonic() - self.started:.0f} s"
            )

        with self._playing() as running:
            names = ["driver", *(f"driver-{number}" for number in range(2, arguments.jobs + 1))]
            drivers = [
                running.enter_context(Driver(release, driver_model(), folder / f"{name}.log"))
                for name in names
            ]
            search(
                [driver.play for driver in drivers],
                self._cases(),
                go_on=self._time_left,
                keep=keep,
                progress=progress,
                on_runner=[partial(driver.play, worker="runner") for driver in drivers],
                tally=tally,
            )
        summary = SearchSummary(
            version=self.version,
            start=self.start,
            mixes=self.mixes,
            tally=tally,
            live=[self._draft(hit, folder) for hit in tally.findings],
            tests=[self._test(hit, folder) for hit in tally.findings],
            duration_s=self.duration_s,
            again=self.again,
            interrupted=self.interrupted,
            record=record,
        )
        _write(folder / "explore.md", page(summary))
        _write(folder / "explore.json", _json(as_json(summary)))
        return summary, folder

    @property
    def again(self) -> str:
        """Return the command that repeats the search, with private paths redacted."""
        arguments = self.arguments
        options = [
            ("--vllm", self.version),
            *(("--patch", path) for path in arguments.patch or ()),
            ("--seeds", arguments.seeds),
            ("--from", arguments.first if arguments.first != 1 else None),
            ("--for", f"{arguments.most:g}s" if arguments.most else None),
        ]
        words = [
            word for name, value in options if value is not None for word in (name, str(value))
        ]
        command = shlex.join(["vllm-repro", "explore", *self.words, *words])
        return Redactor(private_folders()).command(command)

    def compare(self) -> tuple[Comparison, Path]:
        """Run the cases on EngineCore as released and with each patch; return (counts, folder).

        The new folder gets only the drivers' logs. After Ctrl-C the counts are those so far.
        """
        arguments = self.arguments
        release = provision(self.source, self.progress.line)
        overlays = {
            str(path): make_overlay(
                cache_root(), release.packages, read_diff(path), self.progress.line
            )
            for path in arguments.patch
        }
        folder = stamped_folder(self.out, Path("explore"))
        comparison = Comparison(patches=[PatchTally(name=name) for name in overlays])
        logs = {name: folder / f"driver-{number}.log" for number, name in enumerate(overlays, 1)}

        def progress(counts: Comparison) -> None:
            self.progress.notify(f"{counts.trials} cases, {counts.failing} fail as released")

        with self._playing() as drivers:

            def player(packages: Path, log: Path, patched: Collection[str] = ()) -> Play:
                """Return the method `play` of a new driver of `packages`; `drivers` stops it."""
                changed = replace(release, packages=packages)
                driver = Driver(changed, driver_model(), log, patched=patched)
                return drivers.enter_context(driver).play

            compare(
                self._cases(),
                player(release.packages, folder / "driver.log"),
                {
                    name: player(overlay.folder, logs[name], overlay.digests)
                    for name, overlay in overlays.items()
                },
                go_on=self._time_left,
                progress=progress,
                comparison=comparison,
            )
        for patch in comparison.patches if comparison.trials else ():
            files = overlays[patch.name].digests.keys()
            loaded = imported(read_lines(logs[patch.name].read_bytes()))
            patch.unloaded = sorted(files - set(loaded))
            patch.tested = len(patch.unloaded) < len(files)
        return comparison, folder

    def search_frontend(self) -> tuple[FrontendSearch, Path]:
        """Search the front end, write its files, and return (search, folder)."""
        arguments = self.arguments
        names = known_names(arguments.frontend)
        release = provision(self.source, self.progress.line)
        folder = stamped_folder(self.out, Path("explore"))
        search = FrontendSearch(version=self.version, again=self.again)
        try:
            with self._playing():
                play_frontend(
                    release,
                    search,
                    folder / "frontend.log",
                    self.progress.notify,
                    first=arguments.first or 1,
                    answers=self._limit(10_000),
                    seconds=arguments.most,
                    names=names,
                )
        finally:  # what was found before the program died is kept
            search.interrupted, search.duration_s = self.interrupted, self.duration_s
            for finding in search.distinct:
                text = script(finding, self.version)
                finding["script"] = str(_write(folder / script_name(finding), text))
            _write(folder / "frontend.md", search.text("md") + "\n")
            _write(folder / "frontend.json", _json(search.as_json()))
        return search, folder

    def _limit(self, default: int) -> int | None:
        """Return how many cases to play: `--seeds`, else `default`, or no limit with `--for`."""
        many: int | None = self.arguments.seeds
        return default if many is None and self.arguments.most is None else many

    def _cases(self) -> Iterator[tuple[int, Case]]:
        """Yield (seed, case) from the first seed on: `--seeds` cases, else endlessly with `--for`.

        Without both, yield 300.
        """
        first, many = self.arguments.first or 1, self._limit(300)
        for seed in count(first) if many is None else range(first, first + many):
            yield seed, self.case(seed)

    def _test(self, hit: Found, folder: Path) -> str | None:
        """Write the finding's pytest file; return its path, None if no such test shows it."""
        path = folder / f"test_{draft_id(hit.finding, self.version).replace('-', '_')}.py"
        with contextlib.suppress(UsageError):
            return str(_write(path, finding_test(hit.as_json(), self.version)))
        return None

    def _draft(self, hit: Found, folder: Path) -> str:
        """Write the finding's scenario file, and return the command that runs it.

        Return `none: ` and the reason if no server can show the finding.
        """
        if reasons := unlike_live(hit.shrunk):
            return f"none: {'; '.join(reasons)}"
        if hit.finding.kind in (FindingKind.CORRUPTED, FindingKind.LEAK):
            return "none: a server would live and not show it"
        path = folder / f"{draft_id(hit.finding, self.version).replace('-', '_')}.py"
        name = shlex.quote(str(_write(path, draft(hit, self.version))))
        hang = " --answer-stall 60" if hit.finding.kind is FindingKind.STUCK else ""
        vllm = shlex.quote(self.version)
        return f"vllm-repro run {name} --server lab --vllm {vllm}{hang}"


def _read_record(out: Path, version: str, search_fields: Mapping[str, Any]) -> Record:
    """Return the findings of the earlier searches below `out` that have the same `search_fields`.

    `last` is the highest seed of those of `version`; `first` has for each finding the first folder,
    by name. An explore.json that cannot be read is left out.
    """
    searches, last, first = 0, 0, dict[tuple[str, str], str]()
    for file in sorted((out / "explore").glob("[0-9]*/explore.json")):
        try:
            earlier = json.loads(file.read_text(encoding="utf-8"))
            if any(earlier.get(key) != value for key, value in search_fields.items()):
                continue
            findings = [(finding["kind"], finding["site"]) for finding in earlier["findings"]]
            seed = (earlier["seeds"][1] or 0) if earlier["vllm_version"] == version else 0
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
        searches, last = searches + 1, max(last, seed)
        for key in findings:
            first.setdefault(key, file.parent.name)
    return Record(searches=searches, last=last, first=first)


def _json(value: object) -> str:
    """Return a value as indented JSON text."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


_OF_A_SEARCH = (
    *(
        "scenario",
        "engine",
        "frontend",
        "json",
        "mix",
        "arm",
        "vllm",
        "with",
        "patch",
        "seeds",
        "first",
    ),
    *("go_on", "most", "boot"),
)
"""Arguments that only a search has."""


def _check(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for options that exclude each other, or that need another one."""
    leave_out, patches = "leave one of them out", arguments.patch or []
    frontend = arguments.frontend is not None
    refusals = (
        (
            len(set(patches)) < len(patches),
            "the same --patch is given twice",
            "name each file once",
        ),
        (
            arguments.boot and (patches or arguments.json),
            "--boot is for a search without --patch and --json",
            leave_out,
        ),
        (patches and arguments.jobs > 1, "--jobs is for a search without --patch", leave_out),
        (
            arguments.vendor and any(vars(arguments)[name] for name in _OF_A_SEARCH),
            "--vendor writes the search, and goes without SCENARIO and the options of a search",
            "vllm-repro explore --vendor tests/v1/search",
        ),
        (
            not arguments.vendor and bool(arguments.scenario) + arguments.engine + frontend != 1,
            "name a SCENARIO, --engine or --frontend to explore",
            "vllm-repro explore --engine --for 10m",
        ),
        (
            frontend and (patches or arguments.jobs > 1 or arguments.go_on or arguments.boot),
            "--frontend goes without --patch, --jobs, --go-on and --boot",
            "`vllm-repro gate DIFF` compares a patch of the front end; or " + leave_out,
        ),
        (
            arguments.go_on and (arguments.first or patches),
            "--go-on is for a search without --from and --patch",
            leave_out,
        ),
        (
            arguments.mix and not arguments.engine,
            "--mix needs --engine",
            "vllm-repro explore --engine --mix plain,off",
        ),
        (
            arguments.arm and not arguments.scenario,
            "--arm needs a SCENARIO",
            "vllm-repro explore SCENARIO --arm A",
        ),
    )
    for wrong, message, hint in refusals:
        if wrong:
            raise UsageError(message, hint=hint)


def run(arguments: argparse.Namespace) -> int:
    """Run `vllm-repro explore`: a search, or a comparison of patches; return the exit status.

    With `--vendor`, write the search's files instead. With `--boot`, then run each finding that has
    a scenario file on a server.
    """
    _check(arguments)
    if arguments.vendor:
        count = len(vendor(arguments.vendor))
        print(f"{count} files in {arguments.vendor}: python -m pytest {arguments.vendor}")
        return 0
    exploring = _for_scenario(arguments) if arguments.scenario else _general(arguments)
    stream = sys.stderr if arguments.json else sys.stdout
    if arguments.frontend is not None:
        return _search_frontend(exploring, stream)
    if arguments.patch:
        return _compare_patches(exploring, stream)
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
    return 1 if (summary.new if arguments.go_on else summary.tally.hits) else 0


def _search_frontend(exploring: _Exploring, stream: TextIO) -> int:
    """Search the front end, print the result to `stream`, and return the exit status."""
    search, folder = exploring.search_frontend()
    print(search.text("txt"), file=stream)
    print(f"folder:  {folder}   page: frontend.md", file=stream)
    if exploring.arguments.json:
        print_json(search.as_json())
    if search.interrupted:
        return INTERRUPTED
    if not search.judged:
        return 2
    return 1 if search.findings else 0


def _boot(live: Sequence[str], out: Path | None) -> None:
    """Run the `vllm-repro run` command of each finding that has one; each boots a server.

    live: for each finding its command, or `none: ` and a reason. out: the `--out` of the runs. The
    exit statuses are ignored.
    """
    from vllm_repro.cli import main  # it imports the commands

    for command in live:
        if not command.startswith("none: "):
            print(f"\n$ {command}", flush=True)
            main([*shlex.split(command)[1:], *(["--out", str(out)] if out else [])])


def _compare_patches(exploring: _Exploring, stream: TextIO) -> int:
    """Compare the patches, print the result to `stream`, write it, return the exit status."""
    comparison, folder = exploring.compare()
    result = {
        "schema": 1,
        "vllm_version": exploring.version,
        **search_fields(exploring.start, exploring.mixes),
        **comparison.as_json(),
        "interrupted": exploring.interrupted,
        "duration_s": round(exploring.duration_s, 3),
        "reproduce": exploring.again,
    }
    _write(folder / "explore.json", _json(result))
    head = heading(exploring.version, exploring.start, exploring.mixes)
    lines = [f"{head}: patches compared", "", *comparison.lines(), ""]
    lines += [f"again:   {exploring.again}", f"folder:  {folder}"]
    print("\n".join(lines), file=stream)
    if exploring.arguments.json:
        print_json(result)
    return INTERRUPTED if exploring.interrupted else comparison.exit_status


def _general(arguments: argparse.Namespace) -> _Exploring:
    """Return the search of `--engine`: a seed draws the server's flags and the workload.

    The mixes of `--mix` (default: all) take the seeds in turn. A mix is a table in `draw.MIXES` of
    features, such as "abort", and their probabilities. Raises `UsageError` for an unknown mix.
    """
    mixes, words = tuple(MIXES), ["--engine"]
    if arguments.frontend is not None:
        mixes, words = (), ["--frontend", *filter(None, [arguments.frontend])]
    if arguments.mix:
        mixes, words = tuple(arguments.mix.split(",")), ["--engine", "--mix", arguments.mix]
    if unknown := [name for name in mixes if name not in MIXES]:
        raise UsageError(
            f"no mix is called {', '.join(unknown)}", hint=f"--mix takes {', '.join(MIXES)}"
        )
    return _Exploring(
        source=_source(arguments, NEWEST),
        start="general",
        mixes=mixes,
        case=lambda seed: draw(seed, mixes[seed % len(mixes)]),
        arguments=arguments,
        words=words,
    )


def _source(arguments: argparse.Namespace, release: str) -> Source:
    """Return the vLLM of `--vllm`, else `release`, with the packages of `--with`.

    Raises `UsageError` for a text that names no package.
    """
    return exchanged(arguments.vllm or Source(release=release), getattr(arguments, "with"))


def _for_scenario(arguments: argparse.Namespace) -> _Exploring:
    """Return the search of random workloads for the server of one scenario's arm.

    Raises `UsageError` if the search does not support that server's flags or layers.
    """
    scenario = find(arguments.scenario)
    arm, *_ = find_arms(scenario, [arguments.arm] if arguments.arm else None)
    setup = setup_from(scenario, arm)
    words = [arguments.scenario, *folder_words(), *(["--arm", arm.name] if arguments.arm else [])]
    return _Exploring(
        source=_source(arguments, scenario.try_with),
        start=f"{scenario.id}, arm {arm.name}" if arguments.arm else scenario.id,
        case=lambda seed: draw_for(setup, seed),
        arguments=arguments,
        words=words,
    )
