"""Functions of the lab around methods of vLLM. Imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any


def wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method or class method by `function`, which gets the original as first argument."""
    method = getattr(owner, name)
    original = getattr(method, "__func__", method)

    @wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(original, *arguments, **keywords)

    setattr(owner, name, call if original is method else classmethod(call))


def keep(platform: Any, *names: str) -> None:
    """Make vLLM's CPU platform keep values of the configuration that it would change.

    platform: the class `CpuPlatform`. names: such as `scheduler_config.async_scheduling`.
    """

    def check_and_update_config(original: Any, cls: Any, vllm_config: Any) -> None:
        chosen = [attrgetter(name)(vllm_config) for name in names]
        original(cls, vllm_config)
        for name, value in zip(names, chosen, strict=True):
            part, _, field = name.partition(".")
            setattr(getattr(vllm_config, part), field, value)

    wrap(platform, "check_and_update_config", check_and_update_config)
