"""Signatures of deaths: the description of one bug's death, and the comparison of a diagnosis with it.

A signature holds no line numbers, which move with every release. It holds the exception's class, a template of its
message, and function names in order. Named holes of the template are captured as evidence and not compared:

    "Workspace is locked but allocation from '{file}:{line}:_continuation_prefill' requires {asked} MB"
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from vllm_repro_diagnosis.diagnosis import Diagnosis, Phase
from vllm_repro_diagnosis.root_cause import squeeze, unwrap
from vllm_repro_diagnosis.tracebacks import Frame, bare_name

__all__ = ["Comparison", "How", "Signature", "compare", "failed_nodes", "quotes"]


class How(StrEnum):
    """MATCH: this bug. NEAR: half of it agrees, so a person must look. OTHER: another death, or none."""

    MATCH = "match"
    NEAR = "near"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The description of one bug's death.

    exception: class; its module is not compared. message: template, found anywhere in the message with white space
        squeezed; `{}` is a hole, `{name}` a captured hole, `{{` and `}}` are braces; "" means an exception without a
        message.
    frames: function names in this order, others may stand between. phase: BOOT includes WARMUP.
    source: text in the echoed source line of the last frame, for a bare `assert`.
    not_in_message: texts that exclude this bug.
    """

    exception: str
    message: str = ""
    frames: tuple[str, ...] = ()
    phase: Phase | None = None
    source: str | None = None
    not_in_message: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _compiled(self.message)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison. captured: text of the named holes. why: one sentence for people."""

    how: How
    captured: Mapping[str, str] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class _Printed:
    """One exception of a chain. exception: None if only the text quoted by a wrapper is known."""

    exception: str | None
    message: str
    frames: tuple[Frame, ...]


_RANK = {How.OTHER: 0, How.NEAR: 1, How.MATCH: 2}


_IN_VLLM = re.compile(r"vllm|^(?:torch|triton)/")
"""Files of vLLM and of the libraries whose calls end its tracebacks. A user's own plugin has functions of the same names."""


def compare(signature: Signature, diagnosis: Diagnosis) -> Comparison:
    """Compare a diagnosis with a signature.

    Each link of a chain is compared, the root first. Of a worker's text that only EngineCore quoted, class and frames are
    unknown: it matches if the template does.
    """
    if diagnosis.root is None or diagnosis.died is False:
        return Comparison(how=How.OTHER, why="no exception of this death is known")
    compared = [_compare_one(signature, printed, diagnosis.phase) for printed in _chain(diagnosis)]
    return max(compared, key=lambda comparison: _RANK[comparison.how])


def _chain(diagnosis: Diagnosis) -> list[_Printed]:
    root = diagnosis.root
    if root is None:
        return []
    chain = [_Printed(root.raised.exception if root.class_known else None, root.message, root.frames)]
    for link in root.raised.links:
        quoted = unwrap(link.message)
        chain.append(
            _Printed(link.exception, link.message, link.frames) if quoted is None else _Printed(None, quoted, ())
        )
    return chain


def _compare_one(signature: Signature, printed: _Printed, phase: Phase | None) -> Comparison:
    message = squeeze(printed.message)
    excluded = next((text for text in signature.not_in_message if squeeze(text) in message), None)
    if excluded is not None:
        return Comparison(how=How.OTHER, why=f"the message holds “{excluded}”, which excludes this bug")
    found = _compiled(signature.message).search(message) if signature.message else None
    message_agrees = found is not None if signature.message else not message
    ends_at = _in_order(signature.frames, [frame.function for frame in printed.frames])
    # The line of `source` raises, so its frame is the traceback's last.
    followed = signature.source is not None and ends_at is not None and ends_at != len(printed.frames) - 1
    ends_at = None if followed else ends_at
    frames_agree = None if not signature.frames or not printed.frames else ends_at is not None
    same_class = printed.exception is None or bare_name(printed.exception) == bare_name(signature.exception)
    wrong = []
    if not same_class:
        wrong.append(f"{bare_name(printed.exception or '')} is not {bare_name(signature.exception)}")
    if not message_agrees:
        wrong.append(
            "the message differs" if signature.message else "this exception has a message and the bug's has none"
        )
    if followed:
        wrong.append(f"it failed in {printed.frames[-1].function}, not in {signature.frames[-1]}")
    elif frames_agree is False:
        wrong.append(f"the frames do not go {' → '.join(signature.frames)}")
    if ends_at is not None and not _IN_VLLM.search(file := printed.frames[ends_at].file):
        wrong.append(f"it failed in {file}, outside of vLLM")
    if signature.source is not None and frames_agree and ends_at is not None:
        echo = squeeze(printed.frames[ends_at].source)
        if echo and squeeze(signature.source) not in echo:
            wrong.append(f"it failed at `{echo}`")
    if not _same_phase(signature.phase, phase):
        wrong.append(f"it died in phase {phase}, not {signature.phase}")
    captured = {name: value for name, value in found.groupdict().items() if value} if found else {}
    # A template of holes alone agrees with any message.
    agreed = (message_agrees and bool(_HOLE.sub("", signature.message).strip())) + bool(frames_agree)
    if not wrong and agreed:
        known = "class, message and frames agree" if frames_agree else "the message agrees; the frames are not known"
        why = known if signature.frames else "class and message agree"
        return Comparison(how=How.MATCH, captured=captured, why=why)
    why = "; ".join(wrong) or "only the class agrees"
    if agreed == 0 or (not same_class and agreed < 2):
        return Comparison(how=How.OTHER, why=why)
    return Comparison(how=How.NEAR, captured=captured, why=why)


def quotes(signature: Signature, text: str) -> bool:
    """Return True if a text without a traceback holds the message of the signature."""
    return len(_HOLE.sub("", signature.message)) >= _TELLING and bool(
        _compiled(signature.message).search(squeeze(text))
    )


def _in_order(wanted: Sequence[str], functions: Sequence[str]) -> int | None:
    """Return the last possible index of the frame that ends the sequence; None if the order is not there."""
    at = len(functions)
    end: int | None = None
    for name in reversed(wanted):
        at = next((index for index in range(at - 1, -1, -1) if functions[index] == name), -1)
        if at < 0:
            return None
        end = at if end is None else end
    return end


def _same_phase(wanted: Phase | None, seen: Phase | None) -> bool:
    boot = (Phase.BOOT, Phase.WARMUP)
    return wanted is None or seen is None or wanted is seen or (wanted in boot and seen in boot)


_TELLING = 16
"""Fewest fixed characters of a template by which a message alone is recognized."""
_HOLE = re.compile(r"\{\{|\}\}|\{(\w*)\}")


@lru_cache(maxsize=256)
def _compiled(message: str) -> re.Pattern[str]:
    """Compile a template. Raises ValueError if it names a hole twice or leaves a brace open."""
    pattern = ""
    last = 0
    names: set[str] = set()
    message = squeeze(message)
    for hole in _HOLE.finditer(message):
        pattern += _literal(message[last : hole.start()])
        last = hole.end()
        if hole[0] in ("{{", "}}"):
            pattern += re.escape(hole[0][0])
            continue
        name = hole[1]
        if name in names or name[:1].isdigit():
            raise ValueError(
                f"a template may name a hole only once, and not with a digit first: {{{name}}} in {message!r}"
            )
        if name:
            names.add(name)
        inner = f"(?P<{name}>.+?)" if name else "(?:.+?)"
        pattern += inner + (r"(?=[.,;:'\")\]]*(?:\s|$))" if last == len(message) else "")
    return re.compile(pattern + _literal(message[last:]))


def _literal(text: str) -> str:
    if "{" in text or "}" in text:
        raise ValueError(f"an open brace in a template, near {text!r}; write {{{{ or }}}} for the character itself")
    return re.escape(text)


def failed_nodes(nodes: Mapping[int, Diagnosis], signature: Signature | None) -> tuple[int, ...]:
    """Return the nodes with which a death began, in order. nodes: diagnosis of each node's log, by node rank.

    Those that lost a worker process, else those whose exception matches the signature, else those with any exception. The other
    nodes only report a closed connection.
    """
    lost = [node for node, diagnosis in nodes.items() if diagnosis.lost_worker]
    raised = [node for node, diagnosis in nodes.items() if diagnosis.root is not None]
    same = [node for node in raised if signature and compare(signature, nodes[node]).how is How.MATCH]
    return tuple(sorted(lost or same or raised))
