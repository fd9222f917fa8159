"""The Python API: its names, its cost, and the examples of docs/api.md."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import pytest

import vllm_repro
from vllm_repro.errors import ScenarioError, UsageError
from vllm_repro.features import additions

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = ["EngineDied", "RunResult", "VllmServer", "diagnose", "load_scenario", "run"]
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
        vllm_repro.VllmSever  # type: ignore[attr-defined]  # noqa: B018


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


def test_a_run_refuses_what_the_command_refuses(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--image has no meaning with --server rehearsal"):
        vllm_repro.run("min-tokens-stop-ids", server="rehearsal", image="x", out=tmp_path)
    with pytest.raises(UsageError, match="has no arm 'eagr'"):
        vllm_repro.run("min-tokens-stop-ids", server="rehearsal", arms=["eagr"], out=tmp_path)
    assert not list(tmp_path.iterdir())


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


pytest_plugins = ["pytester"]


@pytest.mark.usefixtures("short_waits")
def test_the_tests_of_the_docs_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", lambda _: None)
    assert len(TESTS) == 2
    for number, block in enumerate(TESTS):
        pytester.makepyfile(**{f"test_{number}": block})
    pytester.runpytest_inprocess().assert_outcomes(passed=2)
