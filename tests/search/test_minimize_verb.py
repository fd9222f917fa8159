"""`vllm-repro minimize` on the rehearsal engine and with made-up runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Harness
from tests.golden_files import assert_refused
from tests.report_examples import run_of
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job
from vllm_repro.verdict.outcome import Outcome

TQ = ("minimize", "tq-mtp-cudagraphs", "--server", "rehearsal")


def record_in(out: Path) -> dict[str, Any]:
    (path,) = out.glob("*/minimize/2*/minimize.json")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def test_what_the_crash_needs_is_found_with_a_limit_and_a_resume(
    harness: Harness, tmp_path: Path
) -> None:
    out = tmp_path / "reports"
    cut = harness(*TQ, "--max-boots", "4")
    assert cut.status == 2, cut.err
    assert cut.out.startswith("REHEARSAL: ")
    folder = out / "tq-mtp-cudagraphs" / "minimize" / "latest"
    assert f"resume:   vllm-repro minimize --resume {folder.resolve()}" in cut.out
    first = record_in(out)
    assert (first["stopped"], first["answer"], first["state"]) == ("--max-boots 4", None, "open")
    assert first["boots"][0]["unused"] == [0, 1], "it crashed while booting"
    done = harness("minimize", "--resume", str(folder), "--json")
    assert done.status == 0, done.err
    record = record_in(out)
    assert json.loads(done.out) == record
    assert record["boots"][:4] == first["boots"]
    assert record["answer"] == [
        "--kv-cache-dtype turboquant_k8v4",
        """--speculative-config '{"method":"mtp","num_speculative_tokens":3}'""",
    ]
    assert [why.partition(":")[0] for why in record["removals"].values()] == [
        "untriggered",
        "untriggered",
    ]
    assert "in phase warmup" in record["reading"]
    assert record["command"] == (
        "vllm serve \\\n  --model Lorbus/Qwen3.6-27B-int4-AutoRound \\\n  --kv-cache-dtype"
        " turboquant_k8v4 \\\n"
        """  --speculative-config '{"method":"mtp","num_speculative_tokens":3}'"""
    )
    text = (folder / "minimize.md").read_text(encoding="utf-8")
    assert record["command"] in text
    assert str(tmp_path) not in text + json.dumps(record)
    for boot in record["boots"]:
        run = f"../tq-mtp-cudagraphs/{boot['run']}/report.md"
        assert f"]({run})" in text
        assert (folder.resolve() / run).is_file()
    crashes = [boot for boot in record["boots"] if boot["outcome"] == "crash"]
    smallest = json.loads(
        (
            out
            / "tq-mtp-cudagraphs/minimize/tq-mtp-cudagraphs"
            / crashes[-1]["run"]
            / "report.json"
        ).read_text()
    )
    (arm,) = smallest["arms"]
    flags = [word for word in arm["server"]["argv"] if word.startswith("--")]
    assert flags == [
        "--model",
        "--kv-cache-dtype",
        "--speculative-config",
        "--host",
        "--port",
    ], "what was said is what was booted"
    assert arm["k"] == 1
    again = "minimize tq-mtp-cudagraphs --server rehearsal --vllm 0.20.2 --arm reported --seed 1"
    assert again in text
    assert again in smallest["reproduce"]
    nights = harness("history", "--json")
    assert json.loads(nights.out)["bugs"] == [], "these runs are not of the reported command"


def test_requests_that_the_crash_does_not_need_are_dropped(
    harness: Harness, tmp_path: Path
) -> None:
    done = harness("minimize", "tq-chunked-prefill", "--server", "rehearsal")
    assert done.status == 0, done.err
    record = record_in(tmp_path / "reports")
    assert record["answer"] == ["long chat of 7593 tokens", "--kv-cache-dtype turboquant_4bit_nc"]
    assert "If one of these is left out" in record["reading"]


def test_a_release_without_the_bug_is_a_surprise(harness: Harness, tmp_path: Path) -> None:
    done = harness("minimize", "tq-chunked-prefill", "--server", "rehearsal", "--vllm", "0.24.0")
    assert done.status == 1, done.err
    record = record_in(tmp_path / "reports")
    assert (record["state"], record["answer"], len(record["boots"])) == ("quiet", None, 1)
    assert "clean: the boundary was crossed and the engine lived" in record["reading"]


MadeUp = Callable[[Sequence[Outcome]], list[Job]]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """Replace runs by made-up outcomes, and return the list of their jobs.

    A run after the last one is interrupted.
    """

    def put(outcomes: Sequence[Outcome]) -> list[Job]:
        jobs: list[Job] = []

        def run_one(job: Job, *_: object) -> RunReport:
            jobs.append(job)
            if len(jobs) > len(outcomes):
                raise KeyboardInterrupt("SIGTERM")
            return run_of("0.23.0", [outcomes[len(jobs) - 1]])

        monkeypatch.setattr("vllm_repro_search.boot_search.run_one", run_one)
        return jobs

    return put


def test_two_boots_without_an_answer_end_it_and_are_tried_again(
    harness: Harness, tmp_path: Path, made_up: MadeUp
) -> None:
    jobs = made_up([Outcome.CRASH, Outcome.INFRA, Outcome.INFRA, Outcome.CRASH])
    assert (harness(*TQ).status, len(jobs)) == (2, 3)
    record = record_in(tmp_path / "reports")
    assert (record["stopped"], len(record["boots"])) == ("two boots in a row without an answer", 3)
    folder = str(tmp_path / "reports" / "tq-mtp-cudagraphs" / "minimize" / "latest")
    assert (harness("minimize", "--resume", folder).status, len(jobs)) == (130, 5)
    record = record_in(tmp_path / "reports")
    assert (record["stopped"], [boot["outcome"] for boot in record["boots"]]) == (
        "SIGTERM",
        ["crash", "crash"],
    )
    assert jobs[1].arms[0] == jobs[3].arms[0]


def test_a_refused_command_keeps_its_flags(
    harness: Harness, tmp_path: Path, made_up: MadeUp
) -> None:
    made_up([Outcome.CRASH, *[Outcome.BOOT_FAILED] * 60])
    done = harness(*TQ)
    assert done.status == 0, done.err
    record = record_in(tmp_path / "reports")
    assert (len(record["answer"]), len(record["units"])) == (15, 15)
    assert set(record["removals"].values()) == {"vLLM does not start: it was boot-failed"}
    assert record["boots"][-1]["units"] == [], "and all of them were left out together, at last"


def test_a_secret_in_a_flag_is_printed_nowhere(
    harness: Harness, tmp_path: Path, made_up: MadeUp
) -> None:
    source = Path(__file__).parents[2] / "scenarios" / "tq_mtp_cudagraphs.py"
    text = source.read_text(encoding="utf-8")
    mine = tmp_path / source.name
    mine.write_text(text.replace("--trust-remote-code", "--api-key sk-abcdefghijklmnop"))
    made_up([Outcome.CRASH, *[Outcome.CLEAN] * 60])
    done = harness("minimize", str(mine), "--server", "rehearsal")
    assert done.status == 0, done.err
    written = "".join(
        path.read_text() for path in (tmp_path / "reports").rglob("*") if path.is_file()
    )
    assert "--api-key" in written
    assert "abcdefghijklmnop" not in written + done.out + done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["minimize"], "no SCENARIO is named"),
        (
            ["minimize", "tq-mtp-wrong-tokens", "--server", "rehearsal"],
            "is not declared to crash with a signature",
        ),
        ([*TQ, "--arm", "eager"], "is not declared to crash with a signature"),
        (
            ["minimize", "dsv4-tp2", "--server", "rehearsal", "--arm", "branch"],
            "changes vLLM's source",
        ),
        ([*TQ, "--arm", "reported", "--arm", "4bit-nc"], "2 arms are named"),
        ([*TQ, "--max-boots", "0"], "'0' is no number of boots"),
        (
            ["minimize", "tq-mtp-cudagraphs", "--server", "attach"],
            "'attach' is none of auto, docker",
        ),
        (["minimize", "--resume", "/nowhere"], "holds no search that can be read"),
    ],
)
def test_wrong_usage_is_reported_and_leaves_no_folder(
    harness: Harness, words: list[str], message: str, tmp_path: Path
) -> None:
    assert_refused(harness(*words), message, "next:")
    assert not (tmp_path / "reports").exists()
