"""Where the files that come with the package are: in a checkout, or in an installed wheel, which carries them too."""

from __future__ import annotations

from pathlib import Path

from vllm_repro.errors import HarnessBug

__all__ = ["rehearsal_engine", "scenario_folder"]

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
