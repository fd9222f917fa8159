"""Diagnosis of an engine from a server log or a pasted traceback. Pure.

The last lines of a log mislead. `EngineDeadError` only reports a death, and an ordered shutdown can
print it too. A killed process prints nothing. A refused request can print a whole traceback. An
exception in the cleanup stands closer to the end than its cause. If a log does not decide it,
`died` is None and `why` names what is missing.

The rules are in `vllm_repro_diagnosis.judgement`, the search for the root is in
`vllm_repro_diagnosis.root_cause`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader

from vllm_repro_diagnosis.access_runs import AccessRuns, kind_of
from vllm_repro_diagnosis.boot_facts import EVIDENCE_WORDS, evidence_in
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.judgement import Diagnosis, Phase, judge_life
from vllm_repro_diagnosis.life_signs import BEGINNINGS, INITIALIZES, ServerLife, boot_marker
from vllm_repro_diagnosis.log_text import Line, from_the_end, read_lines
from vllm_repro_diagnosis.outside import report_of

__all__ = ["Diagnosis", "Phase", "diagnose"]

_Readable = str | bytes | BufferedReader


def diagnose(source: _Readable | Iterable[Line], *, we_terminated: bool | None = None) -> Diagnosis:
    """Diagnose a server log, a part of one, or a pasted traceback.

    A log may hold several lives of a server, as of a container that restarts. The first life that
    died counts, else the first that ended silently, else the last. Later lives only add to the
    evidence, to the number of deaths and to `why`.

    A log with the newest lines first is read again from its end, up to 20,000 lines. In any other
    wrong order no cause is named.

    source: an open binary file is read ten times as fast as its text. we_terminated: the caller
    stopped this server itself; None if unknown.
    """
    streams: dict[str, _Container] = {}
    order, later_evidence, deaths = _Order(), set[Evidence](), _LaterDeaths()
    runs, latest = AccessRuns(), dict[str, Line]()
    readable = isinstance(source, _Readable)
    lines = read_lines(source, runs) if isinstance(source, _Readable) else source
    kept: list[Line] | None = [] if readable else None  # while they may be the newest first
    for line in lines:
        if kept is not None:
            kept.append(line)
            kept = None if order.rises or len(kept) > _MOST_KEPT else kept
        # Runs of equal access lines are skipped unparsed, see `access_runs`.
        if runs.only is not None:
            later_evidence.add(evidence_in([line]))
            deaths.feed(line)
            continue
        server = _container_of(line, streams)
        if runs.dropped:  # before the end of a run, which is a line of the same server
            server.life.skip(runs.dropped)
            for kind, time in runs.stamps:
                order.note_time(latest[kind], time)
            runs.dropped, runs.stamps = 0, []
        if server.life.ended_by(line):
            server.end_life()
            latest.clear()
            if server.died and len(streams) == 1 and not order.broken:
                weaker = _marks_of_weaker(_evidence(server.died, server.evidence))
                runs.only = (*weaker, *_LATER_DEATHS)
                deaths.feed(line)
                continue
        server.life.feed(line)
        order.feed(line)
        if not line.stream and (kind_here := kind_of(line.raw)):
            latest[kind_here] = line
            settled = server.life.is_settled
            runs.skip([kind for kind, last in latest.items() if settled(last)])
        else:
            runs.skip(())
    servers = list(streams.values()) or [_Container()]
    diagnosis = _most_telling(servers, we_terminated)
    seen = later_evidence.union(*(server.evidence for server in servers))
    count = deaths.count + sum(server.deaths for server in servers)
    diagnosis = replace(diagnosis, evidence=_evidence(diagnosis, seen), deaths=count)
    if diagnosis.died and (deaths.ready or deaths.count):
        later = "A later life in this text was ready to serve." if deaths.ready else ""
        if deaths.count:
            at = f" ({deaths.last})" if deaths.last else ""
            later = f"The last of {count} deaths{at} may have another cause. {later}".rstrip()
        diagnosis = replace(diagnosis, why=f"{diagnosis.why.rstrip('.')}. {later}")
    if order.broken:
        if kept and (again := diagnose(from_the_end(kept), we_terminated=we_terminated)).died:
            return again
        return _without_order(diagnosis, any(server.stopped for server in servers))
    return diagnosis


_MOST_KEPT = 20_000
"""Most lines of a log that are read again from its end."""
_LATER_DEATHS = (
    *(words.encode() for words in (*BEGINNINGS, INITIALIZES)),
    *(b"EngineCore encountered a fatal error.", b"EngineCore failed to start."),
    *(b"died unexpectedly", b"EngineDeadError: EngineCore"),
    b"Application startup complete.",
)


class _LaterDeaths:
    """Counter of deaths in the lives of a server after the first that died, one for each life."""

    def __init__(self) -> None:
        self.count = 0
        # time of the last one, or ""
        self.last = ""
        # a later life was ready
        self.ready = False
        # the present life has reported no death yet
        self._fresh = True
        # EngineCore's name and pid in the last death that it reported
        self._engine: tuple[str, int | None] = "", None

    def feed(self, line: Line) -> None:
        """Take one line; count a death that is the first of its life, and note `ready`."""
        begins = boot_marker(line) is not None or line.text.startswith(INITIALIZES)
        died = any(words.decode() in line.text for words in _LATER_DEATHS[len(BEGINNINGS) + 1 : -1])
        self.ready |= _LATER_DEATHS[-1].decode() in line.text
        name, pid = self._engine
        again = line.process == name and line.pid != pid
        if (self._fresh or again) and died and line.level != "INFO":
            self.count, self.last = self.count + 1, line.stamp
        self._fresh = begins or (self._fresh and not died)
        if died and line.process.startswith("EngineCore"):
            self._engine = line.process, line.pid


def _container_of(line: Line, streams: dict[str, _Container]) -> _Container:
    """Return the container whose server printed a line; add it to `streams` if it is new.

    A line in which another program reports an end, such as compose's "exited with code 137", goes
    to the only vLLM server in the text if one of the two has no container's name.
    """
    server = streams.get(line.stream)
    if server is not None and (server.of_vllm or server.life.of_vllm):
        return server
    if report_of(line.text) and (not line.stream or report_of(f"{line.stream} {line.text}")):
        of_vllm = [name for name, each in streams.items() if each.of_vllm or each.life.of_vllm]
        # compose names the container that ended; the log of `docker logs` has no name
        if len(of_vllm) == 1 and "" in (line.stream, *of_vllm):
            return streams[of_vllm[0]]
    return server or streams.setdefault(line.stream, _Container())


_MOST_SILENT = 64
"""Most lives kept of which it is open whether they ended silently or go on beside the next."""


@dataclass(slots=True)
class _SilentLife:
    """Life of a server whose lines end without showing how it ended."""

    # place among the lives of its container, from 1
    number: int
    diagnosis: Diagnosis
    api_pid: int | None
    # its server may still log beside the later lives
    open: bool = True


class _Container:
    """The lives of the server in one container of a log: boots that follow one another.

    Each is judged when the next begins, so that a log of many lives needs no more memory.
    """

    def __init__(self) -> None:
        # the present life
        self.life = ServerLife()
        # diagnosis of the first life that died
        self.died: Diagnosis | None = None
        self.deaths = 0
        # of all lives
        self.evidence: set[Evidence] = set()
        # a life logged a shutdown; a life logged lines of vLLM
        self.stopped = self.of_vllm = False
        self._lives = 1
        self._silent: list[_SilentLife] = []

    def end_life(self) -> None:
        """Judge the present life, keep its diagnosis if it died or fell silent, begin the next."""
        life = self.life
        self.life = ServerLife(life)
        diagnosis = self._judge(life, None)
        settled = any(not silent.open for silent in self._silent)
        if diagnosis.open_end and not settled and len(self._silent) < _MOST_SILENT:
            self._silent.append(_SilentLife(self._lives, diagnosis, life.api_pid))
        self._lives += 1

    def diagnosis(self, we_terminated: bool | None) -> Diagnosis:
        """Return the diagnosis of the first life that died, else fell silent, else of the last.

        Call it once, at the end of the log: it judges the present life and counts its death.
        we_terminated: the caller stopped the server; it is about the last life alone.
        """
        last = self._judge(self.life, we_terminated)
        if self.died is not None:
            return self.died
        if not self._silent:
            return last
        first = self._silent[0]
        why = (
            f"This log holds {self._lives} lives of a server, and number {first.number} ended "
            "without a reason: it was killed, or its last lines are not here."
        )
        return replace(first.diagnosis, died=None, why=why)

    def _judge(self, life: ServerLife, we_terminated: bool | None) -> Diagnosis:
        """Return the diagnosis of one life, and note its death, evidence and shutdown.

        Drop the silent lives whose server logs in this life: they go on.
        """
        diagnosis = judge_life(life, we_terminated)
        self.deaths += bool(diagnosis.died)
        if self.died is None and diagnosis.died:
            self.died = diagnosis
        self.evidence.add(life.boot.evidence)
        self.stopped |= not life.stopping.isdisjoint(life.first)
        self.of_vllm |= life.of_vllm
        # In a container each life has the same pid. Outside of one, a pid that still logs belongs
        # to another server, which shares the log.
        for silent in self._silent:
            if silent.number == self._lives - 1:
                silent.open = silent.api_pid not in (None, life.api_pid)
        self._silent = [
            silent for silent in self._silent if not silent.open or silent.api_pid not in life.pids
        ]
        return diagnosis


def _most_telling(servers: Sequence[_Container], we_terminated: bool | None) -> Diagnosis:
    """Diagnose the containers of one log; return the diagnosis that is first by `_rank`.

    Containers that do not run vLLM count only if none does.
    """
    diagnoses = [(server, server.diagnosis(we_terminated)) for server in servers]
    # Other containers in the same log are no servers.
    of_vllm = [each for server, each in diagnoses if server.of_vllm or _in_vllm(each)]
    return min(of_vllm or [each for _, each in diagnoses], key=_rank)


def _evidence(diagnosis: Diagnosis, seen: set[Evidence]) -> Evidence:
    """Return the weakest kind of evidence that the log shows: a simulation goes before a GPU.

    A log may have several: a simulation announces itself before vLLM's first line. seen: the kinds
    that the log's lines show, at least one. Frames of our lab count, too.
    """
    if any(frame.file.startswith("vllm_repro_lab/") for frame in diagnosis.frames):
        seen = seen | {Evidence.LAB}
    return next(evidence for evidence in _WEAKEST_FIRST if evidence in seen)


_WEAKEST_FIRST = (
    *(Evidence.REHEARSAL, Evidence.SCHEDULER, Evidence.LAB),
    *(Evidence.CPU, Evidence.GPU, Evidence.UNKNOWN),
)


def _marks_of_weaker(evidence: Evidence) -> tuple[bytes, ...]:
    """Return the texts of log lines that announce weaker evidence than this."""
    weaker = _WEAKEST_FIRST[: _WEAKEST_FIRST.index(evidence)]
    return tuple(word.encode() for word, shown in EVIDENCE_WORDS.items() if shown in weaker)


def _in_vllm(diagnosis: Diagnosis) -> bool:
    """Return True if the traceback of the root exception has a frame of vLLM."""
    return any("vllm" in frame.file for frame in diagnosis.frames)


def _rank(diagnosis: Diagnosis) -> int:
    """Return a sort key: 0 a death with its cause, 1 a death, 2 undecided, 3 no death."""
    if diagnosis.died:
        return 0 if diagnosis.root is not None and not diagnosis.root.of_consequence else 1
    return 2 if diagnosis.died is None else 3


class _Order:
    """Test of whether each process's lines are in order of time; a log store may reverse them.

    In a reversed log the header of a traceback follows its frames, which shows it even if all times
    are equal.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, int | str], str] = {}
        self._later = self._earlier = self._headers = self._reversed = 0
        self._after_frame: set[tuple[str, int | str, str]] = set()

    def feed(self, line: Line) -> None:
        """Take one line: its time, and whether a traceback's header comes after its frames."""
        # processes without a prefix are told apart by the logging call
        key = (line.stream, line.speaker, line.source)
        if line.time:
            self.note_time(line, line.time)
        if "Traceback (most recent call last)" in line.text:
            self._headers += 1
            self._reversed += key in self._after_frame
        self._after_frame.discard(key)
        if line.text.lstrip().startswith('File "'):
            self._after_frame.add(key)

    def note_time(self, line: Line, time: str) -> None:
        """Compare a time that the process of `line` printed with the last one, and count it."""
        key = (line.stream, line.speaker)
        before = self._last.get(key, time)
        self._later += time > before
        self._earlier += time < before
        self._last[key] = time

    @property
    def rises(self) -> bool:
        """Return True if a process printed a later time after an earlier one."""
        return self._later > 0

    @property
    def broken(self) -> bool:
        """Return True if the order is wrong: times often fall, or most tracebacks are reversed."""
        falls = self._earlier >= _FALLS and self._earlier * 2 > self._later
        return falls or self._reversed * 2 > self._headers


_FALLS = 3
"""Steps back in time that show a wrong order; fewer are pieces that were put together."""


def _without_order(diagnosis: Diagnosis, stopped: bool) -> Diagnosis:
    """Return the diagnosis of a log in a wrong order: without root and phase, which need the order.

    stopped: a server logs a shutdown. Then `died` is None: what it prints after the shutdown looks
    like a death.
    """
    wrong = (
        "the lines are not in the order of time, so no cause is named: sort them from the oldest "
        "to the newest"
    )
    died = True if diagnosis.died and not stopped else None
    why = f"A process reports the death of the engine; {wrong}."
    if not died:
        why = f"{wrong[0].upper()}{wrong[1:]}."
    return replace(diagnosis, died=died, why=why, phase=None, root=None)
