"""Paths of the files that come with the package, in a checkout or in an installed wheel."""

from __future__ import annotations

from pathlib import Path

from vllm_repro.errors import HarnessBug

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent.parent


def _data_folder(in_checkout: str, in_wheel: str) -> Path:
    """Return a folder of the package's own files: in the checkout, else in the installed wheel.

    in_checkout: path below the checkout. in_wheel: name below the package's `_data`. Raises
    `HarnessBug` if neither has it.
    """
    # The checkout first, so that an edited scenario is used.
    checkout = [_CHECKOUT / in_checkout] if (_CHECKOUT / "pyproject.toml").is_file() else []
    for candidate in (*checkout, _PACKAGE / "_data" / in_wheel):
        if candidate.is_dir():
            return candidate
    raise HarnessBug(f"the package's own {in_wheel} are missing", hint="install it again")


def scenario_folder() -> Path:
    """Return the folder of the package's own scenario files."""
    return _data_folder("scenarios", "scenarios")


def ledger_file() -> Path:
    """Return the path of the ledger of known bugs, `catalogue.json`."""
    return _data_folder("reports/results", "results") / "catalogue.json"


def rehearsal_engine() -> Path:
    """Return the folder of the rehearsal engine (`python FOLDER serve …`), which imitates vLLM."""
    return _data_folder("fixtures/rehearsal", "rehearsal")
