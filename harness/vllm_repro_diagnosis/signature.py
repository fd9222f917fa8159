"""Signatures of deaths: the description of one bug's death, and how a diagnosis compares with it.

A signature holds no line numbers, which move with every release. It holds the exception's class, a
template of its message, and function names in order. Named holes of the template are captured as
evidence and not compared:

    "Workspace is locked but allocation from '{file}:{line}:_forward' requires {asked} MB"
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from vllm_repro_diagnosis.canonical import squeeze
from vllm_repro_diagnosis.diagnosis import Diagnosis, Phase
from vllm_repro_diagnosis.root_cause import Root, unwrap
from vllm_repro_diagnosis.tracebacks import Frame, bare_name


class How(StrEnum):
    """Comparison of a death with a signature: the same bug, half of it, or another."""

    MATCH = "match"  # this bug
    NEAR = "near"  # half of it agrees, so a person must look
    OTHER = "other"  # another death, or none


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Signature of one bug's death: exception class, message template, functions in order.

    Raises `ValueError` for a wrong template.
    """

    # class; its module is not compared
    exception: str
    # template, searched in the message with white space squeezed; `{}` is a hole, `{name}` a
    # captured hole, `{{` and `}}` are braces; "" means an exception without a message
    message: str = ""
    # function names in this order; others may stand between
    frames: tuple[str, ...] = ()
    # BOOT includes WARMUP
    phase: Phase | None = None
    # text in the echoed source line of the last frame, for a bare `assert`
    source: str | None = None
    # texts that exclude this bug
    not_in_message: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _compiled(self.message)


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """The result of comparing a diagnosis with a signature."""

    how: How
    # text of the named holes
    captured: Mapping[str, str] = field(default_factory=dict)
    # one sentence for people
    why: str = ""


_RANK = {How.OTHER: 0, How.NEAR: 1, How.MATCH: 2}


_IN_VLLM = re.compile(r"vllm|^(?:torch|triton)/")
"""Files of vLLM and of the libraries whose calls end its tracebacks.

A user's plugin may have functions of the same names.
"""


def compare(signature: Signature, diagnosis: Diagnosis) -> Likeness:
    """Return whether a diagnosis is the death that a signature describes, and why.

    Each link of a chain is compared, and the best result counts. If only EngineCore quoted a
    worker's text, class and frames are unknown: it matches if the template does.
    """
    if diagnosis.root is None or diagnosis.died is False:
        return Likeness(how=How.OTHER, why="no exception of this death is known")
    chain = [diagnosis.root]
    for link in diagnosis.root.raised.links:
        quoted = unwrap(link.message)
        chain.append(Root(raised=link, class_known=quoted is None, quoted=quoted))
    compared = [_compare_link(signature, link, diagnosis.phase) for link in chain]
    return max(compared, key=lambda likeness: _RANK[likeness.how])


def _compare_link(signature: Signature, link: Root, phase: Phase | None) -> Likeness:
    """Compare one exception of a chain, and the phase of the death, with a signature."""
    message = squeeze(link.message)
    for text in signature.not_in_message:
        if squeeze(text) in message:
            why = f"the message holds “{text}”, which excludes this bug"
            return Likeness(how=How.OTHER, why=why)
    match = _compiled(signature.message).search(message)
    message_agrees = match is not None if signature.message else not message
    name, expected_name = bare_name(link.raised.exception), bare_name(signature.exception)
    same_class = not link.class_known or name == expected_name
    message_wrong = "this exception has a message and the bug's has none"
    if signature.message:
        message_wrong = "the message differs"
    frames_agree, frames_wrong = _compare_frames(signature, link.frames)
    differences = {
        f"{name} is not {expected_name}": not same_class,
        message_wrong: not message_agrees,
        **dict.fromkeys(frames_wrong, True),
        f"it died in phase {phase}, not {signature.phase}": not _same_phase(signature.phase, phase),
    }
    wrong = [difference for difference, holds in differences.items() if holds]
    captured = {name: value for name, value in match.groupdict().items() if value} if match else {}
    # A template of holes alone agrees with any message.
    telling = bool(_HOLE.sub("", signature.message).strip())
    agreed = (message_agrees and telling) + frames_agree
    if not wrong and agreed:
        why = "class and message agree"
        if frames_agree:
            why = "class, message and frames agree"
        elif signature.frames:
            why = "the message agrees; the frames are not known"
        return Likeness(how=How.MATCH, captured=captured, why=why)
    why = "; ".join(wrong) or "only the class agrees"
    if agreed == 0 or (not same_class and agreed < 2):
        return Likeness(how=How.OTHER, why=why)
    return Likeness(how=How.NEAR, captured=captured, why=why)


def _compare_frames(signature: Signature, frames: Sequence[Frame]) -> tuple[bool, list[str]]:
    """Return (True if the frames agree, what differs). Unknown frames neither agree nor differ."""
    end = _in_order(signature.frames, [frame.function for frame in frames])
    if end is None:
        known = signature.frames and frames
        return False, [f"the frames do not go {' → '.join(signature.frames)}"] if known else []
    # The line of `source` raises, so its frame is the traceback's last.
    if signature.source is not None and end != len(frames) - 1:
        return False, [f"it failed in {frames[-1].function}, not in {signature.frames[-1]}"]
    wrong = []
    echo = squeeze(frames[end].source)
    at_source = signature.source is not None and squeeze(signature.source) in echo
    # a bug of a connector out of tree names its line
    if not (at_source or _IN_VLLM.search(frames[end].file)):
        wrong.append(f"it failed in {frames[end].file}, outside of vLLM")
    if signature.source is not None and echo and not at_source:
        wrong.append(f"it failed at `{echo}`")
    return True, wrong


def quotes(signature: Signature, text: str) -> bool:
    """Return True if a text without a traceback holds the message of the signature.

    False for a template with fewer than 16 fixed characters, which could be another bug's.
    """
    if len(_HOLE.sub("", signature.message)) < _TELLING:
        return False
    return _compiled(signature.message).search(squeeze(text)) is not None


def _in_order(names: Sequence[str], functions: Sequence[str]) -> int | None:
    """Return the index in `functions` of the last name, if all `names` are there in this order.

    Others may stand between. The innermost place counts. None if they are not there, or if there
    are no names.
    """
    at = len(functions)
    end: int | None = None
    for name in reversed(names):
        at = next((index for index in range(at - 1, -1, -1) if functions[index] == name), -1)
        if at < 0:
            return None
        end = at if end is None else end
    return end


def _same_phase(phase: Phase | None, other: Phase | None) -> bool:
    """Return True if the phases agree: boot with warm-up, and an unknown phase with any."""
    if phase is None or other is None:
        return True
    return phase is other or {phase, other} == {Phase.BOOT, Phase.WARMUP}


_TELLING = 16
"""Fewest fixed characters of a template by which a message alone is recognized."""
_HOLE = re.compile(r"\{\{|\}\}|\{(\w*)\}")


@lru_cache(maxsize=256)
def _compiled(message: str) -> re.Pattern[str]:
    """Return the pattern of a message template.

    Raises `ValueError` for a hole that is named twice, begins with a digit or is not closed.
    """
    pattern = ""
    last = 0
    names: set[str] = set()
    message = squeeze(message)
    for hole in _HOLE.finditer(message):
        pattern += _fixed_text(message[last : hole.start()])
        last = hole.end()
        if hole[0] in ("{{", "}}"):
            pattern += re.escape(hole[0][0])
            continue
        name = hole[1]
        if name in names or name[:1].isdigit():
            raise ValueError(
                "a template may name a hole only once, and not with a digit first: "
                f"{{{name}}} in {message!r}"
            )
        if name:
            names.add(name)
        inner = f"(?P<{name}>.+?)" if name else "(?:.+?)"
        pattern += inner + (r"(?=[.,;:'\")\]]*(?:\s|$))" if last == len(message) else "")
    return re.compile(pattern + _fixed_text(message[last:]))


def _fixed_text(text: str) -> str:
    """Return the fixed text of a template as a pattern. Raises ValueError if it has a brace."""
    if "{" in text or "}" in text:
        raise ValueError(
            f"an open brace in a template, near {text!r}; write {{{{ or }}}} for the character "
            "itself"
        )
    return re.escape(text)


def failed_nodes(nodes: Mapping[int, Diagnosis], signature: Signature | None) -> tuple[int, ...]:
    """Return the nodes with which a death began, in order.

    They are the nodes that lost a worker process, else the nodes whose exception matches the
    signature, else the nodes with any exception. Other nodes only report a closed connection.
    Empty without any of them.

    nodes: diagnosis of each node's log, by node rank.
    """
    lost = [node for node, diagnosis in nodes.items() if diagnosis.lost_worker]
    raised = [node for node, diagnosis in nodes.items() if diagnosis.root is not None]
    same = [
        node for node in raised if signature and compare(signature, nodes[node]).how is How.MATCH
    ]
    return tuple(sorted(lost or same or raised))
