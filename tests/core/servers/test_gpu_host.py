"""Scripts for a GPU host without network: lists, pieces, and what runs on the host."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report_examples import DIED
from vllm_repro.cli import parser
from vllm_repro.releases.known import RELEASES
from vllm_repro.scenario.catalogue import find, find_arms

SCRIPTS = Path(__file__).parents[3] / "fixtures" / "gpu_host"
RUNS = (SCRIPTS / "runs.txt").read_text(encoding="utf-8").splitlines()
PINS = (SCRIPTS / "requirements.txt").read_text(encoding="utf-8").splitlines()
STUBS = {
    "harness/packages/vllm_repro/__main__.py": (
        "import subprocess, sys\nsys.exit(subprocess.call(['vllm', *sys.argv[1:]]))"
    ),
    "shared/packages/shared.py": "NAME = 'vllm of the pieces:'",
    "vllm-0.1.0/packages/vllm/entrypoints/cli/main.py": (
        "import shared, sys\nsys.exit(' '.join([shared.NAME, *sys.argv[1:]]))"
    ),
}


@pytest.mark.parametrize("line", RUNS)
def test_each_line_names_a_release_a_scenario_and_its_arms(line: str) -> None:
    version, scenario, *options = line.split()
    arguments = parser("run").parse_args(["run", scenario, *options])
    assert version in RELEASES
    assert find_arms(find(scenario), arguments.arm)


def test_each_pin_is_exact() -> None:
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", pin) for pin in PINS)
    assert sorted(set(PINS)) == PINS


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stubs in pieces, with the scripts, a line that can run and one whose release is not there."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    for name, text in STUBS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    folder = tmp_path / "pieces"
    folder.mkdir()
    pack = runpy.run_path(str(SCRIPTS / "pack"))
    for archive in ("harness", "shared", "vllm-0.1.0"):
        assert len(pack["archive"](tmp_path / archive, folder, 150)) > 1
    pack["write_lists"](folder)
    shutil.copy(SCRIPTS / "run", folder)
    (folder / "runs.txt").write_text("0.2.0 other\n0.1.0 stub --arm a\n", encoding="utf-8")
    return folder


def run(pieces: Path) -> subprocess.CompletedProcess[str]:
    command = [f"{pieces}/run", f"{pieces}", f"{pieces}/out", "60"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_pieces_are_joined_and_each_line_runs(pieces: Path) -> None:
    first, second = run(pieces).stdout.splitlines()
    assert first == "0.2.0 other: not run, pieces of vllm-0.2.0 are missing or damaged"
    assert second.startswith("0.1.0 stub: exit status 1, ")
    words = f"run stub --arm a --server process --vllm 0.1.0 --out {pieces}/out"
    assert f"vllm of the pieces: {words}" in second


@pytest.mark.parametrize(
    ("archive", "said"),
    [
        ("vllm-0.1.0", "0.1.0 stub: not run, pieces of vllm-0.1.0 are missing or damaged"),
        ("shared", "run: shared: a piece is missing or damaged"),
    ],
)
def test_a_changed_piece_is_not_unpacked(archive: str, said: str, pieces: Path) -> None:
    with (pieces / f"{archive}.tar.gz.01").open("ab") as piece:
        piece.write(b"x")
    done = run(pieces)
    assert f"{archive}.tar.gz.01: FAILED" in done.stdout
    assert said in done.stdout + done.stderr


def test_a_run_that_leaves_the_host_does_not_name_it(tmp_path: Path) -> None:
    head, *rest = (DIED / "journal.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    started = json.dumps(json.loads(head) | {"hosts": ["gpu-host-7"], "reproduce": "on gpu-host-7"})
    for name, text in {
        "journal.jsonl": "".join([started, "\n", *rest]),
        "requests.jsonl": "",
        "logs/reported-1.log": "INFO gpu-host-7\n",
        "terminal.txt": "on gpu-host-7\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, str(SCRIPTS / "redact.py"), str(tmp_path)]
    assert subprocess.check_output(command, text=True) == "reproduces\n"
    texts = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("gpu-host-7" in text for text in texts)
