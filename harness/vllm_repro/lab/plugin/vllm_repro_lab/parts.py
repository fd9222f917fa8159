"""The mechanisms of the lab. Nothing here imports torch or vllm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import parts_offload, parts_turboquant
from .record import Part

__all__ = ["MECHANISMS", "Mechanism"]


@dataclass(frozen=True)
class Mechanism:
    """A way to run one bug's code on a CPU. install: puts the replacements in place, in the process that calls it."""

    name: str
    parts: tuple[Part, ...]
    install: Callable[[], None]


def _install_turboquant() -> None:
    from . import turboquant  # here, because it imports torch and vllm

    turboquant.install()


def _install_offload() -> None:
    from . import offload

    offload.install()


MECHANISMS: Mapping[str, Mechanism] = {
    "turboquant": Mechanism("turboquant", parts_turboquant.PARTS, _install_turboquant),
    "offload": Mechanism("offload", parts_offload.PARTS, _install_offload),
}
