"""`vllm-repro nightly`: what it runs, and what it keeps however it ends."""

from __future__ import annotations

import errno
import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.commands import journals, started, until
from tests.golden_files import missing
from vllm_repro.cli import _as_interrupt, main, parser
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.releases.known import NEWEST
from vllm_repro.releases.sources import Source
from vllm_repro.report.files import FORMATS
from vllm_repro.report.runs import Run
from vllm_repro.running.job import Job
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.options import ServerOptions
from vllm_repro_nights import run_night
from vllm_repro_nights.nightly_verb import jobs_from

pytestmark = pytest.mark.usefixtures("short_waits", "reports")


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REPRO_REPORTS", str(tmp_path))


NIGHT = (
    "nightly",
    "min-tokens-stop-ids",
    "sco-hybrid",
    "--server",
    "rehearsal",
    "--least-disk",
    "0.001",
)


@pytest.fixture
def night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[Job], str]]:
    """Return exit status, jobs and summary of a night whose runs raise `ends` in turn."""

    def called(*words: str, ends: tuple[BaseException, ...]) -> tuple[int, list[Job], str]:
        jobs: list[Job] = []

        def raising(job: Job, *_: object) -> None:
            jobs.append(job)
            raise ends[len(jobs) - 1]

        monkeypatch.setattr("vllm_repro_nights.run_night.run_one", raising)
        status = main([*NIGHT, *words])
        texts = [path.read_text(encoding="utf-8") for path in tmp_path.glob("nightly/*/summary.md")]
        return status, jobs, "".join(texts)

    return called


@pytest.mark.parametrize(
    ("variables", "words", "trials"),
    [
        ({}, ("--arm", "reported"), 1),
        (
            {"ARM": "reported", "TRIALS": "3", "MAX_TIME": "55m", "WEIGHTS": "", "SERVER": "lab"},
            (),
            3,
        ),
        (
            {"ARM": "nope", "TRIALS": "3", "SCENARIOS": "nope"},
            ("--arm=reported", "--trials=auto"),
            None,
        ),
    ],
)
def test_only_the_arms_that_are_named_run(
    variables: dict[str, str],
    words: tuple[str, ...],
    trials: int | None,
    night: Callable[..., tuple[int, list[Job], str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By an option, or by variables where the command line has no option. JSON has the reasons."""
    for name, value in variables.items():
        monkeypatch.setenv(f"VLLM_REPRO_NIGHTLY_{name}", value)
    status, jobs, _ = night("--json", *words, ends=(Unsupported("enough"),) * 2)
    assert [([arm.name for arm in job.arms], job.trials) for job in jobs] == [
        (["reported"], trials)
    ] * 2
    printed = json.loads(capsys.readouterr().out)
    assert (status, printed["light"]) == (2, "amber")
    assert [(run["scenario"], run["light"], run["why"]) for run in printed["runs"]] == [
        (name, "unsupported", "enough") for name in NIGHT[1:3]
    ]


def test_several_vllms_make_a_table_of_scenarios(
    night: Callable[..., tuple[int, list[Job], str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--server", "lab", "--vllm", "0.24.0, v0.28,0.24.0")
    _, jobs, summary = night(*words, "--with", "pooch==3.1", ends=(Unsupported("enough"),) * 2)
    names = [f"{release} with pooch==3.1" for release in ("0.24.0", "0.28.0")]
    assert [f"{job.options.vllm}" for job in jobs] == names, "the other scenario has no lab"
    assert f"Asked for: vLLM {names[0]} and vLLM {names[1]}, server lab." in summary
    assert "| scenario | 0.24.0 | 0.28.0 | first bad |" in summary
    assert "| sco-hybrid | unsupported | unsupported | - |" in summary
    assert "sco-hybrid           unsupported  unsupported  -" in capsys.readouterr().out


def test_vllms_of_a_night_differ_by_name_and_keep_their_order(
    night: Callable[..., tuple[int, list[Job], str]],
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Packages are named if they differ, private folders are not, and --server cpu's own is last.

    What was not reached before an interrupt has its column, too.
    """
    folders = [tmp_path_factory.mktemp("mine") for _ in range(2)]
    for folder in folders:
        (folder / "vllm").mkdir()
        (folder / "vllm" / "__init__.py").touch()
    named = f"0.24.0 with pooch==3.1,0.24.0,{folders[0]},{folders[1]}"
    words = ("--server", "cpu", "--vllm", named)
    _, jobs, summary = night(*words, ends=(Unsupported("no"), KeyboardInterrupt()))
    assert len(jobs) == 2
    out = " ".join(capsys.readouterr().out.split())
    heads = f"0.24.0 with pooch==3.1 0.24.0 $VLLM_SOURCE $VLLM_SOURCE (4) {NEWEST} first bad"
    assert f"scenario {heads} min-tokens-stop-ids unsupported interrupted" in out
    assert "| sco-hybrid | interrupted | interrupted | interrupted |" in summary


def test_an_image_is_not_compared_with_itself() -> None:
    assert main([*NIGHT, "--server", "docker", "--image", "x", "--vllm", "0.24.0,0.28.0"]) == 64


@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [
        ("SERVER", "gpu", "--server: 'gpu' is none of auto, cpu, docker"),
        ("MAX_TIME", "soon", "--max-time: 'soon' is no time"),
        ("WEIGHTS", "big", "--weights: 'big' is none of real"),
        ("FAIL_ON", "green", "--fail-on: 'green' is none of red"),
        ("THROUGHPUT", "yes", "VLLM_REPRO_NIGHTLY_THROUGHPUT is 'yes', neither on nor off"),
    ],
)
def test_a_variable_is_checked_like_its_option(
    name: str,
    value: str,
    refusal: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(f"VLLM_REPRO_NIGHTLY_{name}", value)
    with pytest.raises(SystemExit, match="64"):
        parser("nightly")
    assert refusal in capsys.readouterr().err


def test_an_unknown_arm_is_named_before_anything_runs(
    night: Callable[..., tuple[int, list[Job], str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert night("--arm", "near-miss", ends=()) == (64, [], "")
    assert "sco-hybrid has no arm 'near-miss'" in capsys.readouterr().err


def test_a_scenario_that_is_named_twice_runs_once() -> None:
    file = str(Path(__file__).parents[2] / "scenarios" / "sco_hybrid.py")
    asked = jobs_from(
        parser("nightly").parse_args(["nightly", "sco-hybrid", "min-tokens-stop-ids", file]),
        ServerOptions(server="rehearsal"),
    )
    assert [job.name for job in asked] == ["sco-hybrid", "min-tokens-stop-ids"]


def cpu_jobs(*words: str, vllm: str) -> list[Job]:
    arguments = parser("nightly").parse_args(["nightly", *words, "--server", "cpu"])
    return jobs_from(arguments, ServerOptions(server="cpu", vllm=Source(release=vllm)))


def test_without_a_gpu_each_scenario_runs_where_it_can() -> None:
    """Run in the lab, or as reported without GPU; in the newest release and in the source.

    Run only the arms that show the bug.
    """
    jobs = cpu_jobs("min-tokens-stop-ids", "sco-hybrid", "tq-mtp-wrong-tokens", vllm="0.28.0")
    assert [(job.name, job.choice.kind, str(job.options.vllm)) for job in jobs] == [
        (name, kind, version)
        for name, kind in (
            ("min-tokens-stop-ids", "process"),
            ("sco-hybrid", "lab"),
            ("tq-mtp-wrong-tokens", "lab"),
        )
        for version in (NEWEST, "0.28.0")
    ]
    assert [[arm.name for arm in job.arms] for job in jobs[::2]] == [
        ["reported"],
        ["reported"],
        ["reported", "cudagraph-none"],
    ]
    assert all(job.named_arms == [arm.name for arm in job.arms] for job in jobs)
    assert [str(job.options.vllm) for job in cpu_jobs("sco-hybrid", vllm=NEWEST)] == [NEWEST]


def test_a_night_ends_in_time_and_runs_the_oldest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Start no run that would end too late, by its last duration, or without time left."""
    night = (
        "nightly",
        "--server",
        "rehearsal",
        "--least-disk",
        "0.001",
        "--arm",
        "reported",
        "min-tokens-stop-ids",
    )
    assert main([*night, "tq-chunked-prefill"]) == 0
    assert re.findall(r"^green: ([^:]*)", capsys.readouterr().out, re.MULTILINE) == [
        "min-tokens-stop-ids",
        "tq-chunked-prefill",
    ]
    time.sleep(1 - time.time() % 1)  # a run is known by the second in which it began
    assert main([*night, "--max-time", "10m"]) == 0  # this one ran last
    capsys.readouterr()
    assert main([*night, "tq-chunked-prefill", "--max-time", "10m"]) == 0
    assert re.findall(r"^green: ([^:]*)", capsys.readouterr().out, re.MULTILINE) == [
        "tq-chunked-prefill",
        "min-tokens-stop-ids",
    ]
    assert main([*night, "--max-time", "0.01s"]) == 2
    text = (tmp_path / "nightly" / "latest" / "summary.md").read_text(encoding="utf-8")
    assert (
        missing(text, "amber: 1 not reached in time.", "| 0 s of 0 s were left, and it took") == []
    )


def test_a_night_with_a_run_without_a_script_is_green(tmp_path: Path) -> None:
    scenarios = ("min-tokens-stop-ids", "async-streaming-stop")
    assert main([NIGHT[0], *scenarios, *NIGHT[3:], "--arm", "reported"]) == 0
    night = tmp_path / "nightly" / "latest"
    assert "# ✅ Nightly: green\n\ngreen: 1 as declared, 1 not for this machine.\n" in (
        night / "summary.md"
    ).read_text(encoding="utf-8")
    names = [{path.name for path in (night / scenario).iterdir()} for scenario in scenarios]
    assert names == [set(FORMATS.values()), set(FORMATS.values()) - {"repro.py"}]


def test_reports_that_cannot_be_copied_leave_the_night_its_light(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    assert main([*NIGHT[:2], *NIGHT[3:], "--arm", "near-miss"]) == 2
    text = (tmp_path / "nightly" / "latest" / "summary.md").read_text(encoding="utf-8")
    assert (
        missing(
            text, "could not be copied beside the night: No space left on device", "1 as declared"
        )
        == []
    )


def test_ctrl_c_leaves_what_had_not_run_interrupted(tmp_path: Path) -> None:
    words = ("nightly", "async-streaming-stop", *NIGHT[1:])
    night = started(tmp_path, *words, VLLM_REHEARSAL_FAULT="stuck-boot")
    until(lambda: "server-started" in "".join(journals(tmp_path)))
    night.send_signal(signal.SIGINT)
    assert night.wait(timeout=120) == 130
    text = (tmp_path / "nightly" / "latest" / "summary.md").read_text(encoding="utf-8")
    assert "amber: interrupted by SIGINT, 3 interrupted." in text
    results = re.findall(r"^\| ⏹️ interrupted \| (.*?) \| (.*?) \|", text, re.MULTILINE)
    not_run = [("min-tokens-stop-ids", "-"), ("sco-hybrid", "-")]
    assert results == [("async-streaming-stop", "inconclusive"), *not_run]


def test_a_signal_says_its_name_where_no_run_takes_it() -> None:
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        _as_interrupt(signal.SIGTERM, None)


@pytest.mark.parametrize(
    ("words", "ends", "status"),
    [
        ((), (InfraError("no disk"), UsageError("no such thing")), 2),
        (("--fail-on", "trouble"), (InfraError("no disk"), UsageError("no such thing")), 2),
        (("--fail-on", "trouble"), (Unsupported("too small"),) * 2, 2),
        (("--fail-on", "red"), (InfraError("no disk"), UsageError("no such thing")), 0),
        (("--fail-on", "red"), (KeyboardInterrupt(),), 130),
    ],
)
def test_each_failure_is_in_the_summary_and_fails_as_asked(
    night: Callable[..., tuple[int, list[Job], str]],
    words: tuple[str, ...],
    ends: tuple[BaseException, ...],
    status: int,
) -> None:
    result, _, summary = night(*words, ends=ends)
    assert result == status
    assert all(f"{end}" in summary for end in ends)


@pytest.mark.usefixtures("sigint")
def test_a_signal_while_the_summary_is_written_waits(
    night: Callable[..., tuple[int, list[Job], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(_: Path) -> tuple[list[Run], list[str]]:
        signal.raise_signal(signal.SIGINT)
        return [], []

    monkeypatch.setattr("vllm_repro_nights.run_night.read_runs", late)
    status, _, summary = night(ends=(InfraError("the disk is full"),) * 2)
    assert (status, "amber: 2 undecided" in summary) == (130, True)


@pytest.mark.parametrize(
    ("end", "by"), [(KeyboardInterrupt(), "SIGINT"), (KeyboardInterrupt("SIGTERM"), "SIGTERM")]
)
def test_an_interrupt_between_two_runs_keeps_the_first(
    night: Callable[..., tuple[int, list[Job], str]], end: KeyboardInterrupt, by: str
) -> None:
    status, _, summary = night(ends=(InfraError("the disk is full"), end))
    assert status == 130
    assert (
        missing(
            summary,
            f"amber: interrupted by {by}, 1 undecided (min-tokens-stop-ids), 1 interrupted.",
            "the disk is full",
        )
        == []
    )


def test_a_run_is_estimated_by_the_last_one_in_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: Any, _: object) -> NoReturn:
        raise Unsupported(f"{job.options.vllm} was started")

    scenario = find("min-tokens-stop-ids")
    runs = [
        SimpleNamespace(
            scenario=scenario.id, vllm_version=version, started_at=str(took), duration_s=float(took)
        )
        for version, took in (("0.32.0", 900), ("0.33.0", 1))
    ]
    monkeypatch.setattr("vllm_repro_nights.run_night.read_runs", lambda _: (runs, []))
    monkeypatch.setattr("vllm_repro_nights.run_night.run_one", run)
    jobs: list[Any] = [
        SimpleNamespace(
            elsewhere=None,
            scenario=scenario,
            options=ServerOptions(server="process", vllm=Source(release=version)),
        )
        for version in ("0.32.0", "0.33.0", "0.29.0")
    ]
    *started, late = [result.why for _, result in run_night._run_jobs(jobs, Path(), 100.0)]
    assert started == [
        "0.33.0 was started",
        "0.29.0 was started",
    ], "a release without a run takes its scenario's last"
    assert late.endswith("were left, and it took 900 s before")
