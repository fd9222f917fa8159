"""Steps of the GitHub workflow, the action, and jobs of other schedulers, on the rehearsal."""

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

import jsonschema
import pytest
import yaml

from tests.commands import QUICK, journals, until, write_script
from tests.golden_files import missing
from vllm_repro.cli import parser
from vllm_repro.servers.kinds import kinds
from vllm_repro_nights.nightly_verb import CPU

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "harness" / "vllm_repro_nights" / "docs"
WORKFLOWS = ROOT / ".github" / "workflows"
SCENARIO = ROOT / "scenarios" / "min_tokens_stop_ids.py"
KUBERNETES = ROOT / "fixtures" / "kubernetes"
SBATCH = ROOT / "fixtures" / "slurm" / "nightly.sbatch"


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
    if "always()" not in condition and job.failed:
        return False
    values = [
        [side and given(f"${{{{ {side} }}}}", {}, job) for side in term.partition(" != ")[::2]]
        for term in condition.split(" && ")
        if term not in ("", "always()")
    ]
    return all(value != other for value, other in values)


def environment(folder: Path) -> None:
    """Make a folder like a virtual environment, whose command is that of this checkout."""
    tools = folder / "bin"
    write_script(tools / "python", f'exec {sys.executable} "$@"')
    write_script(tools / "vllm-repro", f'exec {sys.executable} {tools / "quick.py"} "$@"')
    (tools / "quick.py").write_text(QUICK, encoding="utf-8")


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
        # As GitHub runs a step; one that names its shell fails with any part of a pipe.
        options = ["-e", *(["-o", "pipefail"] if "shell" in step else [])]
        words = ["bash", "--noprofile", *options, "-c", given(step["run"], inputs, job)]
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


def kept(checkout: Path, words: str, index: str = "") -> dict[str, str]:
    """Return the outputs of `.github/kept` in a checkout, with the cache beside it."""
    step = {"name": "kept", "run": f".github/kept {words}", "env": {}}
    return run(checkout, {}, [step], JOB_INDEX=index).outputs


def test_a_new_disk_restores_what_a_disk_of_its_own_keeps(checkout: Path) -> None:
    new, keys = kept(checkout, "before"), []
    cache = Path(new["cache"])
    assert set(new) == {"cache", "releases", "history"}
    assert kept(checkout, "before", index="1")["history"] != new["history"]
    for name in ("0.32.0/bin", "0.32.0/complete.json", "0.33.0/bin", "0.33.0/complete.json"):
        (cache / "releases" / name).mkdir(parents=True)
        keys.append(kept(checkout, f"after {new['releases']}").get("key", ""))
    assert (keys[0], keys[1], len(set(keys))) == ("", keys[2], 3)
    assert keys[3].startswith(f"{new['releases']}-")
    (checkout / "reports" / "nightly").mkdir(parents=True)
    assert kept(checkout, "before") == {"cache": f"{cache}"}


@pytest.mark.parametrize("steps", KEEPERS, ids=("gpu", "cpu", "action"))
def test_the_cache_has_no_log_and_is_saved_after_a_red_night(steps: list[dict[str, Any]]) -> None:
    cached = {step["name"]: step for step in steps if "actions/cache/" in step.get("uses", "")}
    assert [step["with"]["path"].split("\n")[:-1] for step in cached.values()] == [
        releases := [f"${{{{ steps.kept.outputs.cache }}}}/{name}" for name in ("releases", "uv")],
        history := ["reports/*/*/report.json", "reports/*/*/journal.jsonl"],
        history,
        releases,
    ]
    saved = [
        [name for name, step in cached.items() if runs(step["if"], Job({"night": 1}, outputs=made))]
        for made in ({}, {"history": "h", "key": "a"}, {"key": "a", "cache-matched-key": "a"})
    ]
    assert saved == [[], ["Keep the runs", "Keep the releases"], []]


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
    passed_on = set(re.findall(r"inputs\.([\w-]+)", f"{whole['jobs']}"))
    assert passed_on == set(whole[True]["workflow_dispatch"]["inputs"])
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
    assert action["inputs"] == {
        name: {key: called[name][key] for key in ("description", "default")}
        for name in action["inputs"]
    }
    offered = loaded()[True]["workflow_dispatch"]["inputs"]["server"]["options"]
    assert set(re.split(", | or ", called["server"]["description"])[1:]) == {*offered}
    assert {*offered} == {"auto", CPU, *kinds(lambda facts: facts.started)}
    assert workflow["permissions"] == {"contents": "read"}


def test_the_examples_name_inputs_that_exist() -> None:
    page = (DOCS / "nightly.md").read_text(encoding="utf-8")
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
    page = (DOCS / "nightly.md").read_text(encoding="utf-8")
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


def test_the_night_of_kubernetes_has_a_gpu_and_a_volume_and_no_privilege() -> None:
    """The schema has the fields; the command is a night that ends before the job does."""
    schema, manifest = ROOT / "tests/data/kubernetes-night.schema.json", KUBERNETES / "nightly.yaml"
    documents = list(yaml.safe_load_all(manifest.read_text(encoding="utf-8")))
    jsonschema.validate(documents, loaded(schema))
    job = documents[1]["spec"]["jobTemplate"]["spec"]
    words = job["template"]["spec"]["containers"][0]["args"]
    assert parser("nightly").parse_args(words).max_time < job["activeDeadlineSeconds"]


def test_the_commands_that_diagnose_a_pod_parse() -> None:
    pages = [KUBERNETES / "diagnose.yaml", DOCS / "nightly.md"]
    text = re.sub(r"\\\n# +", "", "".join(path.read_text(encoding="utf-8") for path in pages))
    lines = re.findall(r"kubectl \S.*? (?:\| vllm-repro|--) (diagnose .*)", text)
    files = [parser("diagnose").parse_args(line.split()).file for line in lines]
    assert sorted(files) == [["-"], ["-"], ["-"], ["/proc/1/root/tmp/vllm.log"]]
    assert "privileged" not in loaded(pages[0])["securityContext"]


def test_slurm_interrupts_a_night_in_order(checkout: Path) -> None:
    """Its signal reaches the batch shell alone, which is the night by then."""
    directives = ("#SBATCH --gres=gpu:1\n", "#SBATCH --signal=B:TERM@300\n")
    assert missing(SBATCH.read_text(encoding="utf-8"), *directives) == []
    env = {
        "PATH": f"{checkout / '.venv' / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(checkout),
        "SCRATCH": str(checkout.parent),
        "VLLM_REHEARSAL_FAULT": "stuck-boot",
    }
    words = ["--server", "rehearsal", "--least-disk", "0.001", "min-tokens-stop-ids"]
    with subprocess.Popen(["bash", SBATCH, *words], env=os.environ | env) as night:
        until(lambda: "server-started" in "".join(journals(checkout / "reports")))
        night.terminate()
        assert night.wait(timeout=120) == 130
    summary = checkout / "reports" / "nightly" / "latest" / "summary.md"
    assert "amber: interrupted by SIGTERM" in summary.read_text(encoding="utf-8")
