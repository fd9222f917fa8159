"""Steps of the GitHub workflow, the action and the Buildkite pipeline, on the rehearsal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands import QUICK
from tests.golden_files import missing

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
SCENARIO = ROOT / "scenarios" / "min_tokens_stop_ids.py"


@dataclass
class Job:
    """Result of a job. status: exit status of each step that ran, by its name or action."""

    status: dict[str, int] = field(default_factory=dict)
    shown: str = ""
    summary: str = ""
    outputs: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(self.status.values())


def loaded(path: Path = WORKFLOWS / "nightly-gpu.yml") -> dict[Any, Any]:
    # YAML 1.1 reads the key `on` as true.
    found: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def given(text: str, inputs: Mapping[str, str], job: Job) -> str:
    """Return a value with its expressions replaced: inputs and outputs of the night."""

    def value(expression: re.Match[str]) -> str:
        source, _, name = expression[1].rpartition(".")
        values = {"inputs": inputs, "steps.night.outputs": job.outputs}[source]
        return values.get(name, "") or expression[2] or ""

    return re.sub(r"\$\{\{ *([\w.-]+)(?: \|\| '(\w+)')? *\}\}", value, text)


def runs(condition: str, job: Job) -> bool:
    """Evaluate a condition: none, `always()`, or `always()` with an output."""
    if not condition:
        return not job.failed
    always, _, output = condition.partition(" && ")
    assert always == "always()", condition
    return not output or bool(given(f"${{{{ {output} }}}}", {}, job))


def environment(folder: Path) -> None:
    """Make a folder like a virtual environment, whose command is that of this checkout."""
    tools = folder / "bin"
    tools.mkdir(parents=True)
    (tools / "quick.py").write_text(QUICK, encoding="utf-8")
    for name, words in (
        ("python", sys.executable),
        ("vllm-repro", f"{sys.executable} {tools / 'quick.py'}"),
    ):
        (tools / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        (tools / name).chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a working folder for `make install`, whose environment runs this checkout."""
    folder = tmp_path / "checkout"
    environment(folder / ".venv")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, folder / name)
        os.utime(folder / name, (1, 1))  # so that make takes the environment for newer
    (folder / ".venv" / "development").touch()  # the stamp of the installed development tools
    return folder


def run(
    checkout: Path, inputs: Mapping[str, str], steps: Sequence[dict[str, Any]], **extra: str
) -> Job:
    job = Job()
    files = {
        name: checkout.parent / name.lower() for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")
    }
    env = {
        **os.environ,
        **{name: str(path) for name, path in files.items()},
        "GITHUB_ACTIONS": "true",
        "CI": "true",
        "VLLM_REPRO_CACHE": str(checkout.parent / "cache"),  # `doctor` measures its size
        **extra,
    }
    for path in files.values():
        path.write_text("", encoding="utf-8")
    for step in steps:
        name = step.get("name") or step["uses"]
        if not runs(step.get("if", ""), job):
            continue
        if "run" not in step:
            job.status[name] = 0
            continue
        # As GitHub runs a step that names no shell.
        words = ["bash", "-e", "-c", given(step["run"], inputs, job)]
        own = {
            name: given(value, inputs, job)
            for name, value in step.get(
                "env", {} if "VLLM_REPRO_NIGHTLY_SCENARIOS" in extra else NIGHT["env"]
            ).items()
        }
        done = subprocess.run(
            words,
            cwd=checkout,
            env=env | own,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        job.status[name] = done.returncode
        job.shown += done.stdout + done.stderr
        job.outputs |= dict(
            line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines()
        )
    job.summary = files["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8")
    return job


NIGHT = loaded()["jobs"]["nightly"]
ON_A_CPU = loaded(WORKFLOWS / "nightly-cpu.yml")
STEPS = NIGHT["steps"]


def names(steps: Sequence[dict[str, Any]]) -> list[str]:
    return [step.get("name") or step["uses"] for step in steps]


def from_the_night_on(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return steps[[step.get("id") for step in steps].index("night") :]


def altered(folder: Path, before: str, after: str) -> str:
    """Write an altered scenario and return its path relative to `folder`."""
    text = SCENARIO.read_text(encoding="utf-8")
    assert text.count(before) == 1
    (folder / "altered").mkdir()
    (folder / "altered" / SCENARIO.name).write_text(text.replace(before, after), encoding="utf-8")
    return f"altered/{SCENARIO.name}"


(BAD,) = re.findall(r"status=Status\(.*\)", SCENARIO.read_text(encoding="utf-8"))
GOOD = 'status=Status(bad="==0.28.0", good="<0.28.0")'


def test_a_green_night(checkout: Path) -> None:
    job = run(checkout, {"server": "rehearsal", "scenarios": "min-tokens-stop-ids"}, STEPS)
    assert job.status == dict.fromkeys(names(STEPS), 0), job.shown
    assert job.outputs["light"] == "green"
    assert missing(job.summary, "# ✅ Nightly: green", "REHEARSAL") == []
    assert "::" not in job.shown
    kept = checkout / job.outputs["folder"]
    assert {path.name for path in kept.iterdir()} == {
        "summary.md",
        "junit.xml",
        "nights.html",
        "min-tokens-stop-ids",
    }
    nights = (kept / "nights.html").read_text(encoding="utf-8")
    assert missing(nights, 'href="min-tokens-stop-ids/report.html"', "REHEARSAL") == []
    assert (kept / "min-tokens-stop-ids" / "report.md").is_file()
    # those are not redacted
    assert not [path for path in kept.rglob("*") if path.suffix in (".log", ".jsonl")]
    root = ET.parse(kept / "junit.xml").getroot()
    assert (root.get("failures"), root.get("errors")) == ("0", "0")


def test_a_red_night_still_cleans_up_and_keeps_its_reports(checkout: Path) -> None:
    """A release whose engine dies is declared good."""
    inputs = {
        "server": "rehearsal",
        "scenarios": altered(checkout, BAD, GOOD),
        "vllm": "0.27.1",
        "fail-on": "red",
    }
    steps = from_the_night_on(STEPS)
    job = run(checkout, inputs, steps)
    assert job.status == {**dict.fromkeys(names(steps), 0), "Run the night": 1}, job.shown
    assert job.outputs["light"] == "red"
    assert "::error title=vllm-repro nightly::red: 1 surprise (min-tokens-stop-ids)" in job.shown
    root = ET.parse(checkout / job.outputs["folder"] / "junit.xml").getroot()
    assert int(root.get("failures", "0")) >= 1


@pytest.mark.parametrize(("fail_on", "status"), [("", 2), ("red", 0)])
def test_a_runner_that_lost_its_gpu_fails(checkout: Path, fail_on: str, status: int) -> None:
    empty = checkout.parent / "empty"
    empty.mkdir()
    for tool in ("bash", "sh"):
        (empty / tool).symlink_to(shutil.which(tool) or tool)
    steps = from_the_night_on(STEPS)
    job = run(checkout, {"server": "process", "fail-on": fail_on}, steps, PATH=str(empty))
    assert job.status == {**dict.fromkeys(names(steps), 0), "Run the night": status}, job.shown
    assert job.outputs["light"] == "amber"
    assert "::warning title=vllm-repro nightly::amber: host trouble: no NVIDIA GPU" in job.shown


def test_a_night_on_a_cpu_in_which_nothing_ran_fails(checkout: Path) -> None:
    scenario = altered(checkout, "Needs(memory_gb=6)", "Needs(gpus=9)")
    steps = from_the_night_on(ON_A_CPU["jobs"]["nightly"]["steps"])
    job = run(
        checkout,
        {},
        steps,
        VLLM_REPRO_NIGHTLY_SCENARIOS=scenario,
        VLLM_REPRO_NIGHTLY_FAIL_ON="trouble",
    )
    assert job.status == {**dict.fromkeys(names(steps), 0), "Run the night": 2}, job.shown
    assert "the scenario needs 9 GPUs" in job.summary


def test_a_night_on_a_cpu_keeps_only_what_is_redacted() -> None:
    job = ON_A_CPU["jobs"]["nightly"]
    (cached,) = (step["with"]["path"] for step in job["steps"] if "cache" in step.get("uses", ""))
    assert cached.split() == ["reports/*/*/report.json", "reports/*/*/journal.jsonl"]
    assert job["timeout-minutes"] > 60


@pytest.mark.parametrize("workflow", ["nightly-cpu.yml", "nightly-gpu.yml"])
def test_the_rules_of_a_workflow(workflow: str) -> None:
    whole = loaded(WORKFLOWS / workflow)
    assert whole["permissions"] == {"contents": "read"}
    assert whole["concurrency"] == {
        "group": workflow.removesuffix(".yml"),
        "cancel-in-progress": False,
    }
    assert set(whole[True]) == {"schedule", "workflow_dispatch"}
    env = whole["jobs"]["nightly"]["env"]
    assert env["VLLM_REPRO_NIGHTLY_FAIL_ON"] == "${{ inputs.fail-on || 'trouble' }}"
    if workflow == "nightly-gpu.yml":
        last = STEPS[-1]
        assert (last["if"], last["run"]) == ("always()", ".venv/bin/vllm-repro clean --yes")


@pytest.mark.parametrize(
    "installed", [True, pytest.param(False, marks=pytest.mark.live, id="installs")]
)
def test_the_action_runs_the_scenarios_of_another_repository(
    tmp_path: Path, installed: bool
) -> None:
    """A bug that is as declared, then one that is not.

    Without `installed` pip installs the package from the index, as on a runner.
    """
    caller, bugs = tmp_path / "caller", tmp_path / "caller" / "our bugs"
    bugs.mkdir(parents=True)
    text = SCENARIO.read_text(encoding="utf-8").replace("min-tokens-stop-ids", "our-bug")
    (bugs / "our_bug.py").write_text(text, encoding="utf-8")
    action = loaded(ROOT / "action.yml")
    inputs = {name: value["default"] for name, value in action["inputs"].items()}
    inputs |= {"folder": "our bugs", "scenarios": "our-bug", "server": "rehearsal"}
    runner = {"RUNNER_TEMP": str(tmp_path / "runner"), "GITHUB_ACTION_PATH": str(ROOT)}
    steps = action["runs"]["steps"]
    assert names(steps)[0] == "Install"
    assert all(step["shell"] == "bash" for step in steps if "run" in step)
    if installed:
        environment(tmp_path / "runner" / "vllm-repro")
        steps = steps[1:]
    job = run(caller, inputs, steps, **runner)
    assert job.status == dict.fromkeys(names(steps), 0), job.shown
    assert given(action["outputs"]["light"]["value"], {}, job) == "green"
    folder = caller / given(action["outputs"]["folder"]["value"], {}, job)
    assert {"summary.md", "junit.xml", "our-bug"} <= {path.name for path in folder.iterdir()}
    (bugs / "our_bug.py").write_text(text.replace(BAD, GOOD), encoding="utf-8")
    steps = steps if installed else steps[1:]
    after = run(caller, inputs | {"vllm": "0.27.1"}, steps, **runner)
    assert after.status == {**dict.fromkeys(names(steps), 0), "Run the scenarios": 1}, after.shown


def test_the_shared_workflow_gives_the_action_its_inputs() -> None:
    workflow, action = loaded(WORKFLOWS / "scenarios.yml"), loaded(ROOT / "action.yml")
    step = workflow["jobs"]["scenarios"]["steps"][-1]
    assert step["with"] == {name: f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}
    called = workflow[True]["workflow_call"]["inputs"]
    assert {name: called[name]["default"] for name in action["inputs"]} == {
        name: value["default"] for name, value in action["inputs"].items()
    }
    assert workflow["permissions"] == {"contents": "read"}


def test_the_examples_name_inputs_that_exist() -> None:
    page = (ROOT / "docs" / "nightly.md").read_text(encoding="utf-8")
    with_action, with_workflow = (
        yaml.safe_load(one)["jobs"]["crashes"]
        for one in re.findall(r"```yaml\n(jobs:.*?)```", page, re.DOTALL)
    )
    assert set(with_action["steps"][-1]["with"]) <= set(loaded(ROOT / "action.yml")["inputs"])
    called = loaded(WORKFLOWS / "scenarios.yml")[True]["workflow_call"]["inputs"]
    assert (
        {name for name, value in called.items() if value.get("required")}
        <= set(with_workflow["with"])
        <= set(called)
    )


def test_the_pipeline_of_buildkite_shows_amber(checkout: Path) -> None:
    page = (ROOT / "docs" / "nightly.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(steps:.*?)```", page, re.DOTALL)
    (step,) = yaml.safe_load(text)["steps"]
    assert step["soft_fail"] == [{"exit_status": 2}]
    assert (step["concurrency"], bool(step["concurrency_group"])) == (1, True)
    night = {"name": "all", "run": "\n".join(step["commands"])}
    assert ".venv/bin/vllm-repro nightly" in night["run"]
    night["run"] = night["run"].replace("repro nightly", "repro nightly --least-disk 1000000000")
    env = {
        "VLLM_REPRO_NIGHTLY_SERVER": "rehearsal",
        "VLLM_REPRO_NIGHTLY_SCENARIOS": "min-tokens-stop-ids",
    }
    assert run(checkout, {}, [night], **env).status == {"all": 2}
