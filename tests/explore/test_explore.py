"""`vllm-repro explore` and `causes` with a fake driver and with fake runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fake_package import fake_release
from tests.golden_files import assert_golden, missing
from tests.report_examples import replace, run_of
from vllm_repro.cli import main
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.releases.overlay import Overlay
from vllm_repro.releases.provision import Release
from vllm_repro.releases.sources import Source
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job
from vllm_repro.running.resume import read_run
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.reader import read
from vllm_repro.scenario.scenario import Cause
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected
from vllm_repro_explore.case import Case, Request, Setup, beyond_scheduler
from vllm_repro_explore.causes import CauseRow, case_of, lines, play_change, reading
from vllm_repro_explore.draft import unlike_live
from vllm_repro_explore.draw import draw
from vllm_repro_explore.finding import PlayResult, result_from
from vllm_repro_explore.scenario_setup import setup_from
from vllm_repro_explore.scheduler_test import finding_test

DEATH = {
    "kind": "death",
    "exception": "AssertionError",
    "message": "",
    "file": "vllm/v1/core/kv_cache_utils.py",
    "function": "popleft_n",
    "source": "assert curr_block is not None",
    "frames": ["schedule", "popleft_n"],
}
Play = Callable[[Case], PlayResult]
PATCHED = ["vllm/v1/core/kv_cache_utils.py", "vllm/v1/simple_kv_offload/manager.py"]


def quiet(_: Case) -> PlayResult:
    return result_from({"steps": 3})


def dies_of_long_prompts(case: Case) -> PlayResult:
    return result_from(
        {"steps": 3, "death": DEATH} if any(ask.prompt > 40 for ask in case.asks) else {"steps": 3}
    )


@pytest.fixture
def playing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Callable[[Release], Play]], None]:
    """Replace the driver by a function; nothing is installed.

    loads: the patched files that it imports, by default all.
    """

    def put(player: Callable[[Release], Play], loads: Sequence[str] | None = None) -> None:
        class Fake:
            def __init__(
                self,
                release: Release,
                _: Path,
                errors: Path,
                *,
                patched: Sequence[str] = (),
                **__: object,
            ) -> None:
                self._play = player(release)
                lines = (
                    f"REPRO observed imported {json.dumps({'file': one})}\n"
                    for one in patched
                    if loads is None or one in loads
                )
                errors.write_text("".join(lines), encoding="utf-8")

            def play(self, case: Case, worker: str = "") -> PlayResult:
                assert worker in ("", "runner")
                return self._play(case)

            def __enter__(self) -> Fake:
                return self

            def __exit__(self, *_: object) -> None: ...

        def provision(source: Source, _: object) -> Release:
            return fake_release(source.release, tmp_path)

        def overlay(_: Path, __: Path, patches: tuple[Patch, ...], ___: object) -> Overlay:
            return Overlay(
                Path(patches[0].was), dict.fromkeys((patch.file for patch in patches), "")
            )

        for module in ("vllm_repro_explore.explore", "vllm_repro_explore.causes"):
            monkeypatch.setattr(f"{module}.Driver", Fake)
            monkeypatch.setattr(f"{module}.provision", provision)
            monkeypatch.setattr(f"{module}.driver_model", lambda: tmp_path)
            monkeypatch.setattr(f"{module}.make_overlay", overlay)
        monkeypatch.setenv("VLLM_REPRO_REPORTS", str(tmp_path / "reports"))

    return put


def folder_of(tmp_path: Path) -> Path:
    return (tmp_path / "reports" / "explore" / "latest").resolve()


def test_what_is_found_lies_in_the_folder_and_exits_1(
    playing: Any, tmp_path: Path, capsys: Any
) -> None:
    playing(lambda _: dies_of_long_prompts)
    words = ["explore", "--engine", "--mix", "off,stream", "--vllm", "v0.32.0", "--seeds", "40"]
    assert main([*words, "--json"]) == 1
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    folder = folder_of(tmp_path)
    assert record == json.loads((folder / "explore.json").read_text(encoding="utf-8"))
    expected = {
        "evidence": "engine",
        "vllm_version": "0.32.0",
        "trials": 40,
        "seeds": [1, 40],
        "mixes": ["off", "stream"],
        "reproduce": "vllm-repro explore --engine --mix off,stream --vllm 0.32.0 --seeds 40",
    }
    assert {name: record[name] for name in expected} == expected
    assert "vLLM 0.32.0's EngineCore without a model, mixes off, stream" in printed.err
    (finding,) = record["findings"]
    (line,) = (folder / "findings.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["case"] == finding["case"]
    assert [ask["prompt"] for wave in finding["case"]["waves"] for ask in wave] == [41]
    connector = "" if finding["seed"] % 2 else "OffloadingConnector"
    assert (finding["case"]["connector"], finding["model_runner"]) == (connector, "the same")
    assert finding["live"].endswith("explored_popleft_n_0_32_0.py --server lab --vllm 0.32.0")
    assert read(folder / "explored_popleft_n_0_32_0.py")[1] == []
    assert finding["test"].endswith("test_explored_popleft_n_0_32_0.py")
    assert main(["report", str(folder), "--format", "pytest"]) == 0
    test = capsys.readouterr().out
    assert test == (folder / "test_explored_popleft_n_0_32_0.py").read_text(encoding="utf-8")
    assert "WAVES = [[dict(prompt=41, answer=1)]]" in test


def test_a_finding_with_a_scenario_file_is_booted_at_once(
    playing: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    booted: list[list[str]] = []
    playing(lambda _: dies_of_long_prompts)

    def run(words: list[str]) -> int:
        booted.append(words)
        return 0

    monkeypatch.setattr("vllm_repro.cli.main", run)
    words = [
        "explore",
        "--engine",
        "--mix",
        "plain,v2",
        "--seeds",
        "9",
        "--out",
        str(tmp_path / "out"),
        "--boot",
    ]
    assert main(words) == 1
    ((verb, scenario, *options),) = booted
    assert (verb, options[:2], options[-2:]) == (
        "run",
        ["--server", "lab"],
        ["--out", str(tmp_path / "out")],
    )
    assert read(Path(scenario))[1] == []
    assert f"$ vllm-repro run {scenario}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seed", "mix", "beyond"),
    [
        (1, "grammar", "grammars"),
        (10, "stream", "streaming sessions"),
        (6, "ops", "cache resets or pauses"),
    ],
)
def test_a_case_of_the_whole_engine_has_no_scheduler_test(seed: int, mix: str, beyond: str) -> None:
    case = draw(seed, mix)
    assert beyond in beyond_scheduler(case.as_json())
    assert any(reason.endswith(beyond) for reason in unlike_live(case))
    finding = {"kind": "stuck", "site": "requests stay WAITING", "case": case.as_json()}
    with pytest.raises(UsageError, match=f"the scheduler alone does not play .*{beyond}"):
        finding_test(finding, "0.32.0")


def test_no_test_file_for_a_connector_without_copies() -> None:
    # Shrinking may drop all fetches, but keeps the connector.
    case = Case(Setup(connector="NixlConnector"), ((Request(41, 1),),), 1)
    finding = {"kind": "stuck", "site": "requests stay WAITING", "detail": "", "known": None}
    with pytest.raises(UsageError, match="it has no copies for NixlConnector"):
        finding_test(finding | {"case": case.as_json()}, "0.32.0")


def test_a_continued_search_fails_only_for_new_findings(
    playing: Any, tmp_path: Path, capsys: Any
) -> None:
    def night(player: Play, *more: str, vllm: str = "0.32.0") -> tuple[int, str]:
        playing(lambda _: player)
        status = main(
            [
                "explore",
                "--engine",
                "--mix",
                "off",
                "--vllm",
                vllm,
                "--seeds",
                "40",
                "--go-on",
                *more,
            ]
        )
        return status, capsys.readouterr().out

    def also_sticks(case: Case) -> PlayResult:
        stuck = {"kind": "stuck", "states": "WAITING", "detail": "r1 WAITING"}
        short = all(ask.prompt < 20 for ask in case.asks)
        return result_from({"steps": 3, "death": stuck}) if short else dies_of_long_prompts(case)

    assert night(dies_of_long_prompts)[0] == 1
    first = folder_of(tmp_path).name
    # a comparison under a patch has the same keys, and no findings
    record = json.loads((folder_of(tmp_path) / "explore.json").read_text(encoding="utf-8"))
    compared = folder_of(tmp_path).with_name("20000101T000000Z-compared")
    compared.mkdir()
    record = {key: record[key] for key in record if key != "findings"} | {"seeds": [1, 500]}
    (compared / "explore.json").write_text(json.dumps(record), encoding="utf-8")
    status, out = night(dies_of_long_prompts)
    assert (status, "seeds 41 to 80" in out, f"before: first in {first}" in out) == (0, True, True)
    assert f"| {first} |" in (folder_of(tmp_path) / "explore.md").read_text(encoding="utf-8")
    status, out = night(also_sticks)
    assert (
        status,
        "--seeds 40 --from 81" in out,
        "new:   in none of 2 earlier searches" in out,
    ) == (1, True, True)
    page = (folder_of(tmp_path) / "explore.md").read_text(encoding="utf-8")
    assert "New findings: **1**. Seen before, in 2 earlier searches: 1." in page
    assert (
        page.index("## stuck: requests stay WAITING")
        < page.index("## Seen before")
        < page.index("popleft_n")
    )
    # a night that a full disk cut off
    (folder_of(tmp_path) / "explore.json").write_text("{", encoding="utf-8")
    status, out = night(also_sticks, vllm="0.33.0")
    assert (status, "seeds 1 to 40" in out) == (1, True)


def test_an_interrupted_search_keeps_and_tells_what_it_has(
    playing: Any, tmp_path: Path, capsys: Any
) -> None:
    played: list[Case] = []

    def interrupted(case: Case) -> PlayResult:
        played.append(case)
        if len(played) > 60:
            raise KeyboardInterrupt
        return dies_of_long_prompts(case)

    playing(lambda _: interrupted)
    assert main(["explore", "--engine", "--mix", "plain,v2", "--seeds", "900"]) == 130
    assert "interrupted" in capsys.readouterr().out
    assert (
        json.loads((folder_of(tmp_path) / "explore.json").read_text(encoding="utf-8"))[
            "interrupted"
        ]
        is True
    )


PAIR = [
    Path(__file__).parents[2] / "fixtures" / "patches" / f"sco-hybrid-{name}.diff"
    for name in ("fix", "hide")
]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explore"], "name a SCENARIO, --engine or --frontend to explore"),
        (
            ["explore", "--engine", "sco-hybrid"],
            "name a SCENARIO, --engine or --frontend to explore",
        ),
        (["explore", "sco-hybrid", "--mix", "plain"], "--mix needs --engine"),
        (["explore", "--engine", "--mix", "plain,of"], "no mix is called of"),
        (["explore", "--frontend", "hermes,hermit"], "the search has no parser called hermit"),
        (["explore", "--frontend", "--jobs", "2"], "--frontend goes without --patch, --jobs"),
        (["explore", "--frontend", "--mix", "plain"], "--mix needs --engine"),
        (["explore", "tq-chunked-prefill"], "tq-chunked-prefill has no server that can be played"),
        (
            ["explore", "--engine", "--go-on", "--from", "7"],
            "--go-on is for a search without --from and --patch",
        ),
        (
            ["explore", "--engine", "--mix", "plain,v2", "--arm", "reported"],
            "--arm needs a SCENARIO",
        ),
        (
            ["explore", "--engine", "--boot", "--json"],
            "--boot is for a search without --patch and --json",
        ),
        (["explore", "sco-hybrid", *["--patch", str(PAIR[0])] * 2], "given twice"),
        (["causes", "min-tokens-stop-ids"], "names no changes to try"),
        # the scheduler alone has no server
        (["causes", "sco-hybrid", "--server", "lab"], "leave --server out"),
    ],
)
def test_what_cannot_be_searched_is_wrong_usage(
    words: list[str], message: str, capsys: Any
) -> None:
    assert main(words) == 64
    assert message in capsys.readouterr().err


# --- patches
# --------------------------------------------------------------------------------------------------


def patch_of(release: Release) -> str:
    if release.packages.name == "packages":
        return ""
    return "fix" if "gpu_block_id" in str(release.packages) else "hide"


def test_two_patches_are_told_apart_on_the_same_cases(
    playing: Any, tmp_path: Path, capsys: Any
) -> None:
    seen: dict[str, list[Case]] = {"": [], "fix": [], "hide": []}

    def player(release: Release) -> Play:
        name = patch_of(release)

        def play(case: Case) -> PlayResult:
            seen[name].append(case)
            long = any(ask.prompt > 2000 for ask in case.asks)
            site = DEATH if name == "" else DEATH | {"function": "append_n"}
            return result_from({"death": site} if long and name != "fix" else {})

        return play

    playing(player)
    words = ["explore", "sco-hybrid", "--seeds", "9", "--json"]
    assert main([*words, "--patch", str(PAIR[0]), "--patch", str(PAIR[1])]) == 0
    printed = capsys.readouterr()
    given = json.loads(printed.out)
    assert seen[""] == seen["fix"] == seen["hide"]
    assert (given["trials"], given["seeds"]) == (9, [1, 9])
    failing = sum(any(ask.prompt > 2000 for ask in case.asks) for case in seen[""])
    assert 0 < failing < 9
    assert given["failing"] == failing
    fix, hide = given["patches"]
    assert (fix["fixed"], fix["still_failing"], fix["newly_failing"]) == (failing, 0, 0)
    assert (hide["fixed"], hide["still_failing"], hide["in_another_way"]) == (0, failing, failing)
    assert given == json.loads((folder_of(tmp_path) / "explore.json").read_text(encoding="utf-8"))
    assert given["reproduce"].index(PAIR[0].name) < given["reproduce"].index(PAIR[1].name)
    assert (
        missing(
            printed.err,
            "fixes every failing case and breaks none",
            "fixes no case, and hides some: they fail in another way",
        )
        == []
    )


def broken_by_a_patch(release: Release) -> Play:
    """Return an engine that dies of long prompts, and with a patch refuses short ones."""
    if not patch_of(release):
        return dies_of_long_prompts
    return lambda case: (
        PlayResult(invalid="refused") if all(a.prompt <= 40 for a in case.asks) else quiet(case)
    )


ENGINE = ("explore", "--engine", "--mix", "plain,v2", "--seeds")


@pytest.mark.parametrize(
    ("player", "words", "status", "texts"),
    [
        (
            lambda _: quiet,
            ["explore", "sco-hybrid", "--seeds", "4", "--from", "11"],
            0,
            [
                "vLLM 0.21.0's EngineCore without a model, on the server of sco-hybrid",
                "nothing in 4 cases",
                "again:   vllm-repro explore sco-hybrid --vllm 0.21.0 --seeds 4 --from 11",
            ],
        ),
        (
            lambda _: lambda _: PlayResult(invalid="ValueError: no such connector"),
            [*ENGINE, "2"],
            2,
            ["2 of them were refused by vLLM at start"],
        ),
        (
            broken_by_a_patch,
            [*ENGINE, "60", "--patch", str(PAIR[0])],
            1,
            ["newly fails:", "refused at start", "breaks cases"],
        ),
        (
            lambda _: quiet,
            [*ENGINE, "9", "--patch", str(PAIR[0])],
            2,
            ["nothing to tell: no case fails as released"],
        ),
        # a change that does not do what is declared
        (lambda _: quiet, ["causes", "sco-hybrid", "--trials", "3"], 1, ["A SURPRISE"]),
    ],
)
def test_a_search_has_a_status_and_a_reading(
    playing: Any,
    capsys: Any,
    player: Callable[[Release], Play],
    words: list[str],
    status: int,
    texts: list[str],
) -> None:
    playing(player)
    assert main(words) == status
    assert missing(capsys.readouterr().out, *texts) == []


@pytest.mark.parametrize(
    ("loads", "status", "reading"),
    [
        ((), 2, "not tested: the search does not load its files"),
        (PATCHED[:1], 0, "fixes every failing case"),
    ],
)
def test_a_patch_that_is_not_loaded_is_not_called_tested(
    playing: Any, tmp_path: Path, capsys: Any, loads: Sequence[str], status: int, reading: str
) -> None:
    diff = tmp_path / "two.diff"
    diff.write_text(
        "".join(f"--- a/{one}\n+++ b/{one}\n@@ -1 +1 @@\n-old\n+new\n" for one in PATCHED),
        encoding="utf-8",
    )
    playing(lambda release: quiet if patch_of(release) else dies_of_long_prompts, loads)
    words = [
        "explore",
        "--engine",
        "--mix",
        "plain,v2",
        "--seeds",
        "9",
        "--patch",
        str(diff),
        "--json",
    ]
    assert main(words) == status
    shown = capsys.readouterr()
    (patch,) = json.loads(shown.out)["patches"]
    assert (patch["tested"], patch["not_loaded"]) == (bool(loads), PATCHED[len(loads) :])
    assert (
        missing(
            shown.err, reading, f"the search does not load {', '.join(PATCHED[len(loads) :])}\n"
        )
        == []
    )


# --- causes
# --------------------------------------------------------------------------------------------------


def test_each_change_is_compared_with_its_own_release(playing: Any, capsys: Any) -> None:
    scenario = find("sco-hybrid")
    assert scenario.causes is not None
    fatal = {
        cause.patches[0].was for cause in scenario.causes.changes if cause.expected is Expected.DIES
    }

    def player(release: Release) -> Play:
        patched = release.packages.name != "packages"
        dies = str(release.packages) in fatal if patched else release.version == "0.20.2"
        return (lambda _: result_from({"death": DEATH})) if dies else quiet

    playing(player)
    assert main(["causes", "sco-hybrid", "--trials", "20", "--json"]) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)["rows"]
    assert [
        (row["release"], row["change"], row["died"])
        for row in rows
        if row["change"] == "as released"
    ] == [
        ("0.20.2", "as released", 20),
        ("0.22.1", "as released", 0),
        ("0.28.0", "as released", 0),
    ]
    assert len(rows) == 3 + len(scenario.causes.changes)
    assert all(row["n"] == 20 and row["as_expected"] for row in rows)
    assert (
        "0 crashes in 20 such workloads: the true rate is below 14% (95 % confidence)" in shown.err
    )


@pytest.mark.parametrize(("loads", "status"), [(None, 1), ([], 2)])
def test_a_change_of_a_file_that_is_not_loaded_is_not_tested(
    playing: Any, capsys: Any, loads: list[str] | None, status: int
) -> None:
    playing(
        lambda release: (
            lambda _: result_from({"death": DEATH} if release.version == "0.20.2" else {})
        ),
        loads,
    )
    assert main(["causes", "sco-hybrid", "--trials", "3", "--json"]) == status
    shown = capsys.readouterr()
    changed = [row for row in json.loads(shown.out)["rows"] if row["change"] != "as released"]
    assert {row["n"] for row in changed} == {0 if loads == [] else 3}
    assert ("not tested: the search does not load vllm/" in shown.out + shown.err) is (loads == [])


def row(
    name: str, died: int, expected: Expected, believed: str = "", listed: int = 0, n: int = 100
) -> CauseRow:
    patches = () if name == "as released" else (Patch("vllm/x.py", name, "now"),)
    cause = Cause(name, "0.20.2", expected, patches, believed=believed)
    return CauseRow(cause=cause, trials=n, died=died, listed=listed)


def test_the_table_of_causes() -> None:
    dies, lives = Expected.DIES, Expected.LIVES
    base = row("as released", 40, dies, listed=44)
    rows = [
        base,
        row("one that everybody believes in", 40, dies, "it is taken for the fix", 44),
        row("one that protects", 0, lives),
        row("one that helps a little", 38, dies),
        row("one that was to protect", 12, lives),
    ]
    assert_golden(
        "causes.txt", "\n".join(lines(rows, {("0.20.2", "reported"): base})) + "\n", "explore"
    )
    assert (
        reading(row("x", 3, dies, n=4), row("as released", 0, lives, n=4))
        == "too few trials to tell"
    )
    assert (
        reading(row("x", 4, dies, n=4), row("as released", 4, dies, n=4))
        == "changes nothing that was seen"
    )
    assert reading(row("x", 0, lives, n=1), row("as released", 1, dies, n=1)) == "protects"
    assert reading(row("x", 40, dies), row("as released", 0, lives)) == "brings the crash back"


def test_every_change_gets_the_same_workloads() -> None:
    scenario = find("sco-hybrid")
    assert scenario.causes is not None
    setup = setup_from(scenario, scenario.arms[0])
    cases = [case_of(scenario.causes, setup, seed) for seed in range(1, 40)]
    assert cases == [case_of(scenario.causes, setup, seed) for seed in range(1, 40)]
    for case in cases:
        lengths = {ask.prompt for ask in case.asks}
        assert len(case.waves) == 4
        assert len(lengths) == 1
        assert 25 <= lengths.pop() % 32 <= 31
    with pytest.raises(ValueError, match="no such flag"):
        play_change(scenario.causes.changes[0], cases, lambda _: PlayResult(invalid="no such flag"))


def test_a_cause_without_arm_or_change_is_a_mistake() -> None:
    text = (Path(__file__).parents[2] / "scenarios" / "sco_hybrid.py").read_text(encoding="utf-8")
    wrong = text.replace(
        'arm="small-cpu-pool",\n            ),',
        'arm="smal-cpu-pool",\n            ),\n            cause("nothing", "0.20.2", dies),',
    )
    problems = [problem.text for problem in read(Path("sco_hybrid.py"), wrong)[1]]
    assert problems == [
        (
            "cause 'free_blocks in two passes, as to 0.23.0': there is no arm 'smal-cpu-pool'; did"
            " you mean 'small-cpu-pool'?"
        ),
        "cause 'nothing' changes nothing: add patched(…)",
    ]


CRASH, CLEAN = Outcome.CRASH, Outcome.CLEAN
Answer = Callable[[Job], RunReport]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Answer], list[Job]]:
    """Replace runs by `answer` and return the list of requested jobs."""

    def put(answer: Answer) -> list[Job]:
        asked: list[Job] = []

        def run_one(job: Job, _progress: object) -> RunReport:
            asked.append(job)
            return answer(job)

        monkeypatch.setattr("vllm_repro_explore.causes.run_one", run_one)
        monkeypatch.setenv("VLLM_REPRO_REPORTS", str(tmp_path / "reports"))
        return asked

    return put


def as_declared(job: Job) -> RunReport:
    """Crash 0.23.0 unless it is changed, and later releases only if they are changed."""
    release, changed = str(job.options.vllm), bool(job.arms[0].patches)
    dies = (release == "0.23.0") is not changed
    return run_of(
        "0.23.0" if release == "0.23.0" else "0.24.0",
        [CRASH if dies else CLEAN] * (job.trials or 0),
    )


def test_each_change_is_booted_beside_its_release(
    made_up: Callable[[Answer], list[Job]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = made_up(as_declared)
    assert main(["causes", "tq-chunked-prefill", "--trials", "2", "--json"]) == 0
    shown = capsys.readouterr()
    assert [(str(job.options.vllm), len(job.arms[0].patches)) for job in asked] == [
        ("0.23.0", 0),
        ("0.23.0", 1),
        ("0.24.0", 0),
        ("0.24.0", 1),
        ("0.24.0", 1),
        ("0.32.0", 0),
        ("0.32.0", 1),
    ]
    assert {(job.options.server, job.trials, job.arms[0].name) for job in asked} == {
        ("lab", 2, "reported")
    }
    again = "vllm-repro causes tq-chunked-prefill --trials 2 --seed 1 --server lab"
    assert {job.reproduce for job in asked} == {again}, (
        "and not a run of the arm without the change"
    )
    loaded = json.loads(shown.out)
    assert (loaded["evidence"], loaded["reproduce"]) == ("lab", again)
    assert [row["died"] for row in loaded["rows"]] == [2, 0, 0, 2, 2, 0, 2]
    assert {(row["n"], row["listed_twice"], row["as_expected"]) for row in loaded["rows"]} == {
        (2, None, True)
    }
    assert loaded["rows"][0]["sites"] == ["AssertionError"]
    assert all(row["run"] for row in loaded["rows"])
    table = [line.split("  ")[-1].strip() for line in shown.err.splitlines() if " of 2  " in line]
    back = "brings the crash back"
    assert table == ["as released", "protects", "as released", back, back, "as released", back]
    assert "list twice" not in shown.err, "no server tells that"
    assert "0 crashes in 2 boots: the true rate is below 78% (95 % confidence)" in shown.err


def without_a_wheel(job: Job) -> RunReport:
    if str(job.options.vllm) == "0.32.0":
        raise InfraError("no such wheel", hint="look at the index")
    return as_declared(job)


@pytest.mark.parametrize(
    ("answer", "status", "runs", "counts"),
    [
        (
            lambda job: run_of("0.23.0", [CRASH if str(job.options.vllm) == "0.23.0" else CLEAN]),
            1,
            7,
            {
                "1 boot of each, lab servers": 1,
                "changes nothing that was seen  A SURPRISE": 4,
            },
        ),
        (
            without_a_wheel,
            2,
            7,
            {
                "UNDECIDED": 2,
                "unknown: no conclusive trial with it, or without it": 1,
                "no such wheel (look at the index)": 2,
            },
        ),
        (lambda job: replace(as_declared(job), interrupted="SIGTERM"), 130, 1, {}),
    ],
    ids=["a change that does nothing", "nothing could be booted", "interrupted"],
)
def test_runs_of_changes_have_a_status_and_a_table(
    made_up: Callable[[Answer], list[Job]],
    capsys: pytest.CaptureFixture[str],
    answer: Answer,
    status: int,
    runs: int,
    counts: dict[str, int],
) -> None:
    asked = made_up(answer)
    assert (main(["causes", "tq-chunked-prefill"]), len(asked)) == (status, runs)
    shown = "".join(capsys.readouterr())
    assert {text: shown.count(text) for text in counts} == counts


def test_a_run_of_a_change_is_not_gone_on_with_alone(tmp_path: Path) -> None:
    line = {
        "t": 1.0,
        "event": "run-started",
        "reproduce": "vllm-repro causes tq-chunked-prefill --server lab",
    }
    (tmp_path / "journal.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match="belongs to another command") as refused:
        read_run(tmp_path)
    assert refused.value.hint == "again: vllm-repro causes tq-chunked-prefill --server lab"
