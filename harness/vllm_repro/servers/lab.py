"""The server kind `lab`: a cached release as a process, with the lab's plugin on its PYTHONPATH.

vLLM finds the plugin by its entry point in a folder of links, so that nothing else of this
environment is on its path. A release that lacks a name that the lab replaces is `unsupported`.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import vllm_repro_lab
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.host.machine import cpu_flags
from vllm_repro.host.ports import free_port
from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.overlay import patched_files
from vllm_repro.releases.provision import Release, ReleaseCache, provision
from vllm_repro.releases.sources import Source
from vllm_repro.releases.tiny_model_folder import cached_model
from vllm_repro.releases.weights import FAMILIES
from vllm_repro.scenario.scenario import Arm, Lab, Model, Scenario
from vllm_repro.scenario.workload import requests_of
from vllm_repro.servers.base import Replaced, Server, ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.lab_launch import graph_mode, lab_launch, no_lab
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.overlay import PatchedSource, patch_packages
from vllm_repro.servers.process import ProcessServer, misfit, process_server, with_release
from vllm_repro.servers.site import Notify, Offer, Site
from vllm_repro_diagnosis.evidence import Evidence, facts_of
from vllm_repro_lab.parts import MECHANISMS
from vllm_repro_lab.record import Part

_METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: vllm-repro-lab\nVersion: 0\n",
    "entry_points.txt": "[vllm.general_plugins]\nvllm_repro_lab = vllm_repro_lab:register\n",
}


def plugin_folder() -> Path:
    """Make, in the cache, and return a folder for PYTHONPATH with only the lab's vLLM plugin."""
    package = Path(vllm_repro_lab.__file__).resolve().parent
    folder = (
        cache_root() / "plugins" / f"lab-{hashlib.sha256(str(package).encode()).hexdigest()[:8]}"
    )
    metadata = folder / "vllm_repro_lab-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    for name, text in _METADATA.items():
        (metadata / name).write_text(text, encoding="utf-8")
    with contextlib.suppress(FileExistsError):  # an earlier run made it
        (folder / "vllm_repro_lab").symlink_to(package)
    return folder


class LabServer(ProcessServer):
    """A vLLM process on the CPU whose plugin records, beside the log, what it replaced.

    untried: per patched file, the functions that the lab replaces, so that their patch does not
    run.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        untried: Mapping[str, tuple[str, ...]],
        log: Path,
        env: Mapping[str, str],
        **more: Any,
    ) -> None:
        self.facts = log.with_suffix(".lab.json").absolute()
        self.untried = untried
        super().__init__(argv, log=log, env={**env, "REPRO_LAB_FACTS": str(self.facts)}, **more)

    def booted(self, facts: ServerFacts, *, ready: bool) -> ServerFacts:
        """Return `facts` with the parts of vLLM that the lab replaced, and the patched files.

        Raises `InfraError` if the ready server did not load the plugin, `Unsupported` as
        `read_replaced` does.
        """
        if ready and not self.facts.is_file():
            raise InfraError(
                "the release did not load the lab's plugin, so the replaced parts are unknown",
                hint="unset VLLM_PLUGINS: it limits which plugins vLLM loads",
            )
        replaced = read_replaced(self.facts)
        booted = super().booted(facts, ready=ready)
        patched = tuple(
            replace(patched_file, untried=self.untried.get(patched_file.file, ()))
            for patched_file in booted.patched
        )
        return replace(booted, replaced=replaced, patched=patched)


def read_replaced(path: Path) -> tuple[Replaced, ...]:
    """Return the parts of vLLM that the lab's plugin replaced, from its file; none without one.

    Raises `Unsupported` if the release lacks names in vLLM's code that the lab replaces.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    if lacking := record.get("unsupported"):
        raise Unsupported(
            f"the lab cannot run this release: it has no {', '.join(lacking)}",
            hint=(
                "--vllm names another release; vllm-repro show … --as lab lists the names that the"
                " lab replaces"
            ),
        )
    return tuple(Replaced(**part) for part in record["replaced"])


class LabSite(Site):
    """The servers of `--server lab`: real vLLM on the CPU, with parts of it replaced.

    For scenarios with `lab=`; needs no GPU.
    """

    kind = ServerKind.LAB
    evidence = Evidence.LAB

    def __init__(
        self, options: ServerOptions, scenario: Scenario, notify: Notify = lambda _: None
    ) -> None:
        if scenario.lab is None:
            raise no_lab(scenario)
        if options.model or options.weights in ("real", "random"):
            raise UsageError(
                "the lab always serves a tiny model of the scenario's shape",
                hint="leave --model and --weights out",
            )
        self._source = options.vllm or Source(release=scenario.lab_release)
        self.release_version = self._source.version
        self.release: Release | None = None
        self._lab, self._scenario, self._notify = scenario.lab, scenario, notify
        _refuse_made_weights(self._lab, scenario.model)

    @classmethod
    def offer(
        cls, scenario: Scenario, options: ServerOptions, *, missing: str, download: bool
    ) -> Offer:
        """Accept a scenario with `lab=` if this CPU can run it and its release can be had.

        That is: it is in the cache, or may be downloaded. Decline with `--model`, or `--weights`
        real or random.
        """
        if scenario.lab is None or options.model or options.weights in ("real", "random"):
            return Offer(False)
        if lacking := _lacking_flag(scenario.lab, scenario.model):
            return Offer(False, f"the lab needs a processor with {lacking} for it")
        source = options.vllm or Source(release=scenario.lab_release)
        if download or ReleaseCache().get(source):
            return Offer(True)
        return Offer(False, f"--scenario-server lab installs vLLM {source} and runs it without")

    def prepare(self, notify: Notify) -> None:
        """Set `release`, installed if necessary.

        Raises `Unsupported` if this CPU lacks a flag, and `InfraError` if it cannot be installed.
        """
        if lacking := _lacking_flag(self._lab, self._scenario.model):
            raise Unsupported(
                "vLLM's CPU build has the operators of this scenario only for processors with"
                f" {lacking}",
                hint=f"use a machine whose /proc/cpuinfo lists {lacking}",
            )
        self.release = provision(self._source, notify, unchecked=True)
        self._notify = notify

    def usual_arms(self, scenario: Scenario, arms: Sequence[Arm]) -> list[Arm]:
        """Return the arms that the scenario's `lab=` names; all arms if it names none."""
        return [arm for arm in arms if not self._lab.arms or arm.name in self._lab.arms]

    def why_not(self, arm: Arm) -> str:
        """Return why the lab cannot run `arm`, as a sentence; empty if it can.

        Raises `InfraError` as `Site.why_not` does.
        """
        if graph_mode(self._scenario.command_in_lab(arm)) == "PIECEWISE":
            return (
                "the lab captures full graphs of decode batches only, and this arm asks for"
                " PIECEWISE"
            )
        attention = MECHANISMS[self._lab.mechanism].attention
        shape = self._lab.shape(self._scenario.model)
        return misfit(self.release, shape, attention=attention) or super().why_not(arm)

    def launch(
        self, scenario: Scenario, arm: Arm, port: int, *, run: str = "", number: int = 1
    ) -> Launch:
        """Return the command of `arm` in the lab, with its differences from the bug report.

        Before `prepare` has set `release`, its program is just `vllm`, and no patch is applied.
        """
        launch = lab_launch(
            scenario,
            arm,
            vllm=(str(self.release.executable) if self.release else "vllm",),
            version=self.release_version,
            plugin=plugin_folder(),
            overlay=self.patched_source(arm).folder,
            model=lab_model(self._lab, self._scenario.model),
            port=port,
            lab=self._lab,
            kind=self.kind,
        )
        return with_release(launch, self.release)

    def patched_source(self, arm: Arm) -> PatchedSource:
        """Return the release's vLLM with the arm's patches; empty without patches or `release`."""
        if not arm.patches or self.release is None:
            return PatchedSource()
        return patch_packages(self.release.packages, arm.patches, self._notify)

    def _server(
        self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str
    ) -> tuple[Launch, Server]:
        """Return the launch and the server of one trial in the lab, not started."""
        launch = self.launch(scenario, arm, free_port())
        digests = self.patched_source(arm).digests
        make = partial(LabServer, patched=digests, untried=self._untried(arm))
        return process_server(launch, arm, log, self.others, make)

    def _untried(self, arm: Arm) -> dict[str, tuple[str, ...]]:
        """Return, by patched file, the functions that the patch changes and the lab replaces."""
        assert self.release is not None
        folder, parts = (
            self.release.packages,
            MECHANISMS[self._lab.mechanism].parts_with(self._lab.capture),
        )
        changed = patched_files(folder, arm.patches)
        return {
            file: untried(parts, file, (folder / file).read_text(encoding="utf-8"), text)
            for file, text in changed.items()
        }

    def text(self, arm: Arm, port: int) -> str:
        """Return the arm's command, ready to paste, and the replaced parts of vLLM as comments.

        Set `release` to the cached release, if there is one; its program starts the command, else
        `vllm`. Install nothing.
        """
        self.release = ReleaseCache().get(self._source)
        lines = [self.launch(self._scenario, arm, port).render(), ""]
        lines += [
            (
                f"# {facts_of(self.evidence).mark}: vLLM {self.release_version} on the CPU."
                " Replaced, and nothing else:"
            )
        ]
        for part in MECHANISMS[self._lab.mechanism].parts_with(self._lab.capture):
            if part.effect:
                lines += [
                    f"# {part.module}.{part.name}",
                    f"#   why: {part.why}",
                    f"#   effect on the bug: {part.effect}",
                ]
        return "\n".join(lines)


class SchedulerSite(LabSite):
    """The lab without a model, for scenarios whose bug is in the scheduler or a KV connector.

    `auto` never chooses it.
    """

    kind = ServerKind.SCHEDULER
    evidence = Evidence.SCHEDULER

    def __init__(
        self, options: ServerOptions, scenario: Scenario, notify: Notify = lambda _: None
    ) -> None:
        super().__init__(options, scenario, notify)
        if not MECHANISMS[self._lab.mechanism].scheduled:
            raise UsageError(
                f"{scenario.id} needs a model: its bug is not in the scheduler or a KV connector",
                hint=self._hint(scenario.arms[0]),
            )
        self._lab = replace(self._lab, mechanism="scheduler", capture="", weights="dummy")

    @classmethod
    def offer(
        cls, scenario: Scenario, options: ServerOptions, *, missing: str, download: bool
    ) -> Offer:
        """Decline every scenario: `--server auto` never uses this kind."""
        return Offer(False)

    def why_not(self, arm: Arm) -> str:
        """Return why `arm` cannot run without a model, as a sentence; empty if it can."""
        timed = requests_of(tuple(self._scenario.workload_of(arm)))
        if name := next(
            (
                request.label
                for request in timed
                if request.starts_after or request.leaves_after is not None
            ),
            "",
        ):
            return (
                f"the request {name!r} comes or leaves after a time, and without a model no step"
                " takes time"
            )
        return super().why_not(arm)

    def _hint(self, arm: Arm) -> str:
        """Return the advice to use the lab with a model."""
        return "--server lab runs it with a model"


_CPU_FLAGS = {"deepseek_v4": "avx512_bf16"}
"""Processor flag, by model family, that vLLM's CPU build needs for the model's operators."""


def _lacking_flag(lab: Lab, model: Model) -> str:
    """Return the CPU flag that the lab's model needs and this processor lacks, or an empty text."""
    flag = _CPU_FLAGS.get(lab.shape(model).family, "")
    return "" if flag in cpu_flags() else flag


def _refuse_made_weights(lab: Lab, model: Model) -> None:
    """Raise `UsageError` if `lab.weights` is "made" and the model's family has no such weights."""
    family = lab.shape(model).family
    if lab.weights == "made" and family not in FAMILIES:
        raise UsageError(
            f"weights can be made for {', '.join(sorted(FAMILIES))}, not for {family}",
            hint=(
                "leave weights= out of the scenario's lab: dummy weights serve all but a comparison"
                " of answers"
            ),
        )


def lab_model(lab: Lab, model: Model) -> Path:
    """Return the folder of the tiny model that the lab serves, made on first use."""
    return cached_model(lab.shape(model), weights=lab.weights == "made")


def untried(parts: Sequence[Part], file: str, before: str, after: str) -> tuple[str, ...]:
    """Return the functions and classes of `file` that a patch changes and the lab replaces.

    So the patched ones do not run. parts: what the lab replaces. before, after: the text of the
    file without and with the patch.
    """
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    names = dict.fromkeys(part.name for part in parts if part.module == module and not part.runs)
    old, new = dict(_definitions(before)), dict(_definitions(after))
    return tuple(name for name in names if old.get(name) != new.get(name))


def _definitions(source: str) -> Iterator[tuple[str, str]]:
    """Yield (name, normalized source) of each function, class and method of a module.

    Yield nothing for a syntax error.
    """
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, ast.unparse(node)
        if isinstance(node, ast.ClassDef):
            yield from (
                (f"{node.name}.{inner.name}", ast.unparse(inner))
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            )
