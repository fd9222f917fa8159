"""Search of vLLM's front end: parsers, output processor and ranks, on answers without a model.

A program on the release's interpreter draws answers and splits them into deltas. The message that a
client puts together must not depend on the split. For data-parallel ranks it draws what clients
send, and the order in which it arrives.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pformat
from typing import Any

from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.releases.provision import Release
from vllm_repro.report.document import plain_text
from vllm_repro_explore.case_process import ENVIRONMENT
from vllm_repro_explore.program.vllm_repro_frontend.formats import REASONING, TOOL_FORMATS

_PROGRAM = Path(__file__).resolve().parent / "program"
_TEMPLATES = Path(__file__).with_name("templates")


@dataclass(kw_only=True)
class FrontendSearch:
    """Results of a search of the front end of one vLLM."""

    # the vLLM as `--vllm` names it
    version: str
    # the command that repeats the search
    again: str = ""
    findings: list[dict[str, Any]] = field(default_factory=list)
    # answers that were drawn, judged and failed, by the search's name
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    # why parsers were not searched, by name
    left_out: dict[str, str] = field(default_factory=dict)
    # of each search by seed: what goes wrong by the number of the split into deltas, or None for
    # an answer that is not judged
    outcomes: dict[str, dict[int, dict[str, str] | None]] = field(default_factory=dict)
    # the seed after the last, by search
    ends: dict[str, int] = field(default_factory=dict)
    # why nothing can be searched; empty if it can
    unfit: str = ""
    # how often counted statements ran, by number
    runs: dict[int, int] = field(default_factory=dict)
    # answers so far
    drawn: int = 0
    interrupted: bool = False
    duration_s: float = 0.0

    @property
    def judged(self) -> int:
        """Return how many answers were judged."""
        return sum(counts["judged"] for counts in self.counts.values())

    @property
    def distinct(self) -> list[dict[str, Any]]:
        """Return the findings by name, without those that a parser of the pair has alone."""
        alone = {(finding["name"], finding["split"], finding["wrong"]) for finding in self.findings}

        def is_seen_alone(finding: Mapping[str, Any]) -> bool:
            parsers = finding["name"].split(" and ")
            return len(parsers) > 1 and any(
                (parser, finding["split"], finding["wrong"]) in alone for parser in parsers
            )

        return sorted(
            (finding for finding in self.findings if not is_seen_alone(finding)),
            key=lambda finding: (finding["name"], finding["split"], finding["wrong"]),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the content of frontend.json."""
        return {
            "schema": 1,
            "vllm_version": self.version,
            "answers": self.drawn,
            "parsers": self.counts,
            "left_out": self.left_out,
            "findings": self.distinct,
            "interrupted": self.interrupted,
            "duration_s": round(self.duration_s, 3),
            "reproduce": self.again,
        }

    def text(self, form: str) -> str:
        """Return the page (`md`) or what the terminal shows (`txt`)."""
        failed = [name for name, counts in self.counts.items() if counts["failed"]]
        words = (summary_of, received, quoted, next_step)
        return plain_text(
            f"frontend.{form}",
            _TEMPLATES,
            search=self,
            failed=failed,
            **{function.__name__: function for function in words},
        )


def play_frontend(
    release: Release,
    search: FrontendSearch,
    log: Path,
    notify: Callable[[str], None],
    *,
    probes: Path | None = None,
    **options: Any,
) -> None:
    """Run the program on a release until it ends, and fill `search`.

    log: for the program's standard error; its options get a file beside it. probes: as in `Driver`.
    options: as `vllm_repro_frontend.__main__` lists them; each has a default. Raises `Unsupported`
    if this vLLM lacks what the program imports, and `InfraError` if the program fails.
    """
    options = _DEFAULTS | options
    file = log.with_suffix(".options.json")
    file.write_text(json.dumps(options), encoding="utf-8")
    kept = {"PATH", "HOME", "TMPDIR", "LANG"} & os.environ.keys()
    environment = {
        **{name: os.environ[name] for name in kept},
        **ENVIRONMENT,
        "VLLM_LOGGING_LEVEL": "CRITICAL",  # parsers log each answer that they refuse
        "PYTHONPATH": os.pathsep.join(map(str, (_PROGRAM, release.packages))),
        "PYTHONSAFEPATH": "1",
        **({"REPRO_PROBE": str(probes)} if probes else {}),
    }
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [release.python, "-m", "vllm_repro_frontend", file],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            encoding="utf-8",
        ) as program,
    ):
        watchdog = _Watchdog(program)
        try:
            for line in program.stdout or ():
                watchdog.restart()
                if line.endswith("\n"):  # else the program was killed
                    _take(json.loads(line), search)
                notify(f"{search.drawn} answers, {len(search.findings)} kinds of findings")
        except BaseException:
            program.kill()  # otherwise the block waits for its end
            raise
        finally:
            watchdog.stop()
    if search.unfit:
        raise Unsupported(
            f"the front end of vLLM {search.version} cannot be searched: {search.unfit}",
            hint="--vllm names another release",
        )
    if not search.ends:
        end = log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
        if watchdog.rang:
            end = f"it printed nothing for {_SILENT_S:.0f} s"
        elif program.returncode < 0:
            end = f"{signal.Signals(-program.returncode).name} killed it"
        raise InfraError(
            f"the program of the search ended: {end or 'it left no message'}",
            hint=f"{log} has its output",
        )


_DEFAULTS: dict[str, Any] = {
    "first": 1,
    "answers": None,
    "seconds": None,
    "names": [],
    "modules": [],
    "exactly": [],
    "known": {},
}
_SILENT_S = 300.0
"""Seconds without a line after which the program is killed. Each answer has a limit of its own."""


class _Watchdog:
    """Timer that kills a program which prints no line for `_SILENT_S`."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._program = program
        # True once it has killed the program
        self.rang = False
        self.restart()

    def restart(self) -> None:
        """Start the time anew."""
        self.stop()
        self._timer = threading.Timer(_SILENT_S, self._ring)
        self._timer.start()

    def stop(self) -> None:
        """Stop the timer, if it runs."""
        if hasattr(self, "_timer"):
            self._timer.cancel()

    def _ring(self) -> None:
        self.rang = True
        self._program.kill()


def _take(line: Mapping[str, Any], search: FrontendSearch) -> None:
    """Add a line of the program to the search."""
    if "finding" in line:
        search.findings.append(line["finding"])
    elif "left_out" in line:
        search.left_out[line["left_out"]] = line["why"].splitlines()[0]
    elif "unfit" in line:
        search.unfit = line["unfit"].splitlines()[0]
    elif "played" in line:
        search.drawn = line["played"]
    else:
        search.counts, search.ends = line["counts"], line["ends"]
        search.drawn = sum(counts["answers"] for counts in search.counts.values())
        search.outcomes = {
            name: {int(seed): wrong for seed, wrong in outcomes.items()}
            for name, outcomes in line["outcomes"].items()
        }
        search.runs = {int(number): runs for number, runs in line["runs"].items()}


def known_names(text: str) -> list[str]:
    """Return the names of a list such as `hermes,qwen3`. Raises `UsageError` for an unknown one."""
    names = [name for name in text.split(",") if name]
    choices = {*TOOL_FORMATS, *REASONING, "output", "ranks"}
    if unknown := [name for name in names if name not in choices]:
        raise UsageError(
            f"the search has no parser called {', '.join(unknown)}",
            hint=f"--frontend takes {', '.join(sorted(choices))}",
        )
    return names


_WORDS = {
    "finish": "finish reason",
    "stop": "stop reason",
    "answers": "text or tokens in one of the answers",
}
"""Words for fields that are no words."""


_REPORTED = {
    "output processor left": "vllm-project/vllm#51629",
    "ranks a resume without a pause": "vllm-project/vllm#55229",
    "reasoning deepseek_r1": "vllm-project/vllm#55195",
    "reasoning granite": "vllm-project/vllm#50303",
    "tool deepseek_v3": "vllm-project/vllm#48020",
    "tool deepseek_v31": "vllm-project/vllm#48020",
    "tool hunyuan_a13b": "vllm-project/vllm#47901",
    "tool phi4_mini_json": "vllm-project/vllm#18257",
    "tool xlam": "vllm-project/vllm#51697",
}
"""Reports of failures, by name or by name and what is wrong, read in November 2026."""


def next_step(finding: Mapping[str, Any]) -> str:
    """Return what to do with a finding: the report to compare it with, or to write one."""
    name = finding["name"]
    keys = (name, f"{name} {finding['wrong']}", f"{name} {finding['split']}")
    if issue := next(filter(None, map(_REPORTED.get, keys)), None):
        return f"compare it with {issue}, and add the script there"
    return "search vLLM's issues for it, then report it with the script"


def summary_of(finding: Mapping[str, Any]) -> str:
    """Return what is wrong, in words."""
    wrong, split = finding["wrong"], finding["split"]
    if wrong == "hangs" or wrong.startswith("raises ") or "log" in finding:
        return f"{finding['name']}, {split}: {wrong}"
    usual = "one token a step, sent at the end" if "request" in finding else "without streaming"
    what = f"other {_WORDS.get(wrong, wrong)} than {usual}"
    if wrong == "left":
        what = "its state of a request that has ended is left"
    return f"{finding['name']}, {split}: {what}"


def received(message: Mapping[str, Any] | str) -> str:
    """Return what a client received, without empty fields; of an exception its text."""
    if isinstance(message, str):
        return message
    return ", ".join(f"{field} {quoted(value)}" for field, value in message.items() if value)


def quoted(value: object) -> str:
    """Return a value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False)


def script_name(finding: Mapping[str, Any]) -> str:
    """Return the file name of a finding's script."""
    words = f"{finding['name']} {finding['split']} {finding['wrong']}"
    stem = re.sub(r"[^a-z0-9]+", "_", words.lower())[:100]
    return f"frontend_{stem}.{'txt' if 'log' in finding else 'py'}"


def script(finding: dict[str, Any], version: str) -> str:
    """Return a script of at most 30 lines that shows a finding on plain vLLM, without a model.

    Of ranks return the messages instead.
    """
    if "log" in finding:
        about = f"vLLM {version}, {summary_of(finding)}"
        return plain_text("frontend_ranks.txt", _TEMPLATES, about=about, **finding) + "\n"
    template = "frontend_output.txt" if "request" in finding else "frontend_parser.txt"
    fields = finding | finding.get("request", {})
    about = f"vLLM {version}, {summary_of(finding)}"
    text = ""
    for width in (96, 160, 10_000):
        values = {key: _literal(value, width) for key, value in fields.items()}
        text = plain_text(template, _TEMPLATES, about=about, **values) + "\n"
        if len(text.splitlines()) <= 30:
            break
    return text


def _literal(value: object, width: int) -> str:
    """Return a value as Python, in lines of about `width` columns."""
    return pformat(value, width=width, compact=True, sort_dicts=False)
