"""Logs with a header of four lines: died, exception, phase, matches.

A blank line follows the header. `tests/data/recordings` holds logs of real servers,
`tests/data/logs` composed and shortened logs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.scenario.matching import matches
from vllm_repro_diagnosis.diagnosis import Diagnosis
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_diagnosis.signature import How
from vllm_repro_diagnosis.tracebacks import Finder, Raised

DATA = Path(__file__).parents[1] / "data"
LOGS = sorted((*(DATA / "recordings").glob("*.log"), *(DATA / "logs").glob("*.log")))
_DIED = {True: "yes", False: "no", None: "unknown"}


@cache
def split(path: Path) -> tuple[str, str]:
    """Return a log's header and text."""
    header, _, text = path.read_bytes().decode("utf-8", "replace").partition("\n\n")
    return header, text


def recording(name: str) -> str:
    return split(DATA / "recordings" / f"{name}.log")[1]


def pasted(name: str) -> str:
    return (DATA / "pasted" / f"{name}.txt").read_text(encoding="utf-8")


def find_raised(text: str) -> tuple[Raised, ...]:
    finder = Finder()
    for line in read_lines(text):
        finder.feed(line)
    return finder.finish()


def inner(diagnosis: Diagnosis) -> str | None:
    return diagnosis.frames[-1].function if diagnosis.frames else None


def seen(diagnosis: Diagnosis) -> tuple[str, str, str]:
    """Return whether it died, exception with function, and phase, as a header names them."""
    exception = diagnosis.exception or "-"
    exception += f" in {inner(diagnosis)}" if inner(diagnosis) else ""
    return _DIED[diagnosis.died], exception, diagnosis.phase or "-"


def header_of(diagnosis: Diagnosis) -> str:
    """Return the header that a log with this diagnosis has."""
    died, exception, phase = seen(diagnosis)
    message = (diagnosis.message or "").partition("\n")[0]
    scenarios = [
        "near " * (match.how is How.NEAR) + match.scenario.id
        for match in matches(diagnosis, all_scenarios())
    ]
    return "\n".join(
        [
            f"died: {died}: {diagnosis.why}",
            f"exception: {exception}" + (f": {message}" if message else ""),
            f"phase: {phase}",
            f"matches: {', '.join(scenarios) or '-'}",
        ]
    )


def brief(header: str) -> tuple[str, str, str]:
    """Return the parts of a header that do not change with line numbers and prefixes."""
    died, exception, phase, _ = (line.split(": ")[1] for line in header.splitlines())
    return died, exception, phase


# The expected diagnosis of each recording of a real server.
REAL = {path.stem: brief(split(path)[0]) for path in (DATA / "recordings").glob("*.log")}
DEATHS = [name for name, (died, _, _) in REAL.items() if died == "yes"]
DEATHS_WITH_ROOT = [name for name in DEATHS if REAL[name][1] != "-"]
