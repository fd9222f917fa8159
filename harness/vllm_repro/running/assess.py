"""What a trial saw, turned into what it means: trigger proof, death, outcome.

The one effect here is reading the trial's log file; everything else is a function of `Seen`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, assert_never

from vllm_repro.client.answer import Answer
from vllm_repro.command.command import ServeCommand
from vllm_repro.diagnosis.boot_facts import BootFacts, boot_facts, observed, scheduler_dump
from vllm_repro.diagnosis.diagnosis import Diagnosis, Phase, diagnose
from vllm_repro.diagnosis.log_text import Line, read_lines
from vllm_repro.diagnosis.signature import How, NodeLog, compare, failed_nodes, lost_worker
from vllm_repro.evidence import Evidence
from vllm_repro.running.death_signs import Channel, DeathSign
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.servers.base import Exit, ServerFacts
from vllm_repro.tiny_model import StandIn
from vllm_repro.trigger.trigger import Asked, AttentionShape, Condition, Finding, ScheduledChunk, TriggerFacts
from vllm_repro.verdict.outcome import Death, Outcome, Outlasted, TrialFacts, classify
from vllm_repro.verdict.output import OutputSample, ServedWeights, check_output

__all__ = ["Conclusion", "Seen", "assess", "weights_of"]

_MOST_FRAMES = 40


@dataclass
class Seen:
    """What one trial saw, filled while it runs. Times in seconds.

    After the workload: doing, what the engine was asked for last; later, the answers to it that went wrong; said, its answers to the output
    check. stand_in: the model that was made to be served, if one was.
    outlasted: the servers of further nodes that stayed when the first one was gone.
    """

    facts: ServerFacts | None = None
    stand_in: StandIn | None = None
    ready: bool = False
    boot_s: float | None = None
    version: str | None = None
    signs: list[DeathSign] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    sent: int = 0
    canary_ok: bool | None = None
    hung: str | None = None
    exit: Exit | None = None
    infra: str | None = None
    unsupported: str | None = None
    cancelled: str | None = None
    doing: str = ""
    later: list[Answer] = field(default_factory=list)
    said: list[OutputSample] = field(default_factory=list)
    outlasted: tuple[Outlasted, ...] = ()


@dataclass(frozen=True)
class Conclusion:
    """What the report says of a trial. `why`: one sentence for people. during: what an engine that died was asked for, after its workload.
    weights: those that were served; None where nobody can say. imported: of the files that were changed for it, those that a process
    of the server imported."""

    outcome: Outcome
    phase: Phase | None
    trigger: Finding
    death: Death | None
    boot_s: float | None
    version: str | None
    sent: int
    ok: int
    why: str
    captured: dict[str, str]
    boot: dict[str, Any]
    launched: bool
    during: str = ""
    weights: ServedWeights | None = None
    imported: tuple[str, ...] = ()
    outlasted: tuple[Outlasted, ...] = ()

    def as_fields(self) -> dict[str, Any]:
        """For the journal: plain values under the names of `report.json`."""
        death = self.death
        return {
            "outcome": self.outcome,
            "phase": self.phase,
            "trigger": {
                "crossed": self.trigger.crossed,
                "evidence": list(self.trigger.evidence),
                "brief": self.trigger.brief,
            },
            "death": death
            and {
                "detected_by": death.detected_by,
                "latency_s": death.latency_s,
                "exception": death.exception,
                "message": death.message,
                "frames": list(death.frames),
                "signature": death.signature,
                "channels": list(death.channels),
                "ranks": list(death.ranks),
            },
            "boot_s": self.boot_s,
            "version": self.version,
            "requests": {"sent": self.sent, "ok": self.ok, "failed": self.sent - self.ok},
            "why": self.why,
            "captured": self.captured,
            "boot": self.boot,
            "during": self.during,
            "weights": self.weights,
            "imported": list(self.imported),
            "outlasted": [asdict(one) for one in self.outlasted],
        }


def assess(
    scenario: Scenario, command: ServeCommand, seen: Seen, log: Path, trigger: Condition | None = None
) -> Conclusion:
    """The conclusion of one trial; `log` is its whole server log (an absent file is an empty log). trigger: the arm's own."""
    died = any(sign.decisive for sign in seen.signs)
    # Read once for each question rather than kept: a log may be larger than the memory.
    diagnosis = diagnose(_lines(log), we_terminated=not died)
    boot = boot_facts(_lines(log))
    nodes = _node_logs(log, diagnosis)
    death, captured = _death(scenario, seen, diagnosis, nodes) if died else (None, {})
    finding = (trigger or scenario.trigger).find(_trigger_facts(scenario, command, seen, log, boot, captured))
    unsupported = seen.unsupported
    if unsupported is None and not seen.ready and diagnosis.usage is not None:
        unsupported = f"this release refused the command line: {diagnosis.usage}"
    weights = weights_of(command, seen, boot)
    facts = TrialFacts(
        ready=seen.ready,
        finding=finding,
        death=death,
        cancelled=seen.cancelled,
        infra=seen.infra or _infra(seen),
        unsupported=unsupported,
        hung=seen.hung if seen.ready else None,
        wrong_output=_wrong_output(seen) or check_output(scenario.output, seen.said, weights),
    )
    outcome = classify(facts)
    phase = None
    if death is not None:
        phase = diagnosis.phase or (Phase.REQUEST if seen.ready else Phase.BOOT)
    why = _why(outcome, facts, diagnosis, seen)
    return Conclusion(
        outcome,
        phase,
        finding,
        death,
        seen.boot_s,
        seen.version or boot.vllm_version,
        seen.sent,
        sum(answer.ok for answer in seen.answers),
        why,
        captured,
        asdict(boot),
        seen.facts is not None,
        seen.doing if death is not None or outcome is Outcome.HANG else "",
        weights,
        tuple(dict.fromkeys(str(one.values["file"]) for one in observed(_lines(log)) if one.kind == "imported")),
        seen.outlasted,
    )


def _lines(log: Path) -> Iterable[Line]:
    try:
        with log.open("rb") as file:
            yield from read_lines(file)
    except OSError:
        return


def _trigger_facts(
    scenario: Scenario, command: ServeCommand, seen: Seen, log: Path, boot: BootFacts, captured: dict[str, str]
) -> TriggerFacts:
    step = tuple(
        ScheduledChunk(request.computed or 0, request.scheduled or 0, request.new)
        for request in scheduler_dump(_lines(log))
    )
    batch, chunked = boot.max_num_batched_tokens, boot.chunked_prefill
    # The boot line is what is in force, and the flag is what was asked for. Nobody knows that of an attached server: the scenario's
    # flags are not its own, and prove nothing about it.
    attached = seen.facts is not None and not seen.facts.kind.facts.started
    if not attached:
        batch = batch or command.number("--max-num-batched-tokens")
        chunked = command.enabled("--enable-chunked-prefill") if chunked is None else chunked
    return TriggerFacts(
        tuple(_in_flight(asked, seen) for asked in seen.asked),
        batch,
        chunked,
        boot.attention_backend,
        step,
        None if attached else command,
        boot.args,
        _shape(scenario, seen, boot),
        boot.workspace_locked,
        boot.workspace_reserved,
        observed(_lines(log)),
        captured,
        boot,
    )


def _in_flight(asked: Asked, seen: Seen) -> Asked:
    """A request that the death left without any answer, as a reset does or our own end to the waiting, was in flight when it came. So was
    one that hangs."""
    if asked.status is not None:
        return asked
    died = any(sign.decisive for sign in seen.signs)
    return replace(asked, died=asked.died or died, hung=seen.hung is not None and not died and not asked.refusal)


def _shape(scenario: Scenario, seen: Seen, boot: BootFacts) -> AttentionShape | None:
    """None where the server says that it serves another model: its sizes are not those that the scenario states."""
    model, served = scenario.model, seen.stand_in
    if served is None and scenario.lab is not None and seen.facts is not None and seen.facts.kind.facts.in_lab:
        served = scenario.lab.shape(model)
    if served is not None:
        return AttentionShape(served.heads, served.kv_heads, served.head_dim, kinds=served.kinds, window=served.window)
    # How a GPU's pool is cut is for its own release to say: the groups are those of the pool that the rehearsal engine imitates.
    imitated = seen.facts is not None and seen.facts.evidence is Evidence.REHEARSAL
    groups = tuple(model.window_groups) if imitated else ()
    said = boot.args.get("model")
    known = {_last(name) for name in (model.name, scenario.reported().model) if name}
    if not imitated and isinstance(said, str) and _last(said) not in known:
        return None
    return AttentionShape(
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.block_size,
        window_groups=groups,
        group_pages=tuple(model.group_pages) if groups else (),
    )


def _last(name: str) -> str:
    """A model's own name: of `org/model`, and of a folder that was made from it."""
    return name.rstrip("/").rpartition("/")[2].lower()


def _node_logs(log: Path, head: Diagnosis) -> list[NodeLog]:
    """What each node's log says; empty for a server of one node."""
    others = sorted(log.parent.glob(f"{log.stem}.rank*.log"))
    if not others:
        return []
    found = [NodeLog(node=0, diagnosis=head, lost=lost_worker(_lines(log)))]
    for path in others:
        node = int(path.name.removesuffix(".log").rpartition("rank")[2])
        found.append(NodeLog(node=node, diagnosis=diagnose(_lines(path)), lost=lost_worker(_lines(path))))
    return found


def _death(scenario: Scenario, seen: Seen, diagnosis: Diagnosis, nodes: list[NodeLog]) -> tuple[Death, dict[str, str]]:
    signs = sorted((sign for sign in seen.signs if sign.channel is not Channel.COUNTERS), key=lambda sign: sign.at)
    first = signs[0]
    latency = max(0.0, first.at - min(sign.since for sign in signs))
    signature: How | None = None
    captured: dict[str, str] = {}
    if diagnosis.exception is not None and scenario.signature is None:
        signature = How.OTHER  # no death is this bug
    elif diagnosis.exception is not None and scenario.signature is not None:
        comparison = compare(scenario.signature, diagnosis)
        captured = dict(comparison.captured)
        signature = comparison.how
    return (
        Death(
            detected_by=first.channel,
            latency_s=round(latency, 4),
            exception=diagnosis.exception,
            message=diagnosis.message,
            frames=tuple(f"{frame.file}:{frame.function}" for frame in diagnosis.frames)[-_MOST_FRAMES:],
            signature=signature,
            channels=tuple(sign.channel for sign in signs),
            ranks=failed_nodes(nodes, scenario.signature),
        ),
        captured,
    )


def weights_of(command: ServeCommand, seen: Seen, boot: BootFacts) -> ServedWeights | None:
    """What the answers come from; None where nobody knows. `boot` is looked at for a server that somebody else started."""
    if seen.facts is None:
        return None
    if seen.facts.evidence is Evidence.REHEARSAL:
        return ServedWeights.IMITATED
    if not seen.facts.kind.facts.started:
        # Its command line is somebody else's, and only the log may tell.
        if not boot.args:
            return None
        return ServedWeights.DUMMY if boot.args.get("load_format") == "dummy" else ServedWeights.REAL
    if command.get("--load-format") == "dummy":
        return ServedWeights.DUMMY
    return ServedWeights.MADE if seen.facts.kind.facts.in_lab else ServedWeights.REAL


def _infra(seen: Seen) -> str | None:
    if seen.exit is not None and seen.exit.lost:
        return f"the container engine was lost: {seen.exit.detail}"
    if seen.exit is not None and seen.exit.oom_killed:
        return f"out of memory, killed by the kernel: {seen.exit.detail}"
    return None


def _wrong_output(seen: Seen) -> str | None:
    for answer in (*seen.answers, *seen.later):
        if answer.status is None:
            return f"a request got no answer and the engine lives: {answer.error}"
        if answer.status >= 500:
            return f"a request was answered {answer.status} and the engine lives: {answer.error}"
        if answer.empty:
            return "a request was answered 200 without a single token"
        if answer.status == 200 and (answer.error is not None or answer.finish_reason is None):
            return f"an answer ended without finish_reason{': ' + answer.error if answer.error else ''}"
    if seen.canary_ok is False:
        return "the one-token canary at the end got no token"
    return None


def _why(outcome: Outcome, facts: TrialFacts, diagnosis: Diagnosis, seen: Seen) -> str:
    match outcome:
        case Outcome.CANCELLED if facts.death is not None:
            # It counts as cut, and what the engine died of by then is what a reader wants to know.
            return f"{_cause(facts.death, diagnosis).rstrip('.')}; {facts.cancelled} before the trial came to its end"
        case Outcome.CANCELLED:
            return facts.cancelled or ""
        case Outcome.INFRA:
            return facts.infra or ""
        case Outcome.UNSUPPORTED:
            return facts.unsupported or ""
        case Outcome.HANG:
            return facts.hung or ""
        case Outcome.WRONG_OUTPUT:
            return facts.wrong_output or ""
        case Outcome.CLEAN:
            return "the boundary was crossed and the engine lived"
        case Outcome.UNTRIGGERED:
            return "the engine lived, and the boundary was not crossed: " + "; ".join(facts.finding.evidence)
        case Outcome.BOOT_FAILED if facts.death is None:
            return seen.hung or "it never became ready"
        case Outcome.CRASH | Outcome.OTHER_CRASH | Outcome.BOOT_FAILED:
            return diagnosis.why if facts.death is None else _cause(facts.death, diagnosis)
        case _:
            assert_never(outcome)


def _cause(death: Death, diagnosis: Diagnosis) -> str:
    """What an engine died of: `AssertionError in reserve: the workspace is locked`."""
    if death.exception is None:
        return f"{diagnosis.why.rstrip('.')}; no log names the cause" if diagnosis.why else "no log names the cause"
    # The lab's guard stands where a CUDA build has C++, which no traceback shows.
    own = [frame for frame in death.frames if not frame.startswith("vllm_repro_lab/")]
    last = own[-1].rsplit(":", 1)[-1] if own else ""
    message = " ".join((death.message or "").split())
    return f"{death.exception}{' in ' + last if last else ''}: {message}".rstrip(": ")
