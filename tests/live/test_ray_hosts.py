"""One engine over two hosts of a Ray cluster: deaths on either side, a cut network, a lost host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import two_ranks
from tests.live.ray_hosts import Hosts
from tests.live.two_ranks import Run
from tests.skipping import cannot_run
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source

pytestmark = [pytest.mark.live, pytest.mark.by_hand, pytest.mark.alone]

RELEASE = "0.32.0"
LONG = "reported chat"
DSV4 = Path(__file__).parents[2] / "scenarios" / "dsv4_tp2.py"
DEATH = "_forward_prefill' requires 21.80 MB, current size is 21.62 MB"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0:
        cannot_run("network namespaces need root")
    # before the runs, so that their time limits do not include the install
    provision(Source(release=RELEASE))
    hosts = Hosts(nodes=3)
    yield hosts
    hosts.end()


@pytest.fixture
def run(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Return a run of dsv4-tp2 on an unchanged release.

    Its answer to the reported chat is long enough to be interrupted.
    """
    for name, value in hosts.environment().items():
        monkeypatch.setenv(name, value)
    text = DSV4.read_text(encoding="utf-8")
    longer = text.replace("max_tokens=sized(4000, lab=4)", "max_tokens=sized(4000, lab=3500)")
    assert longer != text
    scenario = tmp_path / "dsv4_tp2.py"
    scenario.write_text(longer, encoding="utf-8")
    options = (
        "--server",
        "lab",
        "--arm",
        "reported",
        "--answer-stall",
        "30",
        "--on",
        hosts.address,
    )
    out = tmp_path / "reports"
    run = two_ranks.begin(out, *options, within=hosts.within(1), scenario=scenario, request=LONG)
    yield run
    run.end()


def test_dsv4_dies_on_both_hosts_with_the_reported_numbers(hosts: Hosts, tmp_path: Path) -> None:
    words = (
        "run",
        "dsv4-tp2",
        "--server",
        "lab",
        "--arm",
        "branch",
        "--on",
        hosts.address,
        "--out",
        str(tmp_path),
    )
    program = [*hosts.within(1), sys.executable, "-m", "vllm_repro"]
    done = subprocess.run(
        [*program, *words], check=False, capture_output=True, text=True, env=hosts.environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "dsv4-tp2").glob("2*")
    for log in ("branch-1.log", "branch-1.rank1.log"):
        assert DEATH in (folder / "logs" / log).read_text(encoding="utf-8")
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert "Began on ranks 0 and 1" in report
    assert hosts.ip(2) not in report + (folder / "report.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_a_death_that_names_its_rank(run: Run, rank: int) -> None:
    run.worker(rank).kill()
    trial = run.report()["arms"][0]["trials"][0]
    assert trial["outcome"] == "other-crash"
    assert trial["death"]["ranks"] == [rank]


def host_of(run: Run, rank: int) -> int:
    facts = [run.facts(), *run.facts()["ranks"]][rank]
    return int(facts["env"]["VLLM_HOST_IP"].rpartition(".")[2])


def test_a_cut_network_is_a_hang(run: Run, hosts: Hosts) -> None:
    first, second = host_of(run, 0), host_of(run, 1)
    hosts.cut(first, second)
    hosts.cut(second, first)
    trial = run.report()["arms"][0]["trials"][0]
    assert trial["outcome"] == "hang", trial["why"]


def test_a_lost_host_is_no_crash_and_the_trial_runs_again(run: Run, hosts: Hosts) -> None:
    hosts.lose(lost := host_of(run, 1))
    while run.sent(LONG) < 2:
        assert run.process.poll() is None, "the run ended before its second boot"
        time.sleep(0.5)
    (ended,) = (entry for entry in run.journal() if entry["event"] == "trial-ended")
    assert ended["outcome"] == "infra", ended["why"]
    assert f"rank 1: its node {hosts.ip(lost)} was lost" in ended["why"]
    assert host_of(run, 1) == lost  # of the first boot
    ranks = [
        entry["facts"]["ranks"][0] for entry in run.journal() if entry["event"] == "server-started"
    ]
    assert ranks[1]["env"]["VLLM_HOST_IP"] != hosts.ip(lost)
