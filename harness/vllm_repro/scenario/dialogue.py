"""A growing chat as a client keeps it: what was said so far, and who speaks next. Pure.

Replies are made up (see `workload.conversation`). With tools each reply is a call of the first one, and the message after it
is that call's result, which is how agents fill a context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Dialogue"]

_REPLY = "I have read this. Please go on."


@dataclass
class Dialogue:
    """tools: schemas, as the API takes them. said: the messages so far, a reply last.
    answered: tokens of the longest prompt that the server answered.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    said: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    answered: int = 0

    @property
    def opening(self) -> dict[str, Any]:
        """The next message, without its content: the user's, or the result of the call that was made last."""
        if self.tools and self.turns:
            return {"role": "tool", "tool_call_id": self._call_id}
        return {"role": "user"}

    def take(self, message: Mapping[str, Any]) -> None:
        """Adds a message that was sent, and the reply to it."""
        self.turns += 1
        reply: dict[str, Any] = {"role": "assistant", "content": _REPLY}
        if self.tools:
            call = {"name": self.tools[0]["function"]["name"], "arguments": "{}"}
            reply["tool_calls"] = [{"id": self._call_id, "type": "function", "function": call}]
        self.said += [dict(message), reply]

    @property
    def _call_id(self) -> str:
        return f"call_{self.turns}"
