"""A diagnosis as lines for people, and as values for JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from textwrap import shorten
from urllib.parse import quote_plus

from vllm_repro_diagnosis.evidence import banner, facts_of
from vllm_repro_diagnosis.judgement import Diagnosis, telling_line
from vllm_repro_diagnosis.standstill import Finding, Reading
from vllm_repro_diagnosis.tracebacks import bare_name

_MOST_FRAMES = 12
_DIED = {True: "died", False: "did not die", None: "cannot tell"}
_LIBRARIES = ("torch/", "asyncio/", "multiprocessing/", "concurrent/", "contextlib.py")
_SEARCH = "https://github.com/vllm-project/vllm/issues?q="
_DRIVER = ("CUDA", "Cuda", "NCCL", "HIP", "GPU")
"""Words of errors of which the driver's log has more."""


def as_lines(diagnosis: Diagnosis, name: str = "") -> list[str]:
    """Return the lines to print: a simulation's banner, the verdict, its place, and the traceback.

    name: of the log's file.
    """
    told = verdict(diagnosis)
    head = [banner_of(diagnosis), told, where(diagnosis, name)]
    return [line for line in [*head, *details(diagnosis, told)] if line]


def banner_of(diagnosis: Diagnosis) -> str:
    """Return the line that warns that the server was a simulation; "" if it was none."""
    if not facts_of(diagnosis.evidence).simulated:
        return ""
    return banner(diagnosis.evidence, diagnosis.vllm_version)


def verdict(diagnosis: Diagnosis) -> str:
    """Return the first line of a diagnosis: died, did not die or cannot tell, and why."""
    return f"{_DIED[diagnosis.died]}: {diagnosis.why}"


def where(diagnosis: Diagnosis, name: str = "") -> str:
    """Return what is known of time, line, file `name`, release, phase and number of deaths.

    "" if nothing is known.
    """
    deaths = f"{diagnosis.deaths} deaths in this text" if diagnosis.deaths > 1 else ""
    parts = (
        f"at {diagnosis.time}" if diagnosis.time else "",
        f"line {diagnosis.line}" if diagnosis.line else "",
        f"of {name}" if name else "",
        f"vLLM {diagnosis.vllm_version}" if diagnosis.vllm_version else "",
        f"phase: {diagnosis.phase}" if diagnosis.phase else "",
        deaths or ("1 death" if diagnosis.deaths else ""),
    )
    return ", ".join(filter(None, parts))


def details(diagnosis: Diagnosis, above: str) -> list[str]:
    """Return lines with the last 12 frames of the traceback, and a line with the exception.

    A frame of a library such as torch is kept only if it is the innermost of all. Empty without an
    exception. above: the text printed before; if it holds the exception, that line is left out.
    """
    if not diagnosis.exception:
        return []
    *outer, last = diagnosis.frames or (None,)
    frames = [frame for frame in outer if frame and not frame.file.startswith(_LIBRARIES)]
    frames = [*frames, *([last] if last else [])][-_MOST_FRAMES:]
    raised = f"{diagnosis.exception}: {diagnosis.message or ''}".rstrip(": ")
    lines = [f"  {frame.file}:{frame.function}" for frame in frames]
    message = (diagnosis.message or "").strip()
    told = bare_name(diagnosis.exception) in above and message.rstrip(".") in above
    return lines if told else [*lines, raised]


def next_steps(diagnosis: Diagnosis, name: str, message: str) -> list[str]:
    """Return what to do about a death that no known scenario matches, a sentence for each step.

    name: of the log's file. message: of the exception, without secrets.
    """
    steps = []
    if diagnosis.exception:
        words = _words_to_search(diagnosis, message)
        if len(words) > 1:  # one word is in too many issues
            steps.append(f"search {_SEARCH}{quote_plus(' '.join(['is:issue', *words]))}")
    steps.append(f"make a scenario: vllm-repro intake {name}")
    peer = diagnosis.root is not None and diagnosis.root.of_lost_peer
    told = (diagnosis.exception or "") + message
    if peer or not told or any(word in told for word in _DRIVER):
        steps.append("read `dmesg -T` (OOM, Xid), `nvidia-smi -q` and the logs of the other ranks")
    return steps


_SENTENCE = re.compile(r".{30,80}?\w(?=\. )")
_ASSERTION = re.compile(
    r"([\w-]+\.(?:cuh?|cpp|cc|hpp|hip|h)):\d+: (?:.*?\b(\w+)\(.*?)?\bAssertion [`'].*?"
    r"(?:&& \"([^\"]{1,60})|$)"
)
"""File, function and sentence of an assertion in C++ code."""


def _words_to_search(diagnosis: Diagnosis, message: str) -> list[str]:
    """Return the words to search issues for: class, function and first words of the message.

    Words with digits, paths or quotes are left out: they differ between issues.
    """
    root = diagnosis.root
    text = re.sub(r"^F\d{4,8} \S+ +\d+ \S+ ", "", telling_line(message))  # glog's prefix
    if sentence := _SENTENCE.match(text):
        text = sentence[0]
    if assertion := _ASSERTION.search(text):
        text = " ".join(part for part in assertion.groups() if part and part != "operator")
    name = bare_name(diagnosis.exception or "")
    function = diagnosis.frames[-1].function if diagnosis.frames else ""
    common = [word.strip(".,:;'`()\"") for word in shorten(text, 80, placeholder="").split()]
    common = [word for word in common if word and not re.search(r"[\d/\\=\"<>\[]", word)]
    # such a name is ours
    by_us = root is not None and root.raised.native and "::" not in name and len(common) > 1
    return [word for word in ("" if by_us else name, function, *common) if word]


def first_death(diagnoses: Mapping[str, Diagnosis]) -> str:
    """Return the name of the log whose diagnosis counts, of several ranks or roles.

    Deaths come first, then exceptions that no other process's failure explains, then the earliest
    time. Raises `ValueError` without a diagnosis.
    """

    def order(name: str) -> tuple[int, int, str]:
        """Return a log's sort key: (0 for a death, 1 without a cause of its own, time)."""
        diagnosis = diagnoses[name]
        root = diagnosis.root
        explained = root is None or root.of_consequence
        rank = 0 if diagnosis.died else 1 if diagnosis.died is None else 2
        return rank, int(explained and not diagnosis.lost_worker), diagnosis.time

    return min(diagnoses, key=order)


def as_values(diagnosis: Diagnosis) -> dict[str, object]:
    """Return a diagnosis as a dict for JSON, whose keys are the names of fields and properties.

    A frame is `file:function`; `wrapped` is True if a wrapper reports the exception.
    """
    return {
        "evidence": diagnosis.evidence,
        "died": diagnosis.died,
        "phase": diagnosis.phase,
        "exception": diagnosis.exception,
        "message": diagnosis.message,
        "frames": [f"{frame.file}:{frame.function}" for frame in diagnosis.frames],
        "wrapped": diagnosis.root is not None and diagnosis.root.wrapped,
        "vllm_version": diagnosis.vllm_version,
        "why": diagnosis.why,
        "line": diagnosis.line,
        "time": diagnosis.time,
        "deaths": diagnosis.deaths,
    }


def of_files(diagnoses: Mapping[str, Diagnosis]) -> Sequence[str]:
    """Return a line with the verdict on each of several logs, by file name; none for one log."""
    if len(diagnoses) < 2:
        return []
    lines = []
    for name, diagnosis in diagnoses.items():
        at = where(diagnosis)
        lines.append(f"{name}: {verdict(diagnosis)}{f' ({at})' if at else ''}")
    return lines


def live_lines(finding: Finding, reading: Reading, at: str) -> list[str]:
    """Return the lines for a live server: its state, what to do, when, where, and stacks.

    at: time of the reading.
    """
    release = f"vLLM {reading.version}" if reading.version else ""
    where = filter(None, [reading.url, *map(str, reading.servers), release])
    return [
        f"{finding.kind}: {finding.why}",
        f"do: {finding.do}",
        f"seen: {', '.join([f'at {at} for {reading.seconds:.0f} s', *where])}",
        *(f"  {process.line}" for process in reading.servers),
        *(f"  {stack}" for stack in finding.folded),
        *(f"not seen: {gap}" for gap in reading.unseen),
    ]


def live_values(finding: Finding, reading: Reading) -> dict[str, object]:
    """Return the state of a live server as a dict for JSON.

    `kind`, `why` and `do` are of the finding; `at` has the pids that hang; the rest was observed.
    """
    return {
        "kind": finding.kind,
        "hangs": finding.kind.hangs,
        "why": finding.why,
        "do": finding.do,
        "at": [process.pid for process in finding.at],
        "url": reading.url,
        "seconds": round(reading.seconds, 1),
        "vllm_version": reading.version or None,
        "health": reading.health,
        "requests": reading.requests,
        "processes": {process.pid: process.line for process in reading.servers},
        "stacks": finding.folded,
        "unseen": reading.unseen,
    }
