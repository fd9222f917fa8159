"""A run as the history and the Python API read it: the record of its `report.json`, and its id."""

from __future__ import annotations

import msgspec

from vllm_repro.conversion import convert
from vllm_repro.host.host_id import hardware
from vllm_repro.report.json_report import ArmJson, RunJson
from vllm_repro.report.model import RunReport
from vllm_repro.verdict.verdict import Result


class Run(RunJson, frozen=True, kw_only=True):
    """A run as the history reads it: the content of its `report.json`, and its id."""

    # its folder, relative to that of all reports
    id: str = ""

    @property
    def surprise(self) -> bool:
        """Return True if the verdict is decided, and not the expected one."""
        return not (self.expected or self.undecided)

    @property
    def hardware(self) -> str:
        """Return the hardware of the run in words: `2 x NVIDIA H200` or `2 CPUs`."""
        return hardware(msgspec.to_builtins(self.environment))

    @property
    def leading(self) -> list[ArmJson]:
        """Return the arms that should show the bug, in unpatched vLLM."""
        return [arm for arm in self.arms if arm.expected.has_bug and not arm.patched]

    @property
    def died(self) -> ArmJson | None:
        """Return the first arm of unpatched vLLM that showed the bug, or None."""
        return next((arm for arm in self.leading if arm.k), None)

    @property
    def quiet(self) -> int:
        """Return how many boots of each arm in `leading` crossed the trigger and lived, at least.

        0 if one of these arms is not quiet, or if the rehearsal engine does not have the bug.
        """
        if not self.imitated or any(arm.result is not Result.QUIET for arm in self.leading):
            return 0
        return min((arm.n for arm in self.leading), default=0)


def run_of(report: RunReport) -> Run:
    """Return a report as the history and the Python API read it."""
    return msgspec.structs.replace(convert(report, Run, from_attributes=True), id=run_id(report))


def run_id(report: RunReport) -> str:
    """Return the id of a run, `SCENARIO/FOLDER`."""
    return f"{report.scenario}/{report.folder.name}"
