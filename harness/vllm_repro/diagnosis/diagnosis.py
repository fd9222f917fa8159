"""Diagnosis of an engine from a server log or a pasted traceback. Pure.

The last lines of a log mislead. `EngineDeadError` only reports a death, and an ordered shutdown can print it too. A killed
process prints nothing. A refused request can print a whole traceback. An exception in the cleanup stands closer to the end
than the one that mattered. If a log does not decide it, `died` is None and `why` names what is missing.

The rules are in `vllm_repro.diagnosis.judgement`, the search for the root in `vllm_repro.diagnosis.root_cause`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from io import BufferedReader

from vllm_repro.diagnosis.access_runs import AccessRuns, kind_of
from vllm_repro.diagnosis.judgement import Diagnosis, Phase, judge_life
from vllm_repro.diagnosis.life_signs import ServerLife
from vllm_repro.diagnosis.log_text import Line, read_lines
from vllm_repro.evidence import Evidence

__all__ = ["Diagnosis", "Phase", "diagnose"]


def diagnose(source: str | bytes | BufferedReader | Iterable[Line], *, we_terminated: bool | None = None) -> Diagnosis:
    """Diagnose a server log, a part of one, or a pasted traceback. A file is read ten times as fast as its text.

    we_terminated: the caller stopped this server itself; None if unknown. A log may hold several lives of a server, as of a container
    that restarts. The first life that died counts, else the first that ended silently, else the last.
    """
    streams: dict[str, list[ServerLife]] = {}
    order = _Order()
    runs, latest = AccessRuns(), dict[str, Line]()
    for line in read_lines(source, runs) if isinstance(source, str | bytes | BufferedReader) else source:
        lives = streams.get(line.stream) or streams.setdefault(line.stream, [ServerLife()])
        if runs.dropped:  # before the end of a run, which is a line of the same server
            lives[-1].skip(runs.dropped)
            for kind, time in runs.stamps:
                order.see(latest[kind], time)
            runs.dropped, runs.stamps = 0, []
        if lives[-1].ended_by(line):
            lives.append(ServerLife(lives[-1]))
        lives[-1].feed(line)
        order.feed(line)
        if not line.stream and (own := kind_of(line.raw)):
            latest[own] = line
            runs.skip([kind for kind, one in latest.items() if lives[-1].is_settled(one)])
        else:
            runs.skip(())
    diagnoses = [(lives, _of_stream(lives, we_terminated)) for lives in streams.values() or [[ServerLife()]]]
    # Other containers in the same log are no servers.
    found = [one for lives, one in diagnoses if any(life.of_vllm for life in lives) or _in_vllm(one)]
    diagnosis = min(found or [one for _, one in diagnoses], key=_rank)
    diagnosis = replace(
        diagnosis, evidence=_evidence(diagnosis, [life for lives in streams.values() for life in lives])
    )
    if order.broken:
        stopped = any(not life.stopping.isdisjoint(life.first) for lives in streams.values() for life in lives)
        return _without_order(diagnosis, stopped)
    return diagnosis


def _of_stream(lives: list[ServerLife], we_terminated: bool | None) -> Diagnosis:
    """Return the diagnosis of one server's lives."""
    last = len(lives) - 1
    diagnoses = [judge_life(life, we_terminated if at == last else None) for at, life in enumerate(lives)]
    died = next((diagnosis for diagnosis in diagnoses if diagnosis.died), None)
    if died is not None:
        return died
    for at, diagnosis in enumerate(diagnoses[:-1]):
        if diagnosis.open_end and not _goes_on(lives[at], lives[at + 1 :]):
            why = (
                f"This log holds {len(lives)} lives of a server, and number {at + 1} ended without a reason: it was killed, "
                "or its last lines are not here."
            )
            return replace(diagnosis, died=None, why=why)
    return diagnoses[-1]


def _evidence(diagnosis: Diagnosis, lives: Sequence[ServerLife]) -> Evidence:
    """Return the weakest evidence that a life shows: a simulation announces itself before its boot, in the life before."""
    seen = {life.boot.evidence for life in lives}
    if any(frame.file.startswith("vllm_repro_lab/") for frame in diagnosis.frames):
        seen.add(Evidence.LAB)
    weakest_first = Evidence.REHEARSAL, Evidence.SCHEDULER, Evidence.LAB, Evidence.CPU, Evidence.GPU
    return next((one for one in weakest_first if one in seen), Evidence.UNKNOWN)


def _in_vllm(diagnosis: Diagnosis) -> bool:
    return any("vllm" in frame.file for frame in diagnosis.frames)


def _rank(diagnosis: Diagnosis) -> int:
    """Return the order in which the diagnoses of several servers count: a death with its own cause first."""
    if diagnosis.died:
        return 0 if diagnosis.root is not None and not diagnosis.root.of_consequence else 1
    return 2 if diagnosis.died is None else 3


class _Order:
    """Order of the times in each process's lines, which a search in a log store may reverse or mix.

    In a reversed log, tracebacks end with their headers, also if all times are the same.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, int | str], str] = {}
        self._later = self._earlier = self._headers = self._reversed = 0
        self._after_frame: set[tuple[str, int | str]] = set()

    def feed(self, line: Line) -> None:
        key = (line.stream, line.speaker)
        if line.time:
            self.see(line, line.time)
        if "Traceback (most recent call last)" in line.text:
            self._headers += 1
            self._reversed += key in self._after_frame
        self._after_frame.discard(key)
        if line.text.lstrip().startswith('File "'):
            self._after_frame.add(key)

    def see(self, line: Line, time: str) -> None:
        """Take a time that the process of `line` printed."""
        key = (line.stream, line.speaker)
        before = self._last.get(key, time)
        self._later += time > before
        self._earlier += time < before
        self._last[key] = time

    @property
    def broken(self) -> bool:
        return (self._earlier >= _FALLS and self._earlier * 2 > self._later) or self._reversed * 2 > self._headers


_FALLS = 3
"""Steps back in time that show a wrong order; fewer are pieces that were put together."""


def _without_order(diagnosis: Diagnosis, stopped: bool) -> Diagnosis:
    """Return what a log in a wrong order still shows: no cause, because causes come first.

    stopped: a server logs a shutdown, and what it prints after it looks like a death.
    """
    wrong = "the lines are not in the order of time, so no cause is named: sort them from the oldest to the newest"
    died = True if diagnosis.died and not stopped else None
    why = f"A process reports the death of the engine; {wrong}." if died else f"{wrong[0].upper()}{wrong[1:]}."
    return replace(diagnosis, died=died, why=why, phase=None, root=None)


def _goes_on(life: ServerLife, later: Sequence[ServerLife]) -> bool:
    """Return True if the server still logs after another began: two servers share the log, and none restarted."""
    if life.api_pid == later[0].api_pid:  # in a container each life has the same pid
        return False
    return any(life.api_pid in one.pids for one in later)
