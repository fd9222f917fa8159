"""Mechanisms of the lab. Imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import (
    parts_async,
    parts_deepseek,
    parts_dry_run,
    parts_graphs,
    parts_late_connector,
    parts_nixl,
    parts_offload,
    parts_offloading,
    parts_scheduler,
    parts_turboquant,
)
from .record import Part

__all__ = ["GRAPHS", "MECHANISMS", "Mechanism"]

GRAPHS: Mapping[str, tuple[Part, ...]] = {"guard": parts_graphs.GUARDED, "record": parts_graphs.RECORDED}
"""Names replaced for each value of REPRO_LAB_CAPTURE, besides those of the mechanism."""


@dataclass(frozen=True)
class Mechanism:
    """Set of replacements that runs one bug's code on a CPU.

    install: installs them in the calling process; takes a key of `GRAPHS`, or "". parts: always replaced.
    dry_run: replaced in addition without a key of `GRAPHS`, to run the batches of a capture. env: variables of the server.
    alone: cannot be combined with `GRAPHS`. attention: the CPU build's own attention serves the model.
    scheduled: its bugs are decided in the scheduler or a KV connector, so the mechanism `scheduler` shows them without a model.
    """

    name: str
    parts: tuple[Part, ...]
    install: Callable[[str], None]
    dry_run: tuple[Part, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False
    attention: bool = True
    scheduled: bool = False

    def parts_with(self, graphs: str) -> tuple[Part, ...]:
        """Return all parts for a key of `GRAPHS`, or for an empty string."""
        return self.parts + (GRAPHS[graphs] if graphs else self.dry_run)


def _install_turboquant(graphs: str) -> None:
    from . import turboquant  # here, because it imports torch and vllm

    turboquant.install(graphs=bool(graphs))


def _install_turboquant_flash(graphs: str) -> None:
    from . import turboquant

    turboquant.install(graphs=bool(graphs), flash=True)


def _install_offload(_: str) -> None:
    from . import offload

    offload.install()


def _install_offloading(_: str) -> None:
    from . import offloading

    offloading.install()


def _install_scheduler(_: str) -> None:
    from . import scheduler

    scheduler.install()


def _install_nixl(_: str) -> None:
    from . import nixl

    nixl.install()


def _install_async(_: str) -> None:
    from . import async_steps

    async_steps.install()


def _install_nothing(_: str) -> None:
    """Install nothing: vLLM loads what the command line names."""


def _install_deepseek(_: str) -> None:
    from . import interpreter

    interpreter.install()  # before the next line, which imports vLLM modules that use Triton
    from . import deepseek

    deepseek.install()


def _install_interpreter(_: str) -> None:
    from . import interpreter

    interpreter.install()


_INTERPRET = {"TRITON_INTERPRET": "1"}  # Triton reads it at import, before vLLM loads plugins

MECHANISMS: Mapping[str, Mechanism] = {
    "turboquant": Mechanism(
        "turboquant", parts_turboquant.PARTS, _install_turboquant, parts_dry_run.PARTS, attention=False
    ),
    "turboquant-flash": Mechanism(
        "turboquant-flash",
        parts_turboquant.PARTS + parts_turboquant.FLASH,
        _install_turboquant_flash,
        parts_dry_run.PARTS,
        attention=False,
    ),
    "offload": Mechanism("offload", parts_offload.PARTS, _install_offload, scheduled=True),
    "late-connector": Mechanism("late-connector", parts_late_connector.PARTS, _install_nothing, scheduled=True),
    "offloading": Mechanism("offloading", parts_offloading.PARTS, _install_offloading, scheduled=True),
    "nixl": Mechanism("nixl", parts_nixl.PARTS, _install_nixl),
    "scheduler": Mechanism("scheduler", parts_scheduler.PARTS, _install_scheduler, alone=True, scheduled=True),
    "async": Mechanism("async", parts_async.PARTS, _install_async, alone=True),
    "deepseek": Mechanism("deepseek", parts_deepseek.PARTS, _install_deepseek, env=_INTERPRET, alone=True),
    "interpreter": Mechanism("interpreter", parts_deepseek.INTERPRETER, _install_interpreter, env=_INTERPRET),
}
