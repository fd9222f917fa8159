"""Reproduce an upstream vLLM engine death with one command, and prove it.

docs/api.md documents the Python API.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "EngineDied": "vllm_repro.running.live_server",
    "RunResult": "vllm_repro.api",
    "VllmServer": "vllm_repro.running.live_server",
    "diagnose": "vllm_repro_diagnosis.diagnosis",
    "load_scenario": "vllm_repro.api",
    "run": "vllm_repro.api",
}
"""Module of each name, imported at its first use: some take a second.

`__init__.pyi` has the same names for type checkers.
"""

__all__ = ["EngineDied", "RunResult", "VllmServer", "diagnose", "load_scenario", "run"]


def __getattr__(name: str) -> object:
    # a feature has this name; reading entry points takes 30 ms, so read them only for it
    if name == "frames":
        features = importlib.import_module("vllm_repro.features")
        if name in features.additions("api"):
            return features.load("api", name)
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
