"""A server whose further nodes run beside it: one seam, several processes.

What the engine does is seen at its first node, which has the HTTP. The others are started after it, watched while it boots, when one
that ends would leave the first waiting for it, and ended after it. Later their end alone is no death: an engine goes on when only the
`vllm serve` of another node was killed, and the worker that this leaves behind is ended here, by its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_repro.servers.base import Exit, RankFacts, Server, ServerFacts

__all__ = ["RankedServer"]


class RankedServer(Server):
    """head: the first node. followers: the others, by rank from 1; their logs are their own."""

    def __init__(self, head: Server, followers: Sequence[Server]) -> None:
        self.head = head
        self.followers = tuple(followers)
        self.base_url = head.base_url
        self.log_path = head.log_path

    @property
    def rank_logs(self) -> tuple[Path, ...]:
        return tuple(follower.log_path for follower in self.followers if follower.log_path is not None)

    async def start(self) -> ServerFacts:
        try:
            first = await self.head.start()  # before the others, whose containers join its network
            ranks = []
            for rank, follower in enumerate(self.followers, 1):
                facts = await follower.start()
                ranks.append(RankFacts(rank, facts.argv, facts.env, facts.pid, facts.container_id))
            return replace(first, ranks=tuple(ranks))
        except BaseException:
            await self.stop()
            raise

    def booted(self, facts: ServerFacts, *, ready: bool) -> ServerFacts:
        for follower in self.followers:
            follower.booted(
                facts, ready=ready
            )  # what it would say of itself the first node says too; what is wrong with it, it alone
        return self.head.booted(facts, ready=ready)

    async def exited(self) -> Exit:
        return await self.head.exited()

    async def rank_exited(self) -> tuple[int, Exit]:
        """The rank of the first further node that ended, and how. Safe to cancel and to call again."""
        waits = {asyncio.ensure_future(follower.exited()): rank for rank, follower in enumerate(self.followers, 1)}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            first = min(done, key=lambda task: waits[task])
            return waits[first], first.result()
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def outlasting(self, seconds: float) -> tuple[int, ...]:
        waits = [asyncio.ensure_future(follower.exited()) for follower in self.followers]
        try:
            await asyncio.wait(waits, timeout=seconds)
            return tuple(rank for rank, task in enumerate(waits, 1) if not task.done())
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def stop(self) -> None:
        for server in (self.head, *self.followers):
            await server.stop()

    def stranger(self) -> str:
        return self.head.stranger()

    def processes(self) -> tuple[int, ...]:
        own = self.head.processes()
        # A node's first process is its launcher, whose end is no death; its workers are part of the engine.
        return own + tuple(pid for follower in self.followers for pid in follower.processes()[1:])
