"""Diagnosis of logs: recordings, pasted tracebacks, unknown prefixes, cut logs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_repro_diagnosis
from tests.diagnosis.logs import (
    DATA,
    DEATHS,
    DEATHS_WITH_ROOT,
    LOGS,
    REAL,
    header_of,
    inner,
    pasted,
    recording,
    seen,
    split,
)
from tests.golden_files import TESTS, assert_golden
from vllm_repro_diagnosis.diagnosis import Phase, diagnose
from vllm_repro_diagnosis.log_text import read_lines


@pytest.mark.parametrize("name", REAL)
def test_a_recording_names_its_release(name: str) -> None:
    version = diagnose(recording(name)).vllm_version
    # a command line that is refused prints no release
    assert version == (None if "unknown-flag" in name else name.split("-")[0].removeprefix("v"))


@pytest.mark.parametrize(
    ("name", "version"),
    [("v0-engine-1", "0.6.1"), ("collect-env-2", "2.9.1"), ("collect-env-release", "0.25.1")],
)
def test_the_release_of_a_log(name: str, version: str) -> None:
    assert diagnose(split(DATA / "logs" / f"{name}.log")[1]).vllm_version == version


@pytest.mark.parametrize(
    ("name", "line", "text"),
    [
        ("line-numbers-bar", 6, "Traceback (most"),
        ("line-numbers-explained", 6, "died unexpectedly"),
        ("line-numbers-json", 5, "Traceback (most"),
        ("csv", 8, "Traceback (most"),
        ("newest-first-tabs", 17, "Traceback (most"),
    ],
)
def test_the_line_is_that_of_the_file(name: str, line: int, text: str) -> None:
    log = split(DATA / "logs" / f"{name}.log")[1]
    assert (diagnose(log).line, text in log.split("\n")[line - 1]) == (line, True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tq-chunked-prefill", ("yes", "AssertionError in _ensure_workspace_size", "request")),
        ("tq-mtp-cudagraphs", ("yes", "RuntimeError in _prefill_attention", "warmup")),
        ("tq-mtp-cudagraphs-one-line", ("yes", "RuntimeError in _prefill_attention", "warmup")),
        ("sco-hybrid", ("yes", "AssertionError in popleft_n", "request")),
        ("sco-hybrid-with-prose", ("yes", "AssertionError in popleft_n", "request")),
        ("dsv4-tp2", ("unknown", "AssertionError", "-")),
    ],
)
def test_a_pasted_traceback(name: str, expected: tuple[str, str, str]) -> None:
    assert seen(diagnose(pasted(name))) == expected


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        (
            "v0.32.0-fault-workspace-mp-inflight",
            "WorkerProc hit an exception.",
            "] AssertionError: Workspace",
        ),
        ("v0.28.0-min-tokens", "WorkerProc hit an exception.", "] IndexError: "),
    ],
)
def test_a_log_that_ends_in_a_traceback(name: str, first: str, last: str) -> None:
    lines = recording(name).splitlines()
    begin = next(at for at, line in enumerate(lines) if first in line)
    end = next(at for at, line in enumerate(lines) if last in line)
    assert diagnose("\n".join(lines[:begin])).open_end
    for at in range(begin + 1, end + 1):
        diagnosis = diagnose("\n".join(lines[:at]))
        assert diagnosis.died is None, at
        assert "ends inside a traceback that Worker prints" in diagnosis.why
    assert diagnose("\n".join(lines[: end + 1])).died is True
    answered = ['INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK'] * 3
    assert diagnose("\n".join([*lines[:end], *answered])).open_end, "its last line was lost"


@pytest.mark.parametrize(
    ("name", "prose"),
    [("v0.32.0-killed-idle", True), ("v0.28.0-min-tokens", False), ("v0.32.0-boot", True)],
)
def test_prose_is_kept_unless_a_log_has_an_exception(name: str, prose: bool) -> None:
    diagnosis = diagnose(f"{recording(name)}\nfirst\nkv_connector='X'\n")
    assert diagnosis.prose.endswith("\nfirst\nkv_connector='X'") is bool(diagnosis.prose) is prose
    assert diagnosis.connector == "X"
    assert diagnose("first\n" + pasted("tq-chunked-prefill")).prose.startswith("first\n")


def test_the_error_of_a_refused_command_line() -> None:
    usage = diagnose(recording("v0.28.0-unknown-flag")).usage
    assert usage == "vllm: error: unrecognized arguments: --disable-log-requests"


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_stays_one_whoever_ended_the_rest(name: str) -> None:
    for we_terminated in (True, False):
        assert seen(diagnose(recording(name), we_terminated=we_terminated)) == REAL[name]


ARGS = "(APIServer pid=1) INFO 11-25 10:00:00 [utils.py:233] non-default args: {'model': 'm'}\n"
NIXL = ARGS.replace("}", ", 'kv_transfer_config': C(kv_connector='NixlConnector')}")


@pytest.mark.parametrize(
    ("args", "connector"),
    [(ARGS, ""), (NIXL, "NixlConnector"), (ARGS.replace("}", ""), None)],  # the last is cut
)
def test_complete_arguments_name_the_connector(args: str, connector: str | None) -> None:
    assert diagnose(args + "(EngineCore pid=2) INFO:     x\n").connector == connector


# ── python -m vllm_repro_diagnosis ──────────────────────────────────────────

# argv[1] is the only folder beside the standard library's
ALONE = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("vllm_repro_diagnosis", run_name="__main__", alter_sys=True)
assert not {"vllm_repro", "msgspec", "packaging"} & set(sys.modules)
"""
SCO = DATA / "pasted" / "sco-hybrid.txt"


@pytest.fixture
def run_alone(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the package in a folder of its own, without site-packages."""
    package = Path(vllm_repro_diagnosis.__file__).parent
    (tmp_path / package.name).symlink_to(package)
    command = [sys.executable, "-S", "-I", "-c", ALONE, str(tmp_path)]

    def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words], input=stdin, capture_output=True, text=True, check=False
        )

    return run


def test_the_package_runs_alone(
    run_alone: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_alone(str(SCO))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("died: An exception left the engine's step or boot")
    assert lines[1] == "line 1, phase: request, 1 death"
    assert lines[-1] == "  vllm/v1/core/kv_cache_utils.py:popleft_n"
    missing = run_alone("missing.log")
    assert missing.returncode == 2
    assert "cannot read missing.log: No such file or directory" in missing.stderr


def test_the_package_alone_prints_json(
    run_alone: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    log = "LAB: vllm_repro_lab replaces parts\n" + recording("v0.28.0-min-tokens")
    values = json.loads(run_alone("-", "--json", stdin=log).stdout)
    assert (values["died"], values["phase"], values["evidence"]) == (True, "request", "lab")
    assert (values["exception"], values["vllm_version"]) == ("IndexError", "0.28.0")
    assert values["frames"][-1] == "vllm/v1/sample/logits_processor/builtin.py:apply"
    assert run_alone("-", stdin=log).stdout.startswith("LAB: vLLM 0.28.0 on a CPU")


PRIVATE = re.compile(r"(?<![\w.])/(?:root|work|home/(?!someone)|tmp/pytest)\b|\bhf_\w{10}")


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_has_the_diagnosis_of_its_header(path: Path) -> None:
    header, text = split(path)
    diagnosed = header_of(diagnose(text))
    if os.environ.get("UPDATE_GOLDEN") and not os.environ.get("CI"):
        path.write_bytes(f"{diagnosed}\n\n".encode() + path.read_bytes().partition(b"\n\n")[2])
    assert diagnosed == header
    assert not PRIVATE.search(text)


_, *PARTS = re.split(
    r"^== (\S+)\n", (DATA / "log_lines.txt").read_text("utf-8"), flags=re.MULTILINE
)
LINES = dict(zip(PARTS[::2], PARTS[1::2], strict=True))
TOLD = {" (we terminated: True)": True, " (we terminated: False)": False, "": None}
DIED = {True: "died", False: "lives", None: "undecided"}


def diagnosed(row: str) -> str:
    """Return the diagnosis of a row's log."""
    told = next(words for words in TOLD if row.endswith(words))
    log = "".join(LINES[name] for name in row.removesuffix(told).split())
    diagnosis = diagnose(log, we_terminated=TOLD[told])
    facts = [
        *(DIED[diagnosis.died], diagnosis.phase, diagnosis.exception, inner(diagnosis)),
        *("worker lost" * diagnosis.lost_worker, "open" * diagnosis.open_end),
        *(f"line {diagnosis.line}" * bool(diagnosis.line), diagnosis.time),
    ]
    return f"{', '.join(filter(None, facts))}: {diagnosis.why}"


def test_the_table_of_diagnoses() -> None:
    rows = (TESTS / "golden" / "diagnoses.txt").read_text("utf-8").splitlines()[::2]
    assert len(rows) > 390
    assert_golden("diagnoses.txt", "".join(f"{row}\n    {diagnosed(row)}\n" for row in rows))


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


OTHER_NAMES = {"EngineCore": "DPEngineCore_0", "APIServer": "ApiServer_1", "Worker": "Worker_DP0"}
"""Names of processes in vLLM's prefix, and as other releases or several servers print them."""


def test_processes_may_have_the_names_of_other_releases() -> None:
    renamed = re.compile(rf"\(({'|'.join(OTHER_NAMES)})(?:_0|_DP0)?(?=\w* pid=)")
    for log in LOGS[::3]:  # each takes 20 ms
        header, text = split(log)
        other = renamed.sub(lambda name: f"({OTHER_NAMES[name[1]]}", text)
        # a terminal's copy is joined by the width of its lines, which another name changes
        if other != text and "columns" not in log.stem:
            assert header_of(diagnose(other)) == header, log


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
