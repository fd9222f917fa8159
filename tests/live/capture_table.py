"""What the capture guard does with each operation, in and out of a capture, without vLLM.

    PYTHONPATH=<plugin> <release's python> capture_table.py

Print one line per operation: name, result outside a capture, result inside, separated by tabs.
`copy`: torch's error for a copy that it cannot capture. `wait`: the driver's error for a wait.
`array`: torch's error for a device tensor used as an array.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from vllm_repro_lab import capture, refusals
from vllm_repro_lab.memory import DEVICE, on_device

SAYS = {refusals.COPY: "copy", refusals.WAIT: "wait", refusals.NUMPY: "array"}


def operations() -> dict[str, Callable[[], Any]]:
    """Return the operations by short name.

    `d` is on the device, `h` on the host, `p` in pinned host memory.
    """
    d = torch.arange(6, dtype=torch.int32, device=DEVICE)
    h = torch.arange(6, dtype=torch.int32)
    p = torch.zeros(6, dtype=torch.int32, pin_memory=False)
    f = torch.ones(4, 4, device=DEVICE)
    i = torch.tensor([0, 1], device=DEVICE)
    return {
        # reads
        "d.tolist()": d.tolist,
        "d[1:3].tolist()": lambda: d[1:3].tolist(),
        "(d + 1).tolist()": lambda: (d + 1).tolist(),
        "zeros(device=d.device).tolist()": lambda: torch.zeros(2, device=d.device).tolist(),
        "d.cpu()": d.cpu,
        "d.to('cpu')": lambda: d.to("cpu"),
        "d.to('cpu', non_blocking=True)": lambda: d.to("cpu", non_blocking=True),
        "d.numpy()": d.numpy,
        "d[0].item()": lambda: d[0].item(),
        "int(d[0])": lambda: int(d[0]),
        "range(d[1])": lambda: range(d[1]),
        "if d[0] > 0": lambda: bool(d[0] > 0),
        "if (d > 3).any()": lambda: bool((d > 3).any()),
        "3 in d": lambda: 3 in d,
        "f'{d[0]}'": lambda: f"{d[0]}",
        "repr(d)": lambda: repr(d),
        "d.nonzero()": d.nonzero,
        "torch.where(d > 3)": lambda: torch.where(d > 3),
        "d.unique()": d.unique,
        "torch.equal(d, d)": lambda: torch.equal(d, d),
        "torch.allclose(f, f)": lambda: torch.allclose(f, f),
        "torch.repeat_interleave(i, i)": lambda: torch.repeat_interleave(i, i),
        "torch.repeat_interleave(i, i, output_size=1)": (
            lambda: torch.repeat_interleave(i, i, output_size=1)
        ),
        "i.repeat_interleave(3)": lambda: i.repeat_interleave(3),
        "h.tolist()": h.tolist,
        "h.numpy()": h.numpy,
        "h[0].item()": lambda: h[0].item(),
        # copies
        "h.copy_(d)": lambda: h.copy_(d),
        "d.copy_(h)": lambda: d.copy_(h),
        "d.copy_(p)": lambda: d.copy_(p),
        "d.copy_(p, non_blocking=True)": lambda: d.copy_(p, non_blocking=True),
        "p.copy_(d, non_blocking=True)": lambda: p.copy_(d, non_blocking=True),
        "d.copy_(d + 1)": lambda: d.copy_(d + 1),
        "h.to(DEVICE)": lambda: h.to(DEVICE),
        "h.to(d)": lambda: h.to(d),
        "p.to(DEVICE)": lambda: p.to(DEVICE),
        "p.to(DEVICE, non_blocking=True)": lambda: p.to(DEVICE, non_blocking=True),
        "d.to(torch.int64)": lambda: d.to(torch.int64),
        "torch.tensor([1], device=DEVICE)": lambda: torch.tensor([1], device=DEVICE),
        "torch.tensor(1.0, device=DEVICE)": lambda: torch.tensor(1.0, device=DEVICE),
        "torch.as_tensor(array, device=DEVICE)": lambda: torch.as_tensor(h.numpy(), device=DEVICE),
        "d.new_tensor([1])": lambda: d.new_tensor([1]),
        "torch.tensor([1])": lambda: torch.tensor([1]),
        # indices and assignments
        "d[i]": lambda: d[i],
        "d[[0, 1]]": lambda: d[[0, 1]],
        "d[h]": lambda: d[h.long() % 6],
        "d[d > 3]": lambda: d[d > 3],
        "d[d > 3] = 0": lambda: d.__setitem__(d > 3, 0),
        "f[f > 0] = f.flatten()": lambda: f.__setitem__(f > 0, f.flatten().clone()),
        "d[1] = 3": lambda: d.__setitem__(1, 3),
        "d[1] = h[0]": lambda: d.__setitem__(1, h[0]),
        "d[1:3] = h[:2]": lambda: d.__setitem__(slice(1, 3), h[:2]),
        # what a graph may hold
        "torch.zeros(device=DEVICE)": lambda: torch.zeros(2, device=DEVICE),
        "torch.arange(device=DEVICE)": lambda: torch.arange(1, 5, device=DEVICE),
        "torch.full(device=DEVICE)": lambda: torch.full((2,), 3, device=DEVICE),
        "d.fill_(2)": lambda: d.fill_(2),
        "d.masked_fill(d > 3, 0)": lambda: d.masked_fill(d > 3, 0),
        "torch.where(d > 3, d, 0)": lambda: torch.where(d > 3, d, 0),
        "matmul, softmax, cat": lambda: torch.cat([(f @ f).softmax(-1), f]),
        "d.split([2, 4])": lambda: d.split([2, 4]),
        "list(d)": lambda: list(d),
        "shape, stride, address": lambda: (d.shape, d.stride(0), d.data_ptr(), d.dtype),
        "a kernel that reads": lambda: capture.launch(lambda one: one.tolist(), d),
        # waits
        "torch.cuda.synchronize()": torch.cuda.synchronize,
        "torch.accelerator.synchronize()": torch.accelerator.synchronize,
    }  # fmt: skip


def outcome(operation: Callable[[], Any]) -> str:
    try:
        operation()
    except Exception as error:
        return SAYS.get(str(error), f"{type(error).__name__}: {error}".splitlines()[0])
    return "passes"


def main() -> int:
    guard = capture.Guard()
    capture.install(guard)
    guard.start()
    outside = {name: outcome(operation) for name, operation in operations().items()}
    for name, operation in operations().items():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            inside = outcome(operation)
        print(name, outside[name], inside, sep="\t")
    made = torch.zeros(3, device=DEVICE)
    print("a view's memory", on_device(made[1:].view(1, 2)), on_device(made.cpu()), sep="\t")
    graph = torch.cuda.CUDAGraph()
    refusals.STATE.recording = True
    source, target, factor = torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE), 2
    with torch.cuda.graph(graph):
        sums = source * factor + source.sum()
        capture.launch(lambda one, other: one.copy_(other), target, sums)
    source.fill_(10.0)
    factor = 5
    graph.replay()
    guard.stop()
    print("a replay", *target.tolist(), sep="\t")
    return 0


if __name__ == "__main__":
    sys.exit(main())
