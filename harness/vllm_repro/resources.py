"""Where the files that come with the package are: in a checkout, or in an installed wheel, which carries them too."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from vllm_repro.errors import HarnessBug

__all__ = ["rehearsal_engine", "rehearsal_module", "scenario_folder"]

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent.parent


def _find(in_checkout: str, in_wheel: str) -> Path:
    # The checkout comes first, so that an edited scenario is the one that runs.
    checkout = [_CHECKOUT / in_checkout] if (_CHECKOUT / "pyproject.toml").is_file() else []
    for candidate in (*checkout, _PACKAGE / "_data" / in_wheel):
        if candidate.is_dir():
            return candidate
    raise HarnessBug(f"the package's own {in_wheel} are missing", hint="install it again")


def scenario_folder() -> Path:
    """The folder of scenario files."""
    return _find("scenarios", "scenarios")


def rehearsal_engine() -> Path:
    """The folder that `python FOLDER serve …` runs."""
    return _find("fixtures/rehearsal", "rehearsal")


def rehearsal_module(name: str) -> ModuleType:
    """A module of the rehearsal engine, which is no installed package: `rehearsal_module("forecast")`."""
    if "rehearsal" not in sys.modules:
        folder = rehearsal_engine()
        spec = importlib.util.spec_from_file_location(
            "rehearsal", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise HarnessBug(f"{folder} cannot be loaded", hint="install the package again")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["rehearsal"] = module
    return importlib.import_module(f"rehearsal.{name}")
