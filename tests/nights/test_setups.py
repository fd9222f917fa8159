from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.report_examples import EXAMPLES, REHEARSAL, report
from vllm_repro.report.json_report import ServerReport
from vllm_repro.report.runs import run_of
from vllm_repro_nights.setups import Build, build_of, setup_of, signature_of


@pytest.mark.parametrize(
    ("version", "build"),
    [
        ("0.24.0", Build.RELEASE),
        ("0.24.0+cu130", Build.RELEASE),
        ("0.24.0.post1", Build.RELEASE),
        ("0.24.1rc1.dev12+gabc1234", Build.NIGHTLY),
        ("0.24.1rc2", Build.NIGHTLY),
        (None, Build.UNKNOWN),
        ("main", Build.UNKNOWN),
    ],
)
def test_nightly_or_release(version: str | None, build: Build) -> None:
    assert build_of(version) is build


def test_a_signature_says_whether_it_matches() -> None:
    for arm in (arm for folder in EXAMPLES for arm in report(folder).arms):
        deaths = [trial.death for trial in arm.trials if trial.death]
        matched = any(death.signature == "match" for death in deaths)
        assert signature_of(arm).startswith("match: ") is matched


def test_a_setup_is_its_flags_and_model_and_not_this_run() -> None:
    arm = run_of(report(REHEARSAL)).arms[0]

    def setup(command: str, image: str | None = None) -> str:
        return setup_of(
            replace(arm, command=command, server=ServerReport(kind="docker", image=image))
        )

    old, new = "vllm/vllm-openai:v0.23.0", "vllm/vllm-openai:v0.24.0"
    first = f"docker run -p 127.0.0.1:45421:8000 {old} Qwen/Qwen3-8B --max-num-seqs 2 --port 8000"
    later = f"docker run -p 127.0.0.1:999:8000 {new} Qwen/Qwen3-8B --max-num-seqs 2 --port 8001"
    assert setup(first, old) == setup(later, new)
    assert setup(first, old) != setup(first.replace("seqs 2", "seqs 3"), old)
    assert setup(first, old) != setup(first.replace("8B", "4B"), old)
    assert setup("/a/releases/0.23.0/bin/vllm serve /m/x --f") == setup(
        "/b/0.24.0/bin/vllm serve /n/x --f"
    )
