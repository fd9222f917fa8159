"""Measured prices of workarounds: `prices.json` beside the scenarios, made by `make catalogue`.

Each is a sentence of a kept run's report, so it has its interval and its label.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_repro.conversion import decode
from vllm_repro.resources import scenario_folder


def kept_prices(scenario: str) -> Sequence[str]:
    """Return sentences on the throughput of the scenario's workarounds, as runs measured it.

    They are read from `prices.json`; empty if nothing was measured. scenario: an id.
    """
    file = scenario_folder() / "prices.json"
    return decode(file.read_bytes(), dict[str, tuple[str, ...]]).get(scenario, ())
