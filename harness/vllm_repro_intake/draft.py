"""A draft scenario file from the facts of a text.

Every text becomes a literal, every guess a comment that quotes the words it is from, and everything
that was not read of the text a comment that begins with GAP.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.flag_table import KNOWN
from vllm_repro.command.flags import flag_mistakes, positive
from vllm_repro.errors import CommandError, UsageError
from vllm_repro.scenario.public_models import public_model
from vllm_repro.scenario.scenario import Model
from vllm_repro.scenario.writer import (
    ScenarioWriter,
    Source,
    command_text,
    literal,
    one_a_line,
)
from vllm_repro.secret_names import is_secret_name, steers_vllm, variable_mistakes
from vllm_repro_diagnosis.diagnosis import Phase
from vllm_repro_diagnosis.engine_code import LOOPS
from vllm_repro_diagnosis.signature import How, Signature, compare
from vllm_repro_intake.commands import least_likely_last, rendered
from vllm_repro_intake.facts import Facts, Used, parallel
from vllm_repro_intake.requests import folded
from vllm_repro_intake.text import shortened, statements
from vllm_repro_intake.unread import SENDS, unread

_GENERIC = LOOPS | {
    "__call__",
    "_call_impl",
    "_wrapped_call_impl",
    "_wrapper",
    "call",
    "decorate_context",
    "forward",
    "inner",
    "run",
    "run_method",
    "start",
    "wrapped",
    "wrapper",
    "<lambda>",
    "<module>",
}
"""Functions that only pass a call on."""
_HOLES = re.compile(
    r"(?<![\w.])(?:0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*)(?![\w])|(?:[~/][\w.+\[\]-]+){2,}"
    r"|\[(?:user|host|address|email|redacted:[\w-]+)\]"
)
_VARIABLES = re.compile(
    r"\$(?!(?:anchor|comment|defs|id|ref|schema)\b)\{?[A-Za-z_]\w*\}?|\$\([^)]*\)"
    r"|\{[A-Za-z_][^{}'\"]*\}"
)
"""Variables of a shell or an f-string in the text of a request."""
_CHUNKS = re.compile(r"(?i)chunk|prefill|continuation")
_FIELD_IN_PROSE = re.compile(r"[\"'`](?!max_tokens)([a-z]\w*)[\"']? ?[:=] ?(?:\d|true|false)")
_UNSET = re.compile(r"\$\{?[A-Za-z_]\w*\}?|\$\(\([^()]+\)\)|\A<[\w .-]{1,40}>\Z")
_FILE = re.compile(
    r"(?<![^\s=\"])(?<!served-model-name[ =])(?<!root-path[ =])(?<!-dir[ =])(?<!media-path[ =])"
    r"(?<!--model[ =])"
    r"(?:~|\.{1,2})?/[\w.\[-][\w./\[\]-]*(?=[\s\"]|\Z)"
)
_FILE_OF_BODY = re.compile(
    r"(?:path': '|file://)((?:~|\.{1,2})?/[^\s'\"]+)|([^\s'\"]*\[(?:host|address|user)\][^\s'\"]*)"
)
_IDS = re.compile(
    r"\b[\w-]*(?:chatcmpl|cmpl)-[\w-]+|\b[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\b"
)
_FAILED = re.compile(r"\b500\b|Internal Server Error")
_LINE_OF_FILE = re.compile(r"\bFile \"([^\"\n]+)\", line \d+, in ([\w<>.]+)")
_NAMED_FUNCTION = re.compile(r"\b[\w/]+\.py:(?:\d+:)?([A-Za-z_]\w+)\b")
_SENSES = {True: "also has the bug", False: "works, or is older", None: "also named"}
_SIZES = {
    16: "T4, RTX 5080",
    24: "L4, A10, A10G, A30, RTX 3090, RTX 4090",
    32: "RTX 5090",
    48: "A40, L40, L40S, L20, A6000",
    80: "H100, H800",
    96: "H20, RTX PRO 6000",
    141: "H200",
    180: "B200",
    192: "MI300X",
    256: "MI325X",
    270: "B300",
}
_MEMORY = {kind: size for size, kinds in _SIZES.items() for kind in kinds.split(", ")}
"""Memory in GB of GPUs that have one size. An A100 has 40 or 80, a V100 16 or 32."""
_NEEDED = ("heads", "kv_heads", "head_dim", "layers", "vocab_size")
_SHAPE = {
    "architecture": "architecture",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "full_attention_interval": "full_attention_interval",
    "max_position": "max_position_embeddings",
}
"""Arguments of `Model`, with the names of config.json."""
_REFUSED = re.compile(
    r"--(?:(?:tensor|pipeline|data|prefill-context|decode-context)-parallel-size|quantization"
    r"|kv-cache-dtype|attention-backend|enable-expert-parallel|all2all-backend|moe-backend)"
)
"""Flags that a CPU or a tiny model refuses."""
_PROMPT, _ANSWER, _SPREAD = 100, 8, 8
"""Tokens of a prompt and an answer of unknown length, and requests of a range, as placeholders."""
_MOST_MESSAGE = 160
_MOST_COMMENT = 400
_MOST_FRAMES = 4
_MOST_WORDS = 6
"""Words of an arm's name."""


@dataclass
class Draft:
    """A draft of a scenario file, with what was not read of the text and what to confirm."""

    # id of the scenario: the file's name with hyphens
    id: str
    # the one to try
    release: str = ""
    text: str = ""
    # what was not read of the text
    gaps: list[str] = field(default_factory=list)
    # what to confirm
    guesses: list[str] = field(default_factory=list)
    file: ScenarioWriter = field(default_factory=ScenarioWriter)
    # values, comments, and numbers that stand for what was not read
    values: list[str] = field(default_factory=list)
    quoted: list[str] = field(default_factory=list)
    # parts of sentences, and the words of them that were read
    used: list[Used] = field(default_factory=list)
    made_up: set[str] = field(default_factory=set)

    def gap(self, what: str) -> None:
        """Add a GAP comment on something that was not read of the text."""
        self.gaps.append(what)
        self._comment(f"GAP: {what}")

    def guess(self, what: str, words: str, used: Sequence[Used] | None = None) -> None:
        """Add a comment on a guess, with the words of the text that it is from, or "".

        used: what was read of these words; None if all was.
        """
        self.guesses.append(f"{what}: “{words}”" if words else what)
        self._comment(self.guesses[-1])
        if used is not None:
            self.quoted[-1] = what
            self.used += used

    def put(self, name: str, value: Any) -> None:
        """Write a field of the scenario file; keep its value to find what was not read."""
        self.file.put(name, value)
        # A known model's shape is not of the text, and the rest of a title or message is not read.
        text = "" if name in {"model", "title", "signature"} else literal(value)
        # Of the comments on arms only a part was read.
        self.values.append(re.sub(r"(?m)^\s*# “.*$", "", text) if name == "arms" else text)

    def _comment(self, text: str) -> None:
        """Write a comment to the file, shortened, and keep it in `quoted`."""
        self.quoted.append(shortened(text, _MOST_COMMENT))
        self.file.comment(self.quoted[-1])


def draft(
    facts: Facts,
    name: str,
    *,
    models: Collection[Model] = (),
    known_flags: Collection[str] | None = None,
    version: str = "",
    newest: str = "",
) -> Draft:
    """Return the draft scenario file that the facts of an issue's text give. name: its id.

    Raises `UsageError` if the text names neither a command nor a model.

    models: with a known shape. known_flags: those that the release defines, if it is
    installed. version: the release to try. newest: a release for a text that names none.
    """
    command = facts.commands[0].command if facts.commands else None
    if command is None and facts.model is not None:  # a request may name it
        command = ServeCommand(flags=(), model_argument=facts.model.value)
    if command is None:
        why = f": {facts.unread[0]}" if facts.unread else ""
        raise UsageError(
            f"no vLLM command was read from the text{why}",
            hint="paste the whole issue, with its `vllm serve …` or `docker run … IMAGE …` line",
        )
    made = Draft(name)
    made.put("id", name)
    if not facts.issue:
        made.gap("no issue number was read")
    made.put("issue", facts.issue or made.file.call("unstated"))
    title = facts.title
    if not title:
        made.gap("no title was read")
        title = shortened(
            f"{facts.diagnosis.exception or 'untitled'}: {facts.diagnosis.message or ''}", 150
        ).rstrip(": ")
    made.put("title", title)
    command = _put_command(made, facts, command, known_flags)
    _put_needs(made, facts, command, _put_model(made, facts, command, models))
    _put_release(made, facts, version, newest)
    _put_workload(made, facts, command)
    _put_signature(made, facts)
    _put_arms(made, facts, command)
    if facts.related:
        made.put("related", facts.related)
    made.values += [facts.issue, command.model or "", str(facts.shape)]
    # Of requests with a body the text has a line that sends it.
    sent = [request for request in facts.requests if request.body is not None]
    for part in unread(
        facts.blocks, made.values, made.quoted, made.used, made.made_up, len(sent), title
    ):
        # without a title of its own, the exception is the title
        if facts.title or not title.startswith(part.partition("…")[0].rstrip(": ") or "…"):
            made.gap(f"not read: “{part}”")
    made.text = made.file.text(
        f"{title.rstrip('.…')}.\n\nA draft by `vllm-repro intake`. GAP marks what was not read of"
        " the text.\nEvery other comment is a guess or a note: confirm it or correct it, and remove"
        " the comment.\n"
    )
    return made


def _put_command(
    made: Draft, facts: Facts, command: ServeCommand, known_flags: Collection[str] | None
) -> ServeCommand:
    """Add the reported command, without secrets and words that no server accepts; return it.

    known_flags: those of the release; None if it is not installed.
    """
    if not facts.commands:
        made.gap("no command was read: the model alone is taken from the text")
    elif how := facts.commands[0].how:
        made.guess(f"the command is from {how}", facts.commands[0].words, ())
    for argument in facts.commands[0].unread if facts.commands else ():
        made.gap(
            f"no value of the variable {argument[1:]} was read: left out"
            if argument.startswith("$")
            else f"the value of {argument!r} in that call is not a literal"
        )
    if len(facts.commands) > 1 and least_likely_last(facts.commands[0]) == least_likely_last(
        facts.commands[1]
    ):
        made.gap(
            "the text holds several commands, and which one has the bug was not read: this is the"
            " first"
        )
    for other in facts.commands[1:4]:
        made.guess("another command of the text, not taken", other.words)
    for wrong in facts.unread[:3]:
        made.guess("a command that cannot be read", wrong)
    kept = []
    for flag in command.flags:
        words, base = " ".join(flag.words()), positive(flag.name.partition(".")[0])
        if is_secret_name(flag.name):
            made.guess(f"left out: {flag.name}, which holds a secret", "")
        elif mistakes := flag_mistakes([flag]):
            # What to write in its place holds for newer releases, not for the reported one.
            why = re.sub(
                r"(not defined in any release .*?): .*",
                r"\1, but older ones may define it: check refuses it",
                mistakes[0],
            )
            made.guess(f"left out: {why}", words)
        elif base not in KNOWN and not flag.values and any(name.startswith(base) for name in KNOWN):
            made.guess(
                "left out, as its line seems to be cut off: compare all flags with the text",
                flag.name,
            )
        else:
            if known_flags is None and base not in KNOWN:
                made.guess(f"{flag.name} is in none of the releases known here", words)
            elif known_flags is not None and not {base, f"--no-{base[2:]}"} & {*known_flags}:
                made.guess(f"{flag.name} is not a flag of this release", words)
            for file in _FILE.findall(words):
                made.gap(f"{file} is on the reporter's machine: name a file of yours")
            if re.search(r"\[(?:host|address)\]", words):
                made.gap(f"{flag.name} names a machine of the reporter: name one of yours")
            kept.append(flag)
    # `export MODEL=a/b`, and then `vllm serve $MODEL`
    values = [command.model_argument or "", *(flag.text or "" for flag in kept)]
    for name in (name for value in values for name in _UNSET.findall(value)):
        made.gap(f"no value of {name} was read")
    for setting in command.env:
        for mistake in variable_mistakes([setting]):
            if steers_vllm(setting[0]):
                made.guess(f"left out: {mistake.partition(': remove')[0]}", "=".join(setting))
    for name, value in (*command.env, *(command.container.env if command.container else ())):
        if not (
            steers_vllm(name)
            or is_secret_name(name)
            or (value in values and not name.startswith("PYTHON"))
        ):
            made.gap(f"left out: {name}={value}, which is not known as a variable of vLLM")
        if re.search(r"\[(?:host|address|user)\]", value):
            made.gap(f"{name} names a place of the reporter: name one of yours")
    settings = (setting for setting in command.env if not variable_mistakes([setting]))
    box = command.container
    if box is not None:
        if "[" in box.image:
            made.gap("the image is of a private registry: --image names another one")
        kept_env = (pair for pair in box.env if steers_vllm(pair[0]) or is_secret_name(pair[0]))
        box = replace(box, env=tuple(kept_env))
    command = replace(command, flags=tuple(kept), env=tuple(settings), container=box)
    made.put("command", command_text(rendered(command)))
    return command


def _put_model(made: Draft, facts: Facts, command: ServeCommand, models: Collection[Model]) -> bool:
    """Add the model, with gaps for what is not known; return True if its shape is known."""
    name = command.model or ""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        if facts.model is not None:
            name = facts.model.value
            made.guess("the public model", facts.model.words, facts.model.used)
        else:
            made.gap(f"no public name of the served model {shortened(name, 60)!r} was read")
            name = "unknown/unknown"
    known = next((model for model in models if model.name == name), None)
    with suppress(ValueError):  # a scenario may have another length, or fewer layers
        known = public_model(name)
    sizes = {
        ours: facts.shape.get(theirs) or getattr(known, ours, None)
        for ours, theirs in _SHAPE.items()
    }
    if sizes["heads"] and sizes["kv_heads"] and int(sizes["heads"]) % int(sizes["kv_heads"]):
        sizes |= {"heads": None, "kv_heads": None}
    if missing := [ours for ours in _NEEDED if not sizes[ours]]:
        made.gap(f"{', '.join(missing)}: copy them from the model's config.json")
        sizes |= dict.fromkeys(missing, made.file.call("unstated"))
    made.put(
        "model",
        made.file.block("Model", name, **{ours: size for ours, size in sizes.items() if size}),
    )
    return not missing


def _put_needs(made: Draft, facts: Facts, command: ServeCommand, stated_shape: bool) -> None:
    """Add the number and memory of GPUs, and the nodes, that the bug needs.

    A comment has the fields for a run without a GPU. stated_shape: the model's shape is known.
    """
    on_cpu = facts.on_cpu or (command.container is not None and "-cpu" in command.container.image)
    by_command = parallel(command) if facts.commands else 0
    alone = re.match(r"\d+(?= x )", facts.gpus.value if facts.gpus and not by_command else "")
    count = 0 if on_cpu else by_command or int(alone[0] if alone else 1)
    needs = {"gpus": count}
    if facts.gpus is not None and count:
        made.guess(f"reported on {facts.gpus.value}", facts.gpus.words, facts.gpus.used)
        stated = re.search(r" of (\d+) GB$", facts.gpus.value)
        known = (
            size
            for kind, size in _MEMORY.items()
            if re.search(rf"(?<!\w){kind.removeprefix('RTX ')}\b", facts.gpus.value, re.IGNORECASE)
        )
        if size := int(stated[1]) if stated else max(known, default=0):
            needs["gpu_memory_gb"] = size
    elif count and by_command:
        made.gap("no GPU was read: their number is that of the parallel sizes")
    if count and not by_command and not alone:
        made.gap("the number of GPUs was not read: 1 stands for it")
    nodes = command.get("--nnodes") or ""
    if nodes.isdecimal() and 1 < int(nodes) < 100:
        needs["nodes"] = int(nodes)
    elif facts.nodes:
        made.gap(f"the text names {facts.nodes} nodes, and its command has no --nnodes")
    made.put("needs", made.file.call("Needs", **needs))
    lacks = "a GPU" if count else "the model's weights"
    made.file.comment(f"Without {lacks}, replace the line above by the next one, then:")
    made.file.comment("vllm-repro run FILE --server process --weights dummy --vllm RELEASE")
    changes = [
        made.file.call("without", flag.name, why="a CPU refuses it")
        for flag in command.flags
        if _REFUSED.fullmatch(flag.name)
    ]
    bodies = " ".join(f"{request.body}" for request in facts.requests)
    sees = "image_url" in bodies or command.get("--limit-mm-per-prompt") is not None
    if any(re.search("/(?:rerank|score|classify)$", request.path) for request in facts.requests):
        made.gap("no tiny model ranks or scores: without a GPU the server refuses these requests")
    dummy = made.file.call(
        "Dummy",
        layers=2,
        why="no weights are needed",
        **(
            {"family": "blip2", "heads": 4, "kv_heads": 4, "head_dim": 64}
            if sees
            else {}
            if stated_shape
            else {"heads": 4, "kv_heads": 2, "head_dim": 64}
        ),
        **({"changes": changes} if changes else {}),
    )
    made.file.comment(f"needs=Needs(), dummy={dummy.text},")


def _put_release(made: Draft, facts: Facts, version: str, newest: str) -> None:
    """Add the release to try, and the status that declares it bad; set `made.release`.

    version: the release of --vllm, or "". newest: for a text that names none.
    """
    stated = next((release for release in facts.versions if release.has_it is not False), None)
    if version:
        made.guess(
            "the release of --vllm, taken for a bad one",
            f"the text names {stated.value}" if stated else "",
        )
    elif stated is None:
        made.gap(f"no release was read: {newest} is only the newest one")
    else:
        made.used += stated.used
        if stated.words:
            made.guess("the release", stated.words, ())
        if re.search(r"dev|rc|\+", stated.value):
            made.guess(
                f"{stated.value} is a build between releases: --vllm names a release to try"
                " instead",
                "",
            )
    for other in [release for release in facts.versions if release is not stated][:4]:
        made.guess(f"{_SENSES[other.has_it]}: {other.value}", other.words, other.used)
    made.release = version or (stated.value if stated else newest)
    made.put("status", made.file.call("Status", bad=f"=={made.release}"))
    made.put("try_with", made.release)


def _put_workload(made: Draft, facts: Facts, command: ServeCommand) -> None:
    """Add the requests, and the trigger that follows from their sizes, else an unstated one.

    Placeholders for sizes that are not stated go into `made.made_up`.
    """
    limit, batch = (
        _number(command, name) for name in ("--max-model-len", "--max-num-batched-tokens")
    )
    steps: list[list[Source]] = []
    sizes: list[int] = []
    for request in (request for request in facts.requests if request.elsewhere):
        made.gap(
            f"not sent, as it goes to {request.elsewhere} and not to this server: POST"
            f" {request.path} {literal(request.body)}"
        )
    ours = [request for request in facts.requests if not request.elsewhere]
    short = _ANSWER  # of answers whose length was not read
    for at, request in enumerate(ours, 1):
        room = limit - request.tokens if limit and 0 < request.tokens < limit else _ANSWER
        short = min(short, room)
        answer = request.answer or facts.answer or short
        if request.body is not None:
            alike = at > 1 and ours[at - 2].body == request.body
            for name in () if alike else request.unread:
                made.gap(f"request {at}: the value of {name!r} is not a literal")
            if request.words:
                made.gap(f"request {at}: its body was not read: “{request.words}”")
            for written in (
                ()
                if alike
                else dict.fromkeys(_VARIABLES.findall(f"{request.model} {request.body}"))
            ):
                made.gap(f"request {at}: {written} stands for a value that was not read")
            for file, place in () if alike else _FILE_OF_BODY.findall(str(request.body)):
                where = (
                    "has a host that is left out here"
                    if "://" in place
                    else "is on the reporter's machine"
                )
                made.gap(f"request {at}: {file or place} {where}: name one of yours")
            names = (command.get("--served-model-name") or "").split()
            if (
                not alike
                and request.model
                and request.model
                not in (
                    command.model,
                    facts.model and facts.model.value,
                    *names,
                )
            ):
                made.guess(f"request {at} names another model than the command", request.model)
            step = made.file.call(
                "request", path=request.path, body=folded(request.body), name=f"request {at}"
            )
        elif request.sizes and not (limit and request.tokens + answer > limit):
            made.guess(
                f"prompts of {'-'.join(map(str, request.sizes))} tokens"
                f"{f', {request.at_once} at once' if request.at_once else ''}",
                request.words,
                [(request.words, request.used)],
            )
            if request.spread and request.at_once < 2:
                made.gap(
                    f"the number of requests in that range was not read: {_SPREAD} stand for it"
                )
                request = replace(request, at_once=_SPREAD)
            if facts.streams and request.at_once > 1:
                made.gap("the text states streamed answers, which at_once(…) does not ask for")
            sizes += request.sizes
            more = {"max_tokens": answer} | ({"spread": True} if request.spread else {})
            # Fewer at once than sizes: so many of each size.
            whole = request.at_once > 1 and (
                request.spread or request.at_once >= len(request.sizes)
            )
            steps += [
                [made.file.call("at_once", request.at_once, prompt=group, **more)]
                if request.at_once > 1
                else [
                    made.file.call("chat", prompt=group[0], max_tokens=answer, stream=facts.streams)
                ]
                for group in ([[*request.sizes]] if whole else [[size] for size in request.sizes])
            ]
            continue
        elif limit and request.tokens + answer > limit:
            made.guess(
                f"left out, as it exceeds --max-model-len {limit}: a prompt of {request.tokens:,}"
                " tokens",
                request.words,
                [(request.words, request.used)],
            )
            continue
        else:
            if not request.beside or not steps:
                for name in _FIELD_IN_PROSE.findall(request.words):
                    made.gap(f"request {at}: the field {name} of this sentence is not in it")
                made.guess(
                    f"request {at}: {request.tokens:,} tokens",
                    request.words,
                    [(request.words, request.used)],
                )
            word = "completion" if request.path == "/v1/completions" else "chat"
            step = made.file.call(
                word,
                prompt=request.tokens,
                max_tokens=answer,
                stream=facts.streams,
                name=f"request {at}",
            )
            sizes.append(request.tokens)
        if request.beside and steps:
            steps[-1].append(step)
        else:
            steps.append([step])
    sends = any(SENDS.search(line) for block in facts.blocks for line in block.lines)
    lost = sends and not any(request.body is not None for request in ours)
    if not steps:
        prompt = min(_PROMPT, max(limit, 0) // 2 or _PROMPT)
        stands = f"a chat of {prompt} tokens stands for"
        made.gap(
            f"no request of the text was read with its prompt: {stands} all of them"
            if sends
            else f"no prompt size was {'taken' if ours else 'read'}: {stands} it"
        )
        made.made_up.add(str(prompt))
        answer = facts.answer or _ANSWER
        steps = [[made.file.call("chat", prompt=prompt, max_tokens=answer, stream=facts.streams)]]
    if not facts.answer and not (
        ours and all(request.answer or request.body is not None for request in ours)
    ):
        made.gap(f"the length of the answers was not read: {short} tokens stand for it")
        made.made_up |= {str(short), str(_SPREAD)}
    made.put(
        "workload",
        one_a_line(
            step[0] if len(step) == 1 else made.file.block("together", *step) for step in steps
        ),
    )
    told = facts.title + " ".join(statements(facts.blocks)) + (facts.diagnosis.message or "")
    if batch and max(sizes, default=0) > batch and not lost and _CHUNKS.search(told):
        made.guess(f"the longest prompt exceeds --max-num-batched-tokens {batch}", "")
        made.put("trigger", made.file.call("chunked_prefill", chunks=2))
        return
    made.gap(
        "no boundary of the bug was read: until you name a condition, a quiet run is no evidence"
    )
    made.put("trigger", made.file.call("unstated"))


def _number(command: ServeCommand, name: str) -> int:
    """Return the number that a flag has; 0 without one, and if its value is no number."""
    try:
        return command.number(name) or 0
    except CommandError:
        return 0


_EXCEPTION = re.compile(
    r"\b[A-Z]\w{2,40}(?:Error|Exception)\b(?:: (?:(?!\. [A-Z])[^\n`|\x22]){1,150})?"
)

_OF_REPORT = re.compile(
    r"(?s)[.!?;]\s+(?:(?:With(?:out)?|If|When|After|Since|On|In|I|We|My|Our|It|This|Only|Same"
    r"|Works?|Setting|Removing|Happens)\b|[^.]*--[a-z]|.*?\. [^.]*--[a-z]).*"
)
"""What follows an exception's message on a line of prose, such as a condition or a flag."""


def _put_signature(made: Draft, facts: Facts) -> None:
    """Add the signature of the engine's death, from the text's traceback, if the engine dies.

    If it does not, a gap quotes the exception of the text.
    """
    diagnosis, phase = facts.diagnosis, facts.phase
    if (symptom := _symptom(facts)) != "dies":
        if diagnosis.exception:
            places = [diagnosis.exception, *(frame.function for frame in diagnosis.frames[-1:])]
            what = f"{' in '.join(places)}: {diagnosis.message}"
            made.gap(f"not in this file, as the reported arm {symptom}: the exception {what}")
        return
    if diagnosis.root is None:
        texts = (_EXCEPTION.search("\n".join(block.lines)) for block in facts.blocks)
        named = next((f", only {match[0]}" for match in texts if match), "")
        made.gap(
            f"no traceback of the engine was read{named}: fill in the signature from the report of"
            " a run"
        )
        made.put("signature", made.file.call("unstated"))
        return
    whole = diagnosis.message or ""
    prose = "\n".join(line for block in facts.blocks if not block.code for line in block.lines)
    alone = not diagnosis.frames and whole[:60] in prose
    message = _OF_REPORT.sub("", whole) if alone else whole
    if message != whole:
        made.guess("the message is cut before what may be words of the report", whole, ())
    frames = _frames([(frame.file, frame.function) for frame in diagnosis.frames])
    lines = "\n".join(line for block in facts.blocks for line in block.lines)
    if not frames and (frames := _frames(_LINE_OF_FILE.findall(lines))):
        made.guess("the frames are those of all lines of files in the text: compare them", "")
    if not frames and (frames := tuple(dict.fromkeys(_NAMED_FUNCTION.findall(message)))):
        made.guess("no frames were read; this function is from the message", shortened(message))
    if not frames:
        made.gap("no frames were read: fill them in from the report of a run")
        frames = ("unknown",)
    last = diagnosis.frames[-1].source if diagnosis.frames else ""
    signature = Signature(
        exception=diagnosis.exception or "",
        message=_template(message),
        frames=frames,
        source=(last if last.startswith("assert") and not message else None),
    )
    if (
        frames != ("unknown",)
        and diagnosis.frames
        and compare(signature, diagnosis).how is not How.MATCH
    ):
        made.gap("this signature does not match the text's own traceback: correct it")
    if phase is None:
        made.gap("when the engine dies was not read")
    elif phase is Phase.IDLE:
        made.guess("idle is a guess: no request before the death was read", "")
    elif diagnosis.phase is None or diagnosis.died is None:
        made.guess(f"the phase is a guess from the words of the text: {phase}", "")
    stated = {
        key: value
        for key, value in {
            "phase": str(phase or "request"),
            "exception": signature.exception,
            "message": signature.message,
            "source": signature.source,
            "frames": list(signature.frames),
        }.items()
        if value is not None
    }
    made.put("signature", made.file.block("signature", **stated))


def _frames(frames: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return up to four innermost functions of vLLM, without those that only pass a call on.

    frames: file and function. If none is left, functions of any file count.
    """
    names = [function for file, function in frames if "vllm" in file and function not in _GENERIC]
    names = names or [function for _, function in frames]
    return tuple(name for at, name in enumerate(names) if at == 0 or names[at - 1] != name)[
        -_MOST_FRAMES:
    ]


def _template(message: str) -> str:
    """Return the message as a template, cut at 160 characters: numbers, paths, ids become holes."""
    # what torch adds to an error of CUDA differs between its releases
    message = re.split(r"\s(?:CUDA kernel errors might|Search for [`'‘]cuda)", message)[0]
    line = shortened(message, 1_000).rstrip("…")
    if len(line) > _MOST_MESSAGE:
        line = line[:_MOST_MESSAGE]
        line = line.rpartition(". ")[0] or line.rpartition(" ")[0]
    return re.sub(
        r"\{\}(?:[\W_]{0,2}\{\})+",
        "{}",
        _HOLES.sub("{}", _IDS.sub("{}", line.replace("{", "{{").replace("}", "}}"))),
    )


def _symptom(facts: Facts) -> str:
    """Return the behaviour of the reported arm: `dies`, `hangs` or `errs`.

    A log with a death counts more than the words. Without either it is `dies`.
    """
    root = facts.diagnosis.root
    if facts.diagnosis.died or (root is None and not facts.symptom.value):
        return "dies"
    # an exception that the API server logs failed a request
    of_request = root is not None and root.printed.process.startswith("APIServer")
    return facts.symptom.value or ("errs" if of_request else "dies")


def _put_arms(made: Draft, facts: Facts, command: ServeCommand) -> None:
    """Add the reported arm, and an arm for each flag that the text reports as tried.

    Flags that the command does not have cannot be left out: they get no arm.
    """
    symptom = _symptom(facts)
    if not facts.diagnosis.died and facts.symptom.words:
        made.guess(
            f"the reported arm {symptom}, by the words of the text",
            facts.symptom.words,
            facts.symptom.used,
        )
    elif not facts.diagnosis.died:
        made.gap(f"no statement on what the engine does was read: {symptom} stands for it")
    if symptom == "errs" and not _FAILED.search(facts.symptom.words):
        made.gap("only a failed request counts as wrong: output=checks(…) compares answers")
    arms = [made.file.call("arm", "reported", made.file.word(symptom))]
    names = {"reported"}
    for tried in facts.tried:
        flags, words = tried.flags, re.findall(r"[a-z0-9]+", " ".join(tried.flags).lower())
        words = (["without"] if tried.removed else []) + words
        name = "-".join(words[:_MOST_WORDS])
        name = "-".join(words) if name in names else name
        gone = tried.removed and not any(
            positive(flag.name) == positive(flags[0]) for flag in command.flags
        )
        if gone or not name:
            continue
        made.used.append(tried.used)
        if name in names:
            continue
        names.add(name)
        edit = made.file.call("without" if tried.removed else "with_flags", *flags)
        result = made.file.word("lives" if tried.lives else symptom)
        made.guesses.append(f"arm {name} {result.text}: “{tried.words}”")
        arms.append(Source(f"# “{tried.words}”\n{made.file.call('arm', name, result, edit).text}"))
    for statement in facts.unclear[:6]:
        made.gap(f"tried with an unclear result, or with something else: “{statement}”")
    made.put("arms", one_a_line(arms))
