"""Diagnoses that no collector's prefix, no order of processes and no cut of the log changes."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diagnosis.logs import DEATHS, DEATHS_WITH_ROOT, REAL, recording, seen
from vllm_repro_diagnosis.diagnosis import Phase, diagnose
from vllm_repro_diagnosis.log_text import read_lines


def test_a_lost_peer_is_not_explained() -> None:
    lines = recording("v0.32.0-two-ranks-worker1-stopped-rank1").splitlines()
    diagnosis = diagnose("\n".join(line for line in lines if "[shutdown]" not in line))
    assert seen(diagnosis) == ("unknown", "RuntimeError in all_reduce", "request")
    assert "peer" in diagnosis.why


def drifted(text: str, by: int) -> str:
    """Return the text as a release would print it whose source lines moved."""
    numbers = re.compile(r'(\.py:|", line )(\d+)')
    return numbers.sub(lambda match: f"{match[1]}{int(match[2]) + by}", text)


@pytest.mark.parametrize("name", REAL)
@given(
    by=st.integers(1, 900),
    prefix=st.sampled_from(["vllm-1  | ", "2026-11-20T08:24:30.123Z ", "\x1b[36m", ""]),
)
@settings(max_examples=1)
def test_line_numbers_and_known_prefixes(name: str, by: int, prefix: str) -> None:
    text = "\n".join(prefix + line for line in drifted(recording(name), by).splitlines())
    diagnosis = diagnose(text)
    assert seen(diagnosis) == REAL[name]
    assert diagnosis.vllm_version == diagnose(recording(name)).vllm_version


# Prefixes that the reader does not know by name.
UNKNOWN = {
    "slurm": "0: ",
    "stern": "vllm-7d9-abc vllm ",
    "swarm": "stack_vllm.1.abcdef@node1    | ",
    "logcli": '2026-11-20T08:12:39Z {{app="vllm", pod="vllm-0"}} ',
    "syslog": "<14>1 2026-11-20T08:12:39.{0:06d}Z host vllm 3908 - - ",
    "cat -n": "{0:6d}\t",
    "grep -n": "{0}:",
    "mpirun": "[1,0]<stderr>:",
    "torchrun": "[rank0]: ",
}


def prefixed(text: str, prefix: str) -> str:
    lines = enumerate(text.splitlines(), start=1)
    return "\n".join(prefix.format(number) + line for number, line in lines)


@pytest.mark.parametrize("prefix", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("name", ["v0.32.0-boot", "v0.20.2-fault-workspace-uni-inflight"])
def test_an_unknown_prefix_on_every_line(name: str, prefix: str) -> None:
    assert seen(diagnose(prefixed(recording(name), prefix))) == REAL[name]


def test_several_containers_have_a_prefix_each() -> None:
    death, alive = recording("v0.32.0-fault-workspace-mp-inflight"), recording("v0.32.0-boot")
    text = f"{prefixed(alive, 'sidecar-zz helper ')}\n{prefixed(death, 'vllm-a7f3 main ')}"
    assert seen(diagnose(text)) == REAL["v0.32.0-fault-workspace-mp-inflight"]


def shuffled(text: str, random: Random) -> str:
    """Mix the lines of the processes, and keep each process's order.

    Lines without a prefix belong to the API server (uvicorn).
    """
    voices: dict[int | str, list[str]] = {}
    for line in read_lines(text):
        speaker = "" if line.process == "APIServer" else line.speaker
        voices.setdefault(speaker, []).append(line.raw)
    order = [speaker for speaker, lines in voices.items() for _ in lines]
    random.shuffle(order)
    queues = {speaker: iter(lines) for speaker, lines in voices.items()}
    return "\n".join(next(queues[speaker]) for speaker in order)


ALIVE = ("v0.32.0-boot", "v0.28.0-sigterm", "v0.32.0-killed-streams")


@pytest.mark.parametrize("name", [*DEATHS_WITH_ROOT, *ALIVE])
@given(random=st.randoms(use_true_random=False))
@settings(max_examples=3)
def test_the_order_of_the_processes(name: str, random: Random) -> None:
    shown = seen(diagnose(shuffled(recording(name), random)))
    assert shown[0] == REAL[name][0]
    assert shown == REAL[name] or name not in DEATHS_WITH_ROOT


@pytest.mark.parametrize("name", [name for name in REAL if "startup complete" in recording(name)])
def test_the_end_of_a_log_shows_what_the_whole_shows(name: str) -> None:
    end = recording(name).partition("Application startup complete.\n")[2]
    assert seen(diagnose(end)) == REAL[name]


@pytest.mark.parametrize("name", REAL)
def test_a_cut_log_never_turns_a_clean_end_into_a_death(name: str) -> None:
    died, exception, _ = REAL[name]
    lines = recording(name).splitlines()
    for end in range(0, len(lines), 11):
        diagnosis = diagnose("\n".join(lines[:end]))
        assert died != "no" or diagnosis.died is not True, f"line {end}: {diagnosis.why}"
        assert not diagnosis.died or exception != "-" or diagnosis.exception is None


def test_a_piece_from_the_middle_of_a_clean_end_is_no_death() -> None:
    lines = recording("v0.32.0-boot").splitlines()
    marks = ("[shutdown] API server: shutdown triggered", "[shutdown] EngineCore: exiting busy")
    begin, listed, dead = (
        next(at for at, line in enumerate(lines) if mark in line)
        for mark in (*marks, "EngineDeadError: ")
    )
    for at in range(begin, listed + 1):
        assert diagnose("\n".join(lines[at : dead + 1])).died is not True, at


@pytest.mark.parametrize("name", DEATHS)
def test_the_tail_of_a_death_is_no_ordered_shutdown(name: str) -> None:
    for lines in (40, 80, 160):
        diagnosis = diagnose("\n".join(recording(name).splitlines()[-lines:]))
        assert diagnosis.phase is not Phase.SHUTDOWN or diagnosis.died is not False, diagnosis.why
