"""Search of vLLM's EngineCore for bugs with small random cases. README.md describes it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any

import pytest

from vllm_repro_explore.case import Case, Request, Setup
from vllm_repro_explore.case_process import ENVIRONMENT, CaseProcess
from vllm_repro_explore.draw import MIXES, draw
from vllm_repro_explore.finding import PlayResult
from vllm_repro_explore.search import Found, Play, search

FOLDER = Path(__file__).resolve().parent
SECONDS = float(os.environ.get("SEARCH_SECONDS", "60"))
"""Seconds to search, and at most as many to shrink what is new."""
SEEDS = os.environ.get("SEARCH_SEEDS", "1-")
"""Seeds of the cases, such as `4,17,30-39`; `1-` for all from 1 on."""
SLOW = ("urgent", "off-busy", "sco-busy")
"""Mixes of many requests: an endless search plays a fifth of their seeds."""
JOBS = int(os.environ.get("SEARCH_JOBS", min(4, os.cpu_count() or 1)))
"""Processes that play cases."""
CASES = [
    *sorted(FOLDER.glob("cases/*.json")),
    *[Path(name) for name in [os.environ.get("SEARCH_CASE", "")] if name],
]
"""Files for `test_case`: a case as JSON, or a finding that has it as `case`."""


def _start(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process that plays cases. errors: log for its standard error."""
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={
            **os.environ,
            **ENVIRONMENT,
            "REPRO_DRIVER_MODEL": str(FOLDER / "models" / "attention"),
            "REPRO_DRIVER_MAMBA_MODEL": str(FOLDER / "models" / "mamba"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[CaseProcess]]:
    """Return SEARCH_JOBS processes that play cases. Each starts with its first case."""
    logs = [tmp_path_factory.mktemp("search") / f"process-{n}.log" for n in range(JOBS)]
    with ExitStack() as stack:
        yield [stack.enter_context(CaseProcess(_start, log)) for log in logs]


def _cases() -> Iterator[tuple[int, Case]]:
    """Yield each seed of SEARCH_SEEDS with its case. The mixes take the seeds in turn."""
    mixes = list(MIXES)
    for part in SEEDS.split(","):
        first, dash, last = part.partition("-")
        endless = bool(dash and not last)
        for seed in count(int(first)) if endless else range(int(first), int(last or first) + 1):
            mix = mixes[seed % len(mixes)]
            if not (endless and mix in SLOW and seed // len(mixes) % 5):
                yield seed, draw(seed, mix)


def _within(seconds: float) -> Callable[[], bool]:
    """Return a function that returns True for so many seconds from now on."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() < until


def _play_if(in_time: Callable[[], bool], play: Play, case: Case) -> PlayResult:
    """Play a case; once the time is over, return that nothing is found in it."""
    return play(case) if in_time() else PlayResult()


def _unusual(record: Setup | Request, plain: Setup | Request) -> dict[str, Any]:
    """Return the fields of a record that differ from those of a plain one."""
    return {name: value for name, value in asdict(record).items() if value != getattr(plain, name)}


def _as_json(hit: Found) -> dict[str, Any]:
    """Return a finding as JSON, with the fields of its case that differ from their defaults."""
    case, whole = hit.shrunk, hit.as_json()
    waves = [[_unusual(ask, Request(0, 0)) for ask in wave] for wave in case.waves]
    names = ("kind", "site", "detail", "known", "seed", "shrunk_in", "model_runner")
    return {name: whole[name] for name in names} | {
        "case": {**_unusual(case.setup, Setup()), "waves": waves, "seed": case.seed}
    }


def test_search(processes: list[CaseProcess], tmp_path: Path) -> None:
    """Play cases; fail with the smallest case of each finding that known.json does not list."""
    known = json.loads((FOLDER / "known.json").read_text(encoding="utf-8"))
    listed = {(finding["kind"], finding["site"]) for finding in known}
    players = [process.play for process in processes]
    with ThreadPoolExecutor(JOBS) as pool:  # the import of vLLM is no part of the search's time
        list(pool.map(lambda play: play(draw(1, "plain")), players))
    tally = search(players, _cases(), go_on=_within(SECONDS), budget=0)
    print(f"{tally.trials} cases, {tally.steps} steps, {len(tally.hits)} findings")
    assert tally.trials, "no case was played: SEARCH_SEEDS or SEARCH_SECONDS leaves none"
    assert tally.trials > tally.invalid, f"vLLM refused all cases: {dict(tally.why_invalid)}"
    new = {key: hit for key, hit in tally.hits.items() if (key[0].value, key[1]) not in listed}
    in_time = _within(SECONDS)
    smallest = search(
        [partial(_play_if, in_time, play) for play in players],
        [(hit.seed, hit.case) for hit in new.values()],
        go_on=in_time,
        on_runner=[partial(process.play, worker="runner") for process in processes],
    )
    lines = [f"{len(new)} findings that known.json does not list", ""]
    for number, (key, hit) in enumerate(new.items(), 1):
        finding = _as_json(smallest.hits.get(key, hit))
        file = tmp_path / f"{number}-{finding['kind']}.json"
        file.write_text(json.dumps(finding, indent=1) + "\n", encoding="utf-8")
        again = ["env", f"SEARCH_CASE={file}", sys.executable, "-m", "pytest", __file__]
        lines += [
            f"{finding['kind']}: {finding['site']}",
            *(f"  {name}: {json.dumps(value)}" for name, value in finding.items()),
            f"  again: {shlex.join(again)}",
            "",
        ]
    if new:
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_case(processes: list[CaseProcess], file: Path) -> None:
    """Play the case of a file; fail if anything goes wrong in it."""
    value = json.loads(file.read_text(encoding="utf-8"))
    result = processes[0].play(Case.from_json(value.get("case", value)))
    assert not result.invalid
    if worst := result.worst:
        pytest.fail(f"{worst}\n  detail: {worst.detail}", pytrace=False)
