"""State of a growing chat: its messages, and the role of the next one.

Replies are fixed texts (see `workload.conversation`). With tools each reply calls the first tool, and the next message is its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Dialogue"]

_REPLY = "I have read this. Please go on."


@dataclass
class Dialogue:
    """A growing chat. tools: schemas, as in the API. said: messages so far. answered: tokens of the longest answered prompt."""

    tools: Sequence[Mapping[str, Any]] = ()
    said: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    answered: int = 0

    @property
    def opening(self) -> dict[str, Any]:
        """The next message without its content: a user message, or the result of the last tool call."""
        if self.tools and self.turns:
            return {"role": "tool", "tool_call_id": self._call_id}
        return {"role": "user"}

    def take(self, message: Mapping[str, Any]) -> None:
        """Add a sent message and the reply to it."""
        self.turns += 1
        reply: dict[str, Any] = {"role": "assistant", "content": _REPLY}
        if self.tools:
            call = {"name": self.tools[0]["function"]["name"], "arguments": "{}"}
            reply["tool_calls"] = [{"id": self._call_id, "type": "function", "function": call}]
        self.said += [dict(message), reply]

    @property
    def _call_id(self) -> str:
        return f"call_{self.turns}"
