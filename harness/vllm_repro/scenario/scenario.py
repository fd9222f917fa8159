"""A scenario: one upstream bug as a declaration.

The classes here are what a scenario file declares with the words of `vllm_repro.vocabulary`; `vllm_repro.scenario.reader` reads such a
file and finds its mistakes. Nothing here boots, asks or decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.parse import parse
from vllm_repro.diagnosis.signature import Signature
from vllm_repro.scenario.cause import Causes
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.workload import Step
from vllm_repro.tiny_model import Family, Kind, StandIn
from vllm_repro.trigger.trigger import Condition
from vllm_repro.verdict.output import Checks
from vllm_repro.verdict.throughput import Load
from vllm_repro.verdict.verdict import Expected, Standing

__all__ = ["Arm", "Capture", "Dummy", "Edit", "Lab", "Model", "Needs", "Scenario", "Status"]

Capture = Literal["", "guard", "record"]
LabWeights = Literal["dummy", "made"]

_NARROW = 256
"""Width of a stand-in between its layers. No workspace and no KV cache depends on it, and every matrix product does."""


@dataclass(frozen=True)
class Edit:
    """One small change of the reported command, with the words that declared it, and why where a report is to say so.

    in_lab, in_dummy: the change that does the same to the lab's smaller model and pool, or to the dummy one's, where it is another one.
    """

    words: str
    apply: Callable[[ServeCommand], ServeCommand] = field(compare=False)
    why: str = ""
    in_lab: Edit | None = None
    in_dummy: Edit | None = None

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Arm:
    """One server configuration: the reported command with edits, and possibly a workload of its own.

    patches: changes of vLLM's source that are laid over the release it runs. bad: the releases in which it dies, where they are not
    those of the scenario's status. trigger: what must have happened in it, where that is not the scenario's.
    """

    name: str
    expected: Expected
    edits: tuple[Edit, ...] = ()
    patches: tuple[Patch, ...] = field(default=(), kw_only=True)
    bad: str = field(default="", kw_only=True)
    workload: tuple[Step, ...] | None = None
    why: str = ""
    trigger: Condition | None = field(default=None, kw_only=True)

    def changed_source(self) -> tuple[str, ...]:
        """Each change of vLLM's source, as the sentence that a report has of it."""
        return tuple(f"{patch}" + (f": {patch.why}" if patch.why else "") for patch in self.patches)


@dataclass(frozen=True)
class Model:
    """A public stand-in for the reported model, and the attention shape that matters.

    name: what `--model` defaults to. block_size: KV-cache block in tokens when no flag sets it. full_attention_interval: every
    n-th layer is full attention (1: all are). window_groups: the groups of layers with a sliding window that share the pool with one
    group of full attention, each with its block size and window in tokens. group_pages: bytes of one block of each group, that of full
    attention first, by which vLLM to 0.24.0 words the size of the pool. kv_cache_tokens, kv_cache_gib: the KV cache of the report's
    boot log, on each GPU, for a rehearsal, which has no memory to measure. tiny_will_do: whether any weights show the bug, so that a
    tiny model of random weights may stand in on a machine that cannot hold the real one.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab_size: int
    block_size: int = 16
    full_attention_interval: int = 1
    max_position: int = 131072
    architecture: str = "Qwen3ForCausalLM"
    tiny_will_do: bool = False
    window_groups: Sequence[tuple[int, int]] = ()
    group_pages: Sequence[int] = ()
    kv_cache_tokens: int = 0
    kv_cache_gib: float = 0
    why: str = ""

    def __post_init__(self) -> None:
        sizes = ("heads", "kv_heads", "head_dim", "layers", "vocab_size", "block_size", "max_position")
        for name in (*sizes, "full_attention_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: sizes of a model count from 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")

    def shape(self) -> dict[str, Any]:
        """The shape under the names that a model's config.json uses."""
        told = {
            "window_groups": list(self.window_groups),
            "group_pages": list(self.group_pages),
            "kv_cache_tokens": self.kv_cache_tokens,
            "kv_cache_gib": self.kv_cache_gib,
        }
        return {
            "architecture": self.architecture,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab_size,
            "block_size": self.block_size,
            "full_attention_interval": self.full_attention_interval,
            "max_position_embeddings": self.max_position,
        } | {name: value for name, value in told.items() if value}


@dataclass(frozen=True, kw_only=True)
class Dummy:
    """The model of random weights that stands in for the reported one (`--weights dummy`): the same attention, few layers.

    layers: their number where all are of full attention, else the kind of each. window: of its sliding layers, in tokens. heads, kv_heads,
    head_dim: those of the reported model unless given. family: the code of vLLM that runs it; unless given a gemma3 where it has sliding
    layers, else a qwen3. drafts: how many further layers draft tokens for it. fp8: see `StandIn`. changes: edits of the reported command
    that such a model needs, each with its `why`; they come before an arm's own. why: what makes it stand for the reported model.
    """

    layers: int | Sequence[Kind]
    why: str
    changes: Sequence[Edit] = ()
    window: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    family: Family | None = None
    drafts: int = 0
    fp8: bool = False

    def __post_init__(self) -> None:
        sliding = not isinstance(self.layers, int) and "sliding" in self.layers
        if sliding != (self.window is not None):
            raise ValueError("window=… goes with sliding layers, and they with it")

    def shape(self, model: Model) -> StandIn:
        """Of the stand-in for `model`. Raises `ValueError` for one that cannot be."""
        layers: Sequence[Kind] = ["full"] * self.layers if isinstance(self.layers, int) else self.layers
        return StandIn(
            family=self.family or ("gemma3" if "sliding" in layers else "qwen3"),
            kinds=tuple(layers),
            heads=self.heads or model.heads,
            kv_heads=self.kv_heads or model.kv_heads,
            head_dim=self.head_dim or model.head_dim,
            window=self.window,
            drafts=self.drafts,
            hidden=_NARROW,
            max_position=model.max_position,
            fp8=self.fp8,
        )


@dataclass(frozen=True, kw_only=True)
class Lab(Dummy):
    """How a scenario goes to the lab: a real release on the CPU, with its CUDA parts replaced, and a model that a CPU can run.

    mechanism: the part of the lab's plugin that does it. capture: what is done while CUDA graphs are captured: "guard" refuses what CUDA
    refuses then, "record" also replays the graphs while serving; where it is empty the same batches run and nothing looks on. weights:
    "made" where answers are to be compared, which dummy ones do not allow (`vllm_repro.releases.weights`). arms: names of those that a run
    takes where none is named, since each boot is half a minute of a CPU; all of them where this is empty. vllm: the release of a run
    that names none, where the scenario's own cannot be installed.
    """

    mechanism: str
    capture: Capture = ""
    weights: LabWeights = "dummy"
    arms: Sequence[str] = ()
    vllm: str = ""


@dataclass(frozen=True)
class Needs:
    """Hardware without which a boot means nothing. gpu_memory_gb per GPU; capability as CUDA counts it, for example 8.0."""

    gpus: int = 0
    gpu_memory_gb: float = 0
    capability: float | None = None
    nodes: int = 1
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
    """Which releases have the bug: version specifiers as pip writes them, for example bad=">=0.21.0,<0.24.0", good=">=0.24.0"."""

    bad: str
    good: str = ""

    def __post_init__(self) -> None:
        for text in (self.bad, self.good):
            try:
                SpecifierSet(text)
            except InvalidSpecifier as error:
                raise ValueError(f"{text!r} is no version specifier, such as '>=0.21.0,<0.24.0'") from error

    def contradictions(self) -> set[str]:
        """Versions that are named as a bound and fall under both."""
        if not self.good:
            return set()
        bad, good = SpecifierSet(self.bad, prereleases=True), SpecifierSet(self.good, prereleases=True)
        return {part.version for part in (*bad, *good) if part.version in bad and part.version in good}

    @property
    def open(self) -> bool:
        return not self.good

    def standing(self, version: str | None) -> Standing:
        """What is declared for `version`, as the server reports it; a nightly counts as what its number says."""
        try:
            parsed = Version(version or "")
        except InvalidVersion:
            return Standing.UNKNOWN
        if SpecifierSet(self.bad, prereleases=True).contains(parsed):
            return Standing.BAD
        if self.good and SpecifierSet(self.good, prereleases=True).contains(parsed):
            return Standing.GOOD
        return Standing.UNKNOWN

    @property
    def first_bad(self) -> str | None:
        return _bound(self.bad, (">=", "=="))

    @property
    def first_good(self) -> str | None:
        return _bound(self.good, (">=", "=="))

    def __str__(self) -> str:
        return f"bad {self.bad}" + (f", good {self.good}" if self.good else ", open")


def _bound(text: str, operators: tuple[str, ...]) -> str | None:
    versions = [Version(part.version) for part in SpecifierSet(text) if part.operator in operators]
    return str(min(versions)) if versions else None


@dataclass(frozen=True)
class Scenario:
    """One upstream bug.

    id: name on the command line. issue: `owner/repository#number`. filed: False where nobody has reported it, and `issue` is only what it
    is nearest to. command: the reported command, word for word. try_with: the release that a run uses when none is named; one that has
    the bug. same_death_as: the scenario whose signature this one shares; a log from elsewhere is this bug only where its release no
    longer has that one. signature: of a bug that kills. throughput: what `--throughput` measures. output: what is asked of an engine that
    lived. causes: changes of vLLM that `causes` tries one at a time. about: what the file says at its head, in paragraphs.
    """

    id: str
    issue: str
    title: str
    command: str
    model: Model
    needs: Needs
    status: Status
    try_with: str
    workload: Sequence[Step]
    trigger: Condition
    arms: Sequence[Arm]
    signature: Signature | None = None
    related: Sequence[str] = ()
    lab: Lab | None = None
    dummy: Dummy | None = None
    same_death_as: str = ""
    throughput: Load | Sequence[Load] = ()
    output: Checks | None = None
    filed: bool = True
    causes: Causes | None = None
    about: str = field(default="", compare=False)  # of a file that was read; one that was imported keeps it to itself

    @property
    def issue_url(self) -> str:
        repository, _, number = self.issue.partition("#")
        return f"https://github.com/{repository}/issues/{number}"

    @property
    def try_in_lab(self) -> str:
        """The release of a run in the lab that names none."""
        return (self.lab.vllm if self.lab else "") or self.try_with

    def reported(self) -> ServeCommand:
        """The reported command, parsed."""
        return parse(self.command)

    def arm(self, name: str) -> Arm | None:
        return next((arm for arm in self.arms if arm.name == name), None)

    def status_of(self, arm: Arm) -> Status:
        """The scenario's status, with the arm's own bad releases where it has some. Raises ValueError where they are no specifier.

        An arm that changes the source is no release: where the change is what kills it, that releases are good says nothing of it.
        """
        return Status(arm.bad, "" if arm.patches else self.status.good) if arm.bad else self.status

    @property
    def loads(self) -> tuple[Load, ...]:
        return (self.throughput,) if isinstance(self.throughput, Load) else tuple(self.throughput)

    def has_own_server(self, arm: Arm) -> bool:
        """Whether no earlier arm has the same server: one that differs in its requests alone serves no faster, and says nothing else.

        Raises `CommandError` where an edit does not fit.
        """

        def server(one: Arm) -> tuple[ServeCommand, tuple[Patch, ...]]:
            return self.command_of(one), one.patches

        earlier = self.arms[: [one.name for one in self.arms].index(arm.name)]
        return server(arm) not in [server(one) for one in earlier]

    @property
    def stand_in(self) -> StandIn | None:
        """What `--weights dummy` serves; None where the scenario does not say."""
        if self.dummy is not None:
            return self.dummy.shape(self.model)
        return StandIn() if self.model.tiny_will_do else None

    def command_of(self, arm: Arm) -> ServeCommand:
        """The reported command with the edits of `arm`; raises `CommandError` where one does not fit."""
        return self._edited(arm.edits)

    def command_in_lab(self, arm: Arm) -> ServeCommand:
        """`command_of`, with the lab's changes first, so that an arm has the last word."""
        return self._edited([*(self.lab.changes if self.lab else ()), *(edit.in_lab or edit for edit in arm.edits)])

    def command_with_dummy(self, arm: Arm) -> ServeCommand:
        """`command_of`, with the changes first that the stand-in needs."""
        changes = self.dummy.changes if self.dummy else ()
        return self._edited([*changes, *(edit.in_dummy or edit for edit in arm.edits)])

    def _edited(self, edits: Sequence[Edit]) -> ServeCommand:
        command = self.reported()
        for edit in edits:
            command = edit.apply(command)
        return command

    @property
    def leading(self) -> tuple[Arm, ...]:
        """The arm that shows the bug, and where it answers wrongly the one that its answer is held against."""
        first = self.arms[0]
        baseline = self.arm(self.output.baseline) if self.output and first.expected is Expected.ERRS else None
        return (first,) if baseline is None else (first, baseline)

    @property
    def phase(self) -> str | None:
        """Where the bug shows: the phase of the death, "answers" where it kills nothing; None where a death may come in any phase."""
        return "answers" if self.signature is None else self.signature.phase

    def workload_of(self, arm: Arm) -> tuple[Step, ...]:
        return tuple(self.workload) if arm.workload is None else arm.workload
