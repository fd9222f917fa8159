"""`vllm-repro threshold` on the rehearsal engine and with made-up runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Harness
from tests.golden_files import assert_refused
from tests.report_examples import replace, run_of
from vllm_repro.errors import Unsupported
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job
from vllm_repro.scenario.workload import Request
from vllm_repro.verdict.outcome import Outcome

ANSWERED = [(100, "quiet")]
TQ = ("threshold", "tq-chunked-prefill", "--server", "rehearsal")


def record_in(out: Path) -> dict[str, Any]:
    (path,) = out.glob("*/threshold/2*/threshold.json")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def sent(record: dict[str, Any]) -> list[list[tuple[int, str]]]:
    return [
        [(probe["length"], probe["answer"]) for probe in boot["probes"]] for boot in record["boots"]
    ]


def test_the_threshold_is_found_with_a_limit_and_a_resume(harness: Harness, tmp_path: Path) -> None:
    out = tmp_path / "reports"
    cut = harness(*TQ, "--max-boots", "1")
    assert cut.status == 2, cut.err
    assert cut.out.startswith("REHEARSAL: ")
    assert (
        "A prompt of 4,225 tokens crashed, 4,224 did not. The checks are not finished." in cut.out
    )
    folder = out / "tq-chunked-prefill" / "threshold" / "latest"
    assert f"resume:   vllm-repro threshold --resume {folder.resolve()}" in cut.out
    first = record_in(out)
    assert (first["stopped"], first["answer"], first["state"]) == ("--max-boots 1", None, "open")
    done = harness("threshold", "--resume", str(folder), "--json")
    assert done.status == 0, done.err
    record = record_in(out)
    assert json.loads(done.out) == record
    assert sent(record) == [
        [(100, "quiet"), (2162, "quiet"), (4224, "quiet"), (4225, "crash")],
        [(4225, "crash")],
        [(6337, "crash")],
        [(8450, "crash")],
    ]
    assert record["boots"][0] == first["boots"][0]
    assert (record["answer"], record["guess"], record["version"], record["stopped"]) == (
        4225,
        4225,
        "0.23.0",
        None,
    )
    text = (folder / "threshold.md").read_text(encoding="utf-8")
    assert "> **REHEARSAL" in text
    assert str(tmp_path) not in text + json.dumps(record)
    for boot in record["boots"]:
        run = f"../tq-chunked-prefill/{boot['run']}/report.md"
        assert f"]({run})" in text
        assert (folder.resolve() / run).is_file()
    again = "threshold tq-chunked-prefill --server rehearsal --vllm 0.23.0 --arm reported --seed 1"
    assert again in text
    assert (
        again
        in json.loads((folder.resolve() / run).with_name("report.json").read_text())["reproduce"]
    )
    nights = harness("history", "--json")
    assert json.loads(nights.out)["bugs"] == [], "these runs are not of the scenario's workload"


def test_a_fixed_release_answers_every_prompt_in_one_boot(harness: Harness, tmp_path: Path) -> None:
    done = harness(*TQ, "--vllm", "0.24.0")
    assert done.status == 0, done.err
    record = record_in(tmp_path / "reports")
    assert (record["state"], record["answer"], len(record["boots"])) == ("quiet", None, 1)
    assert (
        record["reading"]
        == "None of 17 lengths from 100 to 8,450 tokens crashes it. The trigger computes 4,225."
    )


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Replace runs by one that answers a prompt, then by failed boots; return their jobs."""
    jobs: list[Job] = []

    def run_one(job: Job, *_: object) -> RunReport:
        jobs.append(job)
        report = run_of("0.24.0", [Outcome.BOOT_FAILED])
        folder = job.out / f"run-{len(jobs)}"
        folder.mkdir(parents=True)
        sent = {
            "t": 0,
            "trial": 1,
            "name": "100 tokens",
            "status": 200,
            "error": None,
            "finish_reason": "length",
        }
        answered = [
            {**sent, "event": "request-sent"},
            {**sent, "event": "answer", "usage": {"prompt_tokens": 100}},
        ]
        lines = [
            *(answered if len(jobs) == 1 else []),
            {
                "t": 0,
                "event": "trial-ended",
                "trial": 1,
                "outcome": "untriggered" if len(jobs) == 1 else "boot-failed",
                "why": "it never became ready",
            },
            {"t": 0, "event": "run-ended", "interrupted": None},
        ]
        (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if len(jobs) == 5:
            raise KeyboardInterrupt("SIGTERM")
        return replace(report, folder=folder)

    monkeypatch.setattr("vllm_repro_search.boot_search.run_one", run_one)
    return jobs


def test_two_boots_without_an_answer_end_it_and_are_tried_again(
    harness: Harness, tmp_path: Path, made_up: list[Job]
) -> None:
    done = harness(*TQ)
    assert (done.status, len(made_up)) == (2, 3), done.err
    record = record_in(tmp_path / "reports")
    assert (record["stopped"], sent(record)) == (
        "two boots in a row without an answer",
        [ANSWERED, [], []],
    )
    assert "boot-failed: it never became ready" in done.out
    folder = str(tmp_path / "reports" / "tq-chunked-prefill" / "threshold" / "latest")
    assert harness("threshold", "--resume", folder).status == 130
    record = record_in(tmp_path / "reports")
    assert (record["stopped"], sent(record)) == ("SIGTERM", [ANSWERED, []])


def test_each_prompt_is_one_of_its_own(harness: Harness, made_up: list[Job]) -> None:
    harness(*TQ, "--max-boots", "1")
    requests = made_up[0].arms[0].workload
    assert requests
    for request, length in zip(requests, (100, 2162, 4224, 4225), strict=False):
        assert isinstance(request, Request)
        assert (request.prompt, request.name) == (length, f"{length} tokens")


def test_a_time_limit_ends_it(
    harness: Harness, tmp_path: Path, made_up: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(
        "vllm_repro_search.threshold.boots.time.monotonic", lambda: float(next(clock))
    )
    assert harness(*TQ, "--max-time", "150").status == 2
    assert (record_in(tmp_path / "reports")["stopped"], len(made_up)) == ("--max-time 150s", 1)


def test_a_server_that_cannot_run_leaves_no_folder(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_one(*_: object) -> RunReport:
        raise Unsupported("the lab cannot run this release")

    monkeypatch.setattr("vllm_repro_search.boot_search.run_one", run_one)
    assert_refused(harness(*TQ), "the lab cannot run this release", status=Unsupported.exit_status)
    assert not (tmp_path / "reports").exists()


def test_a_refusal_suggests_a_command_with_the_options(harness: Harness, tmp_path: Path) -> None:
    given = [
        "--server",
        "lab",
        "--vllm",
        "0.23.0",
        "--answer-stall",
        "33",
        "--seed",
        "7",
        "--arm",
        "eager",
    ]
    folders = ["--out", str(tmp_path / "my runs"), "--scenarios", str(tmp_path)]
    done = harness("threshold", "tq-chunked-prefill", *given, *folders)
    (hint,) = [line for line in done.err.splitlines() if "next:" in line]
    program, verb, name, *words = shlex.split(hint.partition("what this arm does: ")[2])
    assert (program, verb, name) == ("vllm-repro", "run", "tq-chunked-prefill")
    pairs = [set(zip(one[::2], one[1::2], strict=True)) for one in (words, [*given, *folders])]
    assert pairs[0] == {
        (key, "33.0" if key == "--answer-stall" else value) for key, value in pairs[1]
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["threshold"], "no SCENARIO is named"),
        (["threshold", "sco-hybrid", "--server", "rehearsal"], "is not the length of one prompt"),
        ([*TQ, "--arm", "eager"], "no prompt crashes the arm eager"),
        ([*TQ, "--arm", "reported", "--arm", "near-miss-129"], "2 arms are named"),
        ([*TQ, "--arm", "prefix-hit"], "also needs a prefix in the cache"),
        ([*TQ, "--arm", "growing-chat"], "also needs a prefix in the cache"),
        ([*TQ, "--max-boots", "0"], "'0' is no number of boots"),
        ([*TQ, "--trials", "3"], "unrecognized arguments: --trials"),
        (
            ["threshold", "tq-chunked-prefill", "--server", "attach"],
            "'attach' is none of auto, docker",
        ),
        (["threshold", "--resume", "/nowhere"], "holds no search that can be read"),
    ],
)
def test_wrong_usage_is_said_and_leaves_no_folder(
    harness: Harness, words: list[str], message: str, tmp_path: Path
) -> None:
    assert_refused(harness(*words), message, "next:")
    assert not (tmp_path / "reports").exists()
