"""`vllm-repro bisect` on the rehearsal engine and with made-up runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import psutil
import pytest

from tests.conftest import Harness
from tests.core.releases.test_sources import commit, git
from tests.golden_files import assert_refused, missing
from tests.report_examples import run_of
from tests.search.conftest import Answer, MadeUp, record_in, releases_of
from vllm_repro.cli import main
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.releases.provision import Release
from vllm_repro.releases.sources import Source
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job
from vllm_repro.servers.rehearsal import RehearsalSite
from vllm_repro.verdict.outcome import Outcome

ROOT = Path(__file__).parents[2]
TQ = ("bisect", "tq-chunked-prefill", "--server", "rehearsal")
FIX = ("--bad", "0.20.0", "--good", "0.32.0", "--find-fix")


def booted(record: Mapping[str, Any]) -> list[str]:
    return [step["candidate"] for step in record["steps"]]


def bisected(out: Path, *words: str, status: int = 0) -> dict[str, Any]:
    """Bisect with reports in `out`; return the record."""
    assert main([*TQ, *words, "--out", str(out)]) == status
    return record_in(out, "bisect")


def resumed(out: Path, *words: str, status: int = 0) -> dict[str, Any]:
    """Resume the only bisection in `out`; return the record."""
    (folder,) = out.glob("*/bisect/latest")
    assert main(["bisect", "--resume", str(folder), *words]) == status
    return record_in(out, "bisect")


def test_the_first_fixed_release_is_found_over_failed_boots(
    harness: Harness, tmp_path: Path
) -> None:
    done = harness(*TQ, "--bad", "0.23.0", "--good", "0.27.1", "--find-fix", "--json")
    assert done.status == 0, done.err
    assert done.err.startswith("boot 1: 0.23.0 (about 3 left)\nREHEARSAL: ")
    record = record_in(tmp_path / "reports", "bisect")
    assert json.loads(done.out) == record
    assert (record["state"], record["answer"], record["left"], record["probability"]) == (
        "found",
        "0.24.0",
        ["0.24.0"],
        1,
    )
    assert [(step["candidate"], step["fate"]) for step in record["steps"]] == [
        ("0.23.0", "dies"),
        ("0.27.1", "lives"),
        ("0.25.1", "boot-failed"),
        ("0.26.0", "boot-failed"),
        ("0.24.0", "lives"),
    ]
    assert "Unknown TurboQuant cache dtype" in record["steps"][2]["why"]
    folder = tmp_path / "reports" / "tq-chunked-prefill" / "bisect" / "latest"
    text = (folder / "bisection.md").read_text(encoding="utf-8")
    assert (
        missing(
            text,
            "**The first fixed one is 0.24.0: it lived in 1 of 1 boots; 0.23.0 died"
            " in 1 of 1 boots.**",
            "This holds if a bad one dies in every boot",
            "> **REHEARSAL",
        )
        == []
    )
    assert not re.search(r"[*<|]", done.err.partition("again: ")[0].partition("vllm-project")[2]), (
        "it is no Markdown"
    )
    assert str(tmp_path) not in text + json.dumps(record)
    for step in record["steps"]:
        assert f"](../../{step['run']}/report.md)" in text
        report = json.loads(
            (folder / "../.." / step["run"] / "report.json").read_text(encoding="utf-8")
        )
        assert f"--vllm {step['candidate']} --arm reported" in report["reproduce"]
    assert (
        "bisect tq-chunked-prefill --server rehearsal --bad 0.23.0 --arm reported --seed 1 --good"
        " 0.27.1 --find-fix" in text
    )


def outcome_of(job: Job, outcome: Outcome) -> RunReport:
    return run_of("0.24.0", [outcome], reported=str(job.options.vllm))


def by_release(bad: Sequence[str], skipped: Sequence[str] = ()) -> Answer:
    """Return runs that die in `bad`, do not boot in `skipped`, and else live."""

    def answer(job: Job) -> RunReport:
        version = str(job.options.vllm)
        outcome = (
            Outcome.BOOT_FAILED
            if version in skipped
            else Outcome.CRASH
            if version in bad
            else Outcome.CLEAN
        )
        return outcome_of(job, outcome)

    return answer


OLD = ("0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1")


def test_the_first_bad_release_is_found(made_up: MadeUp, tmp_path: Path) -> None:
    asked = made_up(by_release(["0.30.0", "0.31.0", "0.32.0"]))
    record = bisected(tmp_path, "--good", "v0.22", "--bad", "0.32.0")
    assert (record["answer"], record["candidates"][0]["label"], len(record["candidates"])) == (
        "0.30.0",
        "0.22.0",
        14,
    )
    assert releases_of(asked) == booted(record)
    assert booted(record)[:2] == ["0.32.0", "0.22.0"], "both ends, the bad one first"
    assert len(asked) <= 6
    assert record["reading"].startswith(
        "The first bad one is 0.30.0: it died in 1 of 1 boots; 0.29.0 lived"
    )


class Room:
    """A cluster that bears three runs; made-up runs take the place of its own."""

    def run(self, *_: object) -> RunReport:
        raise AssertionError("made-up runs do not get here")

    def interrupt(self, name: str) -> None:
        raise AssertionError(name)

    def room(self, _: Job) -> int:
        return 3


@pytest.fixture
def on_a_cluster(made_up: MadeUp, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Replace a cluster, and return the words of a bisection on it."""
    monkeypatch.setattr("vllm_repro_cluster.fleet.connect", lambda _: Room())
    made_up(by_release(["0.30.0", "0.31.0", "0.32.0"]))
    return ("--good", "v0.22", "--bad", "0.32.0", "--on", "10.0.0.1:6379")


def test_a_cluster_with_room_boots_ahead_and_says_what_it_cost(
    on_a_cluster: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = bisected(tmp_path, *on_a_cluster)
    assert record["answer"] == "0.30.0"
    rounds = [step["candidate"] for step in record["steps"] if "ahead" not in step]
    assert "0.32.0" in rounds
    assert len(rounds) <= 3, "one after the other it takes six boots"
    assert len(set(booted(record))) == len(booted(record)) <= 9
    assert missing(capsys.readouterr().err, ", beside boot 1", "  0.32.0: bad: ") == []
    text = next(tmp_path.glob("*/bisect/2*/bisection.md")).read_text(encoding="utf-8")
    assert f"they were known to be needed: {len(booted(record)) - len(rounds)}, " in text


def test_boots_ahead_count_for_the_limit(on_a_cluster: tuple[str, ...], tmp_path: Path) -> None:
    assert len(booted(bisected(tmp_path, *on_a_cluster, "--max-boots", "4", status=2))) == 4


def test_what_cannot_be_tried_leaves_a_set(made_up: MadeUp, tmp_path: Path) -> None:
    made_up(by_release(OLD, ["0.23.0", "0.24.0"]))
    record = bisected(tmp_path, *FIX, status=2)
    assert (record["state"], record["answer"], record["left"]) == (
        "stuck",
        None,
        ["0.23.0", "0.24.0", "0.25.0"],
    )
    assert (
        missing(record["reading"], "Those between could not be tried: ", "0.23.0 boot-failed") == []
    )


def test_a_limit_ends_it_and_a_resume_repeats_no_boot(
    made_up: MadeUp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = made_up(by_release(OLD))
    first = bisected(tmp_path, *FIX, "--max-boots", "3", status=2)
    assert (first["stopped"], first["state"], len(asked)) == ("--max-boots 3", "open", 3)
    assert releases_of(asked) == booted(first)
    assert "--max-boots" not in first["reproduce"]
    folder = (tmp_path / "tq-chunked-prefill" / "bisect" / "latest").resolve()
    assert (
        missing(
            capsys.readouterr().out,
            "Undecided: the first fixed one is one of ",
            f"resume:   vllm-repro bisect --resume {folder}",
        )
        == []
    )
    whole = resumed(tmp_path, "--max-time", "1h")
    assert (whole["answer"], whole["stopped"], booted(whole)) == (
        "0.23.0",
        None,
        releases_of(asked),
    )
    assert whole["steps"][:3] == first["steps"]
    assert (len(set(booted(whole))), whole["started_at"]) == (len(asked), first["started_at"])
    assert resumed(tmp_path)["steps"] == whole["steps"]
    assert len(asked) == len(whole["steps"]), "nothing is left to boot"
    resumed(tmp_path, "--rate", "0.5", status=64)
    assert "--rate would change them" in capsys.readouterr().err


def test_a_time_limit_ends_it(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr("vllm_repro_search.bisect.boots.time.monotonic", lambda: float(next(clock)))
    asked = made_up(by_release(OLD))
    record = bisected(tmp_path, *FIX, "--max-time", "10m", status=2)
    assert (record["stopped"], 1 <= len(asked) <= 3) == ("--max-time 600s", True)


def test_an_interrupt_keeps_steps_and_infra_is_retried(made_up: MadeUp, tmp_path: Path) -> None:
    def troubled(job: Job) -> RunReport:
        if len(asked) == 3:
            raise InfraError(f"no wheel in {Path.cwd()}/wheels")
        if len(asked) == 4:
            raise KeyboardInterrupt("SIGTERM")
        return by_release(OLD)(job)

    asked = made_up(troubled)
    cut = bisected(tmp_path, *FIX, status=130)
    assert (cut["stopped"], [step["fate"] for step in cut["steps"]]) == (
        "SIGTERM",
        ["dies", "lives", "infra"],
    )
    assert cut["steps"][2]["why"] == "no wheel in ./wheels"
    again = made_up(by_release(OLD))
    assert resumed(tmp_path)["answer"] == "0.23.0"
    assert releases_of(again)[0] == cut["steps"][2]["candidate"]


def test_one_that_is_killed_in_its_first_boot_can_be_resumed(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(job: Job, _progress: object, opened: Callable[[object, str], None]) -> RunReport:
        opened(RehearsalSite(replace(job.options, vllm=None), job.scenario), job.choice.why)
        raise SystemExit

    monkeypatch.setattr("vllm_repro_search.versions.verb.run_one", killed)
    with pytest.raises(SystemExit):
        bisected(tmp_path, *FIX)
    assert record_in(tmp_path, "bisect")["steps"] == []
    made_up(by_release(OLD))
    assert resumed(tmp_path)["answer"] == "0.23.0"


@pytest.mark.parametrize(("key", "value", "status"), [("source", "0.19.9", 64), ("date", "x", 0)])
def test_only_another_source_is_another_bisection(
    made_up: MadeUp,
    tmp_path: Path,
    key: str,
    value: str,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made_up(by_release(OLD))
    record = bisected(tmp_path, *FIX, "--max-boots", "1", status=2)
    record["candidates"][3][key] = value
    (path,) = tmp_path.glob("*/bisect/2*/bisection.json")
    path.write_text(json.dumps(record), encoding="utf-8")
    resumed(tmp_path, status=status)
    assert ("its candidates has changed" in capsys.readouterr().err) is bool(status)


def test_a_flaky_bug_is_booted_again_with_a_probability(made_up: MadeUp, tmp_path: Path) -> None:
    def answer(job: Job) -> RunReport:
        dies = str(job.options.vllm) in OLD and len(asked) % 2
        return outcome_of(job, Outcome.CRASH if dies else Outcome.CLEAN)

    asked = made_up(answer)
    record = bisected(tmp_path, *FIX, "--rate", "0.5")
    assert (record["answer"], 0.95 <= record["probability"] < 1) == ("0.23.0", True)
    assert releases_of(asked).count("0.23.0") >= 4
    text = next(tmp_path.glob("*/bisect/2*/bisection.md")).read_text(encoding="utf-8")
    assert (
        f"Probability {record['probability']:.1%}, if a bad one dies in 50% of boots (--rate 0.5)."
        in text
    )
    assert "--rate 0.5" in record["reproduce"]


@pytest.mark.parametrize(
    ("bad", "skipped", "status", "reading"),
    [
        (
            [],
            [],
            1,
            (
                "No answer: 0.20.0 is named as bad, and lived in 1 of 1 boots. Next: name another"
                " --bad; if the bug shows in some boots only, add --rate with their share."
            ),
        ),
        (
            ["0.20.0", "0.32.0"],
            [],
            1,
            (
                "No answer: 0.32.0 is named as good, and died in 1 of 1 boots. Next: name a newer"
                " --good."
            ),
        ),
        (
            [],
            ["0.20.0"],
            2,
            (
                "No answer: 0.20.0 is named as bad, and could not be tried (boot-failed: it was"
                " boot-failed). Next: name a --bad near it that boots."
            ),
        ),
    ],
)
def test_an_end_that_is_not_as_named_ends_it(
    made_up: MadeUp,
    tmp_path: Path,
    bad: list[str],
    skipped: list[str],
    status: int,
    reading: str,
) -> None:
    asked = made_up(by_release(bad, skipped))
    assert bisected(tmp_path, *FIX, status=status)["reading"] == reading
    assert len(asked) <= 2


def test_an_unsupported_release_is_a_skip(
    made_up: MadeUp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(job: Job) -> RunReport:
        if str(job.options.vllm) not in ("0.20.0", "0.32.0"):
            raise Unsupported("the lab cannot run this release", hint="--vllm names another")
        return by_release(OLD)(job)

    made_up(answer)
    record = bisected(tmp_path, *FIX, "--versions", "0.22.0,0.24.0", status=2)
    assert "--vllm" not in capsys.readouterr().err
    assert record["left"] == ["0.22.0", "0.24.0", "0.32.0"]
    assert {step["fate"] for step in record["steps"][2:]} == {"unsupported"}


def test_a_cached_release_is_booted_before_one_to_install(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm_repro_search.bisect.boots.ReleaseCache.get",
        lambda _, source: "a release" if source.release == "0.23.0" else None,
    )
    asked = made_up(by_release(OLD))
    record = bisected(tmp_path, *FIX, "--server", "lab")
    assert (releases_of(asked)[2], record["answer"]) == ("0.23.0", "0.23.0")


@pytest.fixture(scope="session")
def made_history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a checkout and its commits: v0.23.0 is on a branch from the first one."""
    folder = tmp_path_factory.mktemp("history")
    git(folder, "init", "-q", "-b", "main")
    hashes = [commit(folder, __init__="", a="0\n")]
    git(folder, "checkout", "-q", "-b", "release")
    commit(folder, b="picked\n")
    git(folder, "tag", "v0.23.0")
    git(folder, "checkout", "-q", "main")
    hashes += [commit(folder, a=f"{number}\n") for number in range(1, 12)]
    git(folder, "commit", "-q", "--allow-empty", "-m", "docs")
    return folder, hashes


@pytest.fixture
def history(tmp_path: Path, made_history: tuple[Path, list[str]]) -> tuple[Path, list[str]]:
    made, hashes = made_history
    return Path(copytree(made, tmp_path / "my vllm")), hashes


def test_the_commit_that_fixed_it_is_found_and_resumed(
    made_up: MadeUp,
    tmp_path: Path,
    history: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, hashes = history
    monkeypatch.chdir(tmp_path)
    sources = [f"{folder}@{one}" for one in hashes]

    def answer(job: Job) -> RunReport:
        assert job.options.vllm
        outcome = Outcome.CRASH if str(job.options.vllm) in sources[:7] else Outcome.CLEAN
        return run_of("0.24.0", [outcome], reported=job.options.vllm.version)

    asked = made_up(answer)
    words = ["bisect", "tq-chunked-prefill", "--server", "lab", "--repo", str(folder), "--find-fix"]
    words += ["--bad", "0.23.0", "--good", "main", "--out", str(tmp_path)]
    assert main([*words, "--max-boots", "3"]) == 2
    assert releases_of(asked)[:2] == [
        sources[0],
        sources[-1],
    ], "the oldest is where the release branch was cut"
    resume = ["bisect", "--resume", str(tmp_path / "tq-chunked-prefill" / "bisect" / "latest")]
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir("/")
        assert main(resume) == 64
        assert "there is no ./my vllm here" in capsys.readouterr().err
    assert main(resume) == 0
    record = record_in(tmp_path, "bisect")
    assert (record["answer"], len(asked), len(set(releases_of(asked)))) == (
        hashes[7][:12],
        len(record["steps"]),
        len(asked),
    )
    assert (
        f"The first fixed one is {hashes[7][:12]} (a change): it lived in 1 of 1 boots"
        in record["reading"]
    )
    text = next(tmp_path.glob("*/bisect/2*/bisection.md")).read_text(encoding="utf-8")
    assert (
        missing(
            text,
            "ran over the compiled parts of a CPU release",
            "Commits that change nothing under vllm/ and were not tried: 1.",
        )
        == []
    )
    today = git(folder, "log", "-1", "--format=%as", hashes[7])
    assert f"- {hashes[7][:12]}, {today}: a change\n" in text


OF_CHECKOUT = ("bisect", "tq-chunked-prefill", "--repo")
SCRIPT = 'test "$(cat "$VLLM_REPRO_TREE/vllm/a.py")" -{} 7 {}'


@pytest.fixture
def laid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lay out the commits of `history` without the compiled parts of a release."""

    def provision(_: object, source: Source, _progress: object) -> Release:
        packages = tmp_path / "laid" / source.commit
        packages.mkdir(parents=True, exist_ok=True)
        words = ["git", "-C", str(source.folder), "archive", source.commit]
        packed = subprocess.run(words, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", packages], input=packed, check=True)
        return Release(
            source=Source(),
            version="",
            torch="",
            python=Path(sys.executable),
            packages=packages,
            executable=packages,
        )

    monkeypatch.setattr("vllm_repro_search.bisect.boots.ReleaseCache.provision", provision)


@pytest.mark.usefixtures("laid")
def test_a_script_answers_instead_of_servers(
    harness: Harness, tmp_path: Path, history: tuple[Path, list[str]]
) -> None:
    folder, hashes = history
    ends = ("--find-fix", "--bad", hashes[0], "--good", "main")
    script = SCRIPT.format(
        "ge", '&& "$VLLM_REPRO_PYTHON" -c "import os; os.environ[\'VLLM_REPRO_SOURCE\']"'
    )
    done = harness(*OF_CHECKOUT, str(folder), *ends, "--script", script, "--max-boots", "3")
    assert (done.status, done.out.splitlines()[0]) == (2, f"Script: {script}"), done.err
    cut = record_in(tmp_path / "reports", "bisect")
    assert [step["candidate"] for step in cut["steps"]][:2] == [hashes[0][:12], hashes[-1][:12]]
    resume = shlex.split(done.out.partition("resume:   ")[2].splitlines()[0])[1:]
    assert resume[-2:] == ["--script", script]
    assert_refused(harness(*resume[:-2]), "a command is never taken from a record")
    assert_refused(harness(*resume[:-1], "exit 0"), "its script has changed since")
    assert harness(*resume).status == 0
    record = record_in(tmp_path / "reports", "bisect")
    assert (record["answer"], record["steps"][:3], record["evidence"]) == (
        hashes[7][:12],
        cut["steps"],
        None,
    )
    text = next((tmp_path / "reports").glob("*/bisect/2*/bisection.md")).read_text(encoding="utf-8")
    assert (
        missing(
            text,
            f"**The first fixed one is {hashes[7][:12]} (a change): it is good in 1 of 1 run of the"
            " script;",
            "This holds if a bad one fails in every run (--rate 1): each was run once.",
            "ran over the compiled parts of a CPU release.",
        )
        == []
    )
    assert "died" not in text
    assert "lived" not in text
    assert "dies" not in text
    again = shlex.split(text.rpartition("```console\n")[2].splitlines()[0])
    assert again[again.index("--script") + 1] == script


@pytest.mark.usefixtures("laid")
@pytest.mark.parametrize("status", [2, 126, 127, 130])
def test_another_exit_status_of_a_script_stops_and_is_no_answer(
    harness: Harness, tmp_path: Path, history: tuple[Path, list[str]], status: int
) -> None:
    folder, hashes = history
    ends = ("--bad", "main", "--good", hashes[0])
    done = harness(*OF_CHECKOUT, str(folder), *ends, "--script", f"exit {status}")
    record = record_in(tmp_path / "reports", "bisect")
    assert (done.status, record["steps"], record["stopped"]) == (
        2,
        [],
        f"exit status {status} of the script",
    )


@pytest.mark.usefixtures("laid")
def test_a_script_skips_with_125_and_leaves_no_process(
    harness: Harness, tmp_path: Path, history: tuple[Path, list[str]]
) -> None:
    folder, hashes = history
    script = SCRIPT.format("lt", f"|| exit 1; sleep 999 & echo $! >> {tmp_path}/pids")
    script = f'case "$VLLM_REPRO_SOURCE" in *@{hashes[6]}) exit 125;; esac; {script}'
    ends = ("--bad", "main", "--good", hashes[0])
    done = harness(*OF_CHECKOUT, str(folder), *ends, "--json", "--script", script)
    record = json.loads(done.out)
    assert (done.status, record["left"]) == (2, [hashes[6][:12], hashes[7][:12]]), record["reading"]
    assert f"{hashes[6][:12]} undecided (exit status 125)" in record["reading"]
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert pids
    # Nobody may have reaped them yet.
    assert not [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


def test_again_names_the_folders_of_scenarios(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    text = (ROOT / "scenarios" / "tq_chunked_prefill.py").read_text(encoding="utf-8")
    (folder / "mine.py").write_text(
        text.replace('id="tq-chunked-prefill"', 'id="mine"'), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_REPRO_SCENARIOS", "")
    asked = made_up(by_release(OLD))
    words = ["bisect", "mine", "--server", "rehearsal", *FIX, "--scenarios", "mine"]
    assert main([*words, "--out", str(tmp_path), "--max-boots", "2"]) == 2
    text = next(tmp_path.glob("mine/bisect/2*/bisection.md")).read_text(encoding="utf-8")
    again = shlex.split(text.rpartition("```console\n")[2].splitlines()[0])
    assert again[again.index("--scenarios") + 1] == "./mine"
    monkeypatch.setenv("VLLM_REPRO_SCENARIOS", "")
    assert main(["bisect", "--resume", str(tmp_path / "mine" / "bisect" / "latest")]) == 0
    assert {job.scenario.id for job in asked} == {"mine"}


SCRIPT_OF_MAIN = ("--bad", "main", "--good", "0.23.0", "--script", "true")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(
            (["--server", "lab", *words], message)
            for words, message in (
                (["--bad", "main~3", "--good", "main"], "main~3 is not newer than main"),
                (
                    ["--bad", "main", "--good", "main~1"],
                    "no commit from main~1 to main changes vllm/",
                ),
                (["--bad", "main", "--good", "0.22.0"], "is no git checkout with a commit 0.22.0"),
                (
                    ["--bad", "main", "--good", "0.23.0", "--versions", "0.24.0"],
                    "--versions has no meaning with --repo",
                ),
                (
                    ["--bad", "main", "--good", "0.23.0", "--server", "rehearsal"],
                    "--server rehearsal runs releases only",
                ),
            )
        ),
        *(
            ([*SCRIPT_OF_MAIN, option, value], f"{option} has no meaning with --script")
            for option, value in (("--server", "lab"), ("--model", "m"), ("--arm", "reported"))
        ),
    ],
)
def test_wrong_usage_of_a_checkout(
    harness: Harness, words: list[str], message: str, history: tuple[Path, list[str]]
) -> None:
    assert_refused(harness(*OF_CHECKOUT, str(history[0]), *words), message, "next:")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bad", "0.20.0", "--good", "0.32.0"], "--bad 0.20.0 is older than --good 0.32.0"),
        (
            ["--bad", "0.32.0", "--good", "0.20.0", "--find-fix"],
            "--bad 0.32.0 is newer than --good 0.20.0",
        ),
        (["--bad", "0.32.0", "--good", "v0.32"], "--bad and --good are both 0.32.0"),
        (
            ["--bad", "0.32.0", "--good", "0.30.0", "--versions", "0.31.0,0.29.0"],
            "--versions names 0.29.0, not between 0.30.0 and 0.32.0",
        ),
        (["--bad", "0.32.0"], "bisect needs a SCENARIO and either --bad and --good"),
        (["--bad", "main", "--good", "0.32.0"], "'main' is not the number of a vLLM release"),
        (["--bad", "0.27.5", "--good", "0.32.0", "--find-fix"], "there is no vLLM 0.27.5"),
        ([*FIX, "--versions", "0.23.0,0.27.5"], "there is no vLLM 0.27.5"),
        (
            [*FIX, "--arm", "eager"],
            "no arms that show the bug are named (eager), and bisect follows one",
        ),
        ([*FIX, "--rate", "0"], "'0' is no share of boots"),
        ([*FIX, "--max-boots", "0"], "'0' is no number of boots"),
        ([*FIX, "--image", "mine"], "every release would run mine"),
        ([*FIX, "--trials", "3"], "unrecognized arguments: --trials"),
        ([*FIX, "--server", "attach"], "'attach' is none of auto, docker"),
    ],
)
def test_wrong_usage_is_said_and_leaves_no_folder(
    harness: Harness, words: list[str], message: str, tmp_path: Path
) -> None:
    done = harness(*TQ, *words)
    assert (done.status, message in done.err, "next:" in done.err) == (64, True, True), done.err
    assert "--vllm" not in done.err, "bisect has no such option"
    assert not list((tmp_path / "reports").glob("*"))


def test_what_is_no_bisection_is_not_resumed(harness: Harness, tmp_path: Path) -> None:
    assert_refused(harness("bisect", "--resume", str(tmp_path)), "holds no search that can be read")
