"""`vllm-repro gate`: whether a change of vLLM fixes a bug, breaks something, or neither."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_repro.cli.common import add_common, duration, number, print_json
from vllm_repro.cli.source_option import WITH_OPTION, source
from vllm_repro.errors import INTERRUPTED, UsageError
from vllm_repro.journal.redact import Redactor
from vllm_repro.report.files import write_file
from vllm_repro.running.folders import default_out, private_folders, stamped_folder
from vllm_repro.running.terminal import Progress
from vllm_repro_explore.draw import draw
from vllm_repro_explore.gate.change import Change, UnfitError, read_change
from vllm_repro_explore.gate.choose import Chooser, Start
from vllm_repro_explore.gate.coverage import ShareMap, read_map, shares
from vllm_repro_explore.gate.frontend import FrontendScore, compare_frontend, is_frontend
from vllm_repro_explore.gate.judge import Answer, Score
from vllm_repro_explore.gate.play import (
    Gating,
    imported_files,
    play_first_case,
    players,
    with_times,
    write_probes,
)
from vllm_repro_explore.gate.result import GateResult, as_json, as_junit, page, terminal
from vllm_repro_explore.gate.starts import general_starts, starts_near
from vllm_repro_explore.scheduler_test import finding_test

_EPILOG = """

CHANGE is a diff, a commit of a checkout (~/vllm@abc123, against its parent), a checkout with
changes (~/vllm, against its HEAD), or any vLLM that --vllm takes, together with --base.

exit status:
  0  fixes: known failures end, and nothing fails newly; or no difference was seen
  1  breaks: a case fails that passes without the change
  2  cannot tell: the changed code is not played, or the diff does not apply
     (with --strict also if no difference was seen)
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

The same random workloads are played on vLLM's own EngineCore of both trees, without a model, as
`explore` does, most of them where the changed lines run. A change of a parser, the detokenizer or
the output processor is played on answers of the front end. No answer says that a change is safe:
it names the cases that were played."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-repro gate`."""
    add_common(
        parser,
        example="vllm-repro gate my-change.diff --for 5m --jobs 2",
        prints="the content of gate.json",
        more=_EPILOG,
    )
    parser.add_argument("change", metavar="CHANGE", help="the change of vLLM")
    parser.add_argument(
        "--base",
        type=source,
        metavar="SOURCE",
        help="the vLLM without the change (default: the newest release for a diff)",
    )
    words = WITH_OPTION["help"].replace("the vLLM that --vllm names", "both vLLMs")
    parser.add_argument("--with", **WITH_OPTION | {"help": words})
    parser.add_argument(
        "--for",
        dest="most",
        type=duration,
        default=300.0,
        metavar="TIME",
        help="stop after so long (default: 5m)",
    )
    parser.add_argument(
        "--jobs",
        type=partial(number, least=1, most=256, what="number of processes"),
        default=2,
        metavar="N",
        help="cases to play at once (default: 2)",
    )
    parser.add_argument(
        "--fixes",
        metavar="SCENARIO|FINDING",
        help=(
            "play only the server of this scenario, or near the finding in this folder of explore"
            " or gate"
        ),
    )
    parser.add_argument(
        "--from",
        dest="first",
        type=partial(number, least=1, most=10**9, what="seed"),
        default=1,
        metavar="K",
        help="the first seed (default: 1)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 2 also if no difference was seen"
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write a test case for CI, too")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where gates are written (default: reports)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `vllm-repro gate`: print and write the answer, and return the exit status."""
    shown = Progress()
    began = time.monotonic()
    starts = starts_near(arguments.fixes) if arguments.fixes else []
    folder = stamped_folder(arguments.out or default_out(), Path("gate"))
    interrupted = False
    gating = None
    try:
        change = read_change(
            arguments.change, arguments.base, shown.line, getattr(arguments, "with")
        )
        gating = _Gate(change, arguments, folder, shown, starts)
        gating.play()
    except UnfitError as error:
        result = _unfit(arguments, error)
    except KeyboardInterrupt:
        if gating is None:
            raise
        interrupted = True
        result = gating.result()
    else:
        result = gating.result()
    shown.close()
    result.duration_s = time.monotonic() - began
    result.again = _again(arguments)
    _write(result, folder, arguments)
    stream = sys.stderr if arguments.json else sys.stdout
    print(terminal(result), file=stream)
    print(f"folder:   {folder}   page: gate.md", file=stream)
    if arguments.json:
        print_json(as_json(result))
    return INTERRUPTED if interrupted else exit_status(result.answer, strict=arguments.strict)


def exit_status(answer: Answer, *, strict: bool) -> int:
    """Return the exit status of an answer."""
    match answer:
        case Answer.FIXES:
            return 0
        case Answer.BREAKS:
            return 1
        case Answer.NO_DIFFERENCE:
            return 2 if strict else 0
        case Answer.CANNOT_TELL:
            return 2


@dataclass
class _Gate:
    """One gate: a change, and the cases that are played on both trees."""

    change: Change
    arguments: argparse.Namespace
    folder: Path
    shown: Progress
    starts: list[Start]
    gating: Gating | None = None
    frontend: FrontendScore | None = None
    # runs of changed statements in the front end, of the base and of the changed tree
    runs: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {})

    def play(self) -> None:
        """Play cases until the time is over or the answer is clear.

        Play none if no code differs, and one if vLLM then has not imported a changed file and no
        recorded case ran one. Raises `UnfitError` if the changed vLLM cannot be imported.
        """
        change, arguments = self.change, self.arguments
        if change.only_words or not change.files:
            return
        until = time.monotonic() + arguments.most
        write_probes(change, self.folder)
        if any(is_frontend(file.name) for file in change.files):
            self.frontend, *runs = compare_frontend(
                change, self.folder, arguments.most, self.shown.notify
            )
            self.runs = (runs[0], runs[1])
            if self.frontend.broken or all(is_frontend(file.name) for file in change.files):
                return
        known = read_map(change.base.version)
        starts = self.starts or _general_starts(change, known)
        imported = partial(imported_files, self.folder / "changed.log")
        files = {name.partition("::")[0] for name in known}
        with players(change, self.folder, arguments.jobs) as threads:
            play_first_case(threads[0], draw(1, "plain"), change.base.version)
            if not imported() and files.isdisjoint(file.name for file in change.files):
                return
            self.gating = Gating(
                change=change,
                chooser=Chooser(starts, arguments.first),
                until=until,
                progress=self._progress,
                whole=bool(arguments.fixes),
                imported=imported,
            )
            self.gating.run(threads)

    def _progress(self, score: Score) -> None:
        """Show how far the gate is."""
        new = sum(pairs.new > 0 for pairs in score.pairs.values())
        self.shown.notify(
            f"{score.trials} cases, {score.reached} run changed code, {new} kinds fail newly"
        )

    def result(self) -> GateResult:
        """Return the result from what was played, worst new failure first."""
        score = self.gating.score if self.gating else Score()
        score.runs_before.update(self.runs[0])
        score.runs_after.update(self.runs[1])
        proofs = [
            with_times(proof, score.pairs[key].new)
            for key, proof in (self.gating.proofs if self.gating else {}).items()
        ]
        return GateResult(
            change=self.change,
            named=self.arguments.fixes or "",
            score=score,
            proofs=sorted(proofs, key=lambda proof: proof.failure.finding.rank),
            frontend=self.frontend or FrontendScore(),
        )


def _general_starts(change: Change, known: ShareMap) -> list[Start]:
    """Return all mixes and scenarios, those first whose cases run the changed functions."""
    functions = {f"{place.file}::{place.function}" for place in (*change.before, *change.after)}
    return general_starts(shares(known, functions))


def _unfit(arguments: argparse.Namespace, error: UnfitError) -> GateResult:
    """Return the result for a change that cannot be played."""
    return GateResult(
        change=None,
        named=arguments.fixes or "",
        score=Score(),
        proofs=[],
        unfit=str(error),
        broken=error.broken,
        title=arguments.change,
        base_version=error.base,
    )


def _again(arguments: argparse.Namespace) -> str:
    """Return the command that repeats the gate, with private paths redacted."""
    options = [
        ("--base", arguments.base),
        *(("--with", package) for package in getattr(arguments, "with") or ()),
        ("--for", f"{arguments.most:g}s"),
        ("--jobs", arguments.jobs),
        ("--fixes", arguments.fixes),
        ("--from", arguments.first if arguments.first != 1 else None),
    ]
    words = [word for name, value in options if value for word in (name, str(value))]
    command = shlex.join(["vllm-repro", "gate", arguments.change, *words])
    return Redactor(private_folders()).command(command)


def _write(result: GateResult, folder: Path, arguments: argparse.Namespace) -> None:
    """Write the files of the gate, and a pytest file for each new failure that has one.

    Set `result.tests`, which the pages name.
    """
    put: Callable[[Path, str], None] = partial(
        write_file, hint="free some space, or name another --out"
    )
    lines: list[str] = []
    tests: list[str | None] = []
    for number_, proof in enumerate(result.proofs, 1):
        lines.append(json.dumps(proof.failure.as_json()))
        path = folder / f"test_gate_{number_}.py"
        try:
            put(path, finding_test(proof.failure.as_json(), result.version))
        except UsageError:
            tests.append(None)
        else:
            tests.append(str(path))
    result.tests = tests
    put(folder / "findings.jsonl", "".join(f"{line}\n" for line in lines))
    put(folder / "gate.json", json.dumps(as_json(result), indent=2, ensure_ascii=False) + "\n")
    put(folder / "gate.md", page(result))
    if arguments.junit:
        put(arguments.junit, as_junit(result))
