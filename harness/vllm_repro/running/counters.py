"""Counters of one server, read from its `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_repro.client.client import Client, HTTPError
from vllm_repro.errors import InfraError
from vllm_repro.running.death_signs import Channel, DeathSign
from vllm_repro_diagnosis.metrics import MetricsReading, read_metrics

_LOOKS_FOR_THE_FIRST = 4
"""Further readings after one from another process, to see whether the first one still answers."""


class Counters:
    """Reader of a server's `/metrics`, which notes when another process answers."""

    def __init__(
        self,
        base_url: str,
        client: Client,
        # called with the sign of a restart
        note: Callable[[DeathSign], None],
        *,
        # the harness started the server, so its counters begin at 0
        new: bool,
    ) -> None:
        # the last reading; kept if a later one fails
        self.reading: MetricsReading | None = None
        # since the watch of this server began; None until `/metrics` counts them
        self.preemptions: int | None = None
        # highest use of the KV cache since it was last set to None
        self.kv_most: float | None = None
        # `/metrics` has answered at least once
        self.answered = False
        self._base_url, self._client, self._note = base_url, client, note
        self._born: float | None = None
        self._preempted_before: float | None = 0.0 if new else None

    async def scrape(self) -> MetricsReading | None:
        """Read `/metrics` and return its values; None unless it answers 200.

        Also set `reading`, `kv_most` and `preemptions`. If another process answers than at the
        first reading, note a sign of death.

        Raises `InfraError` if several servers answer in turn, as behind a load balancer: none of
        them can be watched.
        """
        reading = await self._read()
        if reading is None:
            return None
        self.reading = reading
        if reading.kv_most is not None:
            self.kv_most = max(reading.kv_most, self.kv_most or 0.0)
        if self._born is None:
            self._born = reading.started
        elif self._is_other(reading):
            for _ in range(_LOOKS_FOR_THE_FIRST):
                again = await self._read()
                if again is not None and again.started is not None and not self._is_other(again):
                    raise InfraError(
                        f"several servers answer at {self._base_url}: process_start_time_seconds"
                        " alternates",
                        hint="name one server with --url, not the load balancer in front of it",
                    )
            text = "process_start_time_seconds changed: another process answers now"
            now = time.time()
            self._note(DeathSign(Channel.RESTART, text, now, reading.started or now))
            return reading
        if reading.preemptions is not None:
            if self._preempted_before is None:
                self._preempted_before = reading.preemptions
            self.preemptions = int(reading.preemptions - self._preempted_before)
        return reading

    async def _read(self) -> MetricsReading | None:
        """Return the values of `/metrics` and set `answered`; return None unless it answers 200."""
        try:
            response = await self._client.get("/metrics", timeout=5.0)
        except (HTTPError, OSError):
            return None
        self.answered |= response.status_code == 200
        return read_metrics(response.text) if response.status_code == 200 else None

    def _is_other(self, reading: MetricsReading) -> bool:
        """Return True if the reading has another process start time than the first one."""
        return (
            reading.started is not None
            and self._born is not None
            and abs(reading.started - self._born) > 0.02
        )
