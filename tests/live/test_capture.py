"""Capture guard in a release's Python without vLLM: what it refuses and what it allows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro.servers.lab import plugin_folder

pytestmark = [pytest.mark.live, pytest.mark.depends("search")]

COPIES = {
    "d.tolist()", "d[1:3].tolist()", "(d + 1).tolist()", "zeros(device=d.device).tolist()",
    "d.cpu()", "d.to('cpu')", "h.copy_(d)", "d.copy_(h)", "h.to(DEVICE)", "h.to(d)",
    "torch.tensor([1], device=DEVICE)", "torch.tensor(1.0, device=DEVICE)",
    "torch.as_tensor(array, device=DEVICE)", "d.new_tensor([1])",
    "d[[0, 1]]", "d[h]", "d[1] = h[0]", "d[1:3] = h[:2]",
}  # fmt: skip
WAITS = {
    "d[0].item()", "int(d[0])", "range(d[1])", "if d[0] > 0", "if (d > 3).any()", "3 in d",
    "f'{d[0]}'", "repr(d)", "d.nonzero()", "torch.where(d > 3)", "d.unique()",
    "torch.equal(d, d)", "torch.allclose(f, f)", "torch.repeat_interleave(i, i)", "d.copy_(p)",
    "p.to(DEVICE)", "d[d > 3]", "f[f > 0] = f.flatten()",
    "torch.cuda.synchronize()", "torch.accelerator.synchronize()",
}  # fmt: skip
PASS = {
    "d.to('cpu', non_blocking=True)", "torch.repeat_interleave(i, i, output_size=1)",
    "i.repeat_interleave(3)", "h.tolist()", "h.numpy()", "h[0].item()",
    "d.copy_(p, non_blocking=True)", "p.copy_(d, non_blocking=True)", "d.copy_(d + 1)",
    "p.to(DEVICE, non_blocking=True)", "d.to(torch.int64)", "torch.tensor([1])",
    "d[i]", "d[d > 3] = 0", "d[1] = 3", "torch.zeros(device=DEVICE)",
    "torch.arange(device=DEVICE)", "torch.full(device=DEVICE)", "d.fill_(2)",
    "d.masked_fill(d > 3, 0)", "torch.where(d > 3, d, 0)", "matmul, softmax, cat",
    "d.split([2, 4])", "list(d)", "shape, stride, address", "a kernel that reads",
}  # fmt: skip


@pytest.fixture(scope="module")
def table() -> dict[str, list[str]]:
    release = provision(Source(release="0.20.2"))
    done = subprocess.run(
        [str(release.python), str(Path(__file__).with_name("capture_table.py"))],
        env={"PYTHONPATH": str(plugin_folder()), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    return {name: found for name, *found in rows}


def test_what_is_refused_in_a_capture_and_let_through(table: dict[str, list[str]]) -> None:
    operations = {
        name: found for name, found in table.items() if not name.startswith("a ") or name in PASS
    }
    assert {name for name, (_, inside) in operations.items() if inside == "copy"} == COPIES
    assert {name for name, (_, inside) in operations.items() if inside == "wait"} == WAITS
    assert {name for name, (_, inside) in operations.items() if inside == "array"} == {"d.numpy()"}
    assert {name for name, (_, inside) in operations.items() if inside == "passes"} == PASS


def test_nothing_is_refused_outside_of_a_capture(table: dict[str, list[str]]) -> None:
    assert {
        outside
        for name, (outside, *_) in table.items()
        if not name.startswith("a ") or name in PASS
    } == {"passes"}


def test_a_view_is_of_its_tensors_memory_and_a_copy_is_not(table: dict[str, list[str]]) -> None:
    assert table["a view's memory"] == ["True", "False"]


def test_a_replay_reads_tensors_anew_and_keeps_numbers(
    table: dict[str, list[str]],
) -> None:
    assert table["a replay"] == [
        "50.0",
        "50.0",
        "50.0",
    ]  # 10 x 2 + (10 + 10 + 10); the Python number was 2 at capture and is 5 now
