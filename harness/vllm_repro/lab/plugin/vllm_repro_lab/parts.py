"""The mechanisms of the lab. Nothing here imports torch or vllm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import parts_deepseek, parts_offload, parts_turboquant
from .record import Part

__all__ = ["MECHANISMS", "Mechanism"]


@dataclass(frozen=True)
class Mechanism:
    """A way to run one bug's code on a CPU. install: puts the replacements in place, in the process that calls it. env: what the server is
    started with for it."""

    name: str
    parts: tuple[Part, ...]
    install: Callable[[], None]
    env: Mapping[str, str] = field(default_factory=dict)


def _install_turboquant() -> None:
    from . import turboquant  # here, because it imports torch and vllm

    turboquant.install()


def _install_offload() -> None:
    from . import offload

    offload.install()


def _install_deepseek() -> None:
    from . import interpreter

    interpreter.install()  # before the next line, which imports much of vLLM
    from . import deepseek

    deepseek.install()


def _install_interpreter() -> None:
    from . import interpreter

    interpreter.install()


_INTERPRET = {"TRITON_INTERPRET": "1"}  # Triton reads it when it is imported, which is before there are plugins

MECHANISMS: Mapping[str, Mechanism] = {
    "turboquant": Mechanism("turboquant", parts_turboquant.PARTS, _install_turboquant),
    "offload": Mechanism("offload", parts_offload.PARTS, _install_offload),
    "deepseek": Mechanism("deepseek", parts_deepseek.PARTS, _install_deepseek, _INTERPRET),
    "interpreter": Mechanism("interpreter", parts_deepseek.INTERPRETER, _install_interpreter, _INTERPRET),
}
