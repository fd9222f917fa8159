"""Reproduce an upstream vLLM engine death with one command, and prove it.

docs/api.md documents the Python API.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "CommandError": "vllm_repro.errors",
    "EngineDied": "vllm_repro.running.live_server",
    "InfraError": "vllm_repro.errors",
    "ReproError": "vllm_repro.errors",
    "RunResult": "vllm_repro.api",
    "ScenarioError": "vllm_repro.errors",
    "Unsupported": "vllm_repro.errors",
    "UsageError": "vllm_repro.errors",
    "VllmServer": "vllm_repro.running.live_server",
    "VllmServerFactory": "vllm_repro.running.live_server",
    "diagnose": "vllm_repro_diagnosis.diagnosis",
    "load_scenario": "vllm_repro.api",
    "run": "vllm_repro.api",
}
"""Module of each name, imported at its first use: some take a second.

`__init__.pyi` has the same names for type checkers.
"""


def _additions() -> dict[str, object]:
    """Return the names that installed features add to the Python API, each with its entry point.

    Reading entry points takes 30 ms, so not at import.
    """
    names: dict[str, object] = importlib.import_module("vllm_repro.features").additions("api")
    return names


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted({*_HOMES, *_additions()})
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if not name.startswith("_") and name in _additions():
        return importlib.import_module("vllm_repro.features").load("api", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_additions()})
