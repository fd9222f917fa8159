"""Records of a scenario: one upstream bug, declared with the words of `vllm_repro.vocabulary`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.parse import parse
from vllm_repro.errors import CommandError
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.workload import Step
from vllm_repro.tiny_model import Family, Kind, TinyModel
from vllm_repro.trigger.trigger import Condition
from vllm_repro.verdict.output import Checks
from vllm_repro.verdict.throughput import Load, usual_load
from vllm_repro.verdict.verdict import Expected, Standing, from_source
from vllm_repro_diagnosis.signature import Signature

Capture = Literal["", "guard", "record"]
LabWeights = Literal["dummy", "made"]

_TINY: Mapping[str, Family] = {
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "Blip2ForConditionalGeneration": "blip2",
}

NOT_STATED = "not stated"
"""Issue of a scenario whose issue is not known."""

_NARROW = 256
"""Hidden size of a dummy model.

It does not change the sizes of workspaces and KV caches, but the time of every matrix product.
"""


@dataclass(frozen=True)
class Edit:
    """One change of the reported command."""

    # Its declaration, as a report prints it.
    words: str
    # Function that returns the changed command; raises `CommandError` if the edit does not fit.
    apply: Callable[[ServeCommand], ServeCommand] = field(compare=False)
    # Reason for the report.
    why: str = ""
    # Edit to use instead with the lab's smaller model and pool.
    in_lab: Edit | None = None
    # Edit to use instead with the dummy model.
    in_dummy: Edit | None = None

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Arm:
    """One server configuration: the reported command with edits, and what should happen."""

    name: str
    expected: Expected
    edits: tuple[Edit, ...] = ()
    # Overlay over vLLM's source.
    patches: tuple[Patch, ...] = field(default=(), kw_only=True)
    # Version specifier of the releases with the bug, in place of the scenario's.
    bad: str = field(default="", kw_only=True)
    # None for the scenario's.
    workload: tuple[Step, ...] | None = None
    why: str = ""
    # None for the scenario's.
    trigger: Condition | None = field(default=None, kw_only=True)

    def patch_sentences(self) -> tuple[str, ...]:
        """Return one sentence for each patch, for a report."""
        return tuple(f"{patch}" + (f": {patch.why}" if patch.why else "") for patch in self.patches)


@dataclass(frozen=True)
class Model:
    """A public model in place of the reported one, and its attention shape.

    Raises `ValueError` for impossible sizes.
    """

    # Default of `--model`.
    name: str
    # 0 if it is not stated; so are the next four.
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab_size: int
    # Tokens of a KV-cache block if no flag sets it.
    block_size: int = 16
    # Every n-th layer has full attention.
    full_attention_interval: int = 1
    # Longest prompt and answer together, in tokens.
    max_position: int = 131072
    architecture: str = "Qwen3ForCausalLM"
    # Any weights show the bug. A tiny model of random weights, with two layers and this
    # architecture, attention shape, vocabulary and length, can replace the model.
    tiny_will_do: bool = False
    # (block size, window) in tokens of each group of sliding-window layers that shares the pool
    # with the full-attention group.
    window_groups: Sequence[tuple[int, int]] = ()
    # Bytes of a block of each group, full attention first. vLLM up to 0.24.0 computes the logged
    # pool size from them.
    group_pages: Sequence[int] = ()
    # Tokens of the KV cache of each GPU in the report's boot log, for the rehearsal; 0 if unknown.
    kv_cache_tokens: int = 0
    # The same in GiB.
    kv_cache_gib: float = 0
    why: str = ""

    def __post_init__(self) -> None:
        least = dict.fromkeys(("heads", "kv_heads", "head_dim", "layers", "vocab_size"), 0)
        for name in (*least, "block_size", "max_position", "full_attention_interval"):
            if getattr(self, name) < least.get(name, 1):
                raise ValueError(f"{name}={getattr(self, name)}: sizes of a model count from 1")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly"
            )

    def rehearsal_shape(self) -> dict[str, Any]:
        """Return sizes and KV cache for the rehearsal engine, mostly by names of config.json.

        Sizes of 0 and empty lists are left out.
        """
        return {
            name: value
            for name, value in {
                "window_groups": list(self.window_groups),
                "group_pages": list(self.group_pages),
                "kv_cache_tokens": self.kv_cache_tokens,
                "kv_cache_gib": self.kv_cache_gib,
                "architecture": self.architecture,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "num_hidden_layers": self.layers,
                "vocab_size": self.vocab_size,
                "block_size": self.block_size,
                "full_attention_interval": self.full_attention_interval,
                "max_position_embeddings": self.max_position,
            }.items()
            if value
        }


@dataclass(frozen=True, kw_only=True)
class Dummy:
    """Model of random weights for `--weights dummy`: the reported attention, few layers.

    Raises `ValueError` for sliding layers without a window, or the reverse.
    """

    # Number of full-attention layers, or the kind of each layer.
    layers: int | Sequence[Kind]
    # Reason that it can replace the reported model.
    why: str
    # Edits that this model needs, each with `why`, applied before those of an arm.
    changes: Sequence[Edit] = ()
    # Window of sliding layers in tokens.
    window: int | None = None
    # None for the model's; also for `kv_heads` and `head_dim`.
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    # Not the model's, because few bugs depend on it.
    vocab_size: int = 4096
    # Model code of vLLM. Default: gemma3 with sliding layers, else qwen3.
    family: Family | None = None
    # Number of draft layers.
    drafts: int = 0
    # See `TinyModel`.
    fp8: bool = False

    def __post_init__(self) -> None:
        sliding = not isinstance(self.layers, int) and "sliding" in self.layers
        if sliding != (self.window is not None):
            raise ValueError("window=… goes with sliding layers, and they with it")

    def shape(self, model: Model) -> TinyModel:
        """Return the tiny model in place of `model`.

        Raises `ValueError` for an impossible shape.
        """
        layers: Sequence[Kind] = (
            ["full"] * self.layers if isinstance(self.layers, int) else self.layers
        )
        return TinyModel(
            family=self.family or ("gemma3" if "sliding" in layers else "qwen3"),
            kinds=tuple(layers),
            heads=self.heads or model.heads,
            kv_heads=self.kv_heads or model.kv_heads,
            head_dim=self.head_dim or model.head_dim,
            window=self.window,
            drafts=self.drafts,
            hidden=_NARROW,
            vocab=self.vocab_size,
            max_position=model.max_position,
            fp8=self.fp8,
        )


@dataclass(frozen=True, kw_only=True)
class Lab(Dummy):
    """Settings of the lab: a vLLM release on the CPU with parts replaced, and a tiny model."""

    # Part of the lab's plugin that shows the bug, such as "scheduler"; see `vllm_repro_lab.parts`.
    mechanism: str
    # During graph capture, "guard" refuses what CUDA refuses. "record" also replays the graphs
    # while serving. "" does nothing.
    capture: Capture = ""
    # "made" to compare answers, which dummy weights do not allow.
    weights: LabWeights = "dummy"
    # Arms that a run boots by default; empty for all.
    arms: Sequence[str] = ()
    # Default release if `try_with` cannot be installed.
    vllm: str = ""


@dataclass(frozen=True)
class Needs:
    """Hardware that a scenario requires."""

    gpus: int = 0
    # Per GPU.
    gpu_memory_gb: float = 0
    # Least CUDA compute capability, such as 8.0.
    capability: float | None = None
    nodes: int = 1
    # Memory of the host; 0 if it does not matter.
    memory_gb: float = 0

    def __post_init__(self) -> None:
        if min(self.gpus, self.gpu_memory_gb, self.memory_gb) < 0 or self.nodes < 1:
            raise ValueError("needs are counts and sizes: 0 or more, and at least 1 node")

    def __str__(self) -> str:
        if not self.gpus:
            return f"CPU, {self.memory_gb:g} GB" if self.memory_gb else "CPU"
        parts = [f"{self.gpus} GPU" + ("s" if self.gpus > 1 else "")]
        if self.gpu_memory_gb:
            parts.append(f"{self.gpu_memory_gb:g} GB each")
        if self.capability:
            parts.append(f"capability {self.capability:g}+")
        if self.nodes > 1:
            parts.append(f"{self.nodes} nodes")
        return ", ".join(parts)


@dataclass(frozen=True)
class Status:
    """Releases with and without the bug, as pip specifiers.

    Raises `ValueError` for a wrong specifier.
    """

    # Such as ">=0.21.0,<0.24.0".
    bad: str
    # Such as ">=0.24.0"; empty if the bug is open.
    good: str = ""

    def __post_init__(self) -> None:
        for text in (self.bad, self.good):
            try:
                SpecifierSet(text)
            except InvalidSpecifier as error:
                raise ValueError(
                    f"{text!r} is no version specifier, such as '>=0.21.0,<0.24.0'"
                ) from error

    def contradictions(self) -> set[str]:
        """Return the versions named in `bad` or `good` that lie in both ranges."""
        if not self.good:
            return set()
        bad, good = (
            SpecifierSet(self.bad, prereleases=True),
            SpecifierSet(self.good, prereleases=True),
        )
        return {
            part.version for part in (*bad, *good) if part.version in bad and part.version in good
        }

    @property
    def open(self) -> bool:
        """Return True if the bug is open: no release is declared good."""
        return not self.good

    def standing(self, version: str | None) -> Standing:
        """Return whether the version that a server reports is declared bad, good, or neither.

        A nightly build counts as the release of its number. Unknown for a build from source, for
        None, and for a text that is no version.
        """
        try:
            parsed = Version(version or "")
        except InvalidVersion:
            return Standing.UNKNOWN
        if from_source(version):
            return Standing.UNKNOWN
        if SpecifierSet(self.bad, prereleases=True).contains(parsed):
            return Standing.BAD
        if self.good and SpecifierSet(self.good, prereleases=True).contains(parsed):
            return Standing.GOOD
        return Standing.UNKNOWN

    @property
    def first_bad(self) -> str | None:
        """Return the first release that is declared bad; None without a lower bound."""
        return _bound(self.bad, (">=", "=="))

    @property
    def first_good(self) -> str | None:
        """Return the first release that is declared good, or None."""
        return _bound(self.good, (">=", "=="))

    @property
    def first_past(self) -> str | None:
        """The first good release, or else the first that is no longer declared bad.

        None if the bad releases have no upper bound either.
        """
        return self.first_good or _bound(self.bad, ("<",))

    def reaches(self, version: str) -> bool:
        """Return True if this release or a later one is declared bad."""
        later = self.first_bad is not None and Version(self.first_bad) > Version(version)
        return later or self.standing(version) is Standing.BAD

    def __str__(self) -> str:
        return f"bad {self.bad}" + (f", good {self.good}" if self.good else ", open")


def _bound(text: str, operators: tuple[str, ...]) -> str | None:
    """Return the least version after one of `operators` in a specifier; None without one."""
    versions = [Version(part.version) for part in SpecifierSet(text) if part.operator in operators]
    return str(min(versions)) if versions else None


@dataclass(frozen=True)
class Lengths:
    """Range of prompt lengths: whole KV-cache blocks, and tokens in addition to them.

    Both are pairs (least, most), inclusive. Raises `ValueError` for other values.
    """

    # Whole blocks.
    blocks: Sequence[int]
    # Tokens in addition to the blocks.
    over: Sequence[int]

    def __post_init__(self) -> None:
        for name, pair, least in (("blocks", self.blocks, 1), ("over", self.over, 0)):
            if len(pair) != 2 or not least <= pair[0] <= pair[1]:
                raise ValueError(f"{name}=(least, most) are two numbers from {least} on")

    @property
    def ranges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Two pairs (least, most): whole KV-cache blocks, and tokens in addition to them."""
        return (self.blocks[0], self.blocks[-1]), (self.over[0], self.over[-1])


@dataclass(frozen=True)
class Cause:
    """A change of a release's source that tests what causes the bug.

    With it the arm dies or lives.
    """

    name: str
    # Release that is changed.
    release: str
    # `dies` or `lives`, with the change.
    expected: Expected
    patches: tuple[Patch, ...] = ()
    # Name of the arm whose server runs it.
    arm: str = "reported"
    # Who reported it as the fix, although it is not.
    believed: str = ""


@dataclass(frozen=True)
class Causes:
    """Changes of vLLM's source, and the trials of `vllm-repro causes` with each.

    With `prompts`, a trial runs vLLM's EngineCore without a model. Without, it boots a server and
    sends the workload of the change's arm.
    """

    changes: Sequence[Cause]
    # Lengths of the prompts. A trial picks one at random for all its prompts.
    prompts: Lengths | None = None
    # Tokens of each answer.
    answer: int = 0
    # Number of distinct prompts, sent one after the other.
    requests: int = 0

    def __post_init__(self) -> None:
        if (self.prompts is None) != (self.answer == 0) or (self.prompts is None) != (
            self.requests == 0
        ):
            raise ValueError(
                "prompts=, answer= and requests= go together: a workload for EngineCore without a"
                " model"
            )


@dataclass(frozen=True)
class SourceLine:
    """Line of vLLM's source."""

    # Path below site-packages.
    file: str
    # With its class.
    function: str
    # Whole line, without indentation.
    code: str


_ISSUE_URL = re.compile(
    r"(?:https?://)?(?:www\.)?github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\b.*"
)


def issue_name(text: str) -> str:
    """Return `owner/repository#number` for the address of an issue, and other text as it is."""
    return _ISSUE_URL.sub(r"\1#\2", text.strip())


@dataclass(frozen=True)
class Scenario:
    """One upstream bug: its reported command, its workload, and the arms to compare."""

    id: str
    # `owner/repository#number`, or `NOT_STATED`.
    issue: str
    title: str
    # Reported command, word for word.
    command: str
    model: Model
    needs: Needs
    status: Status
    # Default release of a run. It has the bug.
    try_with: str
    workload: Sequence[Step]
    trigger: Condition
    arms: Sequence[Arm]
    # Of a bug that crashes the engine.
    signature: Signature | None = None
    # Further issues, as in `issue`.
    related: Sequence[str] = ()
    lab: Lab | None = None
    dummy: Dummy | None = None
    # Id of a scenario with the same signature. A log matches this one only if its release no longer
    # has that bug.
    same_death_as: str = ""
    # Loads to measure. Default: 128 tokens in, 128 out, 1 and 4 at once.
    throughput: Load | Sequence[Load] = ()
    # Checks of the answers of an engine that lived.
    output: Checks | None = None
    # False if nobody has reported the bug; `issue` is then the nearest one.
    filed: bool = True
    # Changes of vLLM for `vllm-repro causes`.
    causes: Causes | None = None
    # Line of `lab_release` at which vLLM goes wrong.
    defect: SourceLine | None = None
    # Docstring of the file.
    about: str = field(default="", compare=False)  # set by the reader

    def __post_init__(self) -> None:
        object.__setattr__(self, "issue", issue_name(self.issue))
        object.__setattr__(self, "related", tuple(map(issue_name, self.related)))

    @property
    def lab_release(self) -> str:
        """Default release of a run in the lab."""
        return (self.lab.vllm if self.lab else "") or self.try_with

    def reported(self) -> ServeCommand:
        """Return the reported command, parsed. Raises `CommandError` for any other text."""
        return parse(self.command)

    def arm(self, name: str) -> Arm | None:
        """Return the arm of this name, or None."""
        return next((arm for arm in self.arms if arm.name == name), None)

    @property
    def workarounds(self) -> list[Arm]:
        """Return the arms that avoid the bug by a change of the command, without a patch.

        They meet the trigger and live. If there are none, return arms in which the same requests do
        not meet the trigger.
        """
        changed = [arm for arm in self.arms if arm.edits and not arm.patches]
        living = [arm for arm in changed if arm.expected is Expected.LIVES]
        kept = (Expected.UNTRIGGERED, None)
        return living or [arm for arm in changed if (arm.expected, arm.workload) == kept]

    def status_of(self, arm: Arm) -> Status:
        """Return the scenario's status. If the arm has bad releases, they replace the scenario's.

        Then an arm with patches has no good releases: the patch may cause the crash. Raises
        `ValueError` for a wrong specifier.
        """
        return Status(arm.bad, "" if arm.patches else self.status.good) if arm.bad else self.status

    @property
    def loads(self) -> tuple[Load, ...]:
        """Return the loads whose throughput is measured: the declared ones, else the usual one."""
        names = [arm.name for arm in self.arms]
        loads = self.throughput or usual_load(names, self._max_model_len())
        return (loads,) if isinstance(loads, Load) else tuple(loads)

    def _max_model_len(self) -> int | None:
        """Return `--max-model-len` of the reported command; None without a number or a command."""
        try:
            return self.reported().number("--max-model-len")
        except CommandError:
            return None

    def has_own_server(self, arm: Arm, arms: Sequence[Arm] = ()) -> bool:
        """Return True if no arm before `arm` has the same command and patches.

        Otherwise the throughput of `arm` is not measured. arms: the arms in order; empty for those
        of the scenario. Raises `CommandError` if an edit does not fit.
        """

        def server(candidate: Arm) -> tuple[ServeCommand, tuple[Patch, ...]]:
            """Return what makes an arm's server: its command and its patches."""
            return self.command_of(candidate), candidate.patches

        earlier = takewhile(lambda candidate: candidate.name != arm.name, arms or self.arms)
        return server(arm) not in [server(candidate) for candidate in earlier]

    @property
    def tiny_model(self) -> TinyModel | None:
        """Tiny model of `--weights dummy`; None if the scenario has none.

        Raises `ValueError` for a shape that it cannot have.
        """
        model = self.model
        if self.dummy is None and not model.tiny_will_do:
            return None
        if self.dummy is not None:
            return self.dummy.shape(model)
        family = _TINY.get(model.architecture)
        if family is None or model.full_attention_interval > 1 or model.window_groups:
            known = " or ".join(_TINY)
            raise ValueError(
                f"tiny_will_do=True serves a {known} of full attention alone: declare"
                " dummy=Dummy(…) instead"
            )
        layers, vocab_size = min(2, model.layers), model.vocab_size
        return Dummy(layers=layers, why=model.why, vocab_size=vocab_size, family=family).shape(
            model
        )

    def command_of(self, arm: Arm) -> ServeCommand:
        """Return the reported command with the edits of `arm`.

        Raises `CommandError` if one does not fit.
        """
        return self._edited(arm.edits)

    def command_in_lab(self, arm: Arm) -> ServeCommand:
        """Return the command of `arm` in the lab; it still names the reported model.

        The lab's changes come first, then the arm's edits, or their `in_lab` where they have one.
        Raises `CommandError` if an edit does not fit.
        """
        return self._edited(
            [*(self.lab.changes if self.lab else ()), *(edit.in_lab or edit for edit in arm.edits)]
        )

    def command_with_dummy(self, arm: Arm) -> ServeCommand:
        """Return the command of `arm` for the dummy model; it still names the reported model.

        The dummy's changes come first, then the arm's edits, or their `in_dummy` where they have
        one. Raises `CommandError` if an edit does not fit.
        """
        changes = self.dummy.changes if self.dummy else ()
        return self._edited([*changes, *(edit.in_dummy or edit for edit in arm.edits)])

    def _edited(self, edits: Sequence[Edit]) -> ServeCommand:
        """Return the reported command with these edits, made in order.

        Raises `CommandError` if one does not fit.
        """
        command = self.reported()
        for edit in edits:
            command = edit.apply(command)
        return command

    @property
    def leading(self) -> tuple[Arm, ...]:
        """The first arm, which shows the bug; for wrong answers also the baseline arm."""
        first = self.arms[0]
        baseline = (
            self.arm(self.output.baseline)
            if self.output and first.expected is Expected.ERRS
            else None
        )
        return (first,) if baseline is None else (first, baseline)

    @property
    def phase(self) -> str | None:
        """Phase of the crash; "answers" without a signature; None if it may come in any phase."""
        return "answers" if self.signature is None else self.signature.phase

    def workload_of(self, arm: Arm) -> tuple[Step, ...]:
        """Return the steps of an arm's workload: its own, else the scenario's."""
        return tuple(self.workload) if arm.workload is None else arm.workload
