from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import vllm_repro_diagnosis
from tests.diagnosis.logs import DATA, DEATHS, REAL, pasted, recording, seen, split
from vllm_repro_diagnosis.diagnosis import diagnose


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
    assert diagnose("\n".join(lines[:begin])).died is False
    for at in range(begin + 1, end + 1):
        diagnosis = diagnose("\n".join(lines[:at]))
        assert diagnosis.died is None, at
        assert "ends inside a traceback that Worker prints" in diagnosis.why
    assert diagnose("\n".join(lines[: end + 1])).died is True
    answered = ['INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK'] * 3
    assert diagnose("\n".join([*lines[:end], *answered])).died is False, "its last line was lost"


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
    assert lines[-2:] == ["  vllm/v1/core/kv_cache_utils.py:popleft_n", "AssertionError"]


def test_the_package_alone_prints_json(
    run_alone: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    log = "LAB: vllm_repro_lab replaces parts\n" + recording("v0.28.0-min-tokens")
    values = json.loads(run_alone("-", "--json", stdin=log).stdout)
    assert (values["died"], values["phase"], values["evidence"]) == (True, "request", "lab")
    assert (values["exception"], values["vllm_version"]) == ("IndexError", "0.28.0")
    assert values["frames"][-1] == "vllm/v1/sample/logits_processor/builtin.py:apply"
    assert run_alone("-", stdin=log).stdout.startswith("LAB: vLLM 0.28.0's own code")


def test_the_package_alone_names_a_missing_file(
    run_alone: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_alone("missing.log")
    assert done.returncode == 2
    assert "cannot read missing.log: No such file or directory" in done.stderr
