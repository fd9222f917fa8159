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
from vllm_repro.servers.kinds import kinds
from vllm_repro_nights.nightly_verb import CPU

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
    """Return a value with its expressions replaced: inputs and outputs of steps."""

    def value(expression: re.Match[str]) -> str:
        source, _, name = expression[1].rpartition(".")
        values = inputs if source == "inputs" else job.outputs
        return values.get(name, "") or expression[2] or ""

    return re.sub(r"\$\{\{ *([\w.-]+)(?: \|\| '(\w+)')? *\}\}", value, text)


def runs(condition: str, job: Job) -> bool:
    """Evaluate a condition: `always()`, outputs that are not empty, and outputs that differ."""
    terms = condition.split(" && ") if condition else []
    if "always()" not in terms and job.failed:
        return False
    for term in filter("always()".__ne__, terms):
        sides = [given(f"${{{{ {side} }}}}", {}, job) for side in term.split(" != ")]
        if sides[0] == ("" if len(sides) == 1 else sides[1]):
            return False
    return True


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
    (folder / ".github").symlink_to(ROOT / ".github")
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
        "GITHUB_WORKFLOW": "of a test",
        "GITHUB_JOB": "nightly",
        "RUNNER_OS": "Linux",
        "RUNNER_ARCH": "X64",
        "RUNNER_ENVIRONMENT": "self-hosted",
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
KEEPERS = (
    STEPS,
    ON_A_CPU["jobs"]["nightly"]["steps"],
    loaded(ROOT / "action.yml")["runs"]["steps"],
)
# Steps of a runner without Python, and of a night that installed a release.
UNUSED = {"actions/setup-python@v5", "Keep the releases"}
# Steps of a runner whose disk is new.
OF_A_NEW_DISK = {
    "Fetch the releases",
    "Fetch the runs of earlier nights",
    "Keep the runs",
    "Look for new releases",
    "Keep the releases",
}


def names(steps: Sequence[dict[str, Any]]) -> list[str]:
    return [step.get("name") or step["uses"] for step in steps]


def ran(steps: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the status of steps that all pass, on a runner that keeps its disk."""
    return dict.fromkeys(set(names(steps)) - UNUSED - OF_A_NEW_DISK, 0)


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
    assert job.status == dict.fromkeys(set(names(STEPS)) - UNUSED, 0), job.shown
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
    assert job.status == {**ran(steps), "Run the night": 1}, job.shown
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
    assert job.status == {**ran(steps), "Run the night": status}, job.shown
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
    assert job.status == {**ran(steps), "Run the night": 2}, job.shown
    assert "the scenario needs 9 GPUs" in job.summary


def kept(folder: Path, *words: str, index: str = "") -> dict[str, str]:
    """Return the outputs of `.github/kept` with a cache and reports in the folder."""
    step = {"name": "kept", "run": " ".join((f"{ROOT}/.github/kept", *words)), "env": {}}
    (folder / "checkout").mkdir(parents=True, exist_ok=True)
    return run(folder / "checkout", {}, [step], JOB_INDEX=index).outputs


def test_a_new_disk_restores_what_a_disk_of_its_own_keeps(tmp_path: Path) -> None:
    release = tmp_path / "cache" / "releases" / "0.32.0"
    new = kept(tmp_path, "before")
    assert (set(new), new["cache"]) == (
        {"cache", "releases", "history"},
        str(release.parents[1]),
    )
    assert kept(tmp_path, "before", index="1")["history"] != new["history"]
    assert kept(tmp_path, "after", new["releases"]) == {}
    (tmp_path / "checkout" / "reports" / "nightly").mkdir(parents=True)
    release.mkdir(parents=True)  # not complete
    assert kept(tmp_path, "before") == {"cache": new["cache"]}
    keys = [kept(tmp_path, "after", new["releases"]).get("key", "")]
    for name in ("0.32.0", "0.33.0"):
        (release.parent / name).mkdir(exist_ok=True)
        (release.parent / name / "complete.json").touch()
        keys += [kept(tmp_path, "after", new["releases"])["key"] for _ in range(2)]
    assert (keys[0], keys[1], len(set(keys))) == ("", keys[2], 3)
    assert all(key.startswith(f"{new['releases']}-") for key in keys[1:])


@pytest.mark.parametrize("steps", KEEPERS, ids=("gpu", "cpu", "action"))
def test_the_cache_has_no_log_and_is_saved_after_a_red_night(steps: list[dict[str, Any]]) -> None:
    cached = {step["name"]: step for step in steps if "actions/cache/" in step.get("uses", "")}
    releases = "${{ steps.kept.outputs.cache }}/releases\n${{ steps.kept.outputs.cache }}/uv\n"
    runs_without_logs = "reports/*/*/report.json\nreports/*/*/journal.jsonl\n"
    assert {name: step["with"]["path"] for name, step in cached.items()} == {
        "Fetch the releases": releases,
        "Fetch the runs of earlier nights": runs_without_logs,
        "Keep the runs": runs_without_logs,
        "Keep the releases": releases,
    }
    keep = cached["Keep the releases"]["if"]
    red = {"Run the night": 1}
    for key, matched, saved in (("a", "", True), ("a", "b", True), ("a", "a", False)):
        outputs = {"key": key, "cache-matched-key": matched}
        assert runs(keep, Job(status=red, outputs=outputs)) is saved
    assert runs(cached["Keep the runs"]["if"], Job(status=red, outputs={"history": "h"}))


def test_the_servers_that_the_inputs_name_are_those_of_the_command() -> None:
    servers = ["auto", CPU, *kinds(lambda facts: facts.started)]
    assert sorted(loaded()[True]["workflow_dispatch"]["inputs"]["server"]["options"]) == sorted(
        servers
    )
    words = loaded(ROOT / "action.yml")["inputs"]["server"]["description"]
    assert sorted(re.split(", | or ", words)[1:]) == sorted(servers)


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
        orphans = STEPS[names(STEPS).index("Remove orphans")]
        assert (orphans["if"], orphans["run"]) == ("always()", ".venv/bin/vllm-repro clean --yes")


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
    assert names(steps)[2] == "Install"
    assert all(step["shell"] == "bash" for step in steps if "run" in step)
    if installed:
        environment(tmp_path / "runner" / "vllm-repro")
        steps = steps[:2] + steps[3:]
    job = run(caller, inputs, steps, **runner)
    assert job.status == dict.fromkeys(set(names(steps)) - UNUSED, 0), job.shown
    assert given(action["outputs"]["light"]["value"], {}, job) == "green"
    folder = caller / given(action["outputs"]["folder"]["value"], {}, job)
    assert {"summary.md", "junit.xml", "our-bug"} <= {path.name for path in folder.iterdir()}
    (bugs / "our_bug.py").write_text(text.replace(BAD, GOOD), encoding="utf-8")
    steps = steps if installed else steps[:2] + steps[3:]
    inputs |= {"vllm": "0.27.1", "arm": "reported", "trials": "2"}
    after = run(caller, inputs, steps, **runner)
    shown = {"Run the scenarios": 1, "Fetch the releases": 0, "Look for new releases": 0}
    assert after.status == {**ran(steps), **shown}, after.shown
    assert "reported 2:" in after.shown


def test_the_shared_workflow_gives_the_action_its_inputs() -> None:
    workflow, action = loaded(WORKFLOWS / "scenarios.yml"), loaded(ROOT / "action.yml")
    step = workflow["jobs"]["scenarios"]["steps"][-1]
    assert step["with"] == {name: f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}
    called = workflow[True]["workflow_call"]["inputs"]
    for name, value in action["inputs"].items():
        assert called[name]["default"] == value["default"]
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
