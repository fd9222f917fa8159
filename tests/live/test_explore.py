"""Search on the server of a scenario, and its pytest files, on real releases."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import uv

from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.overlay import make_overlay
from vllm_repro.releases.provision import Release, provision
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.patch import read_diff
from vllm_repro_explore.causes import case_of, play_change
from vllm_repro_explore.driver import Driver, driver_model
from vllm_repro_explore.scenario_setup import case_from, draw_for, setup_from
from vllm_repro_explore.scheduler_test import finding_test, scenario_test
from vllm_repro_explore.vendor import vendor

pytestmark = [pytest.mark.live, pytest.mark.depends("search")]


def test_workloads_of_causes_crash_as_often_as_known(tmp_path: Path) -> None:
    """Play the first 20 workloads; of the first 100, 40 die."""
    scenario = find("sco-hybrid")
    assert scenario.causes is not None
    cause = next(one for one in scenario.causes.changes if one.release == "0.20.2")
    setup = setup_from(scenario, scenario.arms[0])
    cases = [case_of(scenario.causes, setup, seed) for seed in range(1, 21)]
    with Driver(
        provision(Source(release="0.20.2")), driver_model(), tmp_path / "driver.log"
    ) as driver:
        row = play_change(cause, cases, driver.play)
    assert (row.died, row.listed) == (10, 11)
    assert all(site.startswith("AssertionError in") for site in row.sites)


@pytest.mark.parametrize(("name", "function"), [("fix", None), ("hide", "append_n")])
def test_a_fix_is_told_from_a_patch_that_hides_the_crash(
    tmp_path: Path, name: str, function: str | None
) -> None:
    """Play seed 31 of the server of sco-hybrid, which dies in popleft_n as released."""
    scenario = find("sco-hybrid")
    case = draw_for(setup_from(scenario, scenario.arms[0]), 31)
    diff = Path(__file__).parents[2] / "fixtures" / "patches" / f"sco-hybrid-{name}.diff"
    released = provision(Source(release="0.21.0"))
    patched = replace(
        released,
        packages=make_overlay(cache_root(), released.packages, read_diff(diff), print).folder,
    )
    found = []
    for release in (released, patched):
        with Driver(release, driver_model(), tmp_path / "driver.log") as driver:
            worst = driver.play(case).worst
            found.append(worst.frames[-1] if worst else None)
    assert found == ["popleft_n", function]


ENDS = {"death": "dies", "stuck": "hangs", "restless": "spins"}


@pytest.mark.parametrize(
    "name",
    [
        "offloading-readmitted",
        "offloading-two-groups",
        "offloading-window-twice",
        "sco-hybrid",
        "sco-lazy-never-rests",
    ],
)
def test_the_workload_of_each_arm_ends_as_on_a_server(name: str, tmp_path: Path) -> None:
    scenario = find(name)
    release, log = provision(Source(release=scenario.try_with)), tmp_path / "driver.log"
    with Driver(release, driver_model(), log) as released:
        for arm in scenario.arms:
            if arm.patches:
                packages = make_overlay(cache_root(), release.packages, arm.patches, print).folder
                with Driver(replace(release, packages=packages), driver_model(), log) as patched:
                    worst = patched.play(case_from(scenario, arm)).worst
            else:
                worst = released.play(case_from(scenario, arm)).worst
            ends = ENDS.get(worst.kind.value, "lives") if worst else "lives"
            assert ends == arm.expected.value.replace("untriggered", "lives"), arm.name


@pytest.fixture(scope="module")
def pytest_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install pytest into a folder of its own, for interpreters that have none."""
    folder = tmp_path_factory.mktemp("pytest")
    python = provision(Source(release="0.32.0")).python
    command = [
        uv.find_uv_bin(),
        "pip",
        "install",
        "-q",
        "--native-tls",
        "--python",
        python,
        "--target",
        folder,
        "pytest",
    ]
    subprocess.run(list(map(str, command)), check=True)
    return folder


def run_pytest(
    release: Release, tests: Path, pytest_folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run tests with the release and pytest alone."""
    return subprocess.run(
        [str(release.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=tests.parent,
        env={
            "PATH": os.environ["PATH"],
            # vLLM keeps there what it learns of a model by importing itself again
            "HOME": str(pytest_folder),
            "PYTHONPATH": f"{release.packages}:{pytest_folder}",
            # other sessions of pytest remove the oldest folders of a root that they share
            "PYTEST_DEBUG_TEMPROOT": f"{tests.parent}",
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def failed(release: Release, text: str, pytest_folder: Path, folder: Path) -> str:
    """Run a test file with the release alone; return the output of a failed test, else empty."""
    (folder / "test_it.py").write_text(text, encoding="utf-8")
    done = run_pytest(release, folder / "test_it.py", pytest_folder)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert ("1 failed" if done.returncode else "1 passed") in done.stdout
    return done.stdout if done.returncode else ""


STUCK = "400 steps without progress"
WRONG = "which does not hold its tokens"


@pytest.mark.parametrize(
    ("name", "release", "shown", "mended"),
    [
        ("sco-lazy-starves", "0.32.0", STUCK, "patched"),
        ("sco-lazy-never-rests", "0.32.0", STUCK, "patched"),
        ("sco-window-loads-wait", "0.32.0", STUCK, "patched"),
        ("priority-uncomputed-blocks", "0.32.0", WRONG, "patched"),
        ("session-preempted-at-turn-end", "0.32.0", "some are left: 0.2 WAITING", "patched"),
        ("session-drafts-outlive-turn", "0.32.0", "assert num_new_tokens > 0", "patched"),
        (
            "async-streaming-stop",
            "0.29.0",
            "assert request.num_output_placeholders >= 0",
            "backport",
        ),
        ("kv-abort-reported-twice", "0.32.0", "assert req_id in self.requests", "counted"),
        ("kv-load-rejected", "0.32.0", f"{STUCK}; requests left: 0.0 RUNNING", "patched"),
        ("kv-load-rejected-cached", "0.32.0", WRONG, "patched"),
        (
            "multi-connector-second-report",
            "0.32.0",
            "assert RequestStatus.is_finished(req.status)",
            "guard",
        ),
        ("nixl-failed-fetch-reserves", "0.32.0", f"{STUCK}; requests left: 1.0", "patched"),
        ("nixl-failed-fetch-waits", "0.32.0", f"{STUCK}; requests left: 0.0 WAITING", "patched"),
        ("nixl-fetch-loses-token", "0.32.0", WRONG, "patched"),
        ("nixl-mamba-preempted-for-ever", "0.32.0", STUCK, "patched"),
        ("nixl-mamba-prompt-twice", "0.28.0", "assert num_new_tokens > 0", "truncated-first"),
        ("offloading-reset-running", "0.32.0", "assert self._jobs[any_jid].is_store", "0.33.0"),
        (
            "offloading-waiting-leaves",
            "0.26.0",
            "assert len(offload_keys) == len(offload_block_ids)",
            "0.28.0",
        ),
    ],
)
def test_a_finding_fails_alone_and_its_patch_mends_it(
    name: str, release: str, shown: str, mended: str, pytest_folder: Path, tmp_path: Path
) -> None:
    """mended: a release without the bug, or an arm with a patch."""
    scenario, released = find(name), provision(Source(release=release))
    text = scenario_test(scenario)
    assert shown in failed(released, text, pytest_folder, tmp_path)
    if mended[0].isdigit():
        without = provision(Source(release=mended))
    else:
        patches = next(arm.patches for arm in scenario.arms if arm.name == mended)
        overlay = make_overlay(cache_root(), released.packages, patches, print)
        without = replace(released, packages=overlay.folder)
    assert failed(without, text, pytest_folder, tmp_path) == ""


@pytest.mark.parametrize(("release", "exception"), [("0.21.0", "AssertionError"), ("0.24.0", "")])
def test_a_crash_of_the_search_fails_in_the_same_releases(
    release: str, exception: str, pytest_folder: Path, tmp_path: Path
) -> None:
    scenario = find("sco-hybrid")
    case = draw_for(setup_from(scenario, scenario.arms[0]), 31)
    found = {
        "kind": "death",
        "site": "popleft_n",
        "detail": "",
        "known": None,
        "case": case.as_json(),
    }
    shown = failed(
        provision(Source(release=release)), finding_test(found, release), pytest_folder, tmp_path
    )
    assert ("assert curr_block is not None" in shown) == bool(exception)


def test_the_vendored_search_finds_and_repeats_a_known_bug(
    pytest_folder: Path, tmp_path: Path
) -> None:
    """Play 5 seeds, one of which shows #49250; then list it, and play its smallest case."""
    vendor(tmp_path / "search")
    release, seeds = provision(Source(release="0.33.0")), "242-246"
    done = run_pytest(release, tmp_path / "search", pytest_folder, SEARCH_SEEDS=seeds)
    assert 'known: "vllm-project/vllm#49250"' in done.stdout, done.stdout
    case = done.stdout.partition("again: env SEARCH_CASE=")[2].split()[0]
    (tmp_path / "search" / "known.json").write_text(f"[{Path(case).read_text(encoding='utf-8')}]")
    done = run_pytest(
        release, tmp_path / "search", pytest_folder, SEARCH_SEEDS=seeds, SEARCH_CASE=case
    )
    assert "1 failed, 1 passed" in done.stdout
    assert "schedules-unknown-token (after a rejected load)" in done.stdout
