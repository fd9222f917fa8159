"""The mechanisms of the lab. Nothing here imports torch or vllm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import parts_graphs, parts_offload, parts_turboquant
from .record import Part

__all__ = ["GRAPHS", "MECHANISMS", "Mechanism"]

GRAPHS: Mapping[str, tuple[Part, ...]] = {"guard": parts_graphs.GUARDED, "record": parts_graphs.RECORDED}
"""What is asked for about graphs beside a mechanism, and the parts that it replaces."""


@dataclass(frozen=True)
class Mechanism:
    """A way to run one bug's code on a CPU. install: puts the replacements in place, in the process that calls it.

    parts: replaced in any case. dry_run: those with which it goes through the motions of a capture, where nothing of `GRAPHS` is asked for.
    """

    name: str
    parts: tuple[Part, ...]
    install: Callable[[str], None]
    dry_run: tuple[Part, ...] = ()

    def parts_with(self, graphs: str) -> tuple[Part, ...]:
        """All that is replaced; `graphs` is a key of `GRAPHS`, or empty."""
        return self.parts + (GRAPHS[graphs] if graphs else self.dry_run)


def _install_turboquant(graphs: str) -> None:
    from . import turboquant  # here, because it imports torch and vllm

    turboquant.install(graphs=bool(graphs))


def _install_offload(_: str) -> None:
    from . import offload

    offload.install()


MECHANISMS: Mapping[str, Mechanism] = {
    "turboquant": Mechanism("turboquant", parts_turboquant.PARTS, _install_turboquant, parts_turboquant.DRY_RUN),
    "offload": Mechanism("offload", parts_offload.PARTS, _install_offload),
}
