"""pytest file of a finding, for vLLM's own `tests/v1/core`, which imports nothing of this package.

It plays the scheduler and the connector alone, without the checks of block accounting and of
answers.
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
from vllm_repro_explore.scenario_setup import case_from

_FOLDER = Path(__file__).with_name("templates")
_WIDTH = 118
_SIMPLE, _OFFLOADING = "SimpleCPUOffloadConnector", "OffloadingConnector"
_PARTS = {
    "": (),
    _SIMPLE: (_SIMPLE,),
    _OFFLOADING: (_OFFLOADING,),
    "MultiConnector": (_SIMPLE, _OFFLOADING),
}
"""Connectors that the template has copies for, with the parts of each."""
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
        ("" if scenario.filed else "Not reported. Related, not this bug: ")
        + issue_url(scenario.issue),
        (
            f"vLLM with the bug: {scenario.status.bad}; without:"
            f" {scenario.status.good or 'none known'}. Arm: {arm.name}."
        ),
    ]
    return _test_file(case_from(scenario, arm).as_json(), about)


def _test_file(case: Mapping[str, Any], about: Sequence[str]) -> str:
    """Return the pytest file for a case, as `Case.as_json` has it.

    about: lines on the bug, the first a sentence.

    Raises `UsageError` for a connector whose copies the test cannot simulate.
    """
    if case["connector"] not in _PARTS:
        raise UsageError(f"no test shows this finding: it has no copies for {case['connector']}")
    parts = _PARTS[case["connector"]]
    requests = [request for wave in case["waves"] for request in wave]
    text = plain_text(
        "scheduler_test.txt",
        _FOLDER,
        about="\n".join(line for text in about for line in wrap(text, _WIDTH) or [""])
        .replace("\\", "\\\\")
        .replace('"""', "'''"),
        case=case,
        simple=_SIMPLE in parts,
        offloading=_OFFLOADING in parts,
        late=any(request["after"] or request["abort"] >= 0 for request in requests),
        flags=_flags(case),
        extra=_extra(case, parts),
        waves=_waves(case),
    )
    return f"{text}\n"


def _flags(case: Mapping[str, Any]) -> list[str]:
    """Return source lines with the engine arguments of the case."""
    flags = {
        **{flag: case[name] for name, flag in _FLAGS.items()},
        "enable_chunked_prefill": True,
        "dtype": "bfloat16",
        # some releases disable it if there is a connector
        "disable_hybrid_kv_cache_manager": not case["hybrid"],
        **({"speculative_config": speculative_config(case["draft"])} if case["draft"] else {}),
    }
    text = ", ".join(f"{name}={value!r}" for name, value in flags.items())
    return wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _waves(case: Mapping[str, Any]) -> list[str]:
    """Return source lines that define `WAVES`, the requests of each wave."""
    waves = [_list([_call(request) for request in wave]) for wave in case["waves"]]
    whole = f"WAVES = {_list(waves)}"
    if len(whole) <= _WIDTH:
        return [whole]
    lines = [
        f"    *{many} * [{wave}]," if many > 1 else f"    {wave}," for wave, many in runs(waves)
    ]
    return ["WAVES = [", *lines, "]"]


def _list(values: Sequence[str]) -> str:
    """Return the source of a list of expressions, such as `2 * [a] + [b]` for a, a, b."""
    return " + ".join(
        f"{many} * [{value}]" if many > 1 else f"[{value}]" for value, many in runs(values)
    )


def _call(request: Mapping[str, Any]) -> str:
    """Return the source of one request, a call of `dict`."""
    fields = {
        **{name: request[name] for name in ("prompt", "answer")},
        **{name: request[name] for name in ("shared", "after") if request[name]},
        **({"abort": request["abort"]} if request["abort"] >= 0 else {}),
    }
    return f"dict({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _extra(case: Mapping[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """Return the connector's `kv_connector_extra_config`. parts: names of its connectors."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": case["cpu_blocks"] * case["block"] * KV_BYTES}
    if len(parts) > 1:
        return {"connectors": [transfer_config(name, extra) for name in parts]}
    return extra | ({"lazy_offload": True} if case["lazy"] and _SIMPLE in parts else {})
