"""The Python API: its names, its cost, and the examples of docs/api.md."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

import vllm_repro
from vllm_repro.cli import parser
from vllm_repro.errors import InfraError, ScenarioError, UsageError
from vllm_repro.features import additions
from vllm_repro.running import live_server
from vllm_repro.servers.launch import ServedModel, container_launch
from vllm_repro_diagnosis.evidence import Evidence

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES: list[str] = [*vars(vllm_repro)["_HOMES"]]
BLOCKS = re.findall(
    r"```python\n(.*?)```", (DOCS / "api.md").read_text(encoding="utf-8"), re.DOTALL
)
TESTS = [block for block in BLOCKS if "def test_" in block]


@pytest.mark.features
def test_the_names_are_the_contract_for_type_checkers() -> None:
    names = sorted({*NAMES, *additions("api")})
    assert vllm_repro.__all__ == names
    assert [name for name in names if not hasattr(vllm_repro, name)] == []
    assert set(names) <= set(dir(vllm_repro))
    stub = ast.parse(Path(vllm_repro.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    lists = [node.value for node in stub.body if isinstance(node, ast.Assign | ast.AugAssign)]
    assert sorted(name for value in lists for name in ast.literal_eval(value)) == names
    imported = {
        alias.asname
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == set(names)
    assert Path(vllm_repro.__file__).with_name("py.typed").is_file()
    with pytest.raises(AttributeError, match="has no attribute 'VllmSever'"):
        vllm_repro.VllmSever  # type: ignore[attr-defined]  # noqa: B018  # misspelt on purpose


def test_a_scenario_is_loaded_by_id_or_path(tmp_path: Path) -> None:
    named = vllm_repro.load_scenario("min-tokens-stop-ids")
    assert vllm_repro.load_scenario(ROOT / "scenarios" / "min_tokens_stop_ids.py") == named
    with pytest.raises(UsageError, match="no scenario is named"):
        vllm_repro.load_scenario("min-tokens")
    (tmp_path / "wrong.py").write_text("scenario = 1\n", encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"wrong.py:1: "):
        vllm_repro.load_scenario(tmp_path / "wrong.py")


@pytest.mark.usefixtures("short_waits")
def test_a_run_in_a_notebook_has_an_event_loop_of_its_own(tmp_path: Path) -> None:
    async def cell() -> vllm_repro.RunResult:
        return vllm_repro.run(
            "min-tokens-stop-ids", server="rehearsal", arms=["near-miss"], out=tmp_path
        )

    result = asyncio.run(cell())
    assert (result.expected, result.verdict) == (True, "inconclusive")
    assert result.folder == tmp_path / result.report.id
    assert (result.folder / "report.json").is_file()


def enter(**options: Any) -> None:
    with vllm_repro.VllmServer("vllm serve Qwen/Qwen3-0.6B", **options):
        pass


NO_SERVER = "'{}' is none of auto, attach, docker, process, lab, scheduler, rehearsal"


@pytest.mark.parametrize(
    ("call", "options", "message", "hint"),
    [
        (vllm_repro.run, {"image": "x"}, "--image has no meaning with --server rehearsal", "leave"),
        (vllm_repro.run, {"arms": ["eagr"]}, "has no arm 'eagr'", "It has: reported, near-miss"),
        (vllm_repro.run, {"arms": "near-mis"}, "has no arm 'near-mis'", "did you mean near-miss?"),
        (vllm_repro.run, {"server": "rehersal"}, NO_SERVER, "did you mean rehearsal?"),
        (vllm_repro.run, {"server": "Docker"}, NO_SERVER, "did you mean docker?"),
        (vllm_repro.run, {"server": ""}, NO_SERVER, "name one of these server"),
        (vllm_repro.run, {"weights": "dumy"}, "'dumy' is none of real, random, dummy", "dummy?"),
        (
            vllm_repro.run,
            {"expect": "dead"},
            "'dead' is none of declared, alive, crash, any",
            "leave",
        ),
        (vllm_repro.run, {"trials": 0}, "trials=0 is no number of boots from 1 to 200", "auto"),
        (vllm_repro.run, {"trials": 201}, "trials=201 is no number of boots", "auto"),
        (vllm_repro.run, {"trials": "3"}, "trials='3' is no number of boots", "auto"),
        (vllm_repro.run, {"vllm": "0.99.9.x"}, "0.99.9.x", ""),
        (enter, {"server": "rehersal"}, NO_SERVER, "did you mean rehearsal?"),
        (enter, {"server": "procss"}, NO_SERVER, "did you mean process?"),
        (enter, {"weights": "reel"}, "'reel' is none of real, random, dummy", "mean real?"),
    ],
)
def test_a_wrong_call_is_refused_shortly_with_the_next_step(
    tmp_path: Path, call: Any, options: dict[str, Any], message: str, hint: str
) -> None:
    named = ("min-tokens-stop-ids",) if call is vllm_repro.run else ()
    options = {"server": "rehearsal"} | ({"out": tmp_path} if named else {}) | options
    with pytest.raises(UsageError) as refused:
        call(*named, **options)
    assert message.format(options["server"]) in str(refused.value)
    shown = traceback.format_exception(refused.value)
    assert (hint in shown[-1], len("".join(shown).splitlines()) <= 25) == (True, True), shown
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("short_waits")
def test_a_release_that_does_not_exist_is_a_short_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(*_: object) -> None:
        raise InfraError("error: No solution found\n  cause: no vllm==0.99.9", hint="Check it.")

    monkeypatch.setattr("vllm_repro.releases.provision.ReleaseCache._install", install)
    for call in (
        lambda: vllm_repro.run("min-tokens-stop-ids", server="process", vllm="0.99.9"),
        lambda: enter(server="process", vllm="0.99.9"),
    ):
        with pytest.raises(InfraError) as refused:
            call()
        lines = "".join(traceback.format_exception(refused.value)).splitlines()
        assert (lines[-1], len(lines) < 25) == ("next: Check it.", True), lines


@pytest.mark.parametrize(
    "command",
    ["A=1 vllm serve m", "vllm serve m", "docker run -e A=1 vllm/vllm-openai:v0.33.0 --model m"],
)
def test_a_server_has_the_variables_of_its_call(command: str) -> None:
    scenario = live_server._scenario(command, {"A": "2", "B": "x y"}, "0.33.0", on_gpu=False)
    launch = container_launch(
        scenario,
        scenario.arms[0],
        image="i",
        weights=ServedModel(name="m"),
        port=8000,
        evidence=Evidence.CPU,
    )
    assert dict(launch.env).items() >= {"A": "2", "B": "x y"}.items()


@pytest.mark.usefixtures("short_waits")
def test_a_run_takes_the_options_of_the_command(tmp_path: Path) -> None:
    """Those that choose an exit status or another machine aside; `vllm` has what `--with` says."""
    other = {"scenarios", "scenario_folders", "json", "help", "on", "resume", "bisect_exit", "with"}
    parsers = vars(parser("run"))["_subparsers"]._group_actions[0].choices["run"]._actions
    options = {action.dest for action in parsers} - other
    names = set(inspect.signature(vllm_repro.run).parameters) - {"scenario"}
    assert {name.removesuffix("s") for name in names} == {
        name.removesuffix("s") for name in options
    }
    result = vllm_repro.run(
        "min-tokens-stop-ids",
        server="rehearsal",
        arms="reported",
        expect="crash",
        answer_stall=200,
        outputs=True,
        out=tmp_path,
    )
    command = "--arm reported --expect crash --outputs --seed 1"
    assert (result.expected, command in result.report.reproduce) == (True, True)
    assert "--answer-stall 200" in result.report.reproduce


@pytest.mark.usefixtures("short_waits")
def test_the_examples_of_the_docs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    namespace: dict[str, object] = {}
    for block in BLOCKS:
        if block not in TESTS and "import frames" not in block:
            exec(compile(block, "docs/api.md", "exec"), namespace)
    out = capsys.readouterr().out
    assert re.search(
        r"^IndexError index 999999 is out of bounds .* vllm/v1/sample/.*:apply /\S+log$",
        out,
        re.MULTILINE,
    )
    assert "True IndexError apply 0.28.0" in out
    assert len(list(tmp_path.glob("vllm-repro-server-*"))) == 1, "the log of a death stays"
