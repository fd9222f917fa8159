"""`explore --vendor`: the search as a folder of tests that needs vLLM and pytest alone.

The folder has `vendored_search` as its test file, and each module of this project that it or the
program that plays the cases imports, with relative imports.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from vllm_repro.errors import UsageError
from vllm_repro.report.files import write_file
from vllm_repro_explore.driver import PROGRAM, driver_model, mamba_model

_HARNESS = Path(__file__).resolve().parents[1]
_TEST = _HARNESS / "vllm_repro_explore" / "vendored_search.py"
_TEST_NAME = "test_search"
_HINT = "name a new folder: vllm-repro explore --vendor tests/v1/search"
_README = _TEST.with_name("templates") / "vendored.md"
_STARTED = [PROGRAM / "vllm_repro_driver" / name for name in ("serve.py", "stores.py")]
"""Modules that another program starts or imports by name: `test_search`, and vLLM."""
_HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""
"""First lines of vLLM's own files."""


def vendor(folder: Path) -> list[Path]:
    """Write the search's files to a folder, and return them. A known.json that is there stays.

    Raises `UsageError` if other files are there, or if the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}", hint=_HINT) from error
    if any(folder.iterdir()) and not (folder / f"{_TEST_NAME}.py").exists():
        raise UsageError(f"{folder} has other files, which would be replaced", hint=_HINT)
    texts = {
        "README.md": _README.read_text(encoding="utf-8"),
        **({} if (folder / "known.json").exists() else {"known.json": "[]\n"}),
        "__init__.py": _HEADER,
        **{f"{name}.py": _HEADER + text for name, text in modules().items()},
        **{
            f"models/{name}/{file.name}": file.read_text(encoding="utf-8")
            for name, model in (("attention", driver_model()), ("mamba", mamba_model()))
            for file in model.iterdir()
        },
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, text, hint="free some space, or name another folder")
    return [folder / name for name in texts]


def modules() -> dict[str, str]:
    """Return the text of each module that `vendor` writes, by name, with its imports made relative.

    The name has no ".py".
    """
    texts: dict[str, str] = {}
    waiting = {_TEST_NAME: _TEST, **{path.stem: path for path in _STARTED}}
    while waiting:
        name, path = waiting.popitem()
        texts[name], imported = _with_relative_imports(path)
        waiting |= {module.stem: module for module in imported if module.stem not in texts}
    return texts


def _with_relative_imports(path: Path) -> tuple[str, list[Path]]:
    """Return a module's text for a folder without subfolders, and the files that it then imports.

    Comments for mypy are removed: it checks this project without vLLM.
    """
    text, imported = path.read_text(encoding="utf-8"), list[Path]()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom):
            continue
        name = "." * node.level + (node.module or "")
        if not name.startswith((".", "vllm_repro")):
            continue
        base = (path.parent if node.level else _HARNESS).joinpath(*(node.module or "").split("."))
        file = base.with_suffix(".py")
        imported += [file] if file.is_file() else [base / f"{part.name}.py" for part in node.names]
        text = text.replace(
            f"from {name} import ", f"from .{file.stem if file.is_file() else ''} import ", 1
        )
    return re.sub(r"  # type: ignore.*", "", text), imported
