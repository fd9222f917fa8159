"""Rules that turn the signs of one life of a server into a diagnosis.

The rules go by mechanism, the strongest first: the last lines of the process that died, then a process that others miss,
then an exception that nothing catches, then what is ambiguous. Two facts separate a death from an ordered shutdown:

- Which process logged a request to stop, and whether before any process was missing. uvicorn logs "Shutting down" after a
  request to stop and after a death; newer releases log `[shutdown] API server: shutdown triggered` for the first only.
- Whether the exception is one of termination: printed because another process is gone, or because this one is closing.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_repro_diagnosis.engine_code import booting, leaves_the_engine, starting, stepping, warming_up
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.life_signs import HANDLER_FAILED, ServerLife, SignKind
from vllm_repro_diagnosis.root_cause import Root, find_root
from vllm_repro_diagnosis.tracebacks import Frame, Raised, Unfinished, bare_name

__all__ = ["Diagnosis", "Phase", "judge_life"]


class Phase(StrEnum):
    """Part of the engine's life in which it died, or in which the log of a living one ends."""

    BOOT = "boot"
    WARMUP = "warmup"  # the part of the boot that profiles, compiles and captures graphs
    REQUEST = "request"
    IDLE = "idle"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The diagnosis of one text.

    died: True, False (alive as far as the log goes, or stopped on request), or None if the text does not decide it.
    why: one sentence for people. root: the exception to report.
    lost_worker: a worker process ended without an exception, and that is the cause.
    open_end: the log does not show how this life ended, if it did.
    usage: argparse's error, if the command line was refused. connector: class of the KV connector; empty if there is none, None if unknown.
    prose: what surrounds the log in a pasted text, or all of it. evidence: what the server was, if the text shows it.
    """

    died: bool | None
    why: str
    root: Root | None = None
    phase: Phase | None = None
    lost_worker: bool = False
    open_end: bool = False
    vllm_version: str | None = None
    usage: str | None = None
    connector: str | None = None
    prose: str = ""
    evidence: Evidence = Evidence.UNKNOWN

    @property
    def exception(self) -> str | None:
        """Return the class of the root; the wrapper's if only the text that it quotes is known."""
        return self.root.raised.exception if self.root else None

    @property
    def message(self) -> str | None:
        return self.root.message if self.root else None

    @property
    def frames(self) -> tuple[Frame, ...]:
        return self.root.frames if self.root else ()


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One life with what the rules need to know of it. Numbers are lines of the log; None means not in it."""

    life: ServerLife
    raised: tuple[Raised, ...]
    cut_inside: Unfinished | None
    root: Root | None
    we_terminated: bool | None

    def line(self, *kinds: SignKind) -> int | None:
        return _first(*(self.life.line_of(kind) for kind in kinds))

    @property
    def engine_missing(self) -> int | None:
        """The first line in which the API server reports a dead engine."""
        return self.line(SignKind.ENGINE_GONE, SignKind.ENGINE_DEAD)

    @property
    def first_end(self) -> int | None:
        """The first line that reports an end of any process."""
        return _first(self.engine_missing, self.line(SignKind.FATAL, SignKind.WORKER_DIED, SignKind.BOOT_FAILED))

    @property
    def stop_asked(self) -> int | None:
        """The line in which the API server began an ordered shutdown, not one because its engine was gone."""
        # A 503 of /health does not prove a death, but a uvicorn shutdown after one does not prove a request to stop.
        shutdown = self.line(SignKind.SHUTDOWN)
        unhealthy = None if self.engine_missing is None else self.line(SignKind.HEALTH_503)
        stopping = _first(self.line(SignKind.STOP_ASKED), shutdown if _before(shutdown, unhealthy) else None)
        return stopping if _before(stopping, self.first_end) else None

    @property
    def engine_stop_asked(self) -> bool:
        """Return True if EngineCore logged a request to stop before any end was reported."""
        return _before(self.line(SignKind.ENGINE_STOP_ASKED), self.first_end)

    @property
    def ordered(self) -> bool:
        return self.stop_asked is not None or self.engine_stop_asked

    @property
    def after_stop(self) -> bool:
        """Return True if nothing was raised before an ordered shutdown began."""
        own = self.own_root
        stopping = self.line(SignKind.STOP_ASKED, SignKind.SHUTDOWN, SignKind.ENGINE_STOP_ASKED)
        return self.ordered and (own is None or not _before(own.raised.first_line, stopping))

    @property
    def own_root(self) -> Root | None:
        """Return the root, unless it only reports that something else ended."""
        root = self.root
        if root is None or root.of_termination:
            return None
        lost = root.of_consequence and _before(self.line(SignKind.WORKER_DIED), root.raised.first_line)
        return None if lost else root


def judge_life(life: ServerLife, we_terminated: bool | None) -> Diagnosis:
    """Return the diagnosis of the first rule that applies."""
    life.finish()
    inside = life.cut_inside  # before the tracebacks are closed
    raised = life.finder.finish()
    root = find_root(raised, paste=not life.is_log, survived=life.survived_until)
    case = _Case(life=life, raised=raised, cut_inside=inside, root=root, we_terminated=we_terminated)
    found = next((found for rule in _RULES if (found := rule(case)) is not None), None) or _open_end(case)
    return replace(
        found,
        phase=found.phase or _phase(case, found),
        vllm_version=life.boot.facts().vllm_version,
        usage=life.usage,
        connector=life.connector,
        prose="\n".join(life.prose) if found.root is None or not life.is_log else "",
    )


def _first(*lines: int | None) -> int | None:
    return min((line for line in lines if line is not None), default=None)


def _before(line: int | None, other: int | None) -> bool:
    """Return True if `line` is known and not after `other`."""
    return line is not None and (other is None or line < other)


def _left_the_engine(case: _Case) -> bool:
    own = case.own_root
    return own is not None and own.from_engine and leaves_the_engine(own.raised)


def _died(why: str, root: Root | None = None, phase: Phase | None = None) -> Diagnosis:
    return Diagnosis(died=True, why=why, root=root, phase=phase)


def _undecided(why: str, root: Root | None = None, phase: Phase | None = None) -> Diagnosis:
    return Diagnosis(died=None, why=why, root=root, phase=phase)


def _refused(case: _Case) -> Diagnosis | None:
    life = case.life
    if life.usage is None or life.ready or SignKind.FATAL in life:
        return None
    why = "The command line was refused: no engine was started, so none died."
    return Diagnosis(died=False, why=why, phase=Phase.BOOT)


def _by_kernel(case: _Case) -> Diagnosis | None:
    """Apply the kernel's report: a process that it kills cannot log anything."""
    killed = case.life.first.get(SignKind.OOM_KILLED)
    if killed is None or case.own_root is not None or _before(case.stop_asked, killed.line):
        return None
    return _died(f"The kernel killed a process of this server because memory ran out: {killed.text}")


def _last_words(case: _Case) -> Diagnosis | None:
    """Apply the last log lines of EngineCore, or of the process above a worker."""
    life, root, own = case.life, case.root, case.own_root
    worker, failed = life.first.get(SignKind.WORKER_DIED), life.first.get(SignKind.BOOT_FAILED)
    if failed is not None and not life.ready:
        if own is not None:
            return _died(f"The engine did not come up: {_named(own)}{_by_signal_code(own.message)}.", own)
        if root is None and life.is_log:
            return _died(f"The engine did not come up: {failed.text}{_by_signal_code(failed.text)}")
        if root is not None and _is_exit(root.raised):
            return Diagnosis(died=False, why="The boot was interrupted by a signal; nothing failed by itself.")
    if own is None:
        if case.ordered:
            return None
        if _before(case.line(SignKind.WORKER_STOPPED), case.line(SignKind.WORKER_DIED, SignKind.FATAL)):
            return _undecided("A signal stopped a worker and EngineCore gave up; this log does not show who sent it.")
        if worker is not None:
            why = f"A worker process ended without an exception: {worker.text}{_by_signal_code(worker.text)}"
            return replace(_died(why), lost_worker=True)
    if SignKind.FATAL in life and (life.is_log or root is not None):
        return _died(f"EngineCore met a fatal error: {_named(root)}.", root)
    if worker is not None and not case.ordered:
        return _died(f"A worker process ended: {_named(own)}.", own)
    return None


_EXIT_CODE = re.compile(r"exit code: -(\d+)|': -(\d+)\}")
_SIGNALS = {
    signal.SIGABRT: "an abort in C++ code",
    signal.SIGBUS: "often too little /dev/shm",
    signal.SIGILL: "an illegal instruction. On a CPU with AMX this is a known bug: vLLM's CPU attention uses AMX without asking "
    "Linux for it; --dtype float32 avoids that",
    signal.SIGKILL: "often the kernel, because memory ran out",
    signal.SIGSEGV: "a segmentation fault",
}


def _by_signal_code(text: str) -> str:
    """Return the signal that an exit code in the text stands for, as the end of a sentence; "" without one."""
    found = _EXIT_CODE.search(text)
    code = int(found[1] or found[2]) if found else 0
    if code not in set(signal.Signals):
        return ""
    meaning = _SIGNALS.get(signal.Signals(code))
    return f" ({signal.Signals(code).name}{': ' + meaning if meaning else ''})"


def _silent_end(case: _Case) -> Diagnosis | None:
    """Judge an EngineCore that ended without logging it, as the API server noticed."""
    life = case.life
    if case.engine_missing is None or case.stop_asked is not None or _left_the_engine(case):
        return None
    if case.engine_stop_asked:
        if SignKind.ENGINE_GONE not in life or SignKind.STOP_ASKED in life:
            return None
        return _undecided("A signal stopped EngineCore and not the API server; this log does not show who sent it.")
    if not life.is_log:
        return None
    handler = next((one for one in case.raised if one.headline == HANDLER_FAILED and not one.of_dead_engine), None)
    if handler is not None and SignKind.ENGINE_GONE not in life:
        root = Root(raised=handler)
        return _died(f"The API server can take no more answers from its engine: {_named(root)}.", root)
    own = case.own_root
    if own is not None and life.survived_until < own.raised.first_line < case.engine_missing:
        return _died(f"The API server reports a dead engine; the exception before that: {_named(own)}.", own)
    if case.root is not None and case.root.of_termination and life.first_engine_line and not life.booted:
        return _undecided(
            "EngineCore reports that another process ended; what ended it came before this part of the log."
        )
    if crash := life.first.get(SignKind.NATIVE_CRASH):
        how = f"it crashed in native code ({crash.text})"
    elif _before(life.first_engine_line, case.engine_missing) and not life.engine_error:
        how = "it printed nothing, like a process killed by a signal"
    else:  # its lines are missing or torn, so its silence proves nothing
        how = "what it printed is not in this part of the log"
    return _died(f"EngineCore was gone before anybody asked the server to stop; {how}.")


def _uncaught(case: _Case) -> Diagnosis | None:
    """Judge an exception that left a loop in which nothing catches it, without the line that reports it."""
    life = case.life
    if not life.is_log:
        return None
    own = case.own_root
    if own is not None and case.after_stop:
        return None
    if own is not None and _left_the_engine(case):
        if own.of_lost_peer:
            return _undecided(f"This rank lost its peer, and only the peer's log can show why: {_named(own)}.", own)
        return _died(f"An exception left the engine's own loop: {_named(own)}.", own)
    if case.ordered:
        return None
    if crash := life.first.get(SignKind.NATIVE_CRASH):
        return _died(f"A process crashed in native code: {crash.text}", own)
    return None if life.ready else _program(case, frozenset())


def _program(case: _Case, but: frozenset[str]) -> Diagnosis | None:
    """Judge an exception that ended the server program. but: functions that do not show that it was one."""
    # The interpreter prints an uncaught exception without a level; its frames include the program's own.
    ended = next((one for one in case.raised if not one.level and starting(frozenset(one.functions) - but)), None)
    if ended is None or _is_exit(ended):
        return None
    last = Root(raised=ended.links[0] if ended.explicit else ended)
    return _died(f"The server ended while it booted, before an engine served: {_named(last)}.", last, Phase.BOOT)


def _is_exit(raised: Raised) -> bool:
    return bare_name(raised.exception) in ("SystemExit", "KeyboardInterrupt")


def _pasted(case: _Case) -> Diagnosis | None:
    """Judge a pasted text that is no log."""
    life, root = case.life, case.root
    if life.is_log or case.after_stop:
        return None
    if crash := life.first.get(SignKind.NATIVE_CRASH):
        return _died(f"A process crashed in native code: {crash.text}", root)
    reported = case.engine_missing is not None or any(one.reports_dead_engine for one in case.raised)
    quoted = life.quoted and root is not None and bool(root.raised.frames)
    if (reported and not case.ordered) or quoted:
        return _died(f"The text reports that the engine died{': ' + _named(root) if root else ''}.", root)
    if root is None:
        return None
    if leaves_the_engine(root.raised):
        return _died(f"An exception left the engine's step or boot, where nothing catches it: {_named(root)}.", root)
    if starting(frozenset(root.raised.functions) - {"<module>"}) and not _is_exit(root.raised):
        return _died(f"The server ended while it booted: {_named(root)}.", root, Phase.BOOT)
    return _program(case, frozenset({"<module>"})) or _undecided(
        f"An exception without its log does not show whether an engine died: {_named(root)}.", root
    )


def _by_signal(case: _Case) -> Diagnosis | None:
    """Judge the line of a shell, compose or systemd when a signal ended the server: nothing else in the log can show it."""
    ended = case.life.first.get(SignKind.BY_SIGNAL)
    if ended is None or case.ordered or not (case.life.booted or case.life.ready):
        return None
    return _died(f"What started the server reports that a signal ended it: {ended.text}")


def _exited(case: _Case) -> Diagnosis | None:
    ended = case.life.first.get(SignKind.EXITED)
    if ended is None or case.ordered:
        return None
    return _undecided(f"The server ended, and this log does not show why: {ended.text}")


def _unhealthy(case: _Case) -> Diagnosis | None:
    """Judge a 503 of /health alone: a server that is scaled and a proxy return it too."""
    unhealthy = case.line(SignKind.HEALTH_503)
    if unhealthy is None or _before(case.stop_asked, unhealthy):
        return None
    return _undecided("/health was answered with 503 and not again with 200; the engine may be dead or not.")


def _unclear(case: _Case) -> Diagnosis | None:
    """Judge what may be an end or not."""
    life = case.life
    # Before an ordered shutdown, one count without a token may have been a long step.
    if max(life.stalls.values(), default=0) > case.ordered or (life.waits > 1 and not case.ordered):
        why = "Where this log ends, requests or workers wait and no token comes: a hang, or one very long step."
        return _undecided(why, phase=Phase.REQUEST)
    if SignKind.DRAINING in life and SignKind.CLOSED not in life and not case.we_terminated:
        why = "The server was asked to stop, but requests are open where this log ends: a hang, or the log is cut."
        return _undecided(why, phase=Phase.REQUEST)
    if case.stop_asked is not None and case.we_terminated is False:
        why = "The server shut down in order, but not at the caller's request; this log does not show who stopped it."
        return _undecided(why, phase=Phase.SHUTDOWN)
    if case.stop_asked is not None or case.we_terminated:
        return None
    if case.engine_stop_asked:
        if SignKind.SHUTDOWN in life:
            return None
        return _undecided(
            "EngineCore was asked to stop, but the API server logs no shutdown: it was killed, or the log is cut."
        )
    if SignKind.PARENT_GONE in life:
        return _undecided("A worker outlived its parent process; this log does not show how the parent ended.")
    return None


def _stopped(case: _Case) -> Diagnosis | None:
    if not case.ordered:
        return None
    life = case.life
    failed = _before(case.line(SignKind.SERVER_ERROR), case.stop_asked)
    lived = life.booted or SignKind.READY in life or (life.served and not failed) or case.engine_stop_asked
    if not lived and not case.we_terminated:
        return _undecided("This log holds only the end of a shutdown; why the server stopped came before.")
    why = "The server was stopped and shut down in order; errors that it logged meanwhile are no crash."
    return Diagnosis(died=False, why=why, phase=Phase.SHUTDOWN)


def _open_end(case: _Case) -> Diagnosis:
    life, inside, own = case.life, case.cut_inside, case.own_root
    if inside is not None and life.is_log:
        who = f"{inside.process} prints" if inside.process else "the engine prints"
        return _undecided(f"The log ends inside a traceback that {who}; only the rest shows whether the engine died.")
    if named := life.first.get(SignKind.OOM_NAMED):
        return _undecided(f"The kernel killed a process like vLLM's, perhaps of another server: {named.text}")
    if life.finder.unread > life.survived_until and (life.ready or life.booted):
        return _undecided(
            "A traceback in this log has no frames that can be read: give the log as the server wrote it."
        )
    if SignKind.BOOT_FAILED in life and not life.ready:
        return _undecided(
            f"The engine did not come up, and this log does not show what ended it: {_named(case.root)}.", case.root
        )
    if life.ready:
        why = "Nothing in this log shows that the engine died."
        return Diagnosis(died=False, why=why, open_end=True)
    if life.booted:
        why = "The server was still booting, without a failure, where this log ends."
        return Diagnosis(died=False, why=why, open_end=True)
    if life.is_log and own is not None:
        return _undecided(
            f"The engine raised an exception, and this log does not show what followed: {_named(own)}.", own
        )
    if life.is_log:
        return _undecided("This part of a log shows neither a boot nor an answered request: paste it from the boot on.")
    return _undecided("There is neither a server's log nor a server's traceback in this text.")


_RULES = (
    *(_refused, _by_kernel, _last_words, _silent_end, _uncaught, _pasted),
    *(_by_signal, _unhealthy, _unclear, _exited, _stopped),
)


def _named(root: Root | None) -> str:
    if root is None:
        return "the exception behind it is not in this log"
    first = root.message.strip().partition("\n")[0]
    short = first if len(first) <= 160 else first[:159] + "…"
    name = bare_name(root.raised.exception) if root.class_known else "an exception whose class is not in this log"
    where = f" in {root.frames[-1].function}" if root.frames else ""
    return f"{name}{where}{': ' + short if short else ''}".rstrip(".")


def _phase(case: _Case, found: Diagnosis) -> Phase | None:
    life = case.life
    root = found.root
    links = () if root is None else root.raised.links
    functions = frozenset(name for link in links for name in link.functions)
    if warming_up(functions) and not life.ready:
        return Phase.WARMUP
    frames = () if root is None else root.frames
    in_worker = life.ready and any(frame.file.startswith(("vllm/v1/worker/", "vllm/worker/")) for frame in frames)
    if stepping(functions) or in_worker or SignKind.DUMP in life:
        return Phase.REQUEST
    if not life.ready:
        failed = SignKind.BOOT_FAILED in life or booting(functions)
        return Phase.BOOT if failed or (life.booted and not life.headless) else None
    if found.died is False:
        return Phase.REQUEST if any(life.busy.values()) else Phase.IDLE
    waited = any(one.of_dead_engine and "generate" in one.functions for one in case.raised)
    return Phase.REQUEST if waited or SignKind.SERVER_ERROR in life else Phase.IDLE
