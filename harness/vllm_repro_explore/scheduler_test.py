"""pytest file of a finding, for vLLM's own `tests/v1/core`: a case, and a player that needs nothing of this package.

It plays the scheduler and the connector alone, without the checks of block accounting and of
answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from textwrap import wrap
from typing import Any

from vllm_repro.errors import UsageError
from vllm_repro.report.build import build_foreign
from vllm_repro.report.format import runs, template_for
from vllm_repro.report.model import issue_url
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro_explore.case import beyond_scheduler
from vllm_repro_explore.draft import KV_BYTES
from vllm_repro_explore.finding import ENDLESS, FindingKind
from vllm_repro_explore.scenario_setup import case_from

__all__ = ["finding_test", "folder_test", "scenario_test"]

_TEMPLATE = Path(__file__).with_name("templates") / "scheduler_test.txt"
_WIDTH = 118
_COPY = '''
class Copy:
    """A copy of KV blocks: complete after some polls, or when it is waited for."""

    def __init__(self, polls):
        self.left = polls

    def query(self):
        self.left -= 1
        return self.left < 0

    def synchronize(self):
        self.left = 0

'''
_SIMPLE = """
class SimpleCopies:
    def launch_copy(self, source, target, is_store, event_idx, events_list, wait_event=None):
        events_list.append((event_idx, Copy(STORE_POLLS if is_store else LOAD_POLLS)))

"""
_OFFLOADING = """
class OffloadingCopies:
    def __init__(self):
        self.jobs = {}

    def submit_store(self, job_id, source, target):
        self.jobs[job_id] = Copy(STORE_POLLS)
        return True

    def submit_load(self, job_id, source, target):
        self.jobs[job_id] = Copy(LOAD_POLLS)
        return True

    def transfer_async(self, job_id, spec):  # of older releases
        return (self.submit_store if "GPU" in type(spec[0]).__name__ else self.submit_load)(job_id, *spec)

    def get_finished(self):
        done = [job for job, copy in self.jobs.items() if copy.query()]
        unknown = dict(transfer_size=None, transfer_time=None, transfer_type=None)
        self.jobs = {job: copy for job, copy in self.jobs.items() if job not in done}
        return [MagicMock(job_id=job, success=True, **unknown) for job in done]

    def wait(self, job_ids):
        for job in set(job_ids) & set(self.jobs):
            self.jobs[job].synchronize()

"""

_WORKER = """
def worker_half(config, cache, monkeypatch):
    \"\"\"Return the connector's half of a worker, which copies nothing.\"\"\"
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
    for one in getattr(connector, "_connectors", [connector]):
$install    return connector


def copied(worker, finished):
    \"\"\"Return what a worker reports of its copies after a step.\"\"\"
    found = KVConnectorOutput()
    worker.start_load_kv(MagicMock(no_compile_layers={}, attn_metadata=None))
    worker.wait_for_save()
    found.finished_sending, found.finished_recving = worker.get_finished(finished)
    found.kv_connector_worker_meta = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    return found

"""
_INSTALL = {
    "SimpleCPUOffloadConnector": (
        """\
        if getattr(one, "worker_handler", None) is not None:  # there is none without prefix caching
            monkeypatch.setattr("vllm.v1.simple_kv_offload.worker.torch", MagicMock())  # its CUDA events
            one.worker_handler._backend = SimpleCopies()
"""
    ),
    "OffloadingConnector": (
        """\
        if hasattr(one, "connector_worker"):
            one.connector_worker.worker = OffloadingCopies()
"""
    ),
}
_CLASSES = {"SimpleCPUOffloadConnector": _SIMPLE, "OffloadingConnector": _OFFLOADING}
_FLAGS = {
    "max_len": "max_model_len",
    "block": "block_size",
    "blocks": "num_gpu_blocks_override",
    "chunk": "max_num_batched_tokens",
    "seqs": "max_num_seqs",
    "caching": "enable_prefix_caching",
}


def finding_test(finding: Mapping[str, Any], version: str) -> str:
    """Return the file for a finding, as `explore.json` has it.

    Raise `UsageError` for one that such a test does not show.
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
    return _file(finding["case"], about)


def folder_test(folder: Path) -> str:
    """Return the file for the worst finding of a search that a test shows, else for the scenario of a run."""
    path = folder / "explore.json"
    if not path.is_file():
        return scenario_test(find(build_foreign(folder).scenario))
    search = json.loads(path.read_text(encoding="utf-8"))
    findings = search.get("findings") or ()
    if not findings:
        raise UsageError(
            f"{folder} has no finding", hint="vllm-repro explore writes a test for each finding"
        )
    shown = [one for one in findings if one.get("test")]
    return finding_test((shown or findings)[0], search["vllm_version"])


def scenario_test(scenario: Scenario, arm: Arm | None = None) -> str:
    """Return the file for an arm, by default the first.

    Raise `UsageError` if the scheduler alone cannot play it.
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
        ("" if scenario.filed else "Not reported; nearest is ") + issue_url(scenario.issue),
        (
            f"vLLM with the bug: {scenario.status.bad}; without:"
            f" {scenario.status.good or 'none known'}. Arm: {arm.name}."
        ),
    ]
    return _file(case_from(scenario, arm).as_json(), about)


def _file(case: Mapping[str, Any], about: Sequence[str]) -> str:
    """Return the file for a case, as `Case.as_json` has it.

    about: lines on the bug, the first a sentence without its stop.
    """
    connectors = _parts(case["connector"])
    copies = [_COPY, *(_CLASSES[name] for name in connectors)] if connectors else []
    install = "".join(_INSTALL[name] for name in connectors)
    late = any(
        request["after"] or request["abort"] >= 0 for wave in case["waves"] for request in wave
    )
    words = {
        "connector": bool(connectors),
        "bare": not connectors,
        "draft": bool(case["draft"]),
        "async": bool(case["asynchronous"]),
        "sync": not case["asynchronous"],
        "late": late,
        "together": not late,
        "runner": case["runner"] == 2,
    }
    template = template_for(
        _TEMPLATE.read_text(encoding="utf-8"), {word for word, holds in words.items() if holds}
    )
    return Template(template).substitute(
        about=_docstring(case, about),
        data="\n".join(_data(case)),
        copies="".join(
            (*copies, Template(_WORKER).substitute(install=install) if install else "\n")
        ),
    )


def _parts(connector: str) -> tuple[str, ...]:
    return tuple(_CLASSES) if connector == "MultiConnector" else (connector,) if connector else ()


def _docstring(case: Mapping[str, Any], about: Sequence[str]) -> str:
    what = (
        ", KV cache manager and both halves of the connector"
        if case["connector"]
        else " and KV cache manager"
    )
    copies = (
        ", and copies of KV blocks, each complete after some polls" if case["connector"] else ""
    )
    lines = [
        *(line for text in about for line in wrap(text, _WIDTH) or [""]),
        "",
        "Run it with pytest, alone or in tests/v1/core; it needs no GPU and downloads nothing.",
        *wrap(
            f"Scheduler{what} are vLLM's own. Made up are the tokens of the model{copies}.", _WIDTH
        ),
    ]
    text = "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}\n"""'


def _data(case: Mapping[str, Any]) -> Iterator[str]:
    flags = {flag: case[name] for name, flag in _FLAGS.items()} | {
        "enable_chunked_prefill": True,
        "dtype": "bfloat16",
    }
    # some releases disable it if there is a connector
    flags["disable_hybrid_kv_cache_manager"] = not case["hybrid"]
    if case["draft"]:
        given = {"method": "ngram", "num_speculative_tokens": case["draft"], "prompt_lookup_max": 4}
        flags["speculative_config"] = given
    yield "FLAGS = dict("
    yield from wrap(
        ", ".join(f"{name}={value!r}" for name, value in flags.items()),
        _WIDTH,
        initial_indent="    ",
        subsequent_indent="    ",
    )
    yield ")"
    if case["connector"]:
        yield f"CONNECTOR, EXTRA = {case['connector']!r}, {_extra(case)!r}"
    yield f"LAYERS, WINDOW = {list(case['layers'])!r}, {case['window']!r}"
    yield (
        "# The requests of one list arrive together, each list when the one before was answered."
        " shared: with the others."
    )
    waves = [_list([_call(request) for request in wave]) for wave in case["waves"]]
    whole = f"WAVES = {_list(waves)}"
    if len(whole) <= _WIDTH:
        yield whole
    else:
        yield "WAVES = ["
        yield from (
            f"    *{many} * [{wave}]," if many > 1 else f"    {wave}," for wave, many in runs(waves)
        )
        yield "]"
    if case["connector"]:
        yield f"STORE_POLLS, LOAD_POLLS = {case['store_polls']!r}, {case['load_polls']!r}"
    yield (
        f"SEED, DRAFT = {case['seed']!r}, {case['draft']!r}"
        if case["draft"]
        else f"SEED = {case['seed']!r}"
    )


def _list(values: Sequence[str]) -> str:
    """Return an expression for the list, with repeated values written once."""
    return " + ".join(
        f"{many} * [{value}]" if many > 1 else f"[{value}]" for value, many in runs(values)
    )


def _call(request: Mapping[str, Any]) -> str:
    given = {"prompt": request["prompt"], "answer": request["answer"]}
    given |= {name: request[name] for name in ("shared", "after") if request[name]}
    given |= {"abort": request["abort"]} if request["abort"] >= 0 else {}
    return f"dict({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _extra(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the connector's settings."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": case["cpu_blocks"] * case["block"] * KV_BYTES}
    if case["connector"] == "MultiConnector":
        parts = [
            {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
            for name in _CLASSES
        ]
        return {"connectors": parts}
    return extra | (
        {"lazy_offload": True}
        if case["lazy"] and case["connector"] == "SimpleCPUOffloadConnector"
        else {}
    )
