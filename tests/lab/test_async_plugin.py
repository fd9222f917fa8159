"""The mechanism `async` with stubs of vLLM: the kept setting, streams, and the route that feeds one request with segments."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest


class Platform:
    """The part of vLLM's CPU platform that the plugin replaces."""

    checked: ClassVar[list[str]] = []

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        cls.checked.append(cls.__name__)
        vllm_config.scheduler_config.async_scheduling = False
        vllm_config.scheduler_config.other = "changed"


def loaded(monkeypatch: pytest.MonkeyPatch, name: str, modules: dict[str, object]) -> Any:
    for parent in ("vllm", "vllm.platforms", "vllm.engine", "fastapi"):
        modules.setdefault(parent, ModuleType(parent))
    for module, content in modules.items():
        monkeypatch.setitem(sys.modules, module, content)
    monkeypatch.delitem(sys.modules, f"vllm_repro_lab.{name}", raising=False)
    plugin = importlib.import_module(f"vllm_repro_lab.{name}")
    sys.modules.pop(f"vllm_repro_lab.{name}")
    return plugin


def installed(monkeypatch: pytest.MonkeyPatch, platform: object) -> tuple[Any, Any]:
    """Install the mechanism over stubs; return torch and the model runner's module."""
    torch: Any = ModuleType("torch")
    torch.cuda, torch.device = SimpleNamespace(), str
    runner, worker = ModuleType("runner"), ModuleType("vllm.v1.worker")
    worker.cpu_model_runner = runner  # type: ignore[attr-defined]  # a stub
    modules: dict[str, object] = {
        "torch": torch,
        "vllm.platforms.cpu": SimpleNamespace(CpuPlatform=platform),
        "vllm.v1": ModuleType("vllm.v1"),
        "vllm.v1.worker": worker,
        "vllm.v1.worker.cpu_worker": ModuleType("cpu_worker"),
    }
    loaded(monkeypatch, "async_steps", modules).install()
    return torch, runner


def test_streams_and_events_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, runner = installed(monkeypatch, type("CpuPlatform", (Platform,), {}))
    with runner._torch_cuda_wrapper():
        stream, event = torch.cuda.Stream(), torch.cuda.Event(blocking=True)
    stream.wait_stream(torch.cuda.current_stream())
    event.record(stream)
    event.synchronize()
    assert torch.Event is torch.cuda.Event


@pytest.mark.parametrize("decided", [True, False, None])
def test_the_platform_keeps_what_was_decided_and_changes_the_rest(
    monkeypatch: pytest.MonkeyPatch, decided: bool | None
) -> None:
    platform = type("CpuPlatform", (Platform,), {})
    installed(monkeypatch, platform)
    config = SimpleNamespace(async_scheduling=decided, other="")
    # made above
    platform.check_and_update_config(SimpleNamespace(scheduler_config=config))  # type: ignore[attr-defined]
    assert (config.async_scheduling, config.other) == (decided, "changed")
    assert Platform.checked.pop() == "CpuPlatform"


class Engine:
    """Engine that answers each segment with its length."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    async def generate(
        self, inputs: AsyncIterator[Any], params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        self.given.append(params)
        assert request_id
        async for one in inputs:
            yield SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[len(one.prompt["prompt_token_ids"])])]
            )


def test_segments_are_fed_to_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, object] = {
        "vllm.engine.protocol": SimpleNamespace(StreamingInput=SimpleNamespace),
        "vllm.sampling_params": SimpleNamespace(
            SamplingParams=SimpleNamespace(from_optional=dict),
            RequestOutputKind=SimpleNamespace(DELTA="delta"),
        ),
        "fastapi.responses": SimpleNamespace(JSONResponse=lambda content: json.dumps(content)),
    }
    plugin, engine = loaded(monkeypatch, "segments", modules), Engine()
    state = SimpleNamespace(engine_client=engine)

    async def body() -> dict[str, Any]:
        return {"model": "m", "segments": [[7, 8, 9], 0, [10]], "max_tokens": 2}

    async def passed_on(request: Any) -> str:
        return f"passed on {request.url.path}"

    def asked(path: str) -> Any:
        request = SimpleNamespace(
            url=SimpleNamespace(path=path), json=body, app=SimpleNamespace(state=state)
        )
        return asyncio.run(plugin.route(request, passed_on))

    assert asked("/v1/completions") == "passed on /v1/completions"
    assert engine.given == []
    assert json.loads(asked("/segments")) == {"token_ids": [3, 1]}
    assert engine.given == [{"max_tokens": 2, "output_kind": "delta"}]
