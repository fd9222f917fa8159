"""Rules that turn the signs of one life of a server into a diagnosis.

The rules go by mechanism, the strongest first: the last lines of the process that died, a process
that others miss, an uncaught exception, ambiguous signs. Two facts separate a death from an
ordered shutdown:

- Which process logged a request to stop, and whether it did so before any process was missing.
  uvicorn logs "Shutting down" after a request to stop and after a death. Newer releases log
  `[shutdown] API server: shutdown triggered` after a request only.
- Whether the exception is one of termination: printed because another process is gone, or because
  this one is closing.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

from vllm_repro_diagnosis.canonical import shorten
from vllm_repro_diagnosis.engine_code import (
    LOOPS,
    MAIN,
    booting,
    constructing,
    leaves_the_engine,
    of_one_call,
    starting,
    stepping,
    warming_up,
)
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.life_signs import (
    HANDLER_FAILED,
    THROWN,
    AnySign,
    ServerLife,
    Sign,
    SignKind,
)
from vllm_repro_diagnosis.log_text import line_in_file
from vllm_repro_diagnosis.outside import PROSE, Meaning, names_other_only, report_of
from vllm_repro_diagnosis.root_cause import Root, find_root, unwrap
from vllm_repro_diagnosis.tracebacks import (
    API_SERVERS,
    ENGINE_NAMES,
    ERRORS,
    UNCAUGHT,
    Frame,
    OpenTraceback,
    Raised,
    bare_name,
    is_core,
)


class Phase(StrEnum):
    """Phase of the engine's life in which it died, or in which the log of a living one ends."""

    BOOT = "boot"
    WARMUP = "warmup"  # the part of the boot that profiles, compiles and captures graphs
    REQUEST = "request"
    IDLE = "idle"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Diagnosis of a log or traceback: if the engine died, why, when, and of which exception."""

    # False: stopped on request, refused before an engine existed, or stated to run on. None: the
    # text does not decide it, for example if it just ends.
    died: bool | None
    # one sentence for people
    why: str
    # the exception to report
    root: Root | None = None
    phase: Phase | None = None
    # a worker process ended without an exception, and that is the cause
    lost_worker: bool = False
    # the log does not show how this life ended, if it did
    open_end: bool = False
    vllm_version: str | None = None
    # argparse's error, if the command line was refused
    usage: str | None = None
    # class of the KV connector; "" if there is none, None if unknown
    connector: str | None = None
    # lines without a server's prefix, up to 20,000 characters; "" for a log with a root
    prose: str = ""
    # line and time of the exception, else of the first line that reports the death; None and ""
    # without a death
    line: int | None = None
    time: str = ""
    # lives of a server that died in this text
    deaths: int = 0
    # its arguments and configuration as printed at boot
    config: str = ""
    evidence: Evidence = Evidence.UNKNOWN

    @property
    def exception(self) -> str | None:
        """Return the class of the root; None without a root.

        It is the wrapper's class if only the text that the wrapper quotes is known.
        """
        return self.root.raised.exception if self.root else None

    @property
    def message(self) -> str | None:
        """Return the message of the root exception; None without a root."""
        return self.root.message if self.root else None

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Return the frames of the root exception, outermost first; empty without a root."""
        return self.root.frames if self.root else ()


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One life of a server, with the facts that the rules use; a missing line's number is None."""

    life: ServerLife
    # judge it as a pasted text, not as a log
    paste: bool
    raised: tuple[Raised, ...]
    # the engine's traceback in which the log ends
    cut_inside: OpenTraceback | None
    # all tracebacks without an end
    unfinished: tuple[OpenTraceback, ...]
    root: Root | None
    # the caller stopped the server itself; None if unknown
    we_terminated: bool | None

    def line(self, *kinds: AnySign) -> float | None:
        """Return the number of the first line with a sign of one of these kinds, or None."""
        return _first(*(self.life.line_of(kind) for kind in kinds))

    @property
    def engine_missing(self) -> float | None:
        """Return the number of the first line in which the API server reports a dead engine."""
        return self.line(SignKind.ENGINE_GONE, SignKind.ENGINE_DEAD)

    @property
    def first_end(self) -> float | None:
        """Return the number of the first line that reports a process's end or a failed boot."""
        other_end = self.line(SignKind.FATAL, SignKind.WORKER_DIED, SignKind.BOOT_FAILED)
        return _first(self.engine_missing, other_end)

    @property
    def stop_asked(self) -> float | None:
        """Return the number of the line that begins an ordered shutdown of the API server.

        None without one, and if the end of a process was reported before it.
        """
        # A 503 of /health does not prove a death, but uvicorn's shutdown after it does not prove
        # a request to stop either.
        shutdown = self.line(SignKind.SHUTDOWN)
        unhealthy = None if self.engine_missing is None else self.line(SignKind.HEALTH_503)
        ordered = shutdown if _before(shutdown, unhealthy) else None
        stopping = _first(self.line(SignKind.STOP_ASKED), ordered, self.interrupted)
        # One signal for all processes: the API server may log it last.
        worker = self.life.first.get(SignKind.WORKER_STOPPED)
        asked = self.life.first.get(SignKind.STOP_ASKED)
        if worker and asked and asked.time and worker.time[:_MINUTE] == asked.time[:_MINUTE]:
            stopping = _first(stopping, worker.line)
        return stopping if _before(stopping, self._first_gone) else None

    @property
    def interrupted(self) -> float | None:
        """Return the number of the line that shows Ctrl-C on a server that was ready, or None."""
        last = self.life.last_line
        if not self.life.ready or last is None:
            return None
        pressed = self.line(SignKind.INTERRUPTED)
        if pressed is not None and pressed > last.number:  # it ended a command that shows the log
            pressed = None
        raised = (each for each in self.raised if each.exception == "KeyboardInterrupt")
        of_server = (each for each in raised if each.process or _PROCESS.match(each.headline))
        interrupts = (each.first_line for each in of_server)
        return _first(pressed, *interrupts)

    @property
    def engine_stop_asked(self) -> bool:
        """Return True if EngineCore logged a request to stop before any end was reported."""
        exits = (each for each in self.raised if "signal_handler" in each.functions)
        of_core = (each for each in exits if "EngineCore" in f"{each.process}{each.headline}")
        handled = (each.first_line for each in of_core)
        stopping = _first(self.line(SignKind.ENGINE_STOP_ASKED), *handled)
        return _before(stopping, self._first_gone)

    @property
    def _first_gone(self) -> float | None:
        """Return the number of the first line that reports the end of any process."""
        return _first(self.first_end, self.line(SignKind.PROCESS_DIED, SignKind.NATIVE_CRASH))

    @property
    def ordered(self) -> bool:
        """Return True if the log has a request to stop, and no process ended before it."""
        return self.stop_asked is not None or self.engine_stop_asked

    @property
    def after_stop(self) -> bool:
        """Return True if a shutdown was ordered, and the cause (if any) was not raised before."""
        stopping = self.line(SignKind.STOP_ASKED, SignKind.SHUTDOWN, SignKind.ENGINE_STOP_ASKED)
        stopping = _first(stopping, self.interrupted)
        raised_before = self.cause and _before(self.cause.raised.first_line, stopping)
        return self.ordered and not raised_before

    @property
    def root_survived(self) -> bool:
        """Return True if the engine went on after the root exception, so that it is no cause.

        False for one that left the engine's step or boot: nothing catches it.
        """
        root = self.root
        return (
            root is not None
            and not _leaves(root)
            and bool(
                root.printed.first_line < self.life.survived_until
                or root.printed.level == "WARNING"
                # a log without the line above a traceback does not show that it failed one call
                or (not self.paste and self._failed_one_call(root))
                or (root.caught and self.life.lives_below(root.printed.first_line))
                # another file with the errors of C++ code may stand above the log
                or (root.printed.level and self.life.ready_below(root.printed.first_line))
            )
        )

    def _failed_one_call(self, root: Root) -> bool:
        """Return True if EngineCore returned the root to a client as the failure of one call."""
        if root.printed.headline.startswith("Traceback"):
            return False
        calls = (each for each in self.raised if of_one_call(each))
        quotes = (unwrap(link.message) for call in calls for link in call.links)
        quoted = any(quote and root.raised.message.startswith(quote) for quote in quotes)
        return quoted or of_one_call(root.printed)

    @property
    def cause(self) -> Root | None:
        """Return the root exception, unless it reports another process's end or was survived."""
        root = self.root
        if root is None or root.of_termination or self.root_survived:
            return None
        ended = self.line(SignKind.WORKER_DIED, SignKind.NATIVE_CRASH)
        unknown = root.of_unknown_cause and SignKind.NATIVE_CRASH in self.life
        lost = (root.of_consequence or unknown) and _before(ended, root.raised.first_line)
        return None if lost else root


_SILENT_ENDS = frozenset(
    {
        *(SignKind.WORKER_DIED, SignKind.ENGINE_GONE, SignKind.OOM_KILLED, SignKind.NATIVE_CRASH),
        Meaning.KILLED,
    }
)
"""Ends of a process that no exception announces."""
_MINUTE = -len(":00")
"""End of the minute in a time."""


def judge_life(life: ServerLife, we_terminated: bool | None) -> Diagnosis:
    """Return the diagnosis of one life of a server, by the first rule that applies.

    A log among prose or bare lines is also judged as a pasted text: the richer answer counts. This
    ends the reading of `life`: feed it no more lines. The diagnosis lacks `evidence` and `deaths`.
    """
    life.finish()
    inside = life.cut_inside  # before the tracebacks are closed
    unfinished = life.finder.unfinished()
    raised = life.finder.finish()
    if life.first_engine_line and not _SILENT_ENDS.isdisjoint(life.first):
        # an engine's lines have its name, so a bare traceback above the log is of another server
        raised = tuple(
            each
            for each in raised
            if each.process or each.level or each.native or each.first_line > life.booted_at
        )
    diagnoses = []
    as_pastes = (False, True) if life.is_mixed else (not life.is_log,)
    for paste in as_pastes:
        case = _Case(
            life=life,
            paste=paste,
            raised=raised,
            cut_inside=inside,
            unfinished=unfinished,
            root=find_root(raised, paste=paste, survived=life.survived_until),
            we_terminated=we_terminated,
        )
        diagnosis = _explained(case, _by_first_rule(case))
        diagnoses.append(replace(diagnosis, phase=diagnosis.phase or _phase(case, diagnosis)))
    diagnosis = max(diagnoses, key=_richness)
    return replace(
        diagnosis,
        vllm_version=life.boot.facts().vllm_version,
        usage=life.usage,
        connector=life.connector,
        config=life.config,
        prose="\n".join(life.prose) if diagnosis.root is None or not life.is_log else "",
    )


def _richness(diagnosis: Diagnosis) -> tuple[bool, bool, bool]:
    """Return a key to choose between the readings of a life, as a log and as pasted text.

    One with a death, a root and a known end is the greatest.
    """
    return bool(diagnosis.died), diagnosis.root is not None, not diagnosis.open_end


def _by_first_rule(case: _Case) -> Diagnosis:
    """Return the diagnosis of the first rule that applies, else of a log that just ends."""
    for rule in _RULES:
        if (diagnosis := rule(case)) is not None:
            return diagnosis
    return _open_end(case)


def _explained(case: _Case, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of a death with its line and time, and a line that explains it in `why`.

    A root that only reports a failed process is removed, and quoted in `why`. A diagnosis of no
    death is returned as it is.
    """
    if not diagnosis.died:
        return diagnosis
    root = diagnosis.root
    ends = (case.life.first[kind] for kind in _ENDS if kind in case.life)
    end, time = min(((sign.line, sign.time) for sign in ends), default=(0, ""))
    if root is not None and root.of_unknown_cause:
        end = end or root.raised.first_line
        early = Phase.BOOT if "start" in root.message or "init" in root.message else None
        why = "The engine did not come up" if early else "The engine died"
        suffix = _signal_suffix(root.message)
        missing = "" if suffix else "; the root cause is not in this part of the log"
        why = f"{why}{missing}: {_named(root)}{suffix}."
        diagnosis = replace(diagnosis, why=why, root=None, phase=early or diagnosis.phase)
        root = None
    if root is not None:
        end, time = root.raised.first_line, root.raised.time or time
    causes = [(raised.first_line, raised.message) for raised in case.raised if raised.native]
    kinds = (*_CAUSES, SignKind.NATIVE_CRASH, SignKind.EARLIER)
    signs = [
        case.life.first[kind]
        for kind in kinds
        if kind in case.life and _may_explain(case, kind, root, time)
    ]
    # the exception that was thrown tells more
    causes += [(sign.line, sign.text) for sign in signs if not sign.text.startswith(THROWN)]
    line, text = min(causes, default=(0, ""))
    why = diagnosis.why
    # in an issue NCCL's own lines may stand below the exception
    below = case.life.is_mixed and root is not None and "NCCL" in root.message and "NCCL" in text
    if text.removesuffix(":") not in why and (root is None or line < end or below):
        quote = text.partition(_BREAK)[0][:_QUOTE]
        why = f"{why.rstrip('.')}. Line {line_in_file(line)} explains it: {quote}"
    return replace(diagnosis, why=why, line=diagnosis.line or line_in_file(end) or None, time=time)


def _may_explain(case: _Case, kind: AnySign, root: Root | None, time: str) -> bool:
    """Return True if the first sign of a kind may explain a death by `root` at `time`.

    A lack of memory explains no error in the program, and no death hours after it.
    """
    sign = case.life.first[kind]
    if kind is SignKind.EARLIER:
        told = root.message if root else ""
        words = {"import": "_C", "fatal error": "non-zero exit status"}
        return next((words[key] for key in words if key in sign.text), "CUDA") in told
    if kind not in (SignKind.OOM_KILLED, SignKind.OOM_NAMED, Meaning.KILLED):
        # what the kernel killed tells more than who had asked for memory
        return Meaning.KILLED not in case.life or "invoked oom-killer" not in sign.text
    if root is not None and bare_name(root.raised.exception) in _OF_PROGRAM:
        return False
    then, now = _CLOCK.search(sign.text), _CLOCK.search(time)
    if sign.line > case.life.booted_at or then is None or now is None:
        return True
    # clocks differ by their zones, in quarters of an hour
    apart = (60 * (int(now[1]) - int(then[1])) + int(now[2]) - int(then[2])) % 900
    return min(apart, 900 - apart) < _AT_ONCE


_OF_PROGRAM = ("AssertionError", "AttributeError", "IndexError", "KeyError", "TypeError")
"""Exceptions of wrong code."""
_CLOCK = re.compile(r"\b\d\d:(\d\d):(\d\d)\b")
_AT_ONCE = 180
"""Most seconds from a kill to the death that it explains."""
_BREAK = "\n"
_QUOTE = 200
_CAUSES = (SignKind.OOM_KILLED, SignKind.OOM_NAMED, Meaning.TROUBLE, Meaning.KILLED)
"""Signs of other programs that explain why a process ended."""
_ENDS = (
    *(SignKind.FATAL, SignKind.BOOT_FAILED, SignKind.WORKER_DIED, SignKind.ENGINE_GONE),
    *(SignKind.ENGINE_DEAD, SignKind.NATIVE_CRASH, SignKind.OOM_KILLED, Meaning.KILLED),
)


def _first(*lines: float | None) -> float | None:
    """Return the smallest of the line numbers that are not None; None if there are none."""
    return min((line for line in lines if line is not None), default=None)


def _before(line: float | None, other: float | None) -> bool:
    """Return True if `line` is known, and before `other` if that is known."""
    return line is not None and (other is None or line < other)


_LEFT = "An exception left the engine's step or boot, where nothing catches it"


def _leaves(root: Root) -> bool:
    """Return True if a traceback of the chain leaves an engine's step or boot."""
    return any(leaves_the_engine(link) for link in root.printed.links)


def _left_the_engine(case: _Case) -> bool:
    """Return True if the cause came out of an engine's step or boot: nothing catches it there."""
    cause = case.cause
    return cause is not None and cause.from_engine and _leaves(cause)


def _died(why: str, root: Root | None = None) -> Diagnosis:
    """Return the diagnosis that the engine died, with the reason as a sentence."""
    return Diagnosis(died=True, why=why, root=root)


def _lives(why: str, phase: Phase | None = None, *, open_end: bool = False) -> Diagnosis:
    """Return the diagnosis that the engine did not die, with the reason as a sentence."""
    return Diagnosis(died=False, why=why, phase=phase, open_end=open_end)


def _undecided(why: str, phase: Phase | None = None) -> Diagnosis:
    """Return the diagnosis that the text does not show whether the engine died, and why not."""
    return Diagnosis(died=None, why=why, phase=phase)


def _by_exception(
    died: bool | None, why: str, root: Root | None, phase: Phase | None = None
) -> Diagnosis:
    """Return a diagnosis whose sentence ends with the exception. died: None if undecided."""
    return Diagnosis(died=died, why=f"{why}: {_named(root)}.", root=root, phase=phase)


def _by_first_line(case: _Case, meanings: Mapping[AnySign, str]) -> Diagnosis | None:
    """Return "cannot tell", with the line of the first sign in `meanings` that the log shows.

    meanings: the beginning of the sentence for each sign, the most important sign first. None if
    the log shows none of them.
    """
    for kind, meaning in meanings.items():
        if sign := case.life.first.get(kind):
            return _undecided(f"{meaning}: {sign.text}")
    return None


def _refused(case: _Case) -> Diagnosis | None:
    """Judge a server that refused its command line; None if it did not."""
    life = case.life
    started = life.ready or life.booted or life.first_engine_line or case.raised
    if life.usage is None or started or case.line(*_ENDS) is not None:
        return None
    return _lives("The command line was refused: no engine was started, so none died.", Phase.BOOT)


def _by_kernel(case: _Case) -> Diagnosis | None:
    """Judge a server of which the kernel killed a process for lack of memory.

    None if it killed none, if an exception is the cause, or if a stop was asked before.
    """
    killed = case.life.first.get(SignKind.OOM_KILLED)
    if killed is None or case.cause is not None or _before(case.stop_asked, killed.line):
        return None
    return _died(
        f"The kernel killed a process of this server because memory ran out: {killed.text}"
    )


def _by_signal(case: _Case) -> Diagnosis | None:
    """Judge processes that end by a signal from outside, or after a process that is no engine.

    None if an exception, a crash or a failed boot explains it, and in an ordered shutdown.
    """
    first, end = case.life.first, case.first_end
    explained = SignKind.NATIVE_CRASH in first or SignKind.BOOT_FAILED in first
    if case.cause is not None or case.ordered or explained:
        return None
    process = first.get(SignKind.PROCESS_DIED)
    if process is not None and _before(process.line, end):
        return _undecided(
            "A process of the server that is not EngineCore died, and the server ended with it: "
            f"{process.text}{_signal_suffix(process.text)}"
        )
    ended = first.get(Meaning.ENDED)
    # a report above the log may be of an earlier life
    began = _first(case.life.first_engine_line, case.life.booted_at or None)
    if ended and _before(began, ended.line) and ended.line < (end or 0):
        return _undecided(f"{_OUTSIDE[Meaning.ENDED]}: {ended.text}")
    gone = case.line(SignKind.WORKER_DIED, SignKind.FATAL)
    if _before(case.line(SignKind.WORKER_STOPPED), gone):
        return _undecided(
            "A signal stopped a worker and EngineCore gave up; this log does not show who sent it."
        )
    return None


def _last_words(case: _Case) -> Diagnosis | None:
    """Judge by the last lines that EngineCore, or the process above a worker, logged as it died.

    None without such lines, or if an ordered shutdown explains them.
    """
    life, root, cause = case.life, case.root, case.cause
    worker, failed = life.first.get(SignKind.WORKER_DIED), life.first.get(SignKind.BOOT_FAILED)
    crash = life.first.get(SignKind.NATIVE_CRASH)
    reported = case.line(SignKind.WORKER_DIED, SignKind.FATAL, SignKind.BOOT_FAILED)
    crashed = crash and life.survived_until < crash.line < (reported or 0)
    if crash is not None and crashed and cause is None and not case.ordered:
        lost = worker is not None and SignKind.BOOT_FAILED not in life
        return replace(_crash(case, crash), lost_worker=lost)
    # In a text of several servers another one may have been ready.
    late = failed is not None and failed.line > life.survived_until and not case.ordered
    if failed is not None and (late or not life.ready):
        not_up = "The engine did not come up"
        if cause is not None:
            return _died(f"{not_up}: {_named(cause)}{_signal_suffix(cause.message)}.", cause)
        if root is None and _before(case.line(SignKind.INTERRUPTED), failed.line):
            return _lives(_INTERRUPTED)
        if root is None and not case.paste:
            suffix = _signal_suffix(failed.text)
            told = suffix or "Failed to " in failed.text  # Triton quotes the cause
            missing = "" if told else "; the root cause is not in this part of the log"
            return _died(f"{not_up}{missing}: {failed.text}{suffix}")
        if root is not None and _is_exit(root.raised):
            return _lives(_INTERRUPTED)
    if cause is None:
        if case.ordered:
            return None
        if worker is not None:
            why = f"A worker process ended without an exception: {worker.text}"
            return replace(_died(why + _signal_suffix(worker.text)), lost_worker=True)
    if SignKind.FATAL in life and (not case.paste or root is not None):
        return _by_exception(
            True, "EngineCore met a fatal error", None if case.root_survived else root
        )
    if worker is not None and not case.ordered:
        return _by_exception(True, "A worker process ended", cause)
    return None


_INTERRUPTED = "The boot was interrupted by a signal; nothing failed by itself."
_EXIT_CODE = re.compile(r"exit code:? -(\d+)|': -(\d+)\}")
_SIGNALS = {
    signal.SIGABRT: "an abort in C++ code",
    signal.SIGBUS: "often too little /dev/shm",
    signal.SIGILL: (
        "an illegal instruction. On a CPU with AMX this is a known bug: vLLM's CPU "
        "attention uses AMX without asking Linux for it; --dtype float32 avoids that"
    ),
    signal.SIGKILL: "often the kernel, because memory ran out",
    signal.SIGSEGV: "a segmentation fault",
}


def _signal_suffix(text: str) -> str:
    """Return ` (SIGKILL: …)` for an exit code of a signal in the text; "" without one."""
    match = _EXIT_CODE.search(text)
    code = int(match[1] or match[2]) if match else 0
    if code not in set(signal.Signals):
        return ""
    meaning = _SIGNALS.get(signal.Signals(code))
    return f" ({signal.Signals(code).name}{': ' + meaning if meaning else ''})"


_DUMPED = re.compile(r'File "([^"\n]+)", line \d+ in (\w+)')
"""A frame that Python's fault handler dumps."""


def _crash(case: _Case, crash: Sign, root: Root | None = None) -> Diagnosis:
    """Return the diagnosis of a crash in native code, with what C++ code threw if known.

    Undecided if the text names another program and shows no server, or if the dumped stack has no
    code of vLLM.
    """
    text = _named(root) if root and root.raised.native else crash.text.removesuffix(":")
    prose = "\n".join(case.life.prose)
    stack = _DUMPED.findall(prose)
    of_vllm = [f"{shorten(file)}:{name}" for file, name in stack if "vllm" in file]
    of_other = not case.life.is_server and names_other_only(prose)
    if of_other or (stack and not of_vllm and case.first_end is None):
        return _undecided(f"A process crashed that may be another program's: {text}")
    where = f", in {of_vllm[0]}" if of_vllm else ""
    return _died(f"A process crashed in native code{where}: {text}", root)


def _silent_end(case: _Case) -> Diagnosis | None:
    """Judge an EngineCore that ended without logging it, as the API server noticed.

    None if the API server misses no engine or was asked to stop before, and if a later rule fits
    better: for a pasted text, or an exception that left the engine's step or boot.
    """
    life = case.life
    if case.engine_missing is None or case.stop_asked is not None or _left_the_engine(case):
        return None
    if case.engine_stop_asked:
        if SignKind.ENGINE_GONE not in life or SignKind.STOP_ASKED in life:
            return None
        return _undecided(
            "A signal stopped EngineCore and not the API server; this log does not show who sent "
            "it."
        )
    if case.paste:
        return None
    if script := _failed_script(case):
        return script
    # The API server's output handler failed by itself, with a live engine.
    handlers = (raised for raised in case.raised if raised.headline == HANDLER_FAILED)
    handler = next((raised for raised in handlers if not raised.of_dead_engine), None)
    if handler is not None and SignKind.ENGINE_GONE not in life:
        why = "The API server can take no more answers from its engine"
        return _by_exception(True, why, Root(raised=handler))
    cause = case.cause
    if cause is not None and life.survived_until < cause.raised.first_line < case.engine_missing:
        why = "The API server reports a dead engine; the exception before that"
        return _by_exception(True, why, cause)
    terminated = case.root is not None and case.root.of_termination
    if terminated and life.first_engine_line and not life.booted:
        return _undecided(
            "EngineCore reports that another process ended; what ended it came before this part of "
            "the log."
        )
    if silent := life.first.get(SignKind.NO_HEARTBEAT):
        return _died(f"The engine did not answer the API server, which gave it up: {silent.text}.")
    reports = (life.first.get(kind) for kind in (SignKind.ENGINE_GONE, SignKind.ENGINE_DEAD))
    missed = next(filter(None, reports)).time
    if crash := life.first.get(SignKind.NATIVE_CRASH):
        how = f"; it crashed in native code ({crash.text})"
    elif (gone := life.first.get(SignKind.ENGINE_GONE)) and " died with exit code" in gone.text:
        how = f": {gone.text}{_signal_suffix(gone.text)}"
    elif any(kind in life and _may_explain(case, kind, None, missed) for kind in _CAUSES):
        how = ""  # see `_explained`
    elif _before(life.first_engine_line, case.engine_missing) and not life.engine_error:
        how = "; it printed nothing, like a process killed by a signal"
    else:  # its lines are missing or torn, so its silence proves nothing
        how = "; what it printed is not in this part of the log"
    return _died(f"EngineCore was gone before anybody asked the server to stop{how}.")


def _without_fatal_line(case: _Case) -> Diagnosis | None:
    """Judge an uncaught exception or a native crash in a log without the engine's fatal line.

    An exception counts if it left an engine's step or boot, or ended a starting server. None for a
    pasted text, and for what came after a request to stop.
    """
    life = case.life
    if case.paste:
        return None
    cause = case.cause
    if cause is not None and case.after_stop:
        return None
    if cause is not None and _left_the_engine(case):
        if cause.of_lost_peer:
            return _by_exception(None, _LOST_PEER, cause)
        return _by_exception(True, _LEFT, cause)
    if cause is not None and _by_fatal_logger(case, cause.raised):
        return _by_exception(True, "EngineCore logged this as it died", cause)
    refused = None if life.ready else _death_at_start(case)
    if case.ordered:
        # the server program ends its engine when it fails
        stopping = case.line(SignKind.ENGINE_STOP_ASKED, SignKind.STOP_ASKED)
        root = refused.root if refused else None
        return refused if root and _before(root.raised.first_line, stopping) else None
    if crash := life.first.get(SignKind.NATIVE_CRASH):
        return _crash(case, crash, cause)
    return refused


_LOST_PEER = "This rank lost its peer, and only the peer's log can show why"


def _death_at_start(case: _Case) -> Diagnosis | None:
    """Judge an exception of the server program before an engine served; None without one."""
    whole = [(raised, False) for raised in case.raised]
    for raised, cut in (*whole, *((each, True) for each in reversed(case.raised))):
        # The interpreter prints an uncaught exception without a level, with the program's frames.
        by_function = starting(raised) and _in_vllm(raised)
        by_server = (_of_server(raised) and not case.paste) or raised.headline == UNCAUGHT
        # the outer frames may be missing
        by_server |= (
            cut
            and raised.process.startswith(API_SERVERS)
            and not (case.life.ready or "run_asgi" in raised.functions)
        )
        if raised.level or raised.of_side_thread or not (by_function or by_server):
            continue
        if _is_exit(raised):
            return None
        # a library says in its own words what the server refused
        by_http = bare_name(raised.links[0].exception) == "HTTPError"
        last = Root(raised=raised.links[0] if raised.explicit and not by_http else raised)
        if "failed to be inspected" in last.message:
            last = _inspected(case, raised) or last
        elif "DP Coordinator process failed" in last.message:
            own = (
                each for each in case.raised if "Coordinator" in f"{each.process}{each.headline}"
            )
            last = Root(raised=next(own, last.raised))
        how = "The server ended while it booted"
        if case.life.first_engine_line is None:
            how = "The server refused to start"
        if constructing(raised):
            how = "The program that uses vLLM ended in `LLM()`"
        return _by_exception(True, f"{how}, before an engine served", last, Phase.BOOT)
    return None


def _inspected(case: _Case, raised: Raised) -> Root | None:
    """Return the exception of the subprocess that inspects a model, as logged before `raised`.

    None if it logged none.
    """
    logged = (each for each in case.raised if each.first_line < raised.first_line)
    errors = [each for each in logged if "registry.py:" in each.source and each.level == "ERROR"]
    return Root(raised=errors[-1]) if errors else None


def _in_vllm(raised: Raised) -> bool:
    """Return True if the exception, or one that it came from, passed through vLLM's code."""
    files = (frame.file for link in raised.links for frame in link.frames)
    return any(_PACKAGE.search(file) and not file.endswith("setup.py") for file in files)


_PACKAGE = re.compile(r"(?:^|/)vllm\w*(?:[/ ]|$)")
"""A package of vLLM or of its plugins, or its command; not a user's `vllm_client.py`."""


def _of_server(raised: Raised) -> bool:
    """Return True if the outermost frame is of `vllm serve` or of an entry point's module."""
    frames = [
        frame
        for frame in raised.frames
        if not re.search("runpy|<string>|multiprocessing", frame.file)
    ]
    outer = " ".join(frame.file for frame in frames[:2])
    return bool(frames) and frames[0].function == "<module>" and bool(_ENTRY.match(outer))


_ENTRY = re.compile(r"(?:\S*/)?vllm(?: |$)|vllm/entrypoints/|\S+ vllm/entrypoints/cli/")


def _perhaps_of_one_call(raised: Raised) -> bool:
    """Return True if the exception failed one call of the engine, or lacks the line above it."""
    return of_one_call(raised) or raised.headline.startswith("Traceback")


def _by_fatal_logger(case: _Case, raised: Raised) -> bool:
    """Return True if EngineCore logged the exception as it died, and its headline is cut off.

    The same file logs failures of single calls, but those have a headline.
    """
    return (
        is_core(raised.process, raised.source)
        and raised.level in ERRORS
        and not _perhaps_of_one_call(raised)
        and raised.first_line > case.life.survived_until
    )


_OF_CLIENTS = {SignKind.PROGRAM_ENDED, Meaning.UNREACHABLE}
"""Signs that the program which uses an engine may print after its end."""


def _failed_script(case: _Case) -> Diagnosis | None:
    """Judge a script that uses vLLM in its own process and failed in its own code.

    The engine ends with the script, and the client reports that as a death. So it is undecided.
    None for a server, if the engine raised the cause, and if no engine is missing.
    """
    life = case.life
    server = life.ready or any(name.startswith(API_SERVERS) for name in life.pids.values())
    cause = case.cause
    of_engine = cause is not None and cause.from_engine and not _of_script(cause.raised)
    if server or of_engine or case.engine_missing is None:
        return None
    if life.offline and life.prompts_open is False and not case.raised:
        why = "The program that uses vLLM had its answers when its engine ended, perhaps with it"
        return _undecided(f"{why}; this log does not show whether the engine ended first.")
    if life.first.keys() - _OF_CLIENTS == {SignKind.ENGINE_GONE} and not (case.raised or life.pids):
        return _undecided(
            "The client of an engine missed it, which it also logs when its program ends; this "
            "text does not show which of them ended first."
        )
    for raised in case.raised:
        if _of_script(raised) and _before(raised.first_line, case.engine_missing):
            why = "The script that uses vLLM failed in its own code, and its engine ended with it"
            return _by_exception(None, why, Root(raised=raised))
    return None


def _of_script(raised: Raised) -> bool:
    """Return True if an uncaught exception without a frame of vLLM ended a script or a client."""
    # torch puts the rank before an uncaught exception
    named = raised.process and not raised.process.startswith("rank")
    if raised.level or named or _in_vllm(raised) or raised.reports_dead_engine:
        return False
    # a file of the user's has no package, and a process of the engine begins in a library
    return raised.functions[:1] in (("<module>",), ("_run_module_as_main",)) or (
        bool(raised.frames)
        and ("/" not in raised.frames[0].file or bool(_RUNS_SCRIPTS.search(raised.frames[0].file)))
    )


_RUNS_SCRIPTS = re.compile(
    r"(?:^|/)(?:asyncio/(?:runners|base_events)|runpy|concurrent/futures/\w+|click/\w+|typer/\w+"
    r"|fire/core|hydra/\w+(?:/\w+)*)\.py"
)
"""The library in which the frames of a script begin if the first ones are cut off."""


_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")
_ALONE = "An exception without its log does not show whether an engine died"
_OTHER_FAILED = "A script, a client or a build failed, which does not show whether an engine died"


def _multiprocessing(case: _Case) -> Diagnosis | None:
    """Judge a process of the engine whose exception nothing caught: multiprocessing printed it.

    None without one, and in an ordered shutdown.
    """
    if case.ordered:
        return None
    for raised in case.raised:
        functions = frozenset(name for link in raised.links for name in link.functions)
        if _PROCESS.match(raised.headline) and not _is_exit(raised) and functions & LOOPS:
            return _by_exception(True, _BY_MULTIPROCESSING, case.cause or Root(raised=raised))
    for cut in case.unfinished:
        if _PROCESS.match(cut.headline) and LOOPS.intersection(cut.functions):
            why = f"{_BY_MULTIPROCESSING}; the end of its traceback is cut off."
            return replace(_died(why, case.cause), line=line_in_file(cut.last_line))
    return None


_BY_MULTIPROCESSING = "An exception ended a process of the engine, as multiprocessing reports"
_PROCESS = re.compile(r"Process [\w.-]+:$")


def _is_exit(raised: Raised) -> bool:
    """Return True for SystemExit and KeyboardInterrupt, which are no failure."""
    return bare_name(raised.exception) in ("SystemExit", "KeyboardInterrupt")


_PLACEHOLDER = re.compile(
    r"\bpid=(?:[xX]+|N|\.{3}|<\w+>)|\bline (?:\.{3}|[xX]+|N|<\w+>),? in \w"
    r"|\ballocate (?:X+|N|\.{3}|<\w+>) ?[GMK]i?B|\b(?:ERROR|INFO) (?:\.{3}|<\w+>) \["
)
"""Parts of a log line for which a guide writes a placeholder."""


def _pasted(case: _Case) -> Diagnosis | None:
    """Judge a pasted text: a reported death, else its exception.

    None if it has neither, if it is judged as a log, or if the exception came after a shutdown.
    """
    life, root = case.life, case.root
    if not case.paste or case.after_stop:
        return None
    if not life.of_vllm and _PLACEHOLDER.search("\n".join(life.prose)):
        return _undecided("This text describes errors with placeholders, and is no log of one.")
    if script := _failed_script(case):
        return script
    if crash := life.first.get(SignKind.NATIVE_CRASH):
        return _crash(case, crash, root)
    reported = any(raised.reports_dead_engine for raised in case.raised)
    missing = reported or case.engine_missing is not None
    quoted = life.quoted and root is not None and bool(root.raised.frames)
    if (missing and not case.ordered) or quoted:
        why = "The text reports that the engine died"
        if root is None or _of_script(root.raised):  # a client's
            return _died(f"{why}.")
        return _by_exception(True, why, root)
    if root is None or (_is_exit(root.raised) and (life.booted or Meaning.ENDED in life)):
        return None
    if _leaves(root):
        return _by_exception(True, _LEFT, root)
    functions = frozenset(root.raised.functions)
    if starting(root.raised) and not _is_exit(root.raised):
        how = "The server ended while it booted"
        if constructing(root.raised):
            how = "The engine did not come up in `LLM()`"
        return _by_exception(True, how, root, Phase.BOOT)
    if _of_server(root.raised) and bare_name(root.raised.exception) in _IMPORT_ERRORS:
        return _by_exception(True, "vLLM failed as it was imported", root, Phase.BOOT)
    why = _ALONE
    if "run_asgi" in functions:
        why = "An exception failed one request, which does not show whether the engine died"
    elif _of_script(root.raised) or (root.frames and not _in_vllm(root.raised)):
        why = _OTHER_FAILED
    elif life.boot_line and not life.offline:
        why = (
            "This text shows an exception beside the log of an engine, not whether the engine died"
        )
    elif life.offline:
        why = "An exception ended the program that uses vLLM, perhaps with a working engine"
    return _death_at_start(case) or _by_exception(None, why, root)


def _killed_or_ended(case: _Case) -> Diagnosis | None:
    """Judge a server that a signal ended, as only the line of another program can show.

    It died; undecided if it was ended on purpose before. None without such a line, and in an
    ordered shutdown.
    """
    first = case.life.first
    killed, ended = first.get(Meaning.KILLED), first.get(Meaning.ENDED)
    named = killed is not None and "VLLM::" in killed.text
    if killed is None or case.ordered or not (case.life.is_server or named):
        return None
    # `kubectl describe` lists the status before the events.
    status = re.search(r"\bExit Code: ", killed.text)
    if ended is not None and (ended.line < killed.line or status) and not _of_memory(killed):
        return _undecided(f"{_OUTSIDE[Meaning.ENDED]}: {ended.text}")
    how = "crashed" if _CRASHED.search(killed.text) else "was killed"
    return _died(f"It {how}, as another program reports: {killed.text}")


_CRASHED = re.compile(
    r"(?i)segfault|segmentation|(?:SIG|/)(?:SEGV|ABRT|BUS|ILL|FPE)|\babort|bus error|illegal instr"
    r"|dumped|general protection|core-dump|signal\W{1,3}(?:[468]|11)\b"
    r"|(?:exit\w*|code|status)[\"' ]*[:=( ]{1,4}(?:13[24569]|-(?:[468]|11))\b"
)
"""Words and exit codes of a process that ended itself by a fault in native code."""


def _of_memory(killed: Sign) -> bool:
    """Return True if a report names a lack of memory.

    Slurm, the kubelet and others kill what does not end in time; of memory they say so.
    """
    return re.search(r"(?i)oom(?!Killed\"?: ?false)|memory", killed.text) is not None


def _killed_as_it_stopped(case: _Case) -> Diagnosis | None:
    """Judge a server that did not end in time after a request to stop; None if it did."""
    killed = case.life.first.get(Meaning.KILLED)
    asked = _first(case.stop_asked, case.line(SignKind.ENGINE_STOP_ASKED))
    if killed is None or not case.ordered or not _before(asked, killed.line) or _of_memory(killed):
        return None
    why = "The server was asked to stop, did not end in time, and was killed"
    if _CRASHED.search(killed.text):
        why = "The server was asked to stop, and a process of it crashed as it ended"
    return _lives(f"{why}: {killed.text}", Phase.SHUTDOWN)


def _offline(case: _Case) -> Diagnosis | None:
    """Judge a program that uses vLLM in its own process, and that ended without an exception.

    Undecided if prompts were open. None for a server.
    """
    life = case.life
    ended = SignKind.PROGRAM_ENDED in life or case.engine_stop_asked
    if not life.offline or case.raised or not ended or case.first_end is not None:
        return None
    if life.prompts_open:
        return _undecided(
            "The program that uses vLLM ended while prompts were open; this log does not show why."
        )
    return _lives(
        "The program that uses vLLM has its answers, and ended with its engine in order.",
        Phase.SHUTDOWN,
    )


def _by_single_sign(case: _Case) -> Diagnosis | None:
    """Return "cannot tell" for the strongest single sign of a hang, a stop or a report.

    None without such a sign.
    """
    life, terminated = case.life, case.we_terminated
    if _boot_interrupted(case) and Meaning.ENDED not in life:
        return _lives(_INTERRUPTED)
    unhealthy = case.line(SignKind.HEALTH_503)
    # Before an ordered shutdown, a single count without a token may have been a long step.
    fewest_stalls = 2 if case.ordered else 1
    boots = life.booted and not life.ready
    stalled = any(stalls >= fewest_stalls for stalls in life.stalls.values())
    by_engine_alone = case.stop_asked is None and SignKind.SHUTDOWN not in life
    signs = (
        (
            # A server that is scaled and a proxy return 503 too.
            unhealthy is not None and not _before(case.stop_asked, unhealthy),
            "/health was answered with 503 and not again with 200; the engine may be dead or not.",
            None,
        ),
        (
            stalled or (life.waits > 1 and not case.ordered),
            (
                "Where this log ends, workers wait and the boot does not go on: a hang, or one "
                f"very long step, such as a compilation. {_STILL_HANGS}"
                if boots
                else "Where this log ends, requests or workers wait and no token comes: a hang, or "
                f"one very long step. {_STILL_HANGS}"
            ),
            Phase.BOOT if boots else Phase.REQUEST,
        ),
        (
            SignKind.DRAINING in life and SignKind.CLOSED not in life and not terminated,
            (
                "The server was asked to stop, but requests are open where this log ends: a "
                "hang, or the log is cut."
            ),
            Phase.REQUEST,
        ),
        (
            case.stop_asked is not None and terminated is False,
            (
                "The server shut down in order, but not at the caller's request; this log does not "
                "show who stopped it."
            ),
            Phase.SHUTDOWN,
        ),
        (
            case.engine_stop_asked and by_engine_alone and not terminated,
            (
                "EngineCore was asked to stop, but the API server logs no shutdown: it was "
                "killed, or the log is cut."
            ),
            None,
        ),
        (
            SignKind.PARENT_GONE in life and not case.ordered and not terminated,
            "A worker outlived its parent process; this log does not show how the parent ended.",
            None,
        ),
    )
    for holds, why, phase in signs:
        if holds:
            return _undecided(why, phase)
    if not life.is_server or case.ordered:
        return None
    running, meanings = life.first.get(Meaning.RUNNING), dict(_OUTSIDE)
    if running is not None and "vllm" in running.text.lower():
        del meanings[Meaning.UNSURE]
    if life.offline:
        meanings[Meaning.EXITED] = "The program that uses vLLM ended; this log does not show why"
    return _by_first_line(case, meanings)


_STILL_HANGS = "If it still waits, `vllm-repro diagnose --pid PID` tells where."
_OUTSIDE: dict[AnySign, str] = {
    Meaning.ENDED: "The server was ended from outside; nothing shows that its engine had died",
    Meaning.TROUBLE: (
        "What the server runs on failed, and this log does not show whether its engine died of it"
    ),
    Meaning.EXITED: "The server ended, and this log does not show why",
    Meaning.UNSURE: "Something ended that may be this server, as another program reports",
}


def _stopped(case: _Case) -> Diagnosis | None:
    """Judge an ordered shutdown: alive before it, or undecided; None without one.

    Undecided if the log holds only its end, or if an error came before it and may be its cause.
    """
    if not case.ordered:
        return None
    life = case.life
    failed = _before(case.line(SignKind.SERVER_ERROR), case.stop_asked)
    booted = life.booted or SignKind.READY in life
    lived = booted or (life.served and not failed) or case.engine_stop_asked
    by_whom = _by_first_line(case, {Meaning.ENDED: _OUTSIDE[Meaning.ENDED]})
    if not lived and not case.we_terminated:
        return by_whom or _undecided(
            "This log holds only the end of a shutdown; why the server stopped came before."
        )
    cause, error = case.cause, life.first.get(SignKind.ERROR)
    if (
        cause is not None
        and not _perhaps_of_one_call(cause.raised)
        and life.survived_until < cause.raised.first_line
    ):
        error = error or Sign(cause.raised.first_line, _named(cause))
    if (
        error is not None
        and _before(error.line, case.stop_asked)
        and SignKind.STOP_ASKED not in life
    ):
        why = (
            "An error came before the shutdown, which may be its cause; the lines that would show "
            f"it are not in this text: {error.text}"
        )
        return replace(_undecided(why), root=cause)
    if (port := life.first.get(SignKind.SHUTDOWN)) and port.text.startswith("[Errno"):
        return _lives(f"The server could not open its port, and shut down in order: {port.text}")
    if by_whom:
        return replace(by_whom, died=False, phase=Phase.SHUTDOWN)
    return _lives(
        "The server was stopped and shut down in order; errors that it logged meanwhile are no "
        "crash.",
        Phase.SHUTDOWN,
    )


def _open_end(case: _Case) -> Diagnosis:
    """Judge a text that no other rule decides: mostly undecided, with what is missing.

    The first line that holds is the answer, so their order matters.
    """
    life, inside = case.life, case.cut_inside
    cause = case.root if case.root_survived else case.cause
    # after the last sign of life
    raised_last = cause is not None and life.survived_until < cause.raised.first_line
    if inside is not None and not case.paste and (not raised_last or life.ready or life.booted):
        return _undecided(
            f"The log ends inside a traceback that {inside.process or 'the engine'} prints; only "
            "the rest shows whether the engine died."
        )
    if reported := _by_first_line(case, _OF_ANOTHER):
        return reported
    if life.finder.unread > life.survived_until and (life.ready or life.booted):
        return _undecided(
            "A traceback in this log has no frames that can be read: give the log as the server "
            "wrote it."
        )
    if SignKind.STACK in life and not case.raised:
        return _undecided(
            "A tool read the stack of a process, so that process lived: a hang, or one long step. "
            "Compare the stacks of all ranks."
        )
    if SignKind.BOOT_FAILED in life and not life.ready:
        why = "The engine did not come up, and this log does not show what ended it"
        return _by_exception(None, why, case.root)
    served = life.booted or life.boot_line or (life.ready and life.of_vllm)
    if not served and _OF_CLIENT.search("\n".join(life.prose)):  # a proxy answers like a server
        return _undecided(
            "This is the log of a client or a proxy: only its server's log can show whether the "
            "engine died."
        )
    lived = life.ready or life.booted or (life.offline and cause is None)
    if lived and not (raised_last and cause and cause.raised.native):
        return _silence(case)
    if cause is not None:
        if not cause.raised.level and MAIN.intersection(cause.raised.functions):
            return _by_exception(True, "An exception left an engine's main function", cause)
        why = "The engine raised an exception, and this log does not show what followed"
        if cause.frames and not _in_vllm(cause.printed):
            why = _OTHER_FAILED
        return _by_exception(None, why, cause)
    if script := next(filter(_of_script, case.raised), None):
        return _by_exception(None, _OTHER_FAILED, Root(raised=script))
    if any(cut.functions for cut in case.unfinished):
        return _undecided("The traceback in this text ends before its exception: paste it whole.")
    others = [each for each in case.raised if not (each.of_dead_engine or each.of_side_thread)]
    if life.is_log and others:
        return _by_exception(None, _ALONE, Root(raised=others[0]))
    if life.boot_line:
        return _silence(case)
    if not case.paste:
        return _undecided(
            "This part of a log has no line with which vLLM boots or answers: paste it from the "
            f"boot on. {_LOOK}"
        )
    return _by_first_line(case, _REPORTED) or _undecided(
        "There is neither a server's log nor a server's traceback in this text."
    )


_OF_CLIENT = re.compile(
    r"=+ Serving Benchmark Result =+|LiteLLM (?:Proxy|Router)\b|/litellm/|\bopen_webui\b"
)
_OF_ANOTHER: dict[AnySign, str] = {
    SignKind.OOM_NAMED: "The kernel killed a process like vLLM's, perhaps of another server",
    SignKind.PEER_LOST: _LOST_PEER,
}
_REPORTED: dict[AnySign, str] = {
    **dict.fromkeys(
        (Meaning.KILLED, *_OUTSIDE),
        "This text has no log of a server, only the report of another program",
    ),
    Meaning.NOT_STARTED: (
        "This text has no log of a server, only another program's report of what kept a container "
        "from starting"
    ),
}


def _silence(case: _Case) -> Diagnosis:
    """Judge a log that ends without any sign of an end: a killed process prints nothing.

    The engine did not die if the caller stopped it, its boot was interrupted, or another program
    reports that it runs. Else it is undecided.
    """
    life = case.life
    if case.we_terminated:
        return _lives("Nothing in this log shows that the engine died.", open_end=True)
    ended, dump = map(life.first.get, (SignKind.PROGRAM_ENDED, SignKind.DUMP))
    last, where = life.last_line, ""
    if life.ready and not life.offline and ended and last and last.number <= ended.line:
        return replace(
            _undecided(
                "The server ended without a shutdown, as what cleans up after it shows: "
                f"{ended.text}. {_LOOK}"
            ),
            open_end=True,
        )
    refused, running = map(life.first.get, (Meaning.UNREACHABLE, Meaning.RUNNING))
    after = running is not None and (last is None or last.number < running.line)
    # a sentence above a log counts if the engine answers below the last error
    failed = max((each.first_line for each in case.raised), default=0)
    if running is not None and running.line < life.booted_at and life.lives_below(failed):
        report = report_of(running.text)
        after |= report is not None and report.reporter == PROSE
    if running is not None and after and life.ready and not _JUST_STARTED.search(running.text):
        return _lives(f"The engine works where its log ends, and it still runs: {running.text}")
    if dump is not None and life.survived_until < dump.line:
        why = (
            f"A step failed (line {line_in_file(dump.line)}), and its exception is not in this log."
        )
        return replace(_undecided(why), open_end=True, phase=Phase.REQUEST)
    if _boot_interrupted(case):
        return _lives(_INTERRUPTED)
    failed_requests = SignKind.SERVER_ERROR in life or SignKind.STREAM_FAILED in life
    calm = "up after a failed request" if failed_requests else "without a failure"
    state = "The server was still booting, without a failure"
    if life.boot_line and not life.booting:
        state = "The engine had booted, without a failure"
    if life.offline:
        state = "The program that uses vLLM ran without a failure"
    elif life.only_workers:
        state = "The workers of this rank were without a failure"
    elif life.ready:
        working = any(life.busy.values())
        state = f"The server was {'answering requests' if working else calm}"
    if last is not None:
        where = f" (line {line_in_file(last.number)}{', ' + last.stamp if last.stamp else ''})"
    why = f"{state} where this log ends{where}: it may run on, or have been killed"
    quoted = any(each.frames and life.last_error.startswith(each.exception) for each in case.raised)
    if last is not None and life.last_error and not quoted:
        of = f" of {last.process}" if last.process else ""
        error = life.last_error[:_QUOTE].rstrip(".")
        why = f"The last line{where} is an error{of}, and what followed is not here: {error}"
    if refused is not None and life.ready and last and last.number < refused.line:
        why = f"{state} where this log ends{where}, and answers no more: {refused.text.rstrip('.')}"
    return replace(_undecided(f"{why}. {_LOOK}"), open_end=True)


def _boot_interrupted(case: _Case) -> bool:
    """Return True if Ctrl-C ended the server program before it was ready."""
    # without a log's level: Python prints it when the program ends, and no logger
    interrupts = (each for each in case.raised if each.exception == "KeyboardInterrupt")
    return not case.life.ready and any(_of_server(each) and not each.level for each in interrupts)


_JUST_STARTED = re.compile(r"(?i)\b\d{1,2} ?s(?:ec(?:onds?)?)?\b|\b0:00:\d\d\b|less than a minute")
"""The age of a server in a process list that may be a later life than that of the log."""
_LOOK = (
    "If it is gone, look at `kubectl describe pod` or `docker inspect` (exit 137: killed), `dmesg` "
    "(OOM, Xid), the rest of the log, and the logs of the other ranks."
)


_RULES = (
    *(
        _refused,
        _by_kernel,
        _by_signal,
        _last_words,
        _silent_end,
        _without_fatal_line,
        _multiprocessing,
        _pasted,
    ),
    *(_killed_or_ended, _killed_as_it_stopped, _offline, _by_single_sign, _stopped),
)
"""Rules in the order in which they are tried.

First the rules that name a cause, the surest first; then a single sign; a shutdown counts only if
nothing failed before it.
"""


_FAILURE = re.compile(
    r"(?i)\[type=|error|not found|fail|cannot|no such|denied|unable|missing|exit type:"
)
_COMPILER = re.compile(r"^nvcc fatal|\berror: |: not found$|^Killed$|No space left")
_ANNOUNCES = re.compile(r":$|^\d+ validation errors? for |^The actor died unexpectedly")


def telling_line(message: str) -> str:
    """Return the first line of a message.

    If it only announces the next ones, return the first of them that names a failure; of a failed
    build the compiler's.
    """
    first, *lines = message.strip().split("\n")
    if lines and _ANNOUNCES.search(first):
        telling = _COMPILER if "\nFAILED: " in message else _FAILURE
        told = next(filter(telling.search, lines), None)
        return (told or next(filter(_FAILURE.search, lines), lines[0])).strip()
    return first


def _named(root: Root | None) -> str:
    """Return words for an exception: its class, its function and the first line of its message.

    root: None if the log does not hold it.
    """
    if root is None:
        return "the exception behind it is not in this log"
    first, told = root.message.strip().partition("\n")[0], telling_line(root.message)
    first = first if told == first else f"{first.removesuffix(':')}: {told}"
    short = first if len(first) <= 160 else first[:159] + "…"
    name = bare_name(root.raised.exception)
    if not root.class_known:
        name = "an exception whose class is not in this log"
    where = f" in {root.frames[-1].function}" if root.frames else ""
    return f"{name}{where}{': ' + short if short else ''}".rstrip(".")


def _names_in(links: tuple[Raised, ...]) -> frozenset[str]:
    """Return the names of the functions in all links of a chain, and of calls that timed out."""
    called = (_CALL.findall(link.message) for link in links)
    return frozenset(chain(*called, *(link.functions for link in links)))


_CALL = re.compile(r"^RPC call to (\w+) timed out")
"""The function of a worker that did not answer."""


def _tells_phase(functions: frozenset[str]) -> bool:
    """Return True if the functions show what the engine did: warm up, step or boot."""
    return warming_up(functions) or stepping(functions) or booting(functions)


def _in_engine(case: _Case, raised: Raised) -> bool:
    """Return True if an engine raised it and is not known to have survived it."""
    return Root(raised=raised).from_engine and raised.first_line > case.life.survived_until


_CAPTURES = re.compile(r"\s*Capturing (?:CUDA )?graph", re.IGNORECASE)
"""A progress bar of the warm-up, which has no prefix."""
_NEXT = 2
"""Most lines from an answer's first line to the death of its engine."""


def _phase(case: _Case, diagnosis: Diagnosis) -> Phase | None:
    """Return the engine's phase (boot, request, …) by the root's functions or the log's signs.

    None if neither shows it.
    """
    life = case.life
    root = diagnosis.root
    links = () if root is None or _of_script(root.raised) else root.printed.links
    functions = _names_in(links)
    if diagnosis.died:
        if not functions and SignKind.NATIVE_CRASH in life:
            functions = frozenset(name for _, name in _DUMPED.findall("\n".join(life.prose)))
        # another exception of the engine may show what it did, such as a wrapper's
        others = (_names_in(raised.links) for raised in case.raised if _in_engine(case, raised))
        functions = next(filter(_tells_phase, (functions, *others)), functions)
    if warming_up(functions):
        return Phase.WARMUP
    in_worker = any(frame.file.startswith(_WORKER_FILES) for frame in diagnosis.frames)
    if stepping(functions):
        return Phase.REQUEST
    # Another service in the text may have been ready before.
    in_boot = any(link.headline.endswith("EngineCore failed to start.") for link in links)
    if booting(functions) or in_boot or (not functions and SignKind.BOOT_FAILED in life):
        return Phase.BOOT
    if (life.ready and in_worker) or SignKind.DUMP in life:
        return Phase.REQUEST
    if life.offline and life.prompts_open:
        return Phase.REQUEST
    asked = life.open and diagnosis.died
    if not life.ready and any(map(_CAPTURES.match, life.prose[-1:])):
        return Phase.WARMUP
    if not life.ready and not asked:
        begun = life.booted or (life.booting and case.engine_missing is None)
        # EngineCore meets a fatal error once it has booted
        fatal = SignKind.FATAL in life or any(_FATAL_ERROR in link.headline for link in links)
        workers = life.only_workers and not (case.raised or case.unfinished)
        begun &= not (life.headless or workers or life.offline or fatal)
        return Phase.BOOT if begun or SignKind.BOOT_FAILED in life else None
    waited = any(raised.of_dead_engine and "generate" in raised.functions for raised in case.raised)
    broken = SignKind.STREAM_FAILED in life and diagnosis.died
    serving = waited or broken or asked or SignKind.SERVER_ERROR in life or any(life.busy.values())
    # a server that closes logs each stream that failed
    if diagnosis.died and life.open is None and not serving and SignKind.CLOSED not in life:
        # next below such an answer: the server logs its counts ten seconds after the last request
        below = (case.first_end or 0) - life.may_stream
        return Phase.REQUEST if 0 < below <= _NEXT else None
    of_engine = life.last_line is not None and life.last_line.process.startswith(_ENGINE_PARTS)
    if of_engine and "is an error of" in diagnosis.why and not serving:
        return None
    return Phase.REQUEST if serving else Phase.IDLE


_FATAL_ERROR = "EngineCore encountered a fatal error."
_ENGINE_PARTS = ("Worker", "VllmWorker", "RayWorker", *ENGINE_NAMES)

_WORKER_FILES = ("vllm/v1/worker/", "vllm/worker/")
