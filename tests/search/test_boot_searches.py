"""`vllm-repro threshold` and `minimize` on the rehearsal engine and with made-up runs."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.conftest import Harness
from tests.golden_files import assert_refused, missing
from tests.report_examples import replace, run_of
from tests.search.conftest import Answer, MadeUp, record_in
from vllm_repro.errors import Unsupported
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job
from vllm_repro.scenario.workload import Request
from vllm_repro.verdict.outcome import Outcome

ANSWERED = [(100, "quiet")]
THRESHOLD = ("threshold", "tq-chunked-prefill", "--server", "rehearsal")
MINIMIZE = ("minimize", "tq-mtp-cudagraphs", "--server", "rehearsal")


def sent(record: dict[str, Any]) -> list[list[tuple[int, str]]]:
    return [
        [(probe["length"], probe["answer"]) for probe in boot["probes"]] for boot in record["boots"]
    ]


@dataclass(frozen=True)
class Search:
    """Terminal text, record, page and last report of a search that was resumed."""

    cut: str
    record: dict[str, Any]
    page: str
    report: Any


def resumed(harness: Harness, tmp_path: Path, *words: str, most: int, version: str) -> Search:
    """Run a search up to its `most` boots, resume it, and check what every search keeps."""
    verb, name, *_ = words
    out = tmp_path / "reports"
    cut = harness(*words, "--max-boots", str(most))
    assert cut.status == 2, cut.err
    assert cut.out.startswith("REHEARSAL: ")
    folder = (out / name / verb / "latest").resolve()
    assert f"resume:   vllm-repro {verb} --resume {folder}" in cut.out
    first = record_in(out, verb)
    stopped = f"--max-boots {most}"
    assert (first["stopped"], first["answer"], first["state"]) == (stopped, None, "open")
    done = harness(verb, "--resume", str(folder), "--json")
    assert done.status == 0, done.err
    record = record_in(out, verb)
    assert json.loads(done.out) == record
    assert (record["boots"][:most], record["stopped"]) == (first["boots"], None)
    page = (folder / f"{verb}.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in page + json.dumps(record)
    runs = [f"../{name}/{boot['run']}/report.md" for boot in record["boots"]]
    assert missing(page, *(f"]({run})" for run in runs)) == []
    assert all((folder / run).is_file() for run in runs)
    reports = [json.loads((folder / run).with_suffix(".json").read_text()) for run in runs]
    again = f"{verb} {name} --server rehearsal --vllm {version} --arm reported --seed 1"
    assert again in page
    assert all(again in report["reproduce"] for report in reports)
    nights = harness("history", "--json")
    assert json.loads(nights.out)["bugs"] == [], "these runs are not of the reported arms"
    crashed = [boot["outcome"] == "crash" for boot in record["boots"]]
    return Search(cut.out, record, page, [*compress(reports, crashed)][-1])


def test_the_threshold_is_found_with_a_limit_and_a_resume(harness: Harness, tmp_path: Path) -> None:
    search = resumed(harness, tmp_path, *THRESHOLD, most=1, version="0.23.0")
    said = "A prompt of 4,225 tokens crashed, 4,224 did not. The checks are not finished."
    assert said in search.cut
    record = search.record
    assert sent(record) == [
        [(100, "quiet"), (2162, "quiet"), (4224, "quiet"), (4225, "crash")],
        [(4225, "crash")],
        [(6337, "crash")],
        [(8450, "crash")],
    ]
    assert (record["answer"], record["guess"], record["version"]) == (4225, 4225, "0.23.0")
    assert "> **REHEARSAL" in search.page


def test_what_the_crash_needs_is_found_with_a_limit_and_a_resume(
    harness: Harness, tmp_path: Path
) -> None:
    search = resumed(harness, tmp_path, *MINIMIZE, most=4, version="0.20.2")
    record = search.record
    assert record["boots"][0]["unused"] == [0, 1], "it crashed while booting"
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
    assert record["command"] in search.page
    (arm,) = search.report["arms"]
    flags = [word for word in arm["server"]["argv"] if word.startswith("--")]
    assert flags == [
        "--model",
        "--kv-cache-dtype",
        "--speculative-config",
        "--host",
        "--port",
    ], "what was said is what was booted"
    assert arm["k"] == 1


@pytest.mark.parametrize(
    ("verb", "status", "reading"),
    [
        (
            "threshold",
            0,
            "None of 17 lengths from 100 to 8,450 tokens crashes it. The trigger computes 4,225.",
        ),
        ("minimize", 1, "clean: the boundary was crossed and the engine lived"),
    ],
)
def test_a_release_without_the_bug_takes_one_boot(
    harness: Harness, tmp_path: Path, verb: str, status: int, reading: str
) -> None:
    done = harness(verb, *THRESHOLD[1:], "--vllm", "0.24.0")
    assert done.status == status, done.err
    record = record_in(tmp_path / "reports", verb)
    assert (record["state"], record["answer"], len(record["boots"])) == ("quiet", None, 1)
    assert reading in record["reading"]


@pytest.fixture
def failing_runs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Replace runs by one that answers a prompt, then by failed boots; return their jobs."""
    jobs: list[Job] = []

    def run_one(job: Job, *_: object) -> RunReport:
        jobs.append(job)
        outcome = Outcome.UNTRIGGERED if len(jobs) == 1 else Outcome.BOOT_FAILED
        why = "it never became ready"
        report = run_of("0.24.0", [outcome])
        arm = report.arms[0]
        arm = replace(arm, trials=tuple(replace(trial, why=why) for trial in arm.trials))
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
                "outcome": outcome,
                "why": why,
            },
            {"t": 0, "event": "run-ended", "interrupted": None},
        ]
        (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if len(jobs) == 5:
            raise KeyboardInterrupt("SIGTERM")
        return replace(report, folder=folder, arms=(arm,))

    monkeypatch.setattr("vllm_repro_search.boot_search.run_one", run_one)
    return jobs


def test_two_boots_without_an_answer_end_it_and_are_tried_again(
    harness: Harness, tmp_path: Path, failing_runs: list[Job]
) -> None:
    done = harness(*THRESHOLD)
    assert (done.status, len(failing_runs)) == (2, 3), done.err
    record = record_in(tmp_path / "reports", "threshold")
    assert (record["stopped"], sent(record)) == (
        "two boots in a row without an answer",
        [ANSWERED, [], []],
    )
    assert "boot-failed: it never became ready" in done.out
    folder = str(tmp_path / "reports" / "tq-chunked-prefill" / "threshold" / "latest")
    assert harness("threshold", "--resume", folder).status == 130
    record = record_in(tmp_path / "reports", "threshold")
    assert (record["stopped"], sent(record)) == ("SIGTERM", [ANSWERED, []])


def test_each_prompt_is_one_of_its_own(harness: Harness, failing_runs: list[Job]) -> None:
    harness(*THRESHOLD, "--max-boots", "1")
    requests = failing_runs[0].arms[0].workload
    assert requests
    for request, length in zip(requests, (100, 2162, 4224, 4225), strict=False):
        assert isinstance(request, Request)
        assert (request.prompt, request.name) == (length, f"{length} tokens")


def test_a_time_limit_ends_it(
    harness: Harness, tmp_path: Path, failing_runs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr("vllm_repro_search.boot_search.time.monotonic", lambda: float(next(clock)))
    assert harness(*THRESHOLD, "--max-time", "150").status == 2
    assert (record_in(tmp_path / "reports", "threshold")["stopped"], len(failing_runs)) == (
        "--max-time 150s",
        1,
    )


def test_a_server_that_cannot_run_leaves_no_folder(
    harness: Harness, tmp_path: Path, made_up: MadeUp
) -> None:
    made_up(Mock(side_effect=Unsupported("the lab cannot run this release")))
    assert_refused(
        harness(*THRESHOLD), "the lab cannot run this release", status=Unsupported.exit_status
    )
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
        *(
            (["threshold", name, "--server", server], message)
            for name, server, message in (
                ("min-tokens-stop-ids", "rehearsal", "not the length of one prompt: sent_with"),
                ("sco-hybrid", "rehearsal", "is not the length of one prompt"),
                ("tq-prefix-hit-unreserved", "lab", "not the length of one prompt"),
                ("tq-mtp-cudagraphs", "lab", "no prompt crashes the arm reported"),
                ("sco-lazy-never-rests", "lab", "no prompt crashes the arm reported"),
                ("dsv4-cpu-first-request", "lab", "every prompt crosses the boundary"),
            )
        ),
        ([*THRESHOLD, "--arm", "eager"], "no prompt crashes the arm eager"),
        ([*THRESHOLD, "--arm", "reported", "--arm", "near-miss-129"], "2 arms are named"),
        ([*THRESHOLD, "--arm", "prefix-hit"], "also needs a prefix in the cache"),
        ([*THRESHOLD, "--arm", "growing-chat"], "also needs a prefix in the cache"),
        ([*THRESHOLD, "--max-boots", "0"], "'0' is no number of boots"),
        ([*THRESHOLD, "--max-boots", "²"], "'²' is no number of boots"),
        ([*THRESHOLD, "--trials", "3"], "unrecognized arguments: --trials"),
        (
            ["threshold", "tq-chunked-prefill", "--server", "attach"],
            "'attach' is none of auto, docker",
        ),
        (["minimize"], "no SCENARIO is named"),
        (
            ["minimize", "tq-mtp-wrong-tokens", "--server", "rehearsal"],
            "is not declared to crash with a signature",
        ),
        ([*MINIMIZE, "--arm", "eager"], "is not declared to crash with a signature"),
        ([*MINIMIZE, "--arm", "eager"], "--arm eager shows what this arm does"),
        (
            ["minimize", "dsv4-tp2", "--server", "rehearsal", "--arm", "branch"],
            "changes vLLM's source",
        ),
        ([*MINIMIZE, "--arm", "reported", "--arm", "4bit-nc"], "2 arms are named"),
        ([*MINIMIZE, "--max-boots", "0"], "'0' is no number of boots"),
        (
            ["minimize", "tq-mtp-cudagraphs", "--server", "attach"],
            "'attach' is none of auto, docker",
        ),
        (["minimize", "--resume", "/nowhere"], "holds no search that can be read"),
        (["threshold", "--resume", "/nowhere"], "holds no search that can be read"),
    ],
)
def test_wrong_usage_is_said_and_leaves_no_folder(
    harness: Harness, words: list[str], message: str, tmp_path: Path
) -> None:
    assert_refused(harness(*words), message, "next:")
    assert not (tmp_path / "reports").exists()


def test_requests_that_the_crash_does_not_need_are_dropped(
    harness: Harness, tmp_path: Path, made_up: MadeUp
) -> None:
    def needs_two(job: Job) -> RunReport:
        (arm,) = job.arms
        names = {getattr(step, "name", "") for step in arm.workload or ()}
        crashes = "long chat" in names and job.scenario.command_of(arm).has("--kv-cache-dtype")
        return run_of("0.23.0", [Outcome.CRASH if crashes else Outcome.UNTRIGGERED])

    made_up(needs_two)
    done = harness("minimize", "tq-chunked-prefill", "--server", "rehearsal")
    assert done.status == 0, done.err
    record = record_in(tmp_path / "reports", "minimize")
    assert record["answer"] == ["long chat of 7593 tokens", "--kv-cache-dtype turboquant_4bit_nc"]
    assert "If one of these is left out" in record["reading"]


def in_turn(*outcomes: Outcome) -> Answer:
    """Return runs with these outcomes. A run after the last one is interrupted."""
    left = iter(outcomes)

    def answer(_: Job) -> RunReport:
        if (outcome := next(left, None)) is None:
            raise KeyboardInterrupt("SIGTERM")
        return run_of("0.23.0", [outcome])

    return answer


def test_two_boots_without_an_outcome_end_it(
    harness: Harness, tmp_path: Path, made_up: MadeUp
) -> None:
    jobs = made_up(in_turn(Outcome.CRASH, Outcome.INFRA, Outcome.INFRA, Outcome.CRASH))
    assert (harness(*MINIMIZE).status, len(jobs)) == (2, 3)
    record = record_in(tmp_path / "reports", "minimize")
    assert (record["stopped"], len(record["boots"])) == ("two boots in a row without an answer", 3)
    folder = str(tmp_path / "reports" / "tq-mtp-cudagraphs" / "minimize" / "latest")
    assert (harness("minimize", "--resume", folder).status, len(jobs)) == (130, 5)
    record = record_in(tmp_path / "reports", "minimize")
    assert (record["stopped"], [boot["outcome"] for boot in record["boots"]]) == (
        "SIGTERM",
        ["crash", "crash"],
    )
    assert jobs[1].arms[0] == jobs[3].arms[0]


def test_a_refused_command_keeps_its_flags(
    harness: Harness, tmp_path: Path, made_up: MadeUp
) -> None:
    made_up(in_turn(Outcome.CRASH, *[Outcome.BOOT_FAILED] * 60))
    done = harness(*MINIMIZE)
    assert done.status == 0, done.err
    record = record_in(tmp_path / "reports", "minimize")
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
    made_up(in_turn(Outcome.CRASH, *[Outcome.CLEAN] * 60))
    done = harness("minimize", str(mine), "--server", "rehearsal")
    assert done.status == 0, done.err
    written = "".join(
        path.read_text() for path in (tmp_path / "reports").rglob("*") if path.is_file()
    )
    assert "--api-key" in written
    assert "abcdefghijklmnop" not in written + done.out + done.err
