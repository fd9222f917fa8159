"""Text fields of the examples' journals, and reports in which one of them holds another text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.report_examples import EXAMPLES
from vllm_repro.journal.journal import Entry, Recording, read
from vllm_repro.report.build import report_of
from vllm_repro.report.model import RunReport

Field = tuple[Recording, int, tuple[Any, ...]]
"""Recording, number of the entry, and path to the text in it."""


def strings(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each text in a JSON structure."""
    if isinstance(value, str):
        yield at
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(item, (*at, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from strings(item, (*at, number))


def changed(value: Any, at: tuple[Any, ...], change: Callable[[str], str]) -> Any:
    if not at:
        return change(value)
    if isinstance(value, dict):
        return {
            key: changed(item, at[1:], change) if key == at[0] else item
            for key, item in value.items()
        }
    return [
        changed(item, at[1:], change) if number == at[0] else item
        for number, item in enumerate(value)
    ]


MEANINGFUL = {
    *(
        "event",
        "outcome",
        "expected",
        "expect",
        "evidence",
        "signature",
        "bad",
        "good",
        "arm",
        "name",
        "server",
    ),
    *(
        "issue",
        "related",
        "version",
        "phase",
        "weights",
        "log",
        "vllm_version",
        "kind",
        "endpoint",
        "file",
    ),
}
"""Fields that the harness itself reads, and so refuses when they are something else."""


def patched(recording: Recording) -> Recording:
    """Return the recording with a patch in its first arm."""
    change = {"file": "vllm/a.py", "was": "a", "now": "b", "why": "because"}

    def one(entry: Entry) -> Entry:
        fields = json.loads(json.dumps(dict(entry.fields)))
        if entry.event == "run-started":
            fields["arms"][0]["patches"] = [change]
        if entry.event == "server-started":
            fields["facts"]["patched"] = [
                {"file": "vllm/a.py", "sha256": "0" * 64, "untried": ["kernel"]}
            ]
        return replace(entry, fields=fields)

    return replace(recording, entries=tuple(map(one, recording.entries)))


@cache
def text_fields() -> list[Field]:
    """Return each kind of text field of the examples' journals."""
    found: dict[tuple[Any, ...], Field] = {}
    for folder in EXAMPLES:
        recording = patched(read(folder / "journal.jsonl"))
        for place, entry in enumerate(recording.entries):
            for way in strings(json.loads(json.dumps(dict(entry.fields)))):
                if way[-1] in MEANINGFUL or (
                    len(way) > 1 and way[-2] in ("output", "loads", "said", "wishes")
                ):
                    continue
                kind = (
                    folder.name[:5],
                    entry.event,
                    *("*" if isinstance(step, int) else step for step in way),
                )
                found.setdefault(kind, (recording, place, way))
    return list(found.values())


TEXT_FIELDS = st.deferred(lambda: st.sampled_from(text_fields()))


def planted(
    recording: Recording, place: int, way: tuple[Any, ...], change: Callable[[str], str]
) -> RunReport:
    """Return the report of a recording whose text at `way` of the entry at `place` is changed."""
    return all_planted([(recording, place, way)], change)


def all_planted(fields: Sequence[Field], change: Callable[[str], str]) -> RunReport:
    """Return the report of a recording with each of the texts changed. All fields are its own."""
    recording = fields[0][0]
    entries = list(recording.entries)
    for _, place, way in fields:
        entry = entries[place]
        entries[place] = replace(entry, fields=changed(dict(entry.fields), way, change))
    return report_of(replace(recording, entries=tuple(entries)), Path("reports/x"))
