"""The mechanisms of the lab. Nothing here imports torch or vllm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import parts_deepseek, parts_dry_run, parts_graphs, parts_offload, parts_turboquant
from .record import Part

__all__ = ["GRAPHS", "MECHANISMS", "Mechanism"]

GRAPHS: Mapping[str, tuple[Part, ...]] = {"guard": parts_graphs.GUARDED, "record": parts_graphs.RECORDED}
"""What is asked for about graphs beside a mechanism, and the parts that it replaces."""


@dataclass(frozen=True)
class Mechanism:
    """A way to run one bug's code on a CPU. install: puts the replacements in place, in the process that calls it.

    parts: replaced in any case. dry_run: those with which it goes through the motions of a capture, where nothing of `GRAPHS` is asked for.
    env: what the server is started with for it. alone: nothing of `GRAPHS` goes with it; it has a dry run of its own.
    """

    name: str
    parts: tuple[Part, ...]
    install: Callable[[str], None]
    dry_run: tuple[Part, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False

    def parts_with(self, graphs: str) -> tuple[Part, ...]:
        """All that is replaced; `graphs` is a key of `GRAPHS`, or empty."""
        return self.parts + (GRAPHS[graphs] if graphs else self.dry_run)


def _install_turboquant(graphs: str) -> None:
    from . import turboquant  # here, because it imports torch and vllm

    turboquant.install(graphs=bool(graphs))


def _install_offload(_: str) -> None:
    from . import offload

    offload.install()


def _install_deepseek(_: str) -> None:
    from . import interpreter

    interpreter.install()  # before the next line, which imports much of vLLM
    from . import deepseek

    deepseek.install()


def _install_interpreter(_: str) -> None:
    from . import interpreter

    interpreter.install()


_INTERPRET = {"TRITON_INTERPRET": "1"}  # Triton reads it when it is imported, which is before there are plugins

MECHANISMS: Mapping[str, Mechanism] = {
    "turboquant": Mechanism("turboquant", parts_turboquant.PARTS, _install_turboquant, parts_dry_run.PARTS),
    "offload": Mechanism("offload", parts_offload.PARTS, _install_offload),
    "deepseek": Mechanism("deepseek", parts_deepseek.PARTS, _install_deepseek, env=_INTERPRET, alone=True),
    "interpreter": Mechanism("interpreter", parts_deepseek.INTERPRETER, _install_interpreter, env=_INTERPRET),
}
