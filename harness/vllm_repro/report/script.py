"""`repro.py`: one file that repeats an arm's requests on a plain vLLM.

It needs only the standard library and `openai`.

Prompts whose length matters are sent as token ids, from a fixed seed: their length is exact without
a tokenizer. A chat of a stated length becomes a completion of the same length, which is the same
prompt for the engine.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from textwrap import wrap
from typing import Any, assert_never

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.flags import group_by_flag
from vllm_repro.errors import UsageError
from vllm_repro.releases.known import CPU_BUILDS
from vllm_repro.releases.versions import DISTRIBUTION
from vllm_repro.report.format import runs, template_for
from vllm_repro.report.model import RunReport, issue_url
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.scenario.workload import (
    Conversation,
    Pause,
    Request,
    Rest,
    Size,
    Step,
    Together,
    requests_of,
    resolve,
)
from vllm_repro.servers.launch import FIRST_RUNNER, Launch, ServedModel, process_launch
from vllm_repro.verdict.verdict import Expected, Standing
from vllm_repro_diagnosis.diagnosis import Phase
from vllm_repro_diagnosis.evidence import Evidence

_TEMPLATE = Path(__file__).with_name("templates") / "repro.txt"
_COMPLETIONS = "/v1/completions"
_WIDTH = 120
_HOLE = re.compile(r"{\w*}")
"""A hole in the template of a message."""
_OF_TEMPLATE = (
    "tools",
    "tool_choice",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
)
"""Fields of a chat that a completion does not have."""


def no_script(scenario: Scenario) -> str:
    """Return why no `repro.py` can show the scenario's bug; empty if one can."""
    if all(arm.patches for arm in scenario.arms):
        return "every arm of this scenario changes vLLM's source, which a script does not"
    if scenario.lab and any("--middleware" in edit.words for edit in scenario.lab.changes):
        return "its requests take a route that the lab adds, which a plain vLLM does not have"
    lab_kinds = scenario.lab.shape(scenario.model).kinds if scenario.lab else ()
    if "mamba" in lab_kinds and scenario.reported().has("--num-gpu-blocks-override"):
        return "its pool is counted in blocks, whose size a real Mamba model sets by itself"
    requests = (each for arm in scenario.arms for each in requests_of(scenario.workload_of(arm)))
    transfers = filter(None, (each.fields.get("kv_transfer_params") for each in requests))
    if not all(transfer.get("do_remote_decode") for transfer in transfers):
        return "it loads KV blocks that must come from outside the server"
    return ""


def script_of_run(report: RunReport, scenario: Scenario, *, brief: bool = False) -> str | None:
    """Return the text of a run's `repro.py`, or None if it cannot have one (`no_script`).

    It shows the most important failure of an arm without patches, else the first such arm. brief:
    as in `script`.
    """
    if no_script(scenario):
        return None
    tried = [scenario.arm(arm.name) for arm in (*(arm for arm, _ in report.failures), *report.arms)]
    arms = [arm for arm in (*tried, *scenario.arms) if arm is not None and not arm.patches]
    return script(scenario, arms[0], report, brief=brief)


def script(
    scenario: Scenario, arm: Arm, report: RunReport | None = None, *, brief: bool = False
) -> str:
    """Return the text of a `repro.py` that boots an arm and sends its requests.

    Raises `UsageError` for an arm with patches, or if no script can show the scenario's bug
    (`no_script`).

    report: the run that it belongs to. brief: say at the head only how to use the script, and
    nothing of the bug.
    """
    launch = _launch(scenario, arm, 0, report)
    steps = scenario.workload_of(arm)
    boots = (
        scenario.signature
        if scenario.signature and scenario.signature.phase is Phase.BOOT
        else None
    )
    at_boot = [boots.exception, *filter(None, _HOLE.split(boots.message))] if boots else []
    requests = list(requests_of(steps))
    late = any(each.starts_after or each.leaves_after is not None for each in requests)
    parts = {
        "boot": bool(at_boot),
        "ready": not at_boot,
        "idle": any(isinstance(step, Rest) for step in steps),
        "late": late,
    }
    words = [word for word, holds in parts.items() if holds]
    return Template(template_for(_TEMPLATE.read_text(encoding="utf-8"), words)).substitute(
        about=(
            "\n".join(f"# {' '.join(line.split())}" for line in _usage(scenario, report))
            if brief
            else _about(scenario, report)
        ),
        data="\n".join(
            [
                f"MODEL = {scenario.model.name!r}",
                f"ENV = {dict(launch.env)!r}",
                f"COMMAND = r'''\n{_wrapped(launch.argv)}\n'''",
                "# One list is sent at the same time; a number is a pause in seconds.",
                "STEPS = [",
                *(f"    {line}" for line in _steps(steps, launch.command)),
                "]",
                f"REPORTED = {_reported(scenario, arm)!r}",
                *([f"AT_BOOT = {at_boot!r}"] if at_boot else []),
            ]
        ),
    )


def _launch(scenario: Scenario, arm: Arm, port: int, report: RunReport | None = None) -> Launch:
    """Return the command of an arm on a plain vLLM, with the model runner of the run `report`.

    Raises `UsageError` for an arm with patches, or if no script can show the scenario's bug
    (`no_script`).
    """
    if why := no_script(scenario):
        raise UsageError(f"no script for {scenario.id}: {why}", hint="vllm-repro show --as lab")
    if arm.patches:
        raise UsageError(
            f"the arm {arm.name} changes vLLM's source, which this script does not",
            hint="--arm with an arm without patches, or --as docker",
        )
    evidence = Evidence.GPU if scenario.needs.gpus else Evidence.CPU
    weights = ServedModel(name=scenario.model.name)
    # Without Triton, as on a CPU, vLLM takes the first runner by itself; on a GPU it may not.
    first = not scenario.needs.gpus or any(
        FIRST_RUNNER in each.server.env.items() for each in (report.arms if report else ())
    )
    return process_launch(
        scenario,
        arm,
        vllm=("vllm",),
        env=dict([FIRST_RUNNER]) if first else {},
        weights=weights,
        port=port,
        evidence=evidence,
    )


def _wrapped(argv: tuple[str, ...]) -> str:
    """Return a command for a shell, in lines of whole flags, without `--host` and `--port`.

    The script adds these itself.
    """
    groups = (group for group in group_by_flag(argv[3:]) if group[0] not in ("--host", "--port"))
    lines = [shlex.join(argv[:3])]
    for flag in map(shlex.join, groups):
        if len(lines[-1]) + len(flag) < _WIDTH:
            lines[-1] += f" {flag}"
        else:
            lines.append(f"    {flag}")
    return "\n".join(lines)


def _reported(scenario: Scenario, arm: Arm) -> str:
    """Return in words what this arm does in a release with the bug, such as its exception."""
    match arm.expected:
        case Expected.DIES:
            dies = scenario.signature
            named = (
                filter(None, (dies.exception, _HOLE.sub("...", dies.message)))
                if dies
                else ["the engine dies"]
            )
            return ": ".join(named)
        case Expected.HANGS:
            return "requests without an answer"
        case Expected.SPINS:
            return "an engine that keeps working with no request left"
        case Expected.ERRS:
            return "wrong answers, which this script prints and does not judge"
        case Expected.LIVES | Expected.UNTRIGGERED:
            return "this configuration lives"
    assert_never(arm.expected)


_TOKENS = """\
# Prompts of a stated length are random token ids. \
tokens SEED LENGTH SHARED: the first SHARED are those of all prompts.
tokens() { python3 -c 'import random, sys
seed, length, shared = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ids = lambda seed, count: random.Random(seed).choices(range(1000, 3000), k=count)
print(ids("shared", shared) + ids(seed, length - shared))' "$@"; }"""


def curl(scenario: Scenario, arm: Arm, port: int) -> str:
    """Return an arm's server command and its requests, as curl calls, in lines for a shell.

    port: of the server. Raises `UsageError` for an arm with patches, or if no script can show the
    scenario's bug (`no_script`).
    """
    launch = _launch(scenario, arm, port)
    lines = []
    for number, step in enumerate(scenario.workload_of(arm)):
        match step:
            case Pause(seconds=seconds):
                lines.append(f"sleep {seconds:g}")
            case Rest(within=within):
                lines.append(
                    f"# The engine must go idle within {within:g} s: watch the processor time of"
                    " VLLM::EngineCore."
                )
            case Together(requests=requests):
                calls = [
                    _curl(request, launch.command, f"{number}.{index}")
                    for index, request in enumerate(requests)
                ]
                lines += [*(f"{call} &" for call in calls), "wait"]
            case Conversation() | Request():
                lines += [
                    _curl(request, launch.command, f"{number}.0")
                    for request in requests_of((step,))
                ]
    if any("$(tokens " in line for line in lines):
        lines.insert(0, _TOKENS)
    return "\n".join(
        [
            f"# {' '.join(scenario.title.split())}",
            launch.render(),
            "",
            "# The requests, in another shell, once the server is ready:",
            f"url=http://127.0.0.1:{port}",
            *lines,
        ]
    )


def _curl(request: Request, command: ServeCommand, seed: str) -> str:
    """Return one request as a `curl` call. seed: of the prompt's random token ids.

    command: that of the server, for the model's name and the sizes.
    """
    fields = _fields(request, command)
    path, tokens, shared = (
        fields.pop("path", _COMPLETIONS),
        fields.pop("tokens", 0),
        fields.pop("shared", 0),
    )
    seed = fields.pop("conversation", seed)
    model = (command.get("--served-model-name") or command.model or "").split()[0]
    wait, leave = fields.pop("starts_after", 0), fields.pop("leaves_after", None)
    rest = {name: value for name, value in fields.items() if name not in ("name", "may_fail")}
    body = {"model": model} | rest.get("body", rest)
    leaves = f" -m {leave:g}" if leave is not None else ""
    line = f"curl -s{leaves} \"$url\"{shlex.quote(path)} -H 'Content-Type: application/json' -d "
    if tokens:
        head = shlex.quote(json.dumps(body)[:-1] + ', "prompt": ')
        line = f"printf %s {head}\"$(tokens {shlex.quote(seed)} {tokens} {shared})\"'}}' | {line}@-"
    else:
        line += shlex.quote(json.dumps(body))
    return f"(sleep {wait:g}; {line})" if wait else line


def _about(scenario: Scenario, report: RunReport | None) -> str:
    """Return the script's docstring: the bug, the releases with it, how to use the script."""
    near = "" if scenario.filed else "No report was found. Related, not this bug: "
    lines = [
        f"{scenario.title}.",
        f"{near}{issue_url(scenario.issue)}",
        (
            f"Releases with the bug: {scenario.status.bad}; without:"
            f" {scenario.status.good or 'none is declared'}."
        ),
        "",
        *_usage(scenario, report),
        "A chat of a stated length is sent as a completion.",
    ]
    if report is not None and report.banner:
        lines.append(f"Made from a run of vllm-repro, and itself not run. {report.banner}")
        if report.replaced:
            because = "; ".join(list(dict.fromkeys(part.why for part in report.replaced))[:3])
            lines += wrap(
                f"The lab replaced {len(report.replaced)} parts, which the report lists"
                f" ({because}), and served a small model or none. This script does neither.",
                _WIDTH,
            )
    text = "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}\n"""'


def _usage(scenario: Scenario, report: RunReport | None) -> list[str]:
    """Return how to use the script, in lines: what to install, arguments, exit status."""
    release = (report and report.vllm_version) or scenario.try_with
    on_cpu = release in CPU_BUILDS and not scenario.needs.gpus
    install, needs = f" {DISTRIBUTION if on_cpu else 'vllm'}=={release}", str(scenario.needs)
    if "+" in release:
        install = f"; vLLM {release} is a build from source"
    elif not scenario.needs.gpus and not on_cpu:
        newest = CPU_BUILDS[-1]
        needs = f"a GPU; for CPUs there is {DISTRIBUTION} up to {newest}"
        if scenario.status.standing(newest) is Standing.BAD:
            needs += ", which has the bug too"
    by_hand = (
        f"Start it on {scenario.needs.nodes} nodes by hand, each with its --node-rank, and use"
        " --url."
    )
    return [
        f"pip install openai{install}    # needs: {needs}",
        "python repro.py [--url URL] [--model NAME_OR_FOLDER] [further flags of vllm serve]",
        (
            "Exit status: 1 the engine died or hangs, 0 it lived, 2 neither is certain. tokens=9:"
            " nine random token ids."
        ),
        *([f"The run itself: {report.banner}"] if report and report.compiled else []),
        *([by_hand] if scenario.needs.nodes > 1 else []),
    ]


def _steps(steps: Iterable[Step], command: ServeCommand) -> Iterable[str]:
    """Yield the lines of the script's list of steps, with repeated ones written once."""
    texts = [text for step in steps for text in _step(step, command)]
    for text, many in runs(texts):
        yield from (f"*{many} * [{text}]," if many > 1 else f"{text},").splitlines()


def _step(step: Step, command: ServeCommand) -> Iterable[str]:
    """Yield one step of the workload as Python source; a conversation gives a text per turn."""
    match step:
        case Pause(seconds=seconds):
            yield f"{float(seconds)}"
        case Rest(within=within):
            yield f"{f'idle within {within:g}'!r}"
        case Together(requests=requests):
            calls = runs([_request(request, command) for request in requests])
            lines = (
                f"    *{many} * [{call}]," if many > 1 else f"    {call}," for call, many in calls
            )
            yield "\n".join(("[", *lines, "]"))
        case Conversation(turns=turns):
            yield from (f"[{_request(turn, command)}]" for turn in turns)
        case Request():
            yield f"[{_request(step, command)}]"


def _request(request: Request, command: ServeCommand) -> str:
    """Return a request as Python source, a call of `dict`."""
    fields = _fields(request, command).items()
    return f"dict({', '.join(f'{name}={value!r}' for name, value in fields)})"


def _fields(request: Request, command: ServeCommand) -> dict[str, Any]:
    """Return a request as {name: value} for the script's `send`.

    First come options such as `tokens` and `path`, then the fields of the request's body. A request
    without a prompt has them all in one, `body`. A chat of a stated length is sent as a completion,
    so the fields of the chat template are left out.
    """
    fields: dict[str, Any] = _thawed(request.fields)
    sized = isinstance(request.prompt, int | Size)
    if sized:
        fields = {name: value for name, value in fields.items() if name not in _OF_TEMPLATE}
    path = "" if sized or request.endpoint == _COMPLETIONS else request.endpoint
    options = {
        "name": request.label,
        "tokens": resolve(request.prompt, command) if isinstance(request.prompt, int | Size) else 0,
        "shared": resolve(request.shared, command) if sized else 0,
        "conversation": request.conversation if sized else "",
        "path": path,
        "may_fail": list(request.may_fail),
        "starts_after": request.starts_after,
    }
    known: dict[str, Any] = {name: value for name, value in options.items() if value}
    known |= {"leaves_after": request.leaves_after} if request.leaves_after is not None else {}
    if request.prompt is None:
        return known | {"body": fields}
    if isinstance(request.prompt, str) and request.endpoint != _COMPLETIONS:
        known["messages"] = [{"role": "user", "content": request.prompt}]
    elif isinstance(request.prompt, str | tuple):
        known["prompt"] = _thawed(request.prompt)
    known |= {"max_tokens": resolve(request.max_tokens, command), "temperature": 0}
    return known | ({"stream": True} if request.stream else {}) | fields


def _thawed(value: Any) -> Any:
    """Turn tuples and mappings into lists and dicts, at any depth."""
    match value:
        case Mapping():
            return {key: _thawed(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_thawed(inner) for inner in value]
    return value
