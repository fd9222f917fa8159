"""Search of outputs for texts that are planted into the examples' journals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from tests.core.report.journal_fields import Field, all_planted, planted, text_fields
from tests.secrets_planted import Plant
from vllm_repro.report.model import RunReport

Outputs = Callable[[RunReport], Iterator[tuple[str, str]]]
"""Each output made from a report: its name and its text."""

_WRITTEN_BY_OTHERS = {"command", "argv", "message", "frames", "why", "evidence", "os", "reproduce"}


def sources() -> list[Field]:
    """Return one field of each kind that holds text written by others."""
    kinds = {
        (recording.entries[place].event, way[-1] if isinstance(way[-1], str) else way[-2]): (
            recording,
            place,
            way,
        )
        for recording, place, way in text_fields()
        if _WRITTEN_BY_OTHERS & set(way)
    }
    return list(kinds.values())


def _fields_by_recording() -> Iterator[list[Field]]:
    for _, fields in groupby(sources(), key=lambda field: id(field[0])):
        yield list(fields)


def leaks(outputs: Outputs, plants: Sequence[Plant]) -> Iterator[tuple[str, str]]:
    """Yield the name of each output that shows a plant, and the text that it should hide.

    All fields of a recording hold the plants at once: rendering takes long.
    """
    for fields in _fields_by_recording():
        made = all_planted(
            fields, lambda was: "\n".join(f"{was} {plant.written}" for plant in plants)
        )
        for name, text in outputs(made):
            yield from ((name, plant.hidden) for plant in plants if plant.hidden in text)


def shown(outputs: Outputs, text: str, names: set[str]) -> set[str]:
    """Return the outputs that show a harmless text. Stop once all of `names` do."""
    seen: set[str] = set()
    for field in (*sources(), *text_fields()):
        made = planted(*field, lambda was: f"{was} {text}")
        seen |= {name for name, output in outputs(made) if text in output}
        if seen == names:
            break
    return seen
