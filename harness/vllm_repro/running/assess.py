"""The meaning of one trial: evidence of the trigger, cause of death, outcome.

The one effect is reading the log file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, assert_never

from vllm_repro.client.answer import Answer
from vllm_repro.command.command import ServeCommand
from vllm_repro.running.death_signs import Channel, DeathSign, log_sign
from vllm_repro.running.state import Observed
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.trigger.trigger import (
    AttentionShape,
    Condition,
    SentRequest,
    TriggerFacts,
    TriggerResult,
)
from vllm_repro.verdict.outcome import Death, Outcome, Outlasted, TrialFacts, classify
from vllm_repro.verdict.output import ServedWeights, check_output, compare_alone
from vllm_repro_diagnosis.boot_facts import (
    BootFacts,
    boot_facts,
    imported,
    observed,
    scheduler_dump,
    shared_steps,
)
from vllm_repro_diagnosis.diagnosis import Diagnosis, Phase, diagnose
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.log_text import Line, read_lines
from vllm_repro_diagnosis.signature import How, compare, failed_nodes

_MOST_FRAMES = 40
"""Frames of a death that are kept: the innermost ones."""


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """Result of one trial: outcome, evidence of the trigger, death and counts."""

    outcome: Outcome
    phase: Phase | None
    trigger: TriggerResult
    death: Death | None
    boot_s: float | None
    version: str | None
    # number of requests
    sent: int
    ok: int
    # one sentence for people
    why: str
    # values at the placeholders of the crash signature
    captured: dict[str, str]
    # fields of `BootFacts`
    boot: dict[str, Any]
    # the server was started
    launched: bool
    # measurement, or `NEVER_IDLE`, in which the engine died or hung
    during: str = ""
    # the served ones; None if unknown
    weights: ServedWeights | None = None
    # patched files that a process of the server imported
    imported: tuple[str, ...] = ()
    outlasted: tuple[Outlasted, ...] = ()

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of the trial's last journal line, named as in `report.json`."""
        fields = vars(self) | {
            "requests": {"sent": self.sent, "ok": self.ok, "failed": self.sent - self.ok}
        }
        return {
            name: value for name, value in fields.items() if name not in ("sent", "ok", "launched")
        }


def assess(
    scenario: Scenario,
    command: ServeCommand,
    seen: Observed,
    log: Path,
    trigger: Condition | None = None,
) -> Conclusion:
    """Return what one trial showed, from what the harness saw of it and the server's log.

    log: the server's whole log; an absent file is an empty log. The logs of further nodes are read
    beside it. trigger: the trigger of the arm; None for that of the scenario.
    """
    died = any(sign.decisive for sign in seen.signs)
    # Read the log once for each question: it may be larger than the memory.
    diagnosis = diagnose(_lines(log), we_terminated=not died)
    if not died and diagnosis.died and seen.ready and _fatal_lines(log) > seen.refuted_lines:
        # The engine died after the last check, or during the shutdown.
        died, seen = True, replace(seen, signs=[*seen.signs, _unseen_death(log)])
    boot = boot_facts(_lines(log))
    nodes = _node_diagnoses(log, diagnosis)
    death, captured = _death(scenario, seen, diagnosis, nodes) if died else (None, {})
    finding = (trigger or scenario.trigger).find(
        _trigger_facts(scenario, command, seen, log, boot, captured)
    )
    unsupported = seen.unsupported
    if unsupported is None and not seen.ready and diagnosis.usage is not None:
        unsupported = f"this release refused the command line: {diagnosis.usage}"
    weights = weights_of(command, seen, boot)
    facts = TrialFacts(
        ready=seen.ready,
        finding=finding,
        death=death,
        cancelled=seen.cancelled,
        infra=seen.infra
        or _host_trouble(seen)
        or (None if died or seen.hung else _gateway_trouble(seen)),
        unsupported=unsupported,
        hung=seen.hung if seen.ready else None,
        wrong_output=_wrong_output(seen) or check_output(scenario.output, seen.output, weights),
    )
    outcome = classify(facts)
    phase = None
    if death is not None:
        phase = diagnosis.phase or (Phase.REQUEST if seen.ready else Phase.BOOT)
    why = _why(outcome, facts, diagnosis, seen)
    if outcome.facts.alive and (unknown := compare_alone(seen.output, weights).unknown):
        why += f"; {unknown}"
    return Conclusion(
        outcome=outcome,
        phase=phase,
        trigger=finding,
        death=death,
        boot_s=seen.boot_s,
        version=seen.version or boot.vllm_version,
        sent=seen.sent,
        ok=sum(answer.ok for answer in seen.answers),
        why=why,
        captured=captured,
        boot=asdict(boot),
        launched=seen.facts is not None,
        during=seen.measuring if death is not None or outcome is Outcome.HANG else "",
        weights=weights,
        imported=imported(_lines(log)),
        outlasted=seen.outlasted,
    )


def _lines(log: Path) -> Iterable[Line]:
    """Yield the parsed lines of the server's log; none if there is no log."""
    try:
        with log.open("rb") as file:
            yield from read_lines(file)
    except OSError:
        return


def _fatal_lines(log: Path) -> int:
    """Return how many lines of the log are decisive signs of death (`log_sign`)."""
    signs = (log_sign(line.raw) for line in _lines(log))
    return sum(sign is not None and sign[1] for sign in signs)


def _unseen_death(log: Path) -> DeathSign:
    """Return the sign of a death that only the finished log shows.

    Its time is the log's last write.
    """
    at = log.stat().st_mtime
    return DeathSign(Channel.LOG, "found in the log after the trial", at, at)


def _trigger_facts(
    scenario: Scenario,
    command: ServeCommand,
    seen: Observed,
    log: Path,
    boot: BootFacts,
    captured: dict[str, str],
) -> TriggerFacts:
    """Return the facts that trigger conditions use, from log, command and requests.

    For an attached server the scenario's command does not count. captured: values at the
    placeholders of the crash signature.
    """
    batch, chunked = boot.max_num_batched_tokens, boot.chunked_prefill
    # The boot line shows the value in force, the flag only the requested value. An attached server
    # does not have the scenario's flags.
    attached = seen.facts is not None and not seen.facts.kind.facts.started
    if not attached:
        batch = batch or command.number("--max-num-batched-tokens")
        chunked = command.enabled("--enable-chunked-prefill") if chunked is None else chunked
    return TriggerFacts(
        requests=tuple(_mark_in_flight(request, seen) for request in seen.requests),
        batch=batch,
        chunked=chunked,
        backend=boot.attention_backend,
        dump=scheduler_dump(_lines(log)),
        command=None if attached else command,
        args=boot.args,
        shape=_shape(scenario, seen, boot),
        locked=boot.workspace_locked,
        reserved=boot.workspace_reserved,
        observed=observed(_lines(log)),
        preemptions=seen.preemptions,
        steps=shared_steps(_lines(log)),
        captured=captured,
        boot=boot,
    )


def _mark_in_flight(request: SentRequest, seen: Observed) -> SentRequest:
    """Return the request, marked if it was in flight when the engine died or hung."""
    if request.status is not None or request.left:
        return request
    died = any(sign.decisive for sign in seen.signs)
    return replace(
        request,
        died=request.died or died,
        hung=seen.hung is not None and not died and not request.refusal,
    )


def _shape(scenario: Scenario, seen: Observed, boot: BootFacts) -> AttentionShape | None:
    """Return the attention sizes of the served model, tiny or the scenario's.

    Return None if another model is served, or the scenario does not have them.
    """
    model, served = scenario.model, seen.tiny_model
    if (
        served is None
        and scenario.lab is not None
        and seen.facts is not None
        and seen.facts.kind.facts.in_lab
    ):
        served = scenario.lab.shape(model)
    if served is not None:
        return AttentionShape(
            served.heads, served.kv_heads, served.head_dim, kinds=served.kinds, window=served.window
        )
    # Only the rehearsal engine has the groups of the scenario; a real release decides by itself how
    # to divide its pool.
    imitated = seen.facts is not None and seen.facts.evidence is Evidence.REHEARSAL
    groups = tuple(model.window_groups) if imitated else ()
    named = boot.args.get("model")
    known = {_last_part(name) for name in (model.name, scenario.reported().model) if name}
    other = not imitated and isinstance(named, str) and _last_part(named) not in known
    if other or not (model.heads and model.kv_heads and model.head_dim):
        return None
    return AttentionShape(
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.block_size,
        window_groups=groups,
        group_pages=tuple(model.group_pages) if groups else (),
    )


def _last_part(name: str) -> str:
    """Return `model` of `org/model` and of a folder, in lower case."""
    return name.rstrip("/").rpartition("/")[2].lower()


def _node_diagnoses(log: Path, head: Diagnosis) -> dict[int, Diagnosis]:
    """Return the diagnosis of each node's log by rank; empty for a server of one node.

    head: the diagnosis of the first node's log, `log`.
    """
    others = sorted(log.parent.glob(f"{log.stem}.rank*.log"))
    by_rank = {int(path.stem.rpartition("rank")[2]): diagnose(_lines(path)) for path in others}
    return {0: head, **by_rank} if by_rank else {}


def _death(
    scenario: Scenario, seen: Observed, diagnosis: Diagnosis, nodes: dict[int, Diagnosis]
) -> tuple[Death, dict[str, str]]:
    """Return the engine's death, and the values at the placeholders of the crash signature.

    The values are empty if the message differs from the signature's. `seen` must have a decisive
    sign.
    """
    signs = sorted(
        (sign for sign in seen.signs if sign.channel is not Channel.COUNTERS),
        key=lambda sign: sign.at,
    )
    first = signs[0]
    latency = max(0.0, first.at - min(sign.since for sign in signs))
    signature: How | None = None
    captured: dict[str, str] = {}
    differs = ""
    if diagnosis.lost_worker or (diagnosis.exception is not None and scenario.signature is None):
        signature = How.OTHER  # the bug is an exception, or no death
    elif diagnosis.exception is not None and scenario.signature is not None:
        comparison = compare(scenario.signature, diagnosis)
        captured = dict(comparison.captured)
        signature = comparison.how
        differs = comparison.why if signature is How.NEAR else ""
    return (
        Death(
            detected_by=first.channel,
            latency_s=round(latency, 4),
            exception=diagnosis.exception,
            message=diagnosis.message,
            frames=tuple(f"{frame.file}:{frame.function}" for frame in diagnosis.frames)[
                -_MOST_FRAMES:
            ],
            signature=signature,
            channels=tuple(dict.fromkeys(sign.channel for sign in signs)),
            ranks=failed_nodes(nodes, scenario.signature),
            differs=differs,
            lines=tuple(frame.line for frame in diagnosis.frames)[-_MOST_FRAMES:],
        ),
        captured,
    )


def weights_of(command: ServeCommand, seen: Observed, boot: BootFacts) -> ServedWeights | None:
    """Return which kind of weights the server serves, such as real or dummy; None if unknown.

    boot: facts of the boot log, the only source for an attached server.
    """
    if seen.facts is None:
        return None
    if seen.facts.evidence is Evidence.REHEARSAL:
        return ServedWeights.IMITATED
    if not seen.facts.kind.facts.started:
        # The attached server has another command line than the scenario's.
        if not boot.args:
            return None
        return (
            ServedWeights.DUMMY if boot.args.get("load_format") == "dummy" else ServedWeights.REAL
        )
    if command.get("--load-format") == "dummy":
        return ServedWeights.DUMMY
    return ServedWeights.MADE if seen.tiny_model is not None else ServedWeights.REAL


def _host_trouble(seen: Observed) -> str | None:
    """Return the sentence on a lost container engine or an out-of-memory kill; None for neither."""
    if seen.exit is not None and seen.exit.lost:
        return f"the container engine was lost: {seen.exit.detail}"
    if seen.exit is not None and seen.exit.oom_killed:
        return f"out of memory, killed by the kernel: {seen.exit.detail}"
    return None


_OF_A_GATEWAY = frozenset({None, 401, 403, 407, 408, 429, 502, 503, 504, *range(520, 528)})
"""Statuses that a proxy or load balancer returns by itself; None: it closed the connection."""


def _of_a_gateway(answer: Answer) -> bool:
    """Return True if the answer's status, closed connection or HTML shows that it is not vLLM's."""
    page = (answer.error or "").lstrip().startswith("<")
    return answer.status in _OF_A_GATEWAY or answer.error_kind == "transport" or page


def _gateway_trouble(seen: Observed) -> str | None:
    """Return the sentence on an answer that a gateway before an attached server gave, or None.

    Always None for a server that the harness started.
    """
    if seen.facts is None or seen.facts.kind.facts.started:
        return None
    for answer in (*seen.answers, *seen.measured):
        if _of_a_gateway(answer):
            cut = answer.status is None or answer.error_kind == "transport"
            what = "cut off" if cut else f"answered {answer.status}"
            return (
                f"the engine lives, and a request was {what}, as by a gateway or without its key:"
                f" {answer.error}"
            )
    return None


def _wrong_output(seen: Observed) -> str | None:
    """Return the sentence on the first bad answer, or a failed canary; None if all are good.

    Bad is no answer, a 5xx, no token, or an early end.
    """
    for answer in (*seen.answers, *seen.measured):
        if answer.status is None:
            return f"a request got no answer and the engine lives: {answer.error}"
        if answer.status >= 500:
            return f"a request was answered {answer.status} and the engine lives: {answer.error}"
        if answer.empty:
            return "a request was answered 200 without a single token"
        if answer.status == 200 and (answer.error is not None or answer.finish_reason is None):
            return (
                "an answer ended without"
                f" finish_reason{': ' + answer.error if answer.error else ''}"
            )
    if seen.canary_ok is False:
        return "the one-token canary at the end got no token"
    return None


def _why(outcome: Outcome, facts: TrialFacts, diagnosis: Diagnosis, seen: Observed) -> str:
    """Return the sentence that explains a trial's outcome in reports."""
    match outcome:
        case Outcome.CANCELLED if facts.death is not None:
            # The trial counts as cancelled, but the report needs the cause of the crash.
            return (
                f"{_cause(facts.death, diagnosis, seen).rstrip('.')}; {facts.cancelled} before the"
                " trial came to its end"
            )
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
            return "the engine lived, and the boundary was not crossed: " + "; ".join(
                facts.finding.evidence
            )
        case Outcome.BOOT_FAILED if facts.death is None:
            return seen.hung or "it never became ready"
        case Outcome.CRASH | Outcome.OTHER_CRASH | Outcome.BOOT_FAILED:
            return diagnosis.why if facts.death is None else _cause(facts.death, diagnosis, seen)
        case _:
            assert_never(outcome)


def _cause(death: Death, diagnosis: Diagnosis, seen: Observed) -> str:
    """Return the cause of a death: `AssertionError in reserve: the workspace is locked`."""
    if diagnosis.lost_worker:
        return diagnosis.why
    if death.exception is None:
        why = diagnosis.why
        undecided = diagnosis.died is None and diagnosis.phase is None
        if diagnosis.died is False or diagnosis.open_end or undecided:
            # A log that stops early, or none, shows no death: quote the sign that shows it.
            why = next((sign.detail for sign in seen.signs if sign.decisive), why)
        return f"{why.rstrip('.')}; no log names the cause"
    # The lab's guard replaces C++ of a CUDA build, which no traceback shows.
    frames = [frame for frame in death.frames if not frame.startswith("vllm_repro_lab/")]
    last = frames[-1].rsplit(":", 1)[-1] if frames else ""
    message = " ".join((death.message or "").split())
    return f"{death.exception}{' in ' + last if last else ''}: {message}".rstrip(": ")
