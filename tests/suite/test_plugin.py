from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands import WITH_SHORT_WAITS
from tests.core.test_api import TESTS
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.servers.kinds import kinds
from vllm_repro_suite.plugin import _SERVERS

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def suite(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    short_waits: None,  # noqa: ARG001  # a fixture, used for its effect
) -> pytest.Pytester:
    """Make a folder of two scenarios outside the package."""
    # An inner run in this process must not unload what it imported: other tests hold the same
    # modules.
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", lambda _: None)
    folder = pytester.mkdir("scenarios")
    for name in ("min_tokens_stop_ids.py", "tq_chunked_prefill.py"):
        shutil.copyfile(ROOT / "scenarios" / name, folder / name)
    (folder / "helper.py").write_text(
        "raise RuntimeError('not a scenario, so never read')\n", encoding="utf-8"
    )
    return pytester


def run(suite: pytest.Pytester, *words: str) -> pytest.RunResult:
    return suite.runpytest_inprocess("scenarios", "--scenario-server", "rehearsal", "-rA", *words)


def test_an_open_bug_that_reproduces_is_xfailed(suite: pytest.Pytester) -> None:
    result = run(suite, "-k", "min-tokens")
    result.assert_outcomes(passed=1, xfailed=1, skipped=1)  # a rehearsal has no source to patch
    result.stdout.fnmatch_lines(
        [
            "*! REHEARSAL !*",
            "2 of these ran on the rehearsal engine*",
            (
                "XFAIL *min-tokens-stop-ids?reported? - REHEARSAL: vllm-project/vllm#54195 is"
                " declared for 0.28.0"
            ),
        ]
    )


@pytest.mark.parametrize(
    ("declared", "version", "outcome", "lines"),
    [
        ({}, "0.24.0", "passed", []),
        (
            {'bad=">=0.21.0,<0.24.0", good=">=0.24.0"': 'bad=">=0.21.0"'},
            "0.24.0",
            "xpassed",
            ["*NO LONGER REPRODUCES*", "REHEARSAL: *the engine lived*"],
        ),
        (
            {"vllm#41726": "vllm#39702", "<0.24.0": "<0.25.0", ">=0.24.0": ">=0.25.0"},
            "0.24.0",
            "skipped",
            ["SKIPPED*undecided: the rehearsal engine does not imitate vllm-project/vllm#39702*"],
        ),
        (
            {"<0.24.0": "<0.23.0", ">=0.24.0": ">=0.23.0", 'with="0.23.0"': 'with="0.22.1"'},
            "0.23.0",
            "failed",
            ["REHEARSAL", "*_continuation_prefill", "AssertionError*Workspace is locked*"],
        ),
    ],
    ids=["fixed", "no longer reproduces", "not imitated", "dies and should live"],
)
def test_the_declared_status_decides(
    suite: pytest.Pytester, declared: dict[str, str], version: str, outcome: str, lines: list[str]
) -> None:
    path = suite.path / "scenarios" / "tq_chunked_prefill.py"
    text = path.read_text(encoding="utf-8")
    for old, new in declared.items():
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    result = run(suite, "-k", "tq-chunked-prefill and reported", "--scenario-vllm", version)
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(lines)


def test_what_cannot_run_here_is_skipped_with_the_reason(suite: pytest.Pytester) -> None:
    words = ("--scenario-server", "process", "--scenario-vllm", "0.23.0")
    result = run(suite, *words, "-k", "tq-chunked-prefill and eager")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*the scenario needs 1 GPU*"])


def test_trouble_of_the_host_is_an_error(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{suite.path}/none.sock")
    result = run(suite, "--scenario-server", "docker", "-k", "min-tokens and near-miss")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*no Docker Engine answers*"])
    monkeypatch.setenv("VLLM_REHEARSAL_FAULT", "boot")
    run(suite, "-k", "min-tokens and near-miss").assert_outcomes(errors=1)


def test_a_wrong_scenario_file_is_named_with_its_line(suite: pytest.Pytester) -> None:
    text = '"""Bad."""\nfrom vllm_repro.vocabulary import Scenario\nscenario = Scenaro()\n'
    (suite.path / "scenarios" / "bad_one.py").write_text(text, encoding="utf-8")
    result = run(suite, "-k", "nothing")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*bad_one.py:3: unknown name 'Scenaro'*"])


def test_side_by_side(suite: pytest.Pytester) -> None:
    # `short_waits` for the workers, which are processes
    suite.makeconftest(WITH_SHORT_WAITS)
    run(suite, "-n", "2", "-k", "min-tokens").assert_outcomes(passed=1, xfailed=1, skipped=1)


@pytest.mark.parametrize("named", ["scenarios", "elsewhere/evil.py"])
def test_the_scenario_of_a_stranger_runs_no_code(suite: pytest.Pytester, named: str) -> None:
    target = suite.path / "proof"
    text = (
        f'"""Evil."""\nfrom vllm_repro.vocabulary import Scenario\nopen({str(target)!r},'
        ' "w").close()\nscenario = Scenario()\n'
    )
    for folder in ("scenarios", "elsewhere"):
        (suite.path / folder).mkdir(exist_ok=True)
        (suite.path / folder / "evil.py").write_text(text, encoding="utf-8")
    result = suite.runpytest_inprocess(named, "--collect-only", "--scenario-server", "rehearsal")
    assert result.ret != 0
    assert not target.exists()
    result.stdout.fnmatch_lines(["*evil.py:3: *a scenario file may only import*"])


def test_a_folder_of_any_name_has_a_test_for_each_arm(suite: pytest.Pytester) -> None:
    """Files of a folder that is not on the command line are left alone."""
    for path in (ROOT / "scenarios").glob("*.py"):
        shutil.copyfile(path, suite.path / "scenarios" / path.name)
    (suite.path / "scenarios").rename(suite.path / "our bugs")
    result = suite.runpytest_inprocess(
        "our bugs", "--scenario-server", "rehearsal", "-k", "min-tokens and near-miss"
    )
    result.assert_outcomes(passed=1)
    latest = suite.path / "reports" / "min-tokens-stop-ids" / "latest" / "report.json"
    again = json.loads(latest.read_text(encoding="utf-8"))["reproduce"]
    assert again == "pytest 'our bugs/min_tokens_stop_ids.py::min-tokens-stop-ids[near-miss]'"
    arms = sum(len(scenario.arms) for scenario in all_scenarios())
    result = suite.runpytest_inprocess("our bugs", "--collect-only", "-q")
    result.stdout.fnmatch_lines([f"{arms} tests collected*"])
    result = suite.runpytest_inprocess("--collect-only", "-q")
    result.stdout.fnmatch_lines(["no tests collected*"])


def test_a_file_named_on_the_command_line_is_collected_once(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("scenarios/min_tokens_stop_ids.py", "--collect-only", "-q")
    result.stdout.fnmatch_lines(["3 tests collected*"])


SERVED = """
import os, signal
import psutil, pytest
from vllm_repro import VllmServer

COMMAND = "vllm serve Qwen/Qwen3-0.6B --max-model-len 2048"
OPTIONS = {"server": "rehearsal", "vllm": "0.28.0"}

def complete(server, **more):
    create = server.client().completions.create
    return create(model=server.model, prompt="x", max_tokens=3, extra_body=more)

def test_lives(vllm_server):
    first, second = vllm_server(COMMAND, **OPTIONS), vllm_server(COMMAND, **OPTIONS)
    assert complete(first).choices[0].text and complete(second).choices[0].text

def test_own_failure(vllm_server):
    vllm_server(COMMAND, **OPTIONS)
    assert 1 == 2

def test_skips(vllm_server):
    server = vllm_server(COMMAND, **OPTIONS)
    pytest.skip("of its own")

def test_dies(vllm_server):
    complete(vllm_server(COMMAND, **OPTIONS), min_tokens=1, stop_token_ids=[999999])

def test_swallows(vllm_server):
    with pytest.raises(Exception):
        complete(vllm_server(COMMAND, **OPTIONS), min_tokens=1, stop_token_ids=[999999])

@pytest.fixture(scope="module")
def shared():
    with VllmServer(COMMAND, **OPTIONS) as server:
        yield server

def test_kills(shared):
    (core,) = (pid for pid in shared.pids if psutil.Process(pid).name() == "VLLM::EngineCor")
    os.kill(core, signal.SIGKILL)
    pytest.fail("no answer")
"""


def test_a_test_fails_with_the_death_of_its_engine(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(suite.path))
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    suite.makepyfile(test_served=SERVED)
    before = psutil.Process().children(recursive=True)
    result = suite.runpytest_inprocess("test_served.py", "-p", "no:cacheprovider", "-rf")
    result.assert_outcomes(passed=1, failed=4, skipped=1)
    root = "vllm_repro.EngineDied: IndexError: index 999999*"
    result.stdout.fnmatch_lines(
        [
            "E       assert 1 == 2",
            "*>*return create(model=server.model, *",
            f"E       {root}",
            "E         vllm/v1/sample/logits_processor/builtin.py:apply",
            "E       REHEARSAL: *",
            "E       log: */vllm_server*/logs/server-1.log",
            "E       the test saw *Error: *",
            f"E   {root}",
            '*>*pytest.fail("no answer")',
            "E       vllm_repro.EngineDied: *EngineCore*",
            "E       the test saw Failed: no answer",
            "*5 of these ran on the rehearsal engine*",
            "FAILED test_served.py::test_dies - vllm_repro.EngineDied: IndexError*",
        ]
    )
    assert "httpcore" not in result.stdout.str(), "the client's frames are not the cause"
    left = set(psutil.Process().children(recursive=True)) - set(before)
    assert not any("rehearsal" in " ".join(child.cmdline()) for child in left)


@pytest.mark.usefixtures("short_waits")
def test_the_tests_of_the_docs_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", lambda _: None)
    assert len(TESTS) == 2
    for number, block in enumerate(TESTS):
        pytester.makepyfile(**{f"test_{number}": block})
    pytester.runpytest_inprocess().assert_outcomes(passed=2)


def test_pytest_offers_each_kind_that_the_harness_starts() -> None:
    """The plugin cannot import the registry: it is loaded in every run of pytest."""
    assert list(_SERVERS) == ["auto", *kinds(lambda facts: facts.started)]


def test_the_plugin_costs_other_suites_nothing() -> None:
    code = "import sys, vllm_repro_suite.plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = [name for name in done.stdout.split() if name.startswith("vllm_repro")]
    assert ours == ["vllm_repro_suite", "vllm_repro_suite.plugin"]
