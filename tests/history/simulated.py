"""Ten weeks of simulated nights: rows as runs would have left them, with noise, a slow host, one real loss, a flaky scenario and a fix.

Every number is drawn from the seed; nothing here was measured. The noise is made to be worse than a quiet machine's: each night moves
each series, and each host, a little; one value in 25 is far off on the slow side; one run in 25 is missing, one in 50 is infra trouble.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from math import exp

from vllm_repro.history.rows import ArmRow, Figure, RunRow, build_of
from vllm_repro.verdict.throughput import Point
from vllm_repro.verdict.verdict import Expected, Result, Standing, Verdict

NOTICE = "REHEARSAL: simulated nights. Every number here is drawn from a seed; none was measured."
FIRST = date(2026, 9, 1)
POINT = Point(1024, 256, 8)
HOSTS = {"a1b2c3d4": "1 x NVIDIA H200", "b2c3d4e5": "1 x NVIDIA H200", "c3d4e5f6": "2 x NVIDIA L40S"}
SLOW = "b2c3d4e5"
SPEED = {"a1b2c3d4": 1.0, "b2c3d4e5": 0.98, "c3d4e5f6": 0.43}
ARMS = ("reported", "eager", "bigger-chunk")


@dataclass(frozen=True)
class Weeks:
    """What is true of the simulated nights, which are counted from 0. None: it does not happen.

    loss: from this night on `lossy` serves that much slower, on every host. slow: nights [from, to) in which the host SLOW is slower by
    `slow_by`. fix: the first nightly in which `fixed` no longer dies. noise, host_noise: standard deviations, as fractions, from
    night to night.
    """

    seed: int
    nights: int = 70
    loss: int | None = 45
    loss_by: float = 0.08
    slow: tuple[int, int] | None = (30, 70)
    slow_by: float = 0.12
    fix: int | None = 50
    flaky: bool = True
    noise: float = 0.015
    host_noise: float = 0.006

    lossy: tuple[str, str] = ("tq-prefix-hit", "eager")
    fixed: str = "tq-chunked-prefill"
    flaking: str = "sco-hybrid"

    @property
    def scenarios(self) -> tuple[str, ...]:
        return (self.fixed, self.lossy[0], self.flaking, "min-tokens-stop-ids")

    def night(self, number: int) -> date:
        return FIRST + timedelta(days=number)

    def rows(self) -> Iterator[RunRow]:
        """In the order in which the runs started."""
        draw = random.Random(self.seed)
        for number in range(self.nights):
            for host in HOSTS:
                shared = draw.gauss(0, self.host_noise)
                for place, scenario in enumerate(self.scenarios):
                    shape = [draw.gauss(0, self.noise) for _ in ARMS]
                    off = [draw.random() < 0.04 for _ in ARMS]
                    luck, dies = draw.random(), draw.random() < 0.5
                    if luck >= 0.04:
                        factors = [
                            exp(noise + shared) * (0.9 if bad else 1.0) for noise, bad in zip(shape, off, strict=True)
                        ]
                        yield self._row(number, host, scenario, place, factors, infra=luck < 0.06, dies=dies)

    def _row(
        self, number: int, host: str, scenario: str, place: int, factors: list[float], *, infra: bool, dies: bool
    ) -> RunRow:
        started = datetime.combine(self.night(number), datetime.min.time(), UTC) + timedelta(
            hours=1, minutes=20 * place + 5 * list(HOSTS).index(host)
        )
        has_bug = {
            self.fixed: self.fix is None or number < self.fix,
            self.lossy[0]: True,
            self.flaking: dies or not self.flaky,
        }.get(scenario, False)
        version = f"0.24.1rc1.dev{100 + 7 * number}+g{number:07x}"
        died = has_bug and not infra
        result = Result.BLOCKED if infra else Result.REPRODUCES if died else Result.QUIET
        leading = ArmRow(
            ARMS[0],
            Expected.DIES,
            result,
            int(died),
            int(not infra),
            signature="match: AssertionError in _continuation_prefill" if died else "",
            setup="5e7a0001",
            figures=None if died or infra else self._figures(number, host, scenario, 0, factors[0]),
        )
        others = [
            ArmRow(
                name,
                Expected.LIVES,
                Result.BLOCKED if infra else Result.QUIET,
                0,
                int(not infra),
                setup=f"5e7a000{place + 2}",
                figures=None if infra else self._figures(number, host, scenario, place + 1, factors[place + 1]),
            )
            for place, name in enumerate(ARMS[1:])
        ]
        verdict = Verdict.INCONCLUSIVE if infra else Verdict.REPRODUCES if died else Verdict.QUIET
        return RunRow(
            f"{scenario}/{started:%Y%m%dT%H%M%SZ}-{self.seed % 4096:03x}{number % 4096:03x}",
            scenario,
            "vllm-project/vllm#41726",
            f"{started:%Y-%m-%dT%H:%M:%SZ}",
            host,
            HOSTS[host],
            "gpu",
            "docker",
            version,
            build_of(version),
            Standing.UNKNOWN,
            verdict,
            None if infra else True,
            "simulated",
            None,
            False,
            infra,
            (leading, *others),
        )

    def _figures(self, number: int, host: str, scenario: str, arm: int, factor: float) -> tuple[Figure, ...]:
        speed = 2000.0 * SPEED[host] * (1.0, 0.8, 0.95)[arm] * (1.0 + 0.1 * self.scenarios.index(scenario)) * factor
        if self.slow and host == SLOW and self.slow[0] <= number < self.slow[1]:
            speed *= 1.0 - self.slow_by
        if self.loss is not None and number >= self.loss and (scenario, ARMS[arm]) == self.lossy:
            speed *= 1.0 - self.loss_by
        return (Figure(POINT, "output_tok_s", speed, 0.99 * speed, 1.01 * speed, 10, 2),)
