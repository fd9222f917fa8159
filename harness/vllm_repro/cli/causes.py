"""`vllm-repro causes`: which change of vLLM brought a bug, which one protects, and which one does not."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from vllm_repro.catalogue import find
from vllm_repro.cause import Cause, Causes
from vllm_repro.cli.common import Subparsers, print_json, verb
from vllm_repro.cli.options import number
from vllm_repro.errors import Unsupported, UsageError
from vllm_repro.explorer.causing import Row, case_of, lines, tried
from vllm_repro.explorer.driver import Driver
from vllm_repro.explorer.given import setup_of
from vllm_repro.explorer.model import driver_model
from vllm_repro.releases.overlay import overlay
from vllm_repro.releases.provision import cache_root, provision
from vllm_repro.scenario import Scenario
from vllm_repro.terminal import Progress
from vllm_repro.verdict import Expected

_EPILOG = """

exit status:
  0  every change does what the scenario declares of it
  1  a surprise: one that should protect does not, or the other way round
  2  undecided: a change does not fit its release, or a release cannot be tried
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

The changes stand in the scenario's file, causes=Causes(…): small edits of a release's own source, each made in that
release alone. Each is tried on vLLM's own scheduler and connector, without a server and a model, with the same workloads."""


def add(subparsers: Subparsers) -> None:
    parser = verb(
        subparsers,
        "causes",
        run,
        does="make named changes in a release one at a time, and see which die and which live",
        example="vllm-repro causes sco-hybrid --trials 100",
        prints="a row for each release and each change of it",
        more=_EPILOG,
    )
    parser.add_argument("scenario", metavar="SCENARIO")
    parser.add_argument(
        "--trials", type=_trials, default=100, metavar="N", help="workloads for each change (default: 100)"
    )
    parser.add_argument("--seed", type=_trials, default=1, metavar="K", help="the first seed (default: 1)")


def _trials(text: str) -> int:
    return number(text, least=1, most=1_000_000, what="number of workloads")


def run(arguments: argparse.Namespace) -> int:
    scenario = find(arguments.scenario)
    if scenario.causes is None:
        raise UsageError(
            f"{scenario.id} names no changes to try",
            hint="causes=Causes(…) in its file; vllm-repro run … --patch tries one change of yours on a real server",
        )
    said = sys.stderr if arguments.json else sys.stdout
    print(
        f"{scenario.id}   {scenario.issue}   causes, on vLLM's own scheduler: no server, no model",
        file=said,
        flush=True,
    )
    rows, released = _Trying(scenario, scenario.causes, range(arguments.seed, arguments.seed + arguments.trials)).run()
    again = shlex.join(
        ["vllm-repro", "causes", arguments.scenario, "--trials", f"{arguments.trials}", "--seed", f"{arguments.seed}"]
    )
    print("\n" + "\n".join(lines(rows, released)) + f"\nagain: {again}", file=said)
    if arguments.json:
        print_json(
            {
                "schema": 1,
                "scenario": scenario.id,
                "evidence": "scheduler",
                "rows": [row.as_json() for row in rows],
                "reproduce": again,
            }
        )
    return 0 if all(row.as_expected for row in rows) else 1


class _Trying:
    def __init__(self, scenario: Scenario, causes: Causes, seeds: range) -> None:
        self._scenario, self._causes, self._seeds = scenario, causes, seeds
        self._progress = Progress()

    def run(self) -> tuple[list[Row], dict[tuple[str, str], Row]]:
        """The rows, each release's own before those of its changes, and the former by release and arm."""
        rows: list[Row] = []
        released: dict[tuple[str, str], Row] = {}
        for cause in self._causes.changes:
            place = cause.release, cause.arm
            if place not in released:
                released[place] = self._row(self._as_released(cause))
                rows.append(released[place])
            rows.append(self._row(cause))
        self._progress.close()
        return rows, released

    def _as_released(self, cause: Cause) -> Cause:
        arm = self._scenario.arm(cause.arm)
        assert arm is not None, "a scenario is checked for that"
        bad = self._scenario.status_of(arm).standing(cause.release)
        expected = Expected.DIES if bad == "bad" else Expected.LIVES
        return replace(cause, name="as released", patches=(), expected=expected, believed="")

    def _row(self, cause: Cause) -> Row:
        self._progress.say(f"{cause.release}: {cause.name}")
        arm = self._scenario.arm(cause.arm)
        assert arm is not None, "a scenario is checked for that"
        release = provision(cause.release, self._progress.line)
        if cause.patches:
            release = overlay(cache_root(), release, cause.patches, self._progress.line).release
        setup = setup_of(self._scenario, arm)
        cases = [case_of(self._causes, setup, seed) for seed in self._seeds]
        with (
            tempfile.TemporaryDirectory() as folder,
            Driver(release, driver_model(), Path(folder) / "driver.log") as driver,
        ):
            try:
                row = tried(cause, cases, driver.play)
            except ValueError as error:
                raise Unsupported(f"vLLM {cause.release} does not start with {cause.name!r}: {error}") from error
        self._progress.line(f"  {cause.release} {cause.name}: {row.died} of {row.trials} die")
        return row
