"""The plugin without vLLM: survey of a release, the facts file, and when it stays inactive."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from itertools import product
from pathlib import Path

import pytest

import vllm_repro_lab
from tests.golden_files import missing
from vllm_repro.servers.lab import plugin_folder
from vllm_repro_lab.parts import GRAPHS, MECHANISMS
from vllm_repro_lab.record import Part, names_in, survey, write_once

PACKAGE = Path(vllm_repro_lab.__file__).parent

SOURCE = """
from elsewhere import borrowed as here

LIMIT: int = 3

class Worker:
    slots = 2

    def init_device(self, first, /, second, *, third=None):
        def inner(): ...

try:
    import fast
except ImportError:
    fast = None

if LIMIT:
    async def kernel(Key_ptr, D): ...
"""


def find(part: Part, folder: Path) -> tuple[str, Path] | None:
    path = folder / f"{part.module}.py"
    return (path.name, path) if path.exists() else None


def test_names_are_those_that_a_module_has_with_their_parameters() -> None:
    names = dict(names_in(SOURCE))
    assert names["Worker.init_device"] == ("self", "first", "second", "third")
    assert names["kernel"] == ("Key_ptr", "D")
    assert set(names) == {
        "here",
        "LIMIT",
        "Worker",
        "Worker.slots",
        "Worker.init_device",
        "fast",
        "kernel",
    }


def test_a_release_that_has_every_part(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(SOURCE, encoding="utf-8")
    parts = (
        Part("worker", "Worker.init_device", "no GPU", "none"),
        Part("worker", "kernel", "no Triton", "none", ("Key_ptr",)),
        Part("worker", "here"),
    )
    found = survey(parts, lambda part: find(part, tmp_path))
    assert found.missing == ()
    digest = hashlib.sha256(SOURCE.encode()).hexdigest()
    assert [dict(part) for part in found.replaced] == [
        {
            "name": "worker.Worker.init_device",
            "file": "worker.py",
            "sha256": digest,
            "why": "no GPU",
            "effect": "none",
        },
        {
            "name": "worker.kernel",
            "file": "worker.py",
            "sha256": digest,
            "why": "no Triton",
            "effect": "none",
        },
    ]
    assert "unsupported" not in found.as_fields()


def test_missing_names_are_listed(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(SOURCE, encoding="utf-8")
    parts = (
        Part("gone", "anything", "w", "e"),
        Part("worker", "Worker.warm_up", "w", "e"),
        Part("worker", "kernel", "w", "e", ("Key_ptr", "KPS")),
        Part("worker", "renamed"),
    )
    missing = survey(parts, lambda part: find(part, tmp_path)).missing
    assert missing == (
        "gone.anything",
        "worker.Worker.warm_up",
        "worker.kernel(KPS)",
        "worker.renamed",
    )


def test_an_optional_part_is_listed_if_a_release_has_it(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(SOURCE, encoding="utf-8")
    parts = tuple(Part(module, "kernel", "w", "e", needed=False) for module in ("worker", "gone"))
    parts += (Part("worker", "renamed", "w", "e", needed=False),)
    found = survey(parts, lambda part: find(part, tmp_path))
    assert ([part["name"] for part in found.replaced], found.missing) == (["worker.kernel"], ())


def test_the_facts_file_is_written_atomically(tmp_path: Path) -> None:
    write_once(tmp_path / "lab.json", {"replaced": []})
    assert json.loads((tmp_path / "lab.json").read_text(encoding="utf-8")) == {"replaced": []}
    with pytest.raises(TypeError):
        write_once(tmp_path / "other.json", {"replaced": object()})
    assert not (tmp_path / "other.json").exists()


def test_each_replacement_has_a_reason_and_an_effect() -> None:
    for mechanism, graphs in product(MECHANISMS.values(), ("", *GRAPHS)):
        if graphs and mechanism.alone:
            continue
        replaced = [part for part in mechanism.parts_with(graphs) if part.effect]
        assert len({(part.module, part.name) for part in replaced}) == len(replaced) > 0
        assert all(part.why for part in replaced)


def raising(tree: ast.AST) -> list[str]:
    """Return the functions that raise or assert."""
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        one.name
        for one in functions
        for node in ast.walk(one)
        if isinstance(node, ast.Raise | ast.Assert)
    ]


@pytest.mark.parametrize("module", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_only_refuse_raises(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    assert raising(tree) == (["refuse"] if module.stem == "refusals" else [])


@pytest.mark.parametrize("module", ["memory", "refusals", "replay", "capture"])
def test_the_guard_does_not_import_vllm(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    imported = [
        node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
    ]
    imported += [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    assert not [name for name in imported if name.startswith("vllm")]
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not [name for name in named if "turbo" in name.lower() or "prefill" in name.lower()]


def test_vllm_finds_it_by_its_entry_point() -> None:
    points = [
        (point.name, point.value)
        for distribution in distributions(path=[str(plugin_folder())])
        for point in distribution.entry_points
        if point.group == "vllm.general_plugins"
    ]
    assert points == [("vllm_repro_lab", "vllm_repro_lab:register")]


def register(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call the plugin's entry point twice, as vLLM does.

    Use a separate Python with `path` first and without the harness.
    """
    call = (
        "import vllm_repro_lab, sys; vllm_repro_lab.register(); vllm_repro_lab.register();"
        " print('torch' in sys.modules)"
    )
    keep = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("REPRO_LAB", "PYTHON"))
    }
    return subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            f"import sys; sys.path[:0] = {[str(path), str(plugin_folder())]!r}; {call}",
        ],
        env={**keep, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_plugin_does_nothing_without_a_mechanism(tmp_path: Path) -> None:
    done = register(tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False", "")


def test_a_release_without_the_names_exits_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "vllm" / "platforms").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "platforms" / "cpu.py").write_text(
        "class CpuPlatform: ...\n", encoding="utf-8"
    )
    facts = tmp_path / "lab.json"
    done = register(tmp_path, REPRO_LAB_MECHANISM="turboquant", REPRO_LAB_FACTS=str(facts))
    assert done.returncode == 1
    assert done.stderr.startswith(
        "the lab cannot run this release: it has no vllm.platforms.cpu.CpuPlatform.get_attn"
    )
    written = json.loads(facts.read_text(encoding="utf-8"))
    assert "vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls" in written["unsupported"]
    assert written["mechanism"] == "turboquant"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"MECHANISM": "turbo"},
            f"the lab has no mechanism 'turbo'; choose one of {', '.join(MECHANISMS)}",
        ),
        (
            {"MECHANISM": "turboquant", "CAPTURE": "guarded"},
            "REPRO_LAB_CAPTURE is 'guarded'; it must be guard or record",
        ),
    ],
)
def test_unknown_settings_are_refused(
    tmp_path: Path, environment: dict[str, str], message: str
) -> None:
    done = register(tmp_path, **{f"REPRO_LAB_{name}": value for name, value in environment.items()})
    assert (done.returncode, done.stderr.strip()) == (1, message)


@pytest.mark.parametrize("graphs", ["", *GRAPHS])
def test_the_checked_names_depend_on_the_capture_mode(tmp_path: Path, graphs: str) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    facts = tmp_path / "lab.json"
    register(
        tmp_path,
        REPRO_LAB_MECHANISM="turboquant",
        REPRO_LAB_CAPTURE=graphs,
        REPRO_LAB_FACTS=str(facts),
    )
    lacking = json.loads(facts.read_text(encoding="utf-8"))["unsupported"]
    wrapper = "vllm.compilation.cuda_graph.CUDAGraphWrapper"
    assert (wrapper in lacking, "vllm.config.vllm.VllmConfig._set_cudagraph_sizes" in lacking) == (
        bool(graphs),
        not graphs,
    )


def test_called_names_are_marked_as_running() -> None:
    idle = {
        f"{part.module}.{part.name}"
        for one in MECHANISMS.values()
        for part in one.parts_with("")
        if not part.runs
    }
    assert (
        missing(
            idle,
            "vllm.v1.attention.ops.triton_decode_attention._fwd_kernel_stage2",
            "vllm.v1.simple_kv_offload.copy_backend.DmaCopyBackend.launch_copy",
        )
        == []
    )
    assert not {
        name
        for name in idle
        if "CPUWorker" in name or "BlockPool" in name or "capture_model" in name
    }
