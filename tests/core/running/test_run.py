"""Whole runs on the rehearsal engine: every outcome, and every way to interrupt a run."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.commands import interrupted, journals, signalled, started, until
from tests.conftest import Done, Harness
from tests.golden_files import assert_refused
from tests.report_examples import REHEARSAL, report
from vllm_repro.cli import main
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.host.processes import session_members
from vllm_repro.journal.journal import Entry, Journal, Recording, read
from vllm_repro.journal.redact import Redactor
from vllm_repro.releases.sources import Source
from vllm_repro.report.build import build
from vllm_repro.report.files import render
from vllm_repro.report.model import RunReport
from vllm_repro.report.summary import summary
from vllm_repro.running.folders import private_folders, private_sources, redactor, run_folder
from vllm_repro.running.resume import unfinished_run
from vllm_repro.running.run import resolve_measure, signals_later, strongest_record
from vllm_repro.running.state import MeasureOptions, TimeLimits
from vllm_repro.running.terminal import Progress
from vllm_repro.running.trial_order import MOST, Trials, undecided_arms
from vllm_repro.scenario.catalogue import all_scenarios, find, scenario_files
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.scenario import Arm
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import ArmResult, Expected, Record, arm_result
from vllm_repro_diagnosis.evidence import Evidence

TQ = ("run", "tq-chunked-prefill", "--server", "rehearsal")


def test_the_bug_reproduces(harness: Harness) -> None:
    done = harness(*TQ, "--vllm", "0.23.0")
    report = done.report
    assert done.status == 0, done.out + done.err
    verdict = {"verdict": "reproduces", "expected": True, "evidence": "rehearsal"}
    assert report.items() >= {**verdict, "rehearsal": True}.items()
    assert done.outcomes == {
        "reported": ["crash"],
        "eager": ["clean"],
        "prefix-hit": ["crash"],
        "growing-chat": ["crash"],
        "graphs-off": ["clean"],
        "bigger-chunk": ["untriggered"],
        "near-miss-128": ["untriggered"],
        "near-miss-129": ["crash"],
    }
    trial = done.trial
    assert trial["trigger"]["crossed"] is True
    assert (trial["death"]["signature"], trial["death"]["exception"]) == ("match", "AssertionError")
    assert trial["death"]["detected_by"] in trial["death"]["channels"]
    assert trial["death"]["latency_s"] >= 0
    assert (trial["phase"], trial["captured"]["asked"]) == ("request", "16.00")
    server = {"vllm_version": "0.23.0", "weights": "none: a rehearsal"}
    assert report["arms"][0]["server"].items() >= server.items()
    assert "REHEARSAL" in done.out
    for name in ("report.md", "junit.xml"):
        assert "REHEARSAL" in (done.run / name).read_text(encoding="utf-8")


def test_a_fixed_release_is_quiet_and_no_crash_is_expected(
    harness: Harness,
) -> None:
    done = harness(*TQ, "--vllm", "0.24.0", "--arm", "reported")
    assert (done.status, done.report["verdict"]) == (0, "quiet")
    assert done.trial["trigger"]["crossed"] is True
    for version, words, status in (
        ("0.24.0", ("--expect", "crash"), 1),
        ("0.23.0", ("--expect", "alive"), 1),
    ):
        assert harness(*TQ, "--vllm", version, "--arm", "reported", *words).status == status


def test_git_bisect_gets_the_status_of_the_verdict(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_repro.cli.run.run_one", lambda *_: report(REHEARSAL))
    words = (*TQ, "--vllm", "0.23.0", "--bisect-exit")
    assert [harness(*words, *fix).status for fix in ((), ("fix",))] == [1, 0]
    assert_refused(harness(*words, "--arm", "eager"), "eager lives in every release")


def recorded(
    out: Path,
    run: str,
    arm: str,
    version: str,
    k: int,
    *,
    evidence: str = "lab",
    patched: bool = False,
) -> None:
    folder = out / "tq-chunked-prefill" / run
    folder.mkdir(parents=True)
    server = {"vllm_version": version, "patched": [{"file": "vllm/a.py", "sha256": "0"}] * patched}
    report = {"evidence": evidence, "arms": [{"name": arm, "k": k, "n": k, "server": server}]}
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


@pytest.mark.usefixtures("short_waits")
def test_a_fix_is_reported_after_enough_boots(tmp_path: Path) -> None:
    """Compare with deaths of the same arm only."""
    reports = tmp_path / "reports"
    recorded(reports, "a", "reported", "0.23.0", 5, evidence="rehearsal")
    arms = ("--arm", "reported", "--arm", "near-miss-129")
    assert main([*TQ, "--vllm", "0.24.0", "--trials", "4", *arms, "--out", str(reports)]) == 0
    (path,) = reports.glob("*/2*/report.json")
    report = json.loads(path.read_text(encoding="utf-8"))
    assert (report["verdict"], report["arms"][0]["n"]) == ("fixed", 4)
    assert "died in 5 of 5 boots" in report["because"]
    other = [Arm("near-miss-129", Expected.DIES)]
    assert strongest_record(reports, find("tq-chunked-prefill"), "rehearsal", other) is None


def test_a_patch_is_compared_with_its_own_release_first(tmp_path: Path) -> None:
    scenario = find("tq-chunked-prefill")
    recorded(tmp_path, "a", "reported", "0.21.0", 9)
    recorded(tmp_path, "b", "reported", "0.23.0", 2)
    recorded(tmp_path, "c", "prefix-hit", "0.23.0", 3)
    recorded(tmp_path, "d", "reported", "0.23.0", 5, patched=True)
    reported, hit = (arm for arm in scenario.arms if arm.name in ("reported", "prefix-hit"))
    patched = replace(reported, patches=(Patch("vllm/a.py", "a", "b"),))

    def found(*arms: Arm, evidence: str = "lab") -> str | None:
        record = strongest_record(tmp_path, scenario, evidence, arms, "0.23.0")
        return None if record is None else record.run

    assert found(reported, hit) == "a", "the strongest"
    assert (found(hit), found(patched)) == ("c", "b")
    assert found(reported, evidence="cpu") is None
    assert found(Arm("eager", Expected.LIVES)) is None


def test_an_unsupported_arm_does_not_end_the_others(harness: Harness) -> None:
    done = harness(
        *("run", "tq-prefix-hit-unreserved", "--server", "rehearsal"),
        *("--arm", "patched", "--arm", "reported"),
    )
    assert done.outcomes == {"reported": ["crash"], "patched": ["unsupported"]}


@pytest.mark.parametrize(
    ("scenario", "version", "verdict", "arms"),
    [
        (
            "sco-hybrid",
            "0.21.0",
            "reproduces",
            {"reported": "crash", "sco-off": "clean", "near-miss-length": "untriggered"},
        ),
        ("sco-hybrid", "0.23.0", "reproduces", {"reported": "clean", "small-cpu-pool": "crash"}),
        (
            "tq-mtp-cudagraphs",
            "0.20.2",
            "reproduces",
            {"reported": "crash", "eager": "untriggered", "no-spec-decode": "untriggered"},
        ),
        (
            "tq-mtp-cudagraphs",
            "0.24.0",
            "changed",
            {"reported": "wrong-output", "cudagraph-none": "untriggered"},
        ),
        (
            "tq-mtp-first-request",
            "0.23.0",
            "reproduces",
            {"reported": "crash", "eager": "untriggered"},
        ),
        (
            "min-tokens-stop-ids",
            "0.28.0",
            "reproduces",
            {"reported": "crash", "near-miss": "untriggered"},
        ),
        (
            "min-tokens-stop-ids",
            "0.29.0",
            "quiet",
            {"reported": "clean", "near-miss": "untriggered"},
        ),
    ],
)
def test_the_reported_bugs_live_and_die_with_the_releases(
    harness: Harness, scenario: str, version: str, verdict: str, arms: dict[str, str]
) -> None:
    named = [word for arm in arms for word in ("--arm", arm)]
    done = harness("run", scenario, "--server", "rehearsal", "--vllm", version, *named)
    assert done.outcomes == {arm: [outcome] for arm, outcome in arms.items()}, done.out
    assert (done.report["verdict"], done.status) == (verdict, verdict == "changed")
    trial = done.trial
    assert trial["trigger"]["crossed"] is True
    if trial["outcome"] == "crash":
        assert trial["death"]["signature"] == "match"


def test_both_ranks_of_two_are_named(harness: Harness) -> None:
    done = harness("run", "dsv4-tp2", "--server", "rehearsal", "--arm", "reported")
    trial = done.trial
    assert trial["captured"] == {
        "file": "deepseek_v4_attention.py",
        "line": "1457",
        "asked": "21.80",
        "locked": "21.62",
    }
    assert trial["death"]["ranks"] == [0, 1]
    logs = {path.name for path in (done.run / "logs").iterdir()}
    assert logs == {"reported-1.log", "reported-1.rank1.log"}


@pytest.mark.parametrize(
    ("fault", "outcome", "channel"),
    [
        ("kill:2", "other-crash", None),
        ("other:2", "other-crash", None),
        ("hang:2", "hang", None),
        ("busy:2", "clean", None),  # nothing here looks whether it comes to rest
        ("empty:2", "wrong-output", None),
        ("truncate:2", "wrong-output", None),
        ("boot", "boot-failed", None),
        ("exit", "boot-failed", "process"),
        ("stuck-boot", "boot-failed", None),
        ("restart:2", "other-crash", "restart"),
    ],
)
def test_every_fault_has_its_outcome(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, fault: str, outcome: str, channel: str | None
) -> None:
    # A release without the bug, so that what is seen is the fault's.
    # Limits are short only where a stall is ordered: elsewhere a crowded machine would make one.
    short = ("--answer-stall", "2") if fault == "hang:2" else ()
    if fault == "stuck-boot":
        monkeypatch.setattr(
            "vllm_repro.cli.options.TimeLimits", partial(TimeLimits, boot_stall=2.0)
        )
    done = harness(
        *TQ, "--vllm", "0.24.0", "--arm", "reported", *short, env={"VLLM_REHEARSAL_FAULT": fault}
    )
    trial = done.trial
    assert trial["outcome"] == outcome, trial
    assert trial["why"]
    if outcome != "clean":
        assert done.report["verdict"] not in ("reproduces", "quiet", "fixed")
        assert done.status != 0
    assert channel is None or channel in trial["death"]["channels"]


def test_an_unknown_flag_is_unsupported_and_no_crash(harness: Harness) -> None:
    done = harness(*TQ, "--arm", "reported", "--vllm", "0.19.1")
    assert (done.status, done.trial["outcome"]) == (2, "unsupported")
    assert "turboquant_4bit_nc" in done.trial["why"]


def test_the_verdict_is_printed_if_no_report_can_be_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    harness: Harness,
) -> None:
    def refuse(path: Path, _: object, *, hint: str) -> None:
        raise InfraError(f"cannot write {path}: No space left on device", hint=hint)

    with monkeypatch.context() as full:
        full.setattr("vllm_repro.report.files.write_file", refuse)
        assert main([*TQ, "--arm", "reported", "--out", str(tmp_path / "reports")]) == 2
    shown = capsys.readouterr().err
    assert "the verdict is reproduces (REHEARSAL), and cannot write" in shown
    assert "vllm-repro report RUN -o FILE" in shown
    (journal,) = (tmp_path / "reports" / "tq-chunked-prefill").glob("2*/journal.jsonl")
    assert "**reproduces" in harness("report", str(journal.parent), "--format", "md").out
    again = harness("report", str(journal.parent))
    assert (again.status, again.report["verdict"]) == (0, "reproduces")


_DEATH = '"event": "sign"'


def _interrupt(
    tmp_path: Path, state: Path, number: signal.Signals, wait_for: str
) -> tuple[int, Path]:
    """Start a long run, signal it at `wait_for` in its journal; return status and folder."""
    fault = {"request-sent": "hang", _DEATH: ""}.get(wait_for, "slow-boot:60")
    out = tmp_path / "reports"
    process = started(out, *TQ, VLLM_REHEARSAL_FAULT=fault, XDG_STATE_HOME=str(state))
    return interrupted(process, number, wait_for, out)


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "trial-started"),
        (signal.SIGTERM, "server-started"),
        (signal.SIGINT, "request-sent"),
        (signal.SIGQUIT, "request-sent"),
    ],
)
def test_an_interrupted_run_leaves_nothing_and_a_report(
    tmp_path: Path, own_state: Path, number: signal.Signals, moment: str
) -> None:
    status, folder = _interrupt(tmp_path, own_state, number, moment)
    assert status == 130
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["interrupted"] == number.name
    assert report["arms"][0]["trials"][0]["outcome"] == "cancelled"
    for server in read(folder / "journal.jsonl").of("server-started"):
        assert session_members(server["facts"]["pid"]) == []
    assert list((own_state / "vllm-repro" / "leases").glob("*")) == []


def test_a_death_before_an_interrupt_is_reported(tmp_path: Path, own_state: Path) -> None:
    """The trial counts as interrupted, and every rendering shows the death."""
    status, folder = _interrupt(tmp_path, own_state, signal.SIGTERM, _DEATH)
    assert status == 130
    report = build(folder)
    (trial,) = report.arms[0].trials
    assert (trial.outcome, trial.death is not None) == (Outcome.CANCELLED, True)
    cause = "AssertionError in _ensure_workspace_size: Workspace is locked"
    cut = "; the run was interrupted before the trial came to its end"
    assert trial.why.startswith(cause)
    assert trial.why.endswith(cut)
    texts = {form: render(report, form) for form in ("md", "html", "junit")}
    texts["terminal"] = summary(report)
    for form, text in texts.items():
        assert cause in unescape(text), form
        assert cut in unescape(text), form


def test_under_nohup_a_run_outlives_its_terminal(tmp_path: Path, own_state: Path) -> None:
    out = tmp_path / "reports"
    words = (*TQ, "--arm", "eager")
    process = started(out, *words, before=["nohup"], VLLM_REHEARSAL_FAULT="slow-boot:0.5")
    until(lambda: list(out.glob("*/*/logs/*.log")))
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0
    report = json.loads(next(out.glob("*/latest/report.json")).read_text(encoding="utf-8"))
    assert (report["interrupted"], report["arms"][0]["trials"][0]["outcome"]) == (None, "clean")
    assert list((own_state / "vllm-repro" / "leases").glob("*")) == []


def test_the_servers_of_a_living_run_are_left_alone(
    tmp_path: Path, own_state: Path, harness: Harness
) -> None:
    living = started(tmp_path / "living", *TQ, VLLM_REHEARSAL_FAULT="slow-boot:60")
    try:
        until(lambda: list((tmp_path / "living").glob("*/*/logs/*.log")))
        status, folder = _interrupt(tmp_path, own_state, signal.SIGKILL, "request-sent")
        assert status == -signal.SIGKILL
        session = next(read(folder / "journal.jsonl").of("server-started"))["facts"]["pid"]
        until(lambda: not session_members(session), seconds=20)
        assert session_members(session) == [], "the guard did not end the server"
        assert "nothing is left" in harness("clean").out
        done = harness("run", "min-tokens-stop-ids", "--server", "rehearsal", "--arm", "near-miss")
        assert done.status == 0
        assert psutil.Process(living.pid).status() != psutil.STATUS_ZOMBIE
        assert living.poll() is None
        servers = [one for one in psutil.Process(living.pid).children() if "serve" in one.cmdline()]
        assert servers, "the living run's server was ended by somebody else"
    finally:
        living.send_signal(signal.SIGTERM)
        living.wait(timeout=30)


@pytest.mark.parametrize(
    ("number", "words", "status"),
    [(signal.SIGTERM, (), 130), (signal.SIGINT, (), 130), (None, ("--expect", "alive"), 1)],
    ids=["SIGTERM", "SIGINT", "a surprise"],
)
def test_a_run_whose_output_nobody_reads_has_the_same_status(
    tmp_path: Path, number: signal.Signals | None, words: tuple[str, ...], status: int
) -> None:
    stuck = {"VLLM_REHEARSAL_FAULT": "stuck-boot"} if number else {}
    with started(tmp_path, *TQ, "--arm", "reported", *words, piped=True, **stuck) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"REHEARSAL")
        process.stdout.close()  # as `| head -1` does
        if number is not None:
            until(lambda: "server-started" in "".join(journals(tmp_path)))
            process.send_signal(number)
        assert process.wait(timeout=120) == status
        assert b"Error" not in process.stderr.read()


def test_other_endpoints_are_asked_and_shown(harness: Harness) -> None:
    scenario = Path(__file__).parents[2] / "data" / "declared" / "other_endpoints.py"
    reported, other = harness("run", str(scenario), "--server", "rehearsal").report["arms"]
    (crossed,), (missed,) = reported["trials"], other["trials"]
    assert (crossed["outcome"], crossed["requests"]) == ("clean", {"sent": 3, "ok": 2, "failed": 1})
    assert (
        'ids carried input=[7, 8, 9], encoding_format="base64": answered 200'
        in crossed["trigger"]["evidence"]
    )
    assert (missed["outcome"], missed["trigger"]["crossed"]) == ("untriggered", False)
    assert reported["requests"][:2] == [
        'ids: POST /v1/embeddings {"input": [7, 8, 9], "encoding_format": "base64"}',
        'pooled: POST /pooling {"input": "hello"}',
    ]


def test_a_signal_after_the_last_boot_does_not_lose_the_report(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(folder: Path) -> RunReport:
        signal.raise_signal(signal.SIGTERM)
        return build(folder)

    monkeypatch.setattr("vllm_repro.report.build.build", late)
    assert harness(*TQ, "--arm", "reported").status == 130
    (report,) = tmp_path.glob("reports/*/2*/report.json")
    assert json.loads(report.read_text(encoding="utf-8"))["verdict"] == "reproduces"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_report_is_written_waits_for_its_end(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Two Ctrl-C in a row are common, and the second one must not cost the report."""

    def written() -> None:
        with signals_later():
            signal.raise_signal(number)
            (tmp_path / "report.md").write_text("whole", encoding="utf-8")

    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            written()
    finally:
        after = signal.signal(number, before)
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == "whole"
    assert after is signal.default_int_handler


def test_only_this_user_can_open_the_folder_of_a_run(tmp_path: Path) -> None:
    assert run_folder(tmp_path, "tq-chunked-prefill").stat().st_mode & 0o777 == 0o700


LOADS = """    throughput=[
        throughput(prompt=32, output=8, concurrency=[1, 2], baseline="eager"),
        throughput(prompt=5000, output=4, baseline="eager"),
    ],
"""


def scenario(folder: Path, declared: str) -> str:
    """Return tq-chunked-prefill with throughput and output checks."""
    source = next(path for path in scenario_files() if path.name == "tq_chunked_prefill.py")
    text = source.read_text(encoding="utf-8")
    text = text.replace("    chat,\n", "    chat,\n    checks,\n", 1)
    text = re.sub(r"    throughput=throughput\(.*\),\n", declared, text)
    path = folder / source.name
    path.write_text(text, encoding="utf-8")
    return str(path)


def measured(
    harness: Harness, path: str, version: str, arms: str, *words: str, fault: str = ""
) -> Done:
    named = [word for arm in arms.split() for word in ("--arm", arm)]
    env = {"VLLM_REHEARSAL_FAULT": fault} if fault else {}
    return harness("run", path, "--server", "rehearsal", "--vllm", version, *named, *words, env=env)


def test_arms_that_live_are_measured_and_nothing_is_claimed(
    harness: Harness, tmp_path: Path
) -> None:
    arms = "reported eager bigger-chunk near-miss-128"
    done = measured(harness, scenario(tmp_path, LOADS), "0.23.0", arms, "--throughput")
    assert done.status == 0, done.out + done.err
    report = done.report
    assert report["throughput"] is None
    assert "REHEARSAL" in report["throughput_withheld"]
    journal = read(done.run / "journal.jsonl")
    # The one that died is booted once more; the near miss has the same server.
    points = list(journal.of("throughput-point"))
    assert {entry["arm"] for entry in points} == {"reported", "eager", "bigger-chunk"}
    loads = {arm["name"]: arm["load"] for arm in report["arms"]}
    assert [name for name, load in loads.items() if load] == ["reported"]
    # it dies of the longer load, too
    assert (loads["reported"]["trial"], loads["reported"]["death"]["signature"]) == (2, "match")
    assert "the engine died of the load, as in the bug" in done.out
    assert (done.run / loads["reported"]["log"]).is_file()
    assert [len(arm["trials"]) for arm in report["arms"]] == [1, 1, 1, 1]
    assert all(entry["usage"] == entry["counted"] for entry in points)
    # Each load has a figure with the mark, or the reason why not: a busy machine is late by a
    # hundredth of 15 ms.
    lines = [line for line in done.out.splitlines() if "at once" in line]
    lines = [line for line in lines if not line.lstrip("- ").startswith("reported, trial 2")]
    shown = [line for line in lines if ", trial " not in line]
    assert len(shown) + sum("at once is left out: " in line for line in lines) == 6
    assert all("(REHEARSAL)" in line for line in shown)
    assert "--throughput" in report["reproduce"]


def test_an_interrupted_load_is_measured_when_the_run_resumes(
    harness: Harness, tmp_path: Path
) -> None:
    path = scenario(tmp_path, LOADS)
    words = ("--server", "rehearsal", "--vllm", "0.23.0", "--arm", "reported", "--throughput")
    folder = harness("run", path, *words).run
    journal = folder / "journal.jsonl"
    before, begins, _ = journal.read_text(encoding="utf-8").partition('"load-started"')
    journal.write_text(before[: before.rindex("\n") + 1], encoding="utf-8")
    assert begins
    done = harness("run", path, "--resume", str(folder))
    (arm,) = json.loads((folder / "report.json").read_text(encoding="utf-8"))["arms"]
    assert (done.status, arm["k"], len(arm["trials"])) == (0, 1, 1), done.out + done.err
    assert (arm["load"]["trial"], arm["load"]["outcome"]) == (3, "crash")


@pytest.mark.parametrize(
    ("throughput", "trials", "kind", "evidence", "expected"),
    [
        (None, 1, "process", "cpu", (True, 60.0)),
        (None, 2, "docker", "gpu", (True, 30.0)),
        (None, None, "process", "gpu", (True, 30.0)),
        (None, 1, "attach", "gpu", (False, None)),
        (None, 1, "lab", "lab", (False, None)),
        (None, 1, "rehearsal", "rehearsal", (False, None)),
        (True, 1, "attach", "gpu", (True, None)),
        (True, 1, "lab", "lab", (True, None)),
        (False, 1, "process", "cpu", (False, None)),
    ],
)
def test_throughput_is_measured_if_its_figures_count(
    throughput: bool | None,
    trials: int | None,
    kind: str,
    evidence: str,
    expected: tuple[bool, float | None],
) -> None:
    options = resolve_measure(
        MeasureOptions(throughput), ServerKind(kind), Evidence(evidence), trials
    )
    assert (options.throughput, options.most_s) == expected
    measured = [options.applies(boot) for boot in (1, 2, 3)]
    assert measured == [expected[0], expected[0], expected[0] and expected[1] is None]


def test_an_engine_that_dies_while_measured_gives_no_figure(
    harness: Harness, tmp_path: Path
) -> None:
    done = measured(
        harness, scenario(tmp_path, LOADS), "0.24.0", "reported", "--throughput", fault="other:20"
    )
    trial = done.trial
    assert (trial["outcome"], trial["throughput"]) == ("other-crash", None)
    assert trial["during"].startswith("throughput (32 -> 8 tokens, 2 at once)")
    assert "reported (REHEARSAL)" not in done.out
    assert "was not measured: the engine died or hung" in done.out
    page = (done.run / "report.md").read_text(encoding="utf-8")
    assert "after the workload, in throughput" in page


def test_an_arm_that_answers_unlike_the_baseline(harness: Harness, tmp_path: Path) -> None:
    """Spoil the fourth request of each arm: it is an output check only in the reported arm."""
    path = scenario(tmp_path, '    output=checks(same=16, baseline="bigger-chunk"),\n')
    done = measured(harness, path, "0.24.0", "reported bigger-chunk", fault="garbage:4")
    assert done.outcomes == {"reported": ["wrong-output"], "bigger-chunk": ["untriggered"]}
    assert "differs from that of bigger-chunk after" in done.trial["why"]
    assert done.report["verdict"] == "changed"


def test_boots_end_when_they_decide_nothing_more(harness: Harness) -> None:
    arms = ("--vllm", "0.24.0", "--arm", "reported", "--arm", "eager")
    done = harness("run", "tq-chunked-prefill", "--server", "rehearsal", "--trials", "auto", *arms)
    assert done.status == 0, done.out + done.err
    assert "--trials auto" in done.report["reproduce"]
    assert {arm: len(trials) for arm, trials in done.outcomes.items()} == {
        "reported": 4,
        "eager": 1,
    }


def test_an_arm_is_measured_without_the_earlier_one_of_its_server(
    harness: Harness, tmp_path: Path
) -> None:
    """The first arm of the scenario has the same server, and is not in this run."""
    done = measured(harness, scenario(tmp_path, LOADS), "0.23.0", "near-miss-128", "--throughput")
    points = read(done.run / "journal.jsonl").of("throughput-point")
    assert {entry["arm"] for entry in points} == {"near-miss-128"}


def test_a_number_of_boots_that_is_none_is_refused(harness: Harness) -> None:
    done = harness("run", "min-tokens-stop-ids", "--server", "rehearsal", "--trials", "some")
    assert_refused(done, "is no number of boots from 1 to 200")
    assert done.folder is None


def test_a_cache_outside_the_home_folder_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/srv/jane/caches")
    monkeypatch.setenv("HF_HOME", "/srv/jane/models/")
    monkeypatch.delenv("VLLM_REPRO_CACHE", raising=False)
    text = "/srv/jane/caches/vllm-repro/releases/0.23.0 /srv/jane/caches/torch /srv/jane/models/hub"
    assert (
        Redactor(private_folders()).text(text)
        == "$VLLM_REPRO_CACHE/releases/0.23.0 $XDG_CACHE_HOME/torch $HF_HOME/hub"
    )


@pytest.mark.parametrize(
    ("source", "text", "shown"),
    [
        (
            Source(folder=Path("/data/vllm"), commit="0a1b2c"),
            "--vllm /data/vllm@0a1b2c",
            "--vllm $VLLM_SOURCE@0a1b2c",
        ),
        (Source(folder=Path("/data/vllm")), "/data/vllm/vllm/core.py", "$VLLM_SOURCE/vllm/core.py"),
        (
            Source(wheel=Path("/data/vllm-0.33.0.whl")),
            "--vllm /data/vllm-0.33.0.whl",
            "--vllm $VLLM_SOURCE/vllm-0.33.0.whl",
        ),
        (Source(release="0.33.0"), "--vllm 0.33.0", "--vllm 0.33.0"),
        (
            Source(base=Source(release="0.33.0"), packages=("/data/p/a.whl", "/data/conn", "b==1")),
            "None: 0.33.0 with /data/p/a.whl with /data/conn with b==1",
            "None: 0.33.0 with $VLLM_SOURCE/a.whl with $VLLM_SOURCE with b==1",
        ),
        (
            Source(base=Source(wheel=Path("/data/vllm-0.33.0.whl")), packages=("b==1",)),
            "/data/vllm-0.33.0.whl with b==1",
            "$VLLM_SOURCE/vllm-0.33.0.whl with b==1",
        ),
        (None, "/data/vllm", "/data/vllm"),
    ],
)
def test_the_folder_of_a_source_is_not_named(source: Source | None, text: str, shown: str) -> None:
    assert Redactor(private_sources([source])).text(text) == shown


@pytest.mark.parametrize("here", ["work", "work/vllm", "/"])
def test_a_checkout_beside_a_known_folder_is_not_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: str
) -> None:
    (tmp_path / "work" / "vllm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / here)
    source = Source(folder=tmp_path / "work-vllm", commit="abc")
    assert (
        Redactor([*private_folders(), *private_sources([source])]).text(f"{source}")
        == "$VLLM_SOURCE@abc"
    )


@pytest.mark.parametrize(
    ("account", "shown"),
    # the last is in each command
    [("jane", "/mnt/[user]/m"), ("root", "/mnt/root/m"), ("vllm", "/mnt/vllm/m")],
)
def test_a_folder_named_after_the_account_is_not_named(
    monkeypatch: pytest.MonkeyPatch, account: str, shown: str
) -> None:
    monkeypatch.setenv("LOGNAME", account)
    assert redactor(all_scenarios()[0]).text(f"--model /mnt/{account}/m") == f"--model {shown}"


def test_what_a_server_logs_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    Progress(stream).line("booting; last line: \x1b[2J\x1b]0;title\x07 \x9b31m prompt\ttab")
    assert stream.getvalue() == "booting; last line:  \N{REPLACEMENT CHARACTER}31m prompt\ttab\n"


def test_a_run_goes_on_when_nobody_reads_its_progress() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    Progress(stream).line("nobody reads this")
    with pytest.raises(BrokenPipeError):
        stream.close()


ARMS = [Arm("a", Expected.DIES), Arm("b", Expected.LIVES)]
SPINS = Arm("c", Expected.SPINS)
HEADER = {
    "reproduce": "vllm-repro run a-bug --server rehearsal --trials 3",
    "scenario": "a-bug",
    "machine": {"cpus": 2},
    "arms": [{"name": arm.name, "expected": arm.expected} for arm in (*ARMS, SPINS)],
}


def recording(*entries: tuple[str, dict[str, Any]], cut: bool = True) -> Recording:
    whole = (("run-started", HEADER), *entries)
    return Recording(
        tuple(Entry(float(t), event, fields) for t, (event, fields) in enumerate(whole)), cut=cut
    )


def boot(arm: str, number: int, outcome: str | None = "crash") -> list[tuple[str, dict[str, Any]]]:
    started = ("trial-started", {"arm": arm, "trial": number})
    ended = {
        "arm": arm,
        "trial": number,
        "outcome": outcome,
        "during": "",
        "trigger": {"crossed": True},
    }
    return [started] if outcome is None else [started, ("trial-ended", ended)]


def remaining(done: Trials, trials: int) -> list[str]:
    """Return the arms in the order of their trials, each of which crashes."""
    tried = []

    def undecided() -> list[str]:
        return [arm.name for arm in ARMS if len(done.outcomes[arm.name]) < trials]

    for arm in done.in_turn(ARMS, undecided):
        done.outcomes[arm.name].append(Outcome.CRASH)
        tried.append(arm.name)
    return tried


@given(st.integers(1, 6), st.integers(0, 12))
def test_what_was_done_and_what_is_left_are_the_whole_plan(trials: int, done: int) -> None:
    whole = remaining(Trials(), trials)
    assert "".join(whole) == ("abba" * trials)[: 2 * trials], "neither arm is always the first"
    entries = [
        entry for place, arm in enumerate(whole[:done]) for entry in boot(arm, 1 + place // 2)
    ]
    assert (
        remaining(unfinished_run(recording(*entries), Path("run")).trials, trials) == whole[done:]
    )


def test_an_interrupted_boot_is_repeated_with_a_new_number() -> None:
    for cut in (boot("b", 1, None), boot("b", 1, "cancelled")):
        left = unfinished_run(recording(*boot("a", 1), *cut), Path("run"))
        assert dict(left.trials.outcomes) == {"a": [Outcome.CRASH]}
        assert dict(left.trials.last) == {"a": 1, "b": 1}
        assert remaining(left.trials, 2) == ["b", "b", "a"]
        assert left.words == ("run", "a-bug", "--server", "rehearsal", "--trials", "3")


def test_a_hang_of_a_spinning_arm_is_no_bug_after_resume() -> None:
    left = unfinished_run(recording(*boot("c", 1, "hang"), *boot("c", 2, "clean")), Path("run"))
    assert dict(left.trials.strange) == {"c": 1}


def test_a_finished_run_is_not_resumed() -> None:
    finished, interrupted = (
        recording(*boot("a", 1), ("run-ended", {"interrupted": signal}), cut=False)
        for signal in (None, "SIGINT")
    )
    with pytest.raises(UsageError, match="is finished"):
        unfinished_run(finished, Path("run"))
    unfinished_run(interrupted, Path("run"))


@pytest.mark.parametrize("name", ["scenario", "machine"])
def test_resume_refuses_another_scenario_or_machine(name: str) -> None:
    left = unfinished_run(recording(), Path("run"))
    left.refuse_changed(HEADER)
    with pytest.raises(UsageError, match=f"its {name} has changed"):
        left.refuse_changed({**HEADER, name: "another"})


def test_the_command_of_a_refusal_can_be_pasted(harness: Harness, tmp_path: Path) -> None:
    folder = tmp_path / "a run; cut"
    folder.mkdir()
    lines = (REHEARSAL / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "journal.jsonl").write_bytes(b"".join(lines[:-1]))
    for words, message in (
        (["--seed", "2"], "--seed would change them"),
        (["sco-hybrid"], "belongs to tq-chunked-prefill"),
    ):
        refused = harness("run", *words, "--resume", str(folder))
        assert (refused.status, message in refused.err) == (64, True)
        assert f"next: vllm-repro run --resume '{folder}'\n" in refused.err


def test_a_journal_has_one_writer_and_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"t": 1, "event": "run-started"}\n{"t": 2, "ev', encoding="utf-8")
    with Journal(path) as journal:
        with pytest.raises(UsageError, match="another run is writing"):
            Journal(path)
        journal.write("run-ended", interrupted=None)
    found = read(path)
    assert ([entry.event for entry in found.entries], found.damaged) == (
        ["run-started", "run-ended"],
        1,
    )


WORDS = (
    "tq-chunked-prefill",
    "--server",
    "rehearsal",
    "--arm",
    "reported",
    "--arm",
    "eager",
    "--trials",
    "2",
)


def test_the_log_of_a_lost_boot_is_not_reused(
    harness: Harness,
) -> None:
    done = harness("run", *WORDS[:-1], "1")
    journal, logs = done.run / "journal.jsonl", done.run / "logs"
    lines = journal.read_bytes().splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if b'"trial-started"' in line]
    journal.write_bytes(b"".join(lines[: starts[1]]))
    died = (logs / "reported-1.log").read_bytes()
    (logs / "eager-1.log").write_bytes(died)
    assert harness("run", "--resume", str(done.run)).status == 0
    (trial,) = build(done.run).arms[1].trials
    assert (trial.number, trial.outcome) == (2, Outcome.CLEAN)
    assert (logs / "eager-1.log").read_bytes() == died


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_resumes_to_a_whole_report(
    tmp_path: Path, harness: Harness, number: signal.Signals
) -> None:
    out = tmp_path / "reports"
    process = started(out, "run", *WORDS, VLLM_REHEARSAL_FAULT="slow-boot:0.5")
    until(lambda: "".join(journals(out)).count("server-started") == 2)
    _, folder = signalled(process, number, out)
    # The folder names its scenario; the command may name it, too.
    named = () if number is signal.SIGINT else ("tq-chunked-prefill",)
    done = harness("run", *named, "--resume", str(folder))
    assert (done.status, done.folder) == (0, folder), done.out + done.err
    report = done.report
    ended = {"verdict": "reproduces", "interrupted": None, "journal_cut": False}
    assert report.items() >= ended.items()
    counts = [(arm["name"], arm["k"], arm["n"]) for arm in report["arms"]]
    assert counts == [("reported", 2, 2), ("eager", 0, 2)]
    numbers = {arm["name"]: [trial["trial"] for trial in arm["trials"]] for arm in report["arms"]}
    assert numbers == {
        "reported": [1, 2],
        "eager": [1, 2, 3] if number is signal.SIGINT else [2, 3],
    }
    assert len(list((folder / "logs").glob("eager-*.log"))) == 3
    assert harness("run", "tq-chunked-prefill", "--resume", str(folder)).status == 64


CRASH, CLEAN, UNTRIGGERED = Outcome.CRASH, Outcome.CLEAN, Outcome.UNTRIGGERED
REPORTED, EAGER, NEAR = (
    Arm("reported", Expected.DIES),
    Arm("eager", Expected.LIVES),
    Arm("near", Expected.UNTRIGGERED),
)


def boots(
    arms: list[Arm], does: Callable[[str, int], Outcome], record: Record | None = None
) -> dict[str, int]:
    """Return how often each arm is booted. Boot n of an arm ends as `does` returns."""
    done = Trials()

    def results() -> list[ArmResult]:
        return [
            arm_result(
                arm.name, arm.expected, done.outcomes[arm.name], strange=done.strange[arm.name]
            )
            for arm in arms
        ]

    for arm in done.in_turn(arms, lambda: undecided_arms(results(), record, "0.24.0")):
        done.last[arm.name] += 1
        done.finish(arm.name, arm.expected, does(arm.name, done.last[arm.name]), "", crossed=True)
    return {arm.name: done.last[arm.name] for arm in arms}


SPINNING = Arm("reported", Expected.SPINS)


@pytest.mark.parametrize(
    ("arms", "outcomes", "record", "expected"),
    [
        ([REPORTED], [[CRASH]], None, [1]),
        ([REPORTED, EAGER, NEAR], [[CRASH], [CLEAN], [UNTRIGGERED]], None, [5, 4, 1]),
        ([REPORTED, EAGER], [[CRASH], [CRASH]], None, [1, 1]),
        ([REPORTED, EAGER], [[CRASH], [UNTRIGGERED]], None, [1, 1]),
        ([REPORTED, EAGER], [[CLEAN], [CLEAN]], None, [4, 1]),
        ([REPORTED], [[CLEAN]], Record(crashed=5, boots=5, run="r", version="0.23.0"), [4]),
        ([REPORTED], [[CLEAN]], Record(crashed=3, boots=5, run="r", version="0.23.0"), [15]),
        # Fifty-nine boots would be needed, so none is added.
        ([REPORTED], [[CLEAN]], Record(crashed=1, boots=1, run="r", version="0.23.0"), [1]),
        ([REPORTED], [[Outcome.INFRA]], None, [2]),
        ([REPORTED], [[Outcome.OTHER_CRASH]], None, [1]),
        ([REPORTED, EAGER], [[Outcome.HANG], [CLEAN]], None, [1, 1]),
        # A bug in four of five boots needs more quiet boots.
        ([REPORTED, EAGER], [[CRASH, CRASH, CRASH, CRASH, CLEAN, CRASH], [CLEAN]], None, [5, 8]),
        # One infra boot is repeated and does not count.
        ([REPORTED, EAGER], [[CRASH], [Outcome.INFRA, CLEAN]], None, [5, 5]),
        # A hang that is not the bug is no reason to boot again.
        ([SPINNING], [[Outcome.HANG]], None, [1]),
        ([SPINNING, EAGER], [[Outcome.HANG], [CLEAN]], None, [1, 1]),
    ],
)
def test_boots_until_it_is_decided(
    arms: list[Arm], outcomes: list[list[Outcome]], record: Record | None, expected: list[int]
) -> None:
    """The last outcome of an arm is that of its later boots, too."""
    ends = {arm.name: listed for arm, listed in zip(arms, outcomes, strict=True)}

    def does(name: str, number: int) -> Outcome:
        return ends[name][min(number, len(ends[name])) - 1]

    assert list(boots(arms, does, record).values()) == expected


@pytest.mark.parametrize(
    ("record", "needed"),
    [
        (
            Record(crashed=3, boots=3, run="r", version="0.24.0"),
            7,
        ),  # of the release that is patched: what its own deaths ask for
        # of another release: it decides nothing
        (Record(crashed=3, boots=3, run="r", version="0.23.0"), 4),
        (Record(crashed=3, boots=3, run="r", version="0.24.0", arm="near"), 4),
        (None, 4),
    ],
)
def test_a_patch_boots_as_often_as_deaths_of_its_release_ask(
    record: Record | None, needed: int
) -> None:
    boots = 0
    while undecided_arms(
        [arm_result("reported", Expected.DIES, [CLEAN] * boots)], record, "0.24.0+cpu", patched=True
    ):
        boots += 1
    assert boots == needed


@given(
    st.lists(st.sampled_from([CRASH, CLEAN, CLEAN, UNTRIGGERED]), min_size=60, max_size=60),
    st.booleans(),
)
@settings(max_examples=60)
def test_it_always_ends(outcomes: list[Outcome], compared: bool) -> None:
    arms = [REPORTED, EAGER] if compared else [REPORTED]
    offset = {"reported": 0, "eager": 30}
    found = boots(arms, lambda name, number: outcomes[offset[name] + number - 1])
    assert all(1 <= number <= MOST for number in found.values())
