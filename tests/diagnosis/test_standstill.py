"""Readings of real servers (`tests/live/live_states.py`), and changes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.diagnosis.logs import DATA
from vllm_repro_diagnosis import live
from vllm_repro_diagnosis.metrics import MetricsReading
from vllm_repro_diagnosis.standstill import Kind, ProcessReading, Reading, Role, Stack, judge


def reading_of(values: dict[str, Any]) -> Reading:
    pages = [page and MetricsReading(**page) for page in values["metrics"]]
    processes = [
        ProcessReading(
            **process
            | {
                "role": Role(process["role"]),
                "stacks": tuple(
                    tuple(Stack(thread=thread, frames=tuple(frames)) for thread, frames in dump)
                    for dump in process["stacks"]
                ),
            }
        )
        for process in values["processes"]
    ]
    return Reading(**values | {"metrics": tuple(pages), "processes": tuple(processes)})


ROWS = [json.loads(line) for line in (DATA / "live_states.jsonl").read_text("utf-8").splitlines()]
READ = [pytest.param(Kind(row["kind"]), reading_of(row["reading"]), id=row["case"]) for row in ROWS]


@pytest.mark.parametrize(("kind", "reading"), READ)
def test_a_recorded_server(kind: Kind, reading: Reading) -> None:
    assert judge(reading).kind is kind, judge(reading).why
    blind = replace(
        reading, processes=tuple(replace(each, stacks=()) for each in reading.processes)
    )
    # less is seen, so less is said, and never something else
    assert judge(blind).kind in (kind, Kind.UNKNOWN) or not kind.hangs
    assert not judge(blind).kind.hangs or kind.hangs
    # counters alone show neither a hang nor that nothing waits, and no counters no number
    assert judge(replace(reading, processes=())).kind in (Kind.SLOW, Kind.UNKNOWN)
    assert " running, " not in judge(replace(reading, url="", metrics=())).why
    for number, process in enumerate(reading.processes):
        if process.role is not Role.OTHER and not kind.hangs:
            halted = [*reading.processes]
            halted[number] = replace(process, states="SST")
            assert judge(replace(reading, processes=tuple(halted))).at == (halted[number],)
    # one look shows no sleep
    glance = [replace(each, states=each.states[-1:], cpu=0.0) for each in reading.processes]
    stopped = any(each.stopped for each in glance)
    assert judge(replace(reading, processes=tuple(glance))).kind.hangs is stopped
    assert judge(replace(reading, health="503")).kind is Kind.DEAD
    if reading.pages and not any(process.stopped for process in reading.processes):
        moved = replace(
            reading.pages[-1], generation_tokens=reading.pages[-1].generation_tokens + 1
        )
        assert judge(replace(reading, metrics=(*reading.metrics, moved))).kind is Kind.SLOW


def test_the_processes_of_a_server_are_found() -> None:
    words = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE) as process:
        while len(tree := live.tree_of(process.pid)) < 2:
            assert process.poll() is None
        assert tree[0] == process.pid
        assert process.pid in live.tree_of(os.getpid())
        process.communicate(b"\n")
    assert live.tree_of(process.pid) == []
