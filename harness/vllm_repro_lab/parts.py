"""Mechanisms of the lab. Imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

from . import parts_connectors as connectors
from . import parts_kernels as kernels
from .record import Part

GRAPHS: Mapping[str, tuple[Part, ...]] = {"guard": kernels.GUARDED, "record": kernels.RECORDED}
"""Names replaced for each value of REPRO_LAB_CAPTURE, besides those of the mechanism."""


@dataclass(frozen=True)
class Mechanism:
    """Set of replacements that runs one bug's code on a CPU."""

    name: str
    # always replaced
    parts: tuple[Part, ...]
    # installs them in the calling process; takes a key of `GRAPHS`, or an empty string
    install: Callable[[str], None]
    # replaced in addition without a key of `GRAPHS`, to run the batches of a capture
    dry_run: tuple[Part, ...] = ()
    # variables of the server
    env: Mapping[str, str] = field(default_factory=dict)
    # cannot be combined with `GRAPHS`
    alone: bool = False
    # the CPU build's own attention serves the model
    attention: bool = True
    # its bugs are decided in the scheduler or a connector: the mechanism `scheduler` shows them too
    scheduled: bool = False

    def parts_with(self, graphs: str) -> tuple[Part, ...]:
        """Return all names that it replaces. graphs: a key of `GRAPHS`, or an empty string."""
        return self.parts + (GRAPHS[graphs] if graphs else self.dry_run)


def _install_turboquant(graphs: str, *, flash: bool = False) -> None:
    """Install TurboQuant's replacements; flash: also FlashAttention's."""
    from . import turboquant  # here, because it imports torch and vllm

    turboquant.install(graphs=bool(graphs), flash=flash)


def _installs(*modules: str) -> Callable[[str], None]:
    """Return a function that imports modules of this package, and calls `install()` of each.

    It ignores its argument, the graph mode. The modules import torch and vllm.
    """

    def install(_: str) -> None:
        for module in modules:
            import_module(f".{module}", __package__).install()

    return install


_INTERPRET = {"TRITON_INTERPRET": "1"}  # Triton reads it at import, before vLLM loads plugins

# `late-connector` installs nothing: vLLM loads what the command line names.
# `interpreter` goes before `deepseek`, which imports modules of vLLM that use Triton.
MECHANISMS: Mapping[str, Mechanism] = {
    "turboquant": Mechanism(
        "turboquant", kernels.TURBOQUANT, _install_turboquant, kernels.DRY_RUN, attention=False
    ),
    "turboquant-flash": Mechanism(
        "turboquant-flash",
        kernels.TURBOQUANT + kernels.FLASH,
        partial(_install_turboquant, flash=True),
        kernels.DRY_RUN,
        attention=False,
    ),
    "offload": Mechanism("offload", connectors.OFFLOAD, _installs("offload"), scheduled=True),
    "late-connector": Mechanism(
        "late-connector", connectors.LATE_CONNECTOR, _installs(), scheduled=True
    ),
    "offloading": Mechanism(
        "offloading", connectors.OFFLOADING, _installs("offloading"), scheduled=True
    ),
    "nixl": Mechanism("nixl", connectors.NIXL, _installs("nixl")),
    "scheduler": Mechanism(
        "scheduler", connectors.SCHEDULER, _installs("scheduler"), alone=True, scheduled=True
    ),
    "async": Mechanism("async", connectors.ASYNC, _installs("async_steps"), alone=True),
    "deepseek": Mechanism(
        "deepseek",
        kernels.DEEPSEEK,
        _installs("interpreter", "deepseek"),
        env=_INTERPRET,
        alone=True,
    ),
    "interpreter": Mechanism(
        "interpreter", kernels.INTERPRETER, _installs("interpreter"), env=_INTERPRET
    ),
}
