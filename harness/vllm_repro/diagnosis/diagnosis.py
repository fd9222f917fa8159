"""What became of the engine, judged from a log or a pasted traceback alone.

A server's last words mislead in both directions. `EngineDeadError` is only the messenger, and a clean stop
can print it; the process that died prints nothing when it was killed; a refused request can print a whole
traceback; a second exception in the cleanup stands closer to the end than the one that mattered. Where a log
cannot tell, `died` is None and `why` says what is missing.

Pure: text in, data out. The rules are in `vllm_repro.diagnosis.judgement`, the search for the root in
    `vllm_repro.diagnosis.root_cause`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vllm_repro.diagnosis.judgement import Judgement, Phase, judge
from vllm_repro.diagnosis.life_signs import Evidence, Sign, SignKind
from vllm_repro.diagnosis.log_text import Line, read_lines
from vllm_repro.diagnosis.tracebacks import Frame, Raised

__all__ = ["Diagnosis", "Phase", "Sign", "SignKind", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """The judgement on one text.

    died: True, False ("alive as far as this log goes", or stopped as asked), or None where the text cannot
        tell.
    exception, message, frames: the root, not the messenger; None, None and () for an end that left no
        exception, and for none.
    wrapped: EngineCore printed only vLLM's wrapper around the root. `class_known` is False where the
        wrapper's quotation is all there is: `exception` is the wrapper's class then, `message` the text
        inside it, and the frames are unknown.
    why: one sentence for people. signs: what it rests on, with line numbers. raised: the root as printed,
        with its chain.
    usage: argparse's sentence, where the command line was refused.
    """

    died: bool | None
    phase: Phase | None
    exception: str | None
    message: str | None
    frames: tuple[Frame, ...]
    wrapped: bool
    vllm_version: str | None
    why: str
    signs: tuple[Sign, ...] = ()
    class_known: bool = True
    raised: Raised | None = None
    usage: str | None = None


def diagnose(source: str | bytes | Iterable[Line], *, we_terminated: bool | None = None) -> Diagnosis:
    """Judges a server log, a part of one, or a pasted traceback.

    `we_terminated`: whether the caller itself told this server to stop; None where that is not known, as for
    a log from elsewhere. A log that holds several lives of a server (a container that restarts) is judged by
    the first one that died, else by the first that ended without a word, else by the last.
    """
    lives = [Evidence()]
    for line in read_lines(source) if isinstance(source, str | bytes) else source:
        if lives[-1].over(line):
            lives.append(Evidence())
        lives[-1].feed(line)
    last = len(lives) - 1
    judged = [judge(life, we_terminated if at == last else None) for at, life in enumerate(lives)]
    diagnoses = [_diagnosis(life, judgement) for life, judgement in zip(lives, judged, strict=True)]
    died = next((diagnosis for diagnosis in diagnoses if diagnosis.died), None)
    if died is not None:
        return died
    for at, judgement in enumerate(judged[:-1]):
        if judgement.quiet and not _goes_on(lives[at], lives[at + 1 :]):
            why = (
                f"This log holds {len(lives)} lives of a server, and number {at + 1} ended without a word: it was killed, "
                "or its last lines are not here."
            )
            return replace(diagnoses[at], died=None, why=why)
    return diagnoses[-1]


def _goes_on(life: Evidence, later: Sequence[Evidence]) -> bool:
    """Whether the server speaks after another one began: two servers write one log then, and none of them restarted."""
    if life.api_pid is None or life.api_pid == later[0].api_pid:  # in a container each life has the same number
        return False
    return any(life.api_pid in one.pids for one in later)


def _diagnosis(life: Evidence, judgement: Judgement) -> Diagnosis:
    root = judgement.root
    signs = (*life.kept, life.stalled) if life.stalled else tuple(life.kept)
    return Diagnosis(
        died=judgement.died,
        phase=judgement.phase,
        exception=root.raised.exception if root else None,
        message=root.message if root else None,
        frames=root.frames if root else (),
        wrapped=root.wrapped if root else False,
        vllm_version=life.boot.facts().vllm_version,
        why=judgement.why,
        signs=tuple(sorted(signs, key=lambda sign: sign.line)),
        class_known=root.class_known if root else True,
        raised=root.raised if root else None,
        usage=life.usage,
    )
