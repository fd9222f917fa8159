"""The process of a run on a node: its leash, its errors, its environment."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.test_fleet import SCENARIO, job_in
from tests.commands import WITH_SHORT_WAITS, until
from vllm_repro.errors import Unsupported, UsageError
from vllm_repro.host.ports import free_port
from vllm_repro.journal.journal import read
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.multi_node import Meeting
from vllm_repro.servers.options import ServerOptions
from vllm_repro_cluster import item as items
from vllm_repro_cluster import item_process
from vllm_repro_cluster.item import ERROR, EXIT, RANK_LOG, RUNS, SITE, STARTED, Item, Rank

QUICK = f"""
import sys
from pathlib import Path
from vllm_repro_cluster import item_process
{WITH_SHORT_WAITS}
sys.exit(item_process.main(Path(sys.argv[1])))
"""


def started(root: Path, item: Item) -> subprocess.Popen[bytes]:
    """Start the process of an item, with its leash held."""
    from ray import cloudpickle  # here, because each worker would wait for it

    program = [sys.executable, "-P", "-c", QUICK, str(root)]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(cloudpickle.dumps(item))
    process.stdin.flush()
    return process


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder of an item, apart from the one of its job."""
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def item_of(tmp_path: Path, **more: Any) -> Item:
    fields: dict[str, Any] = {"resume": "", "diffs": (), "folder": str(tmp_path)}
    return Item(job=job_in(tmp_path), **fields | more)


def finished(process: subprocess.Popen[bytes], *, cut: bool = False) -> int:
    """Return the status of the process. Cut its leash first, or hold it to the end."""
    if not cut:
        process.wait(timeout=60)
    process.communicate(timeout=60)  # closes the leash
    return process.returncode


def test_a_run_lies_below_the_folder_of_the_item(tmp_path: Path) -> None:
    assert finished(started(tmp_path, item_of(tmp_path))) == 0
    (journal,) = (tmp_path / RUNS / SCENARIO).glob("2*/journal.jsonl")
    assert not read(journal).cut
    assert json.loads((tmp_path / SITE).read_text(encoding="utf-8"))["kind"] == "rehearsal"
    assert not (tmp_path / ERROR).exists()


def test_a_run_ends_and_leaves_nothing_when_its_leash_is_cut(tmp_path: Path, root: Path) -> None:
    item = item_of(tmp_path)
    process = started(root, replace(item, job=replace(item.job, trials=100)))
    logs = f"{RUNS}/{SCENARIO}/2*/logs/*.log"
    until(lambda: any(root.glob(logs)))
    assert any(root.glob(logs))
    assert finished(process, cut=True) == 0
    assert not root.exists()


def second_rank(tmp_path: Path, *, boots: bool = True) -> Item:
    scenario = find("dsv4-tp2")
    rank = Rank(rank=1, arm=scenario.arms[0], meeting=Meeting(port=free_port()))
    return replace(
        item_of(tmp_path),
        job=job_in(tmp_path, scenario=scenario),
        rank=rank if boots else Rank(rank=1),
    )


def test_a_rank_writes_facts_and_log_until_its_leash_is_cut(tmp_path: Path, root: Path) -> None:
    process = started(root, second_rank(tmp_path))
    log = root / RUNS / "dsv4-tp2" / RANK_LOG
    until(lambda: (root / STARTED).exists() and log.exists() and log.stat().st_size > 0)
    facts = json.loads((root / STARTED).read_text(encoding="utf-8"))
    assert facts["argv"][-3:] == ["--node-rank", "1", "--headless"]
    assert psutil.pid_exists(facts["pid"])
    assert finished(process, cut=True) == 130
    assert not psutil.pid_exists(facts["pid"])
    assert not root.exists()


def test_a_rank_whose_server_ends_leaves_how(tmp_path: Path) -> None:
    process = started(tmp_path, second_rank(tmp_path))
    until(lambda: (tmp_path / STARTED).exists())
    psutil.Process(json.loads((tmp_path / STARTED).read_text(encoding="utf-8"))["pid"]).kill()
    assert finished(process) == 0
    ended = json.loads((tmp_path / RUNS / "dsv4-tp2" / EXIT).read_text(encoding="utf-8"))
    assert (ended["code"], ended["detail"]) == (
        -9,
        "the server's process is gone, ended by signal 9",
    )


def test_a_rank_without_an_arm_only_prepares_the_node(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    item_process._run(second_rank(tmp_path, boots=False), root)
    assert not (root / STARTED).exists()
    assert (root / RUNS / "dsv4-tp2" / EXIT).exists()


def test_a_rank_whose_node_does_not_fit_is_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "vllm_repro.servers.rehearsal.RehearsalSite.why_not", lambda *_: "the card is too small"
    )
    item = second_rank(tmp_path)
    assert item.rank is not None
    with pytest.raises(Unsupported, match="the card is too small"):
        item_process._run_rank(item.job, item.rank, tmp_path)


def test_why_there_is_no_run_is_left_in_a_file(tmp_path: Path) -> None:
    assert finished(started(tmp_path, item_of(tmp_path, version="0.0.1"))) == 0
    error = json.loads((tmp_path / ERROR).read_text(encoding="utf-8"))
    assert error["type"] == "InfraError"
    assert "and the command is 0.0.1" in error["message"]


def test_a_resumed_run_needs_its_journal(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no journal at"):
        item_process._run(item_of(tmp_path, resume="20990101T000000Z-abcdef"), root)


def test_a_diff_travels_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(item_process, "run_one", lambda job, *_: ran.append(job.options.patch[0]))
    job = job_in(
        tmp_path, options=ServerOptions(server="rehearsal", patch=(Path("/elsewhere/fix.diff"),))
    )
    item_process._run(Item(job=job, resume="", diffs=(b"--- a\n",), folder="/nowhere"), tmp_path)
    assert (ran[0].name, ran[0].read_bytes()) == ("fix.diff", b"--- a\n")


def test_variables_of_ray_do_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm_repro_cluster.item.psutil.Process",
        lambda _: type(
            "Raylet",
            (),
            {
                "environ": lambda _: {
                    "PATH": "/bin",
                    "RAY_ADDRESS": "x",
                    "CUDA_VISIBLE_DEVICES": "0,1",
                }
            },
        )(),
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # Ray sets it for a task
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert items._environment() == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}
    assert items._environment(["RAY_AUTH_TOKEN"])["RAY_AUTH_TOKEN"] == "secret"


def test_a_folder_without_a_process_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("vllm-repro-item-held", "vllm-repro-item-left", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    with (tmp_path / "vllm-repro-item-held" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        items.remove_left_folders()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "vllm-repro-item-held"]
