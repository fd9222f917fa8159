"""pytest file of a finding, for vLLM's own `tests/v1/core`, which imports nothing of this package.

It plays the scheduler and the connector alone, without the check of block accounting. It checks
what the blocks hold only for a scenario with wrong answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from vllm_repro.errors import UsageError
from vllm_repro.report.build import build_foreign
from vllm_repro.report.document import plain_text
from vllm_repro.report.format import runs
from vllm_repro.report.model import issue_url
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro_explore.case import beyond_scheduler
from vllm_repro_explore.draft import KV_BYTES, speculative_config, transfer_config
from vllm_repro_explore.finding import ENDLESS, FindingKind
from vllm_repro_explore.scheduler_case import scheduler_case

_FOLDER = Path(__file__).with_name("templates")
_WIDTH = 118
_SIMPLE, _OFFLOADING = "SimpleCPUOffloadConnector", "OffloadingConnector"
_NIXL, _LATE = "NixlConnector", "LateConnector"
_COPIED = (_SIMPLE, _OFFLOADING, _NIXL, _LATE)
"""Connectors that the template has copies for, alone or as parts of a MultiConnector."""
_REQUEST = {
    "prompt": None,
    "answer": None,
    "shared": 0,
    "after": 0,
    "abort": -1,
    "priority": 0,
    "transfer": None,
    "parts": None,
    "stop": None,
    "reset": None,
}
"""Arguments of a request in the test, with the default of each."""
_FLAGS = {
    "max_len": "max_model_len",
    "block": "block_size",
    "blocks": "num_gpu_blocks_override",
    "chunk": "max_num_batched_tokens",
    "seqs": "max_num_seqs",
    "caching": "enable_prefix_caching",
}


def finding_test(finding: Mapping[str, Any], version: str) -> str:
    """Return the text of a pytest file that shows a finding. finding: an item of `explore.json`.

    Raises `UsageError` for a finding that such a test does not show.
    """
    if (
        FindingKind(finding["kind"]) in (FindingKind.CORRUPTED, FindingKind.LEAK)
        or finding["site"] == ENDLESS
    ):
        raise UsageError(
            f"no test shows this finding ({finding['site']}): the engine neither dies nor stalls"
            " between steps"
        )
    if beyond := beyond_scheduler(finding["case"]):
        raise UsageError(
            f"no test shows this finding: the scheduler alone does not play {', '.join(beyond)}"
        )
    about = [
        f"{finding['kind']}: {finding['site']}.",
        "",
        (
            f"Found by a search of vLLM {version}, then shrunk. There this test fails:"
            f" {finding['detail']}."
        ),
        *([f"Known: {finding['known']}."] if finding["known"] else []),
    ]
    return _test_file(finding["case"], about)


def folder_test(folder: Path) -> str:
    """Return the text of a pytest file for the worst finding of a search that a test shows.

    For the folder of a run, return the test of its scenario. Raises `UsageError` if there is no
    finding, or if no such test shows one.
    """
    path = folder / "explore.json"
    if not path.is_file():
        return scenario_test(find(build_foreign(folder).scenario))
    search = json.loads(path.read_text(encoding="utf-8"))
    findings = search.get("findings") or ()
    if not findings:
        raise UsageError(
            f"{folder} has no finding", hint="vllm-repro explore writes a test for each finding"
        )
    shown = [finding for finding in findings if finding.get("test")]
    return finding_test((shown or findings)[0], search["vllm_version"])


def scenario_test(scenario: Scenario, arm: Arm | None = None) -> str:
    """Return the text of a pytest file with the workload of an arm, by default the first.

    Raises `UsageError` if the scheduler alone cannot run it, or if the arm has patches.
    """
    arm = arm or scenario.arms[0]
    if arm.patches:
        raise UsageError(
            f"the arm {arm.name} changes vLLM's source, which this test does not",
            hint="name another --arm",
        )
    about = [
        f"{scenario.title}.",
        "",
        ("" if scenario.filed else "No report was found. Related, not this bug: ")
        + issue_url(scenario.issue),
        (
            f"vLLM with the bug: {scenario.status.bad}; without:"
            f" {scenario.status.good or 'none known'}. Arm: {arm.name}."
        ),
    ]
    return _test_file(scheduler_case(scenario, arm), about)


def _test_file(case: Mapping[str, Any], about: Sequence[str]) -> str:
    """Return the pytest file for a case, as `Case.as_json` has it.

    about: lines on the bug, the first a sentence.

    Raises `UsageError` for a connector whose copies the test cannot simulate.
    """
    requests = [request for wave in case["waves"] for request in wave]
    transfer = _transfer(case)
    parts = _connectors(transfer)
    alone = (_LATE,) if _LATE in parts else ()  # its test has no copies of another connector
    if unknown := sorted({*parts} - {*(alone or _COPIED if "transfer" in case else _COPIED[:2])}):
        raise UsageError(f"no test shows this finding: it has no copies for {', '.join(unknown)}")
    text = plain_text(
        "scheduler_test.txt",
        _FOLDER,
        about="\n".join(line for text in about for line in wrap(text, _WIDTH - 3) or [""])
        .replace("\\", "\\\\")
        .replace('"""', "'''"),
        case=case,
        seconds="seconds" in case,
        content=case.get("content", False),
        simple=_SIMPLE in parts,
        offloading=_OFFLOADING in parts,
        nixl=_NIXL in parts,
        late_connector=_LATE in parts,
        mamba="mamba" in case["layers"],
        uses=(uses := _uses(requests)),
        more=uses["priority"] or uses["parts"],
        timed=any(uses[name] for name in ("after", "abort", "parts", "reset")),
        constants=_lines("FLAGS", _flags(case)) + (_lines("TRANSFER", transfer) if parts else []),
        waves=_waves(case),
    )
    return f"{text}\n"


def _uses(requests: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return for each argument of a request whether one of the requests has it."""
    return {
        name: any(request.get(name, default) != default for request in requests)
        for name, default in _REQUEST.items()
    }


def _flags(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine arguments of the case."""
    return {
        **{flag: case[name] for name, flag in _FLAGS.items()},
        "enable_chunked_prefill": True,
        "dtype": "bfloat16",
        # some releases disable it if there is a connector
        "disable_hybrid_kv_cache_manager": not case["hybrid"],
        **({"scheduling_policy": "priority"} if case["priority"] else {}),
        **({"long_prefill_token_threshold": case["threshold"]} if case["threshold"] else {}),
        **({"mamba_cache_mode": case["mamba_mode"]} if "mamba" in case["layers"] else {}),
        **({"speculative_config": speculative_config(case["draft"])} if case["draft"] else {}),
    }


def _lines(name: str, values: Mapping[str, Any]) -> list[str]:
    """Return source lines that define `name`, a `dict` with the values."""
    text = ", ".join(f"{key}={value!r}" for key, value in values.items())
    return wrap(f"{name} = dict({text})", _WIDTH, subsequent_indent="    ")


def _waves(case: Mapping[str, Any]) -> list[str]:
    """Return source lines that define `WAVES`, the requests of each wave."""
    waves = [_list([_call(request) for request in wave]) for wave in case["waves"]]
    whole = f"WAVES = {_list(waves)}"
    if len(whole) <= _WIDTH:
        return [whole]
    lines = [
        f"    *{many} * [{wave}]," if many > 1 else f"    {wave}," for wave, many in runs(waves)
    ]
    wrapped = [part for line in lines for part in wrap(line, _WIDTH, subsequent_indent=" " * 8)]
    return ["WAVES = [", *wrapped, "]"]


def _list(values: Sequence[str]) -> str:
    """Return the source of a list of expressions, such as `2 * [a] + [b]` for a, a, b."""
    return " + ".join(
        f"{many} * [{value}]" if many > 1 else f"[{value}]" for value, many in runs(values)
    )


def _call(request: Mapping[str, Any]) -> str:
    """Return the source of one request, a call of `dict`."""
    fields = {
        name: request[name]
        for name, default in _REQUEST.items()
        if request.get(name, default) != default
    }
    return f"dict({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _transfer(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's `KVTransferConfig`; empty without a connector.

    The sizes of offloading connectors are those of the test's blocks.
    """
    extra: dict[str, Any] = {"cpu_bytes_to_use": case["cpu_blocks"] * case["block"] * KV_BYTES}
    match case["connector"], case.get("transfer"):
        case str(name), _ if name in (_SIMPLE, _OFFLOADING):
            lazy = {"lazy_offload": True} if case["lazy"] and name == _SIMPLE else {}
            return transfer_config(name, extra | lazy)
        case "MultiConnector", None:
            parts = [transfer_config(name, extra) for name in (_SIMPLE, _OFFLOADING)]
            return transfer_config("MultiConnector", {"connectors": parts})
        case str(name), None if name:
            return transfer_config(name, {})
        case _, transfer:
            return _without_module(transfer or {})


def _without_module(transfer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `--kv-transfer-config` without modules: the test has its connector itself."""
    kept = {name: transfer[name] for name in transfer if name != "kv_connector_module_path"}
    extra = dict(kept.get("kv_connector_extra_config", {}))
    if "connectors" in extra:
        extra["connectors"] = [_without_module(part) for part in extra["connectors"]]
    return kept | ({"kv_connector_extra_config": extra} if extra else {})


def _connectors(transfer: Mapping[str, Any]) -> list[str]:
    """Return the names of the connectors that move blocks: itself, or its parts."""
    parts = transfer.get("kv_connector_extra_config", {}).get("connectors", [transfer])
    return [part["kv_connector"] for part in parts if part]
