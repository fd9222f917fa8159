"""Ten weeks of simulated nights with noise, one loss of throughput, a flaky scenario and a fix. Every number is drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from tests.nights.made import arm, row, with_speed
from vllm_repro.report.runs import Run
from vllm_repro.verdict.verdict import Expected

NOTICE = "REHEARSAL: simulated nights. Every number here is drawn from a seed; none was measured."
HOSTS = {"a1b2c3d4": 1.0, "c3d4e5f6": 0.43}
ARMS = ("reported", "eager", "bigger-chunk")
FIXED, LOSSY, FLAKY, STEADY = "tq-chunked-prefill", "tq-prefix-hit", "sco-hybrid", "min-tokens-stop-ids"


@dataclass(frozen=True)
class Weeks:
    """Nights counted from 0. loss: first night in which the arm `eager` of LOSSY is 8 % slower. fix: first night in which FIXED lives."""

    seed: int
    nights: int = 70
    loss: int = 45
    fix: int = 50

    def rows(self) -> Iterator[Run]:
        """Yield the runs in the order of their start."""
        draw = random.Random(self.seed)
        for night in range(self.nights):
            for host, speed in HOSTS.items():
                for hour, scenario in enumerate((FIXED, LOSSY, FLAKY, STEADY)):
                    crashes = {FIXED: night < self.fix, LOSSY: True, FLAKY: draw.random() < 0.5, STEADY: False}[
                        scenario
                    ]
                    speeds = [2000 * speed * draw.gauss(1, 0.01) for _ in ARMS]
                    if scenario == LOSSY and night >= self.loss:
                        speeds[1] *= 0.92
                    _, made = row(night, int(crashes), scenario=scenario, host=host, hour=hour)
                    arms = [arm(int(crashes), 1), *(arm(0, 1, name, Expected.LIVES) for name in ARMS[1:])]
                    yield replace(
                        made,
                        id=f"{made.id}{self.seed:02}",
                        arms=tuple(
                            one if one.k else with_speed(one, value) for one, value in zip(arms, speeds, strict=True)
                        ),
                    )
