"""Fault matrix: break a live run at each moment, and check outcome, journal and what is left.

It writes reports/results/reliability.md.

A cell is (fault, moment, server kind). The run is one arm whose engine lives: a short request, a
pause, a long stream, a pause, a short request. The script watches the run's journal, injects the
fault at the moment, and waits for the command to end. A cell fails if

- the outcome, or the exit status of an interrupted command, is not one of those allowed;
- the journal cannot be read, no report is written, or an interrupted run does not resume to
`clean`;
- ten seconds after the command's end a process or container of the run is left.

    python -m benchmarks.faults --kinds rehearsal --quick      # one moment per fault
    python -m benchmarks.faults --write                        # all of them
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "reports" / "results" / "reliability.md"
COMMAND = (sys.executable, "-m", "vllm_repro")
GONE_WITHIN_S = 10.0
CELL_S = 400.0

SCENARIO = '''
"""A server that lives, for faults from outside."""

from vllm_repro.vocabulary import (
    Model, Needs, Scenario, Status, arm, completion, dies, lives, pause, sent_with, signature
)

scenario = Scenario(
    id="steady",
    issue="vllm-project/vllm#54195",
    title="a server that lives",
    command=(
        "VLLM_REHEARSAL_FAULT=slow-boot:2 vllm serve Qwen/Qwen3-0.6B"
        " --dtype float32 --max-model-len 8192 --enforce-eager"
    ),
    model=Model("Qwen/Qwen3-0.6B", heads=16, kv_heads=8, head_dim=128, layers=28,
                vocab_size=151936, max_position=40960, tiny_will_do=True, why="no weights matter"),
    needs=Needs(memory_gb=6),
    status=Status(bad=">=0.20.0,<0.29.0", good=">=0.29.0"),
    try_with="0.28.0",
    workload=[
        completion(name="before", prompt="hello", max_tokens=4, min_tokens=2),
        pause(2),
        completion(name="stream", prompt="hello", max_tokens=3000, min_tokens=3000, stream=True),
        pause(2),
        completion(name="after", prompt="hello", max_tokens=4, min_tokens=2),
    ],
    trigger=sent_with("min_tokens"),
    signature=signature(
        phase="request", exception="IndexError", message="index {index} is out of bounds",
        frames=["apply"],
    ),
    arms=[arm("reported", dies), arm("steady", lives, why="it crosses no boundary")],
)
'''

KINDS = {
    "rehearsal": "Rehearsal engine, as a process",
    "docker": "Rehearsal engine, in a container of a real Docker Engine",
    "process": "Real vLLM 0.29.0 on the CPU, as a process",
}
TESTED = {  # fault: file below tests/, test
    "a container is out of memory": (
        "core/servers/test_docker.py test_the_out_of_memory_killer_is_named"
    ),
    "the Docker Engine is gone": (
        "core/servers/test_docker_lost.py test_an_engine_that_is_gone_says_nothing_about_the_server"
    ),
    "two installs of a release at once": (
        "core/releases/test_provision.py test_two_runs_at_once_install_once"
    ),
    "a damaged release": (
        "core/releases/test_provision.py test_a_damaged_release_is_installed_again"
    ),
    "a rank of two dies": (
        "live/test_two_ranks.py test_a_killed_worker_of_node_2_is_a_crash_with_its_rank"
    ),
    "a rank of two stops": (
        "live/test_two_ranks.py test_a_stopped_worker_of_the_second_node_is_a_hang"
    ),
    "the link between two ranks is cut": (
        "live/test_two_ranks.py test_a_cut_link_between_the_nodes_is_a_hang"
    ),
    "an answer, a metric or the list of models never ends": (
        "core/running/test_trial.py test_an_answer_that_never_stops_ends_no_run"
    ),
}
REACHED = {
    "boot": ("server-started", None),
    "idle": ("answer", "before"),
    "stream": ("request-sent", "stream"),
    "last pause": ("answer", "stream"),
}
"""Event and request in the journal at which each moment begins."""
MOMENTS = tuple(REACHED)
BOOT, DEATH = frozenset({"boot-failed"}), frozenset({"other-crash"})
SIGNALS = {
    signal.SIGKILL: DEATH,
    signal.SIGSEGV: DEATH,
    signal.SIGILL: DEATH,
    signal.SIGABRT: DEATH,
    # Somebody who stops the server in good order makes no crash.
    signal.SIGTERM: DEATH | {"infra"},
    signal.SIGSTOP: frozenset({"hang"}),
}
"""Signals to the engine and the API server, with the outcomes that are allowed after the boot."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A signal to a process of the server or to the command, or a full disk.

    target: engine, api, command or disk. at_boot, later: allowed outcomes; empty: the run is cut
    short and must resume.
    """

    name: str
    target: str
    number: signal.Signals = signal.SIGKILL
    at_boot: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()


def faults() -> list[Fault]:
    found = []
    for target, process in (("engine", "EngineCore"), ("api", "API server")):
        for number, later in SIGNALS.items():
            does = "is stopped (SIGSTOP)" if number is signal.SIGSTOP else f"gets {number.name}"
            name = f"{process} {does}"
            found.append(Fault(name=name, target=target, number=number, at_boot=BOOT, later=later))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL):
        found.append(Fault(name=f"the command gets {number.name}", target="command", number=number))
    found.append(Fault(name="the disk of the run is full", target="disk"))
    return found


@dataclass(frozen=True, kw_only=True)
class Cell:
    kind: str
    moment: str
    fault: Fault


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a cell. wrong: what broke a rule, empty if nothing did."""

    cell: Cell
    outcome: str
    wrong: str = ""


BOOT_STALL = {"rehearsal": 20.0, "docker": 20.0, "process": 90.0}
"""Seconds without progress after which a boot has failed. The command's own limit is 15 minutes."""

_PROGRAM = """
import functools, sys
from vllm_repro.__main__ import main
from vllm_repro.cli import options
options.TimeLimits = functools.partial(options.TimeLimits, boot_stall={})
sys.exit(main())
"""


def server_flags(kind: str) -> list[str]:
    own = {
        "rehearsal": ["--answer-stall", "4"],
        "docker": ["--image", "vllm-repro/rehearsal:latest", "--answer-stall", "4"],
        "process": ["--vllm", "0.29.0", "--answer-stall", "30"],
    }
    return ["--server", kind, *own[kind]]


def play(cell: Cell) -> Result:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        out = folder / "out"
        out.mkdir()
        if cell.fault.target == "disk":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(out)], check=True)
        command = start_run(folder, cell.kind)
        try:
            mine = _inject(cell, command, out)
            status = command.wait(CELL_S)
            gone_s = _gone(mine, _container(out) if cell.kind == "docker" else "")
            outcome, wrong = _judge(cell, out, status)
        except (TimeoutError, subprocess.TimeoutExpired, RuntimeError, psutil.Error) as error:
            outcome, gone_s, wrong = "-", 0.0, f"{type(error).__name__}: {error}"
            command.kill()
            command.wait()
        finally:
            if cell.fault.target == "disk":
                subprocess.run(["umount", "--lazy", str(out)], check=True)
        if gone_s > GONE_WITHIN_S:
            wrong += f"; something is left after {gone_s:.0f} s"
        if wrong:
            wrong += (
                "\n" + (folder / "output").read_text(encoding="utf-8", errors="replace")[-1500:]
            )
        return Result(cell=cell, outcome=outcome, wrong=wrong)


def start_run(
    folder: Path, kind: str, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[bytes]:
    """Start a run that writes below `out` in the folder. environment: added to this one."""
    (folder / "steady.py").write_text(SCENARIO, encoding="utf-8")
    words = ["run", str(folder / "steady.py"), "--arm", "steady", "--expect", "any", "--out", "out"]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(BOOT_STALL[kind]), *words, *server_flags(kind)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            # time for a fault in the boot
            env={**os.environ, "VLLM_REHEARSAL_FAULT": "slow-boot:2", **environment},
        )


def records(out: Path) -> list[dict[str, Any]]:
    """Return the whole lines of the run's journal so far."""
    found = []
    # `latest` links to the run
    for path in {one.resolve() for one in out.glob("*/*/journal.jsonl")}:
        for line in path.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def reached(moment: str, seen: Sequence[dict[str, Any]]) -> bool:
    return REACHED[moment] in [(one["event"], one.get("name")) for one in seen]


def _inject(cell: Cell, command: subprocess.Popen[bytes], out: Path) -> list[psutil.Process]:
    """Wait for the moment, send the signal, and return the processes of the run alive then."""
    _until(
        lambda: reached(cell.moment, records(out)) or command.poll() is not None,
        "the moment never came",
    )
    if cell.moment != "boot":
        time.sleep(0.3)
    mine = [psutil.Process(command.pid), *_servers(cell.kind, command.pid, out)]
    match cell.fault.target:
        case "disk":
            with contextlib.suppress(OSError), (out / "filler").open("wb", buffering=0) as filler:
                while True:
                    filler.write(b"x" * 4096)
        case target:
            ends = time.monotonic() + CELL_S
            while (process := _target(target, cell.kind, command.pid, out)) is None:
                if command.poll() is not None or time.monotonic() > ends:
                    raise RuntimeError(f"there was no {target} to signal")
                time.sleep(0.02)
            mine += _servers(cell.kind, command.pid, out)
            process.send_signal(cell.fault.number)
    return mine


def _container(out: Path) -> str:
    facts = [one["facts"] for one in records(out) if one["event"] == "server-started"]
    argv = facts[-1]["argv"]
    return str(argv[argv.index("--name") + 1])


def _servers(kind: str, command: int, out: Path) -> list[psutil.Process]:
    if kind != "docker":
        return psutil.Process(command).children(recursive=True)
    shown = subprocess.run(
        ["docker", "inspect", "-f", "{{.State.Pid}}", _container(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    with contextlib.suppress(ValueError, psutil.NoSuchProcess):
        first = psutil.Process(int(shown.stdout))
        return [first, *first.children(recursive=True)]
    return []


def _target(target: str, kind: str, command: int, out: Path) -> psutil.Process | None:
    if target == "command":
        return psutil.Process(command)
    for process in _servers(kind, command, out):
        with contextlib.suppress(psutil.NoSuchProcess):  # also a zombie
            is_engine = process.name().startswith("VLLM::EngineCor")
            is_api = (
                not is_engine
                and {"serve", "--enforce-eager"} & set(process.cmdline())
                and "-init" not in process.name()
            )
            if is_engine if target == "engine" else is_api:
                return process
    return None


def _until(condition: Callable[[], bool], failure: str) -> None:
    ends = time.monotonic() + CELL_S
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError(failure)
        time.sleep(0.02)


def _gone(processes: Sequence[psutil.Process], container: str) -> float:
    """Return the seconds until no process and container is left, at most twice the limit."""

    def left() -> bool:
        if any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):
            return True
        names = ["docker", "ps", "--all", "--quiet", "--filter", f"name={container}"]
        return bool(container and subprocess.run(names, capture_output=True, check=True).stdout)

    began = time.monotonic()
    while left() and time.monotonic() - began < 2 * GONE_WITHIN_S:
        time.sleep(0.05)
    return time.monotonic() - began


def _judge(cell: Cell, out: Path, status: int) -> tuple[str, str]:
    (run,) = {path.parent.resolve() for path in out.glob("*/*/journal.jsonl")}
    allowed = (cell.fault.at_boot if cell.moment == "boot" else cell.fault.later) or {"clean"}
    if cell.fault.target == "disk":
        allowed = {"clean", "infra"}  # infra: the log of a container ends early
    if not cell.fault.later:
        wanted = {"disk": 2, "command": -9 if cell.fault.number is signal.SIGKILL else 130}[
            cell.fault.target
        ]
        if status != wanted:
            return "-", f"exit status {status}, not {wanted}"
        (out / "filler").unlink(missing_ok=True)
        finished = records(out)[-1]["event"] == "run-ended" and not records(out)[-1]["interrupted"]
        verb = ["report"] if finished else ["run", "--resume"]
        again = subprocess.run(
            [*COMMAND, *verb, str(run)], capture_output=True, text=True, check=False, timeout=CELL_S
        )
        if again.returncode:
            return (
                "-",
                (
                    f"{' '.join(verb)} exits with {again.returncode}:"
                    f" {again.stdout[-500:]}{again.stderr[-500:]}"
                ),
            )
    ended = [one for one in records(out) if one["event"] == "trial-ended"]
    outcome = str(ended[-1]["outcome"]) if ended else "none"
    if outcome not in allowed:
        return outcome, f"outcome {outcome}, not {' or '.join(sorted(allowed))}"
    if not (run / "report.json").is_file() or not (run / "report.md").is_file():
        return outcome, "no report is written"
    return outcome, ""


def cells(kinds: Sequence[str], *, quick: bool) -> Iterator[Cell]:
    chance = random.Random(1)
    for kind in kinds:
        for fault in faults():
            moments = [chance.choice(MOMENTS)] if quick or kind == "process" else list(MOMENTS)
            for moment in moments:
                yield Cell(kind=kind, moment=moment, fault=fault)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument(
        "--quick", action="store_true", help="one moment per fault, chosen by a fixed seed"
    )
    parser.add_argument("--jobs", type=int, default=2, help="cells at once")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="cells whose line contains one of these texts"
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    chosen = [
        one
        for one in cells(asked.kinds, quick=asked.quick)
        if any(text in f"{one.kind} {one.moment} {one.fault.name}" for text in asked.only)
    ]
    for number in (signal.SIGHUP, signal.SIGQUIT):
        # a background job ignores them, and so would the commands that it starts
        signal.signal(number, signal.SIG_DFL)
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = []
        for result in pool.map(play, chosen):
            results.append(result)
            cell = result.cell
            print(
                f"{cell.kind:9}  {cell.moment:10}  {cell.fault.name:32}  {result.outcome:12} "
                f" {result.wrong or 'ok'}",
                flush=True,
            )
    wrong = [one for one in results if one.wrong]
    print(f"{len(results)} cells, {len(wrong)} wrong")
    if asked.write:
        old, titles = sections(), [(kind, KINDS[kind]) for kind in asked.kinds]
        write_sections(
            {
                title: section(
                    [one for one in results if one.cell.kind == kind], old.get(title, "")
                )
                for kind, title in titles
            }
        )
    raise SystemExit(bool(wrong))


INTRODUCTION = """\
# Break a run on purpose

    make faults

The command above breaks live runs, checks what becomes of them, and writes this page. Each cell
is one run of an arm whose engine lives, with one fault. A cell is right if the outcome is an
allowed one, the journal is readable, a report is written, and ten seconds later nothing is left.
A run that is cut short must resume: its cell has the outcome of the resumed run.

`boot`: the server is starting. `idle`: between two requests. `stream`: an answer is being
streamed. `last pause`: before the last request. `-`: not tried.
"""
HAVE_TESTS = "Faults that have their own tests"
KILLS = "Random kills"
ORDER = (*KINDS.values(), KILLS, HAVE_TESTS)


def sections() -> dict[str, str]:
    """Return the sections of the page by title."""
    _, *found = PAGE.read_text(encoding="utf-8").split("\n## ")
    return {title: text.strip() for title, _, text in (one.partition("\n") for one in found)}


def write_sections(new: Mapping[str, str]) -> None:
    """Write the page with these sections, by title.

    Keep the other ones, which earlier measurements wrote.
    """
    tested = table(["fault", "test"], (_tested(*one) for one in TESTED.items()))
    texts = {**sections(), **new, HAVE_TESTS: tested}
    titles = dict.fromkeys([*(one for one in ORDER if one in texts), *texts])
    PAGE.write_text(
        INTRODUCTION + "".join(f"\n## {title}\n\n{texts[title].strip()}\n" for title in titles),
        encoding="utf-8",
    )


def _tested(fault: str, test: str) -> tuple[str, str]:
    path, name = test.split()
    if f"def {name}(" not in (ROOT / "tests" / path).read_text(encoding="utf-8"):
        raise SystemExit(f"tests/{path} has no {name}")
    return fault, f"[`{name}`](../../tests/{path})"


def measured_at(*more: str) -> str:
    """Return when and with which harness a section was measured. more: folders that matter, too."""

    def git(*words: str) -> str:
        argv = ["git", "-C", str(ROOT), *words, "--", "harness", "fixtures", *more]
        return subprocess.run(argv, capture_output=True, check=True, text=True).stdout.strip()

    changed = ", with changes" if git("status", "--porcelain") else ""
    measured = " and ".join(("harness", *more))
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {measured} of commit"
        f" {git('log', '-1', '--format=%h')}{changed}"
    )


def section(results: Sequence[Result], old: str) -> str:
    """Return the section of one server kind: a table of outcomes, faults by moments.

    Keep the cells that were measured earlier.

    old: the section until now.
    """
    rows = [line.strip("| ").split(" | ") for line in old.splitlines() if line.startswith("| ")][2:]
    earlier = {
        (name, moment): one
        for name, *shown in rows
        for moment, one in zip(MOMENTS, shown, strict=True)
    }
    earlier = {cell: one for cell, one in earlier.items() if one != "-"}
    cells = earlier | {(one.cell.fault.name, one.cell.moment): _shown(one) for one in results}
    wrong = sum(one.startswith("**wrong**") for one in cells.values())
    now, before = measured_at(), ""
    if len(cells) > len(results):
        commits = dict.fromkeys(re.findall(r"\b[0-9a-f]{7,}\b", old.partition("\n")[0]))
        before = (
            " Some of them earlier: " + ", ".join(one for one in commits if one not in now) + "."
        )
    names = [one.name for one in faults() if any(one.name == name for name, _ in cells)]
    shown = table(
        ["fault", *MOMENTS],
        ([name, *(cells.get((name, one), "-") for one in MOMENTS)] for name in names),
    )
    return f"Measured on {now}: {len(cells)} cells, {wrong} wrong.{before}\n\n{shown}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _shown(result: Result) -> str:
    return f"**wrong**: {result.outcome}" if result.wrong else result.outcome


if __name__ == "__main__":
    main()
