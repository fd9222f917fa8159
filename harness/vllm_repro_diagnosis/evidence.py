"""Kinds of evidence: what a run can prove about vLLM, and what reports must print beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Evidence(StrEnum):
    """Kind of evidence that a run gives: of a GPU, a CPU, a simulation or an unknown device."""

    GPU = "gpu"
    CPU = "cpu"  # the whole vLLM on a CPU
    LAB = "lab"  # vLLM on a CPU with some parts replaced, most of which need a GPU
    SCHEDULER = "scheduler"  # the same without a model
    REHEARSAL = "rehearsal"  # no vLLM at all
    UNKNOWN = "unknown"  # a server that somebody else started, and that does not show its device


@dataclass(frozen=True, kw_only=True)
class EvidenceFacts:
    """Facts about one kind of evidence that reports print. `{release}` stands for the release."""

    # word beside every claim; "" for a GPU
    mark: str = ""
    # what ran, in a heading
    subject: str = "vLLM"
    # parts of vLLM did not run, so the mark also stands beside each verdict
    simulated: bool = False
    # why throughput is not claimed; "" if it may be claimed
    no_throughput: str = ""
    # first line of a report
    banner: str = ""
    # subject of a sentence on what it did
    actor: str = "{release}"


EVIDENCE: Mapping[Evidence, EvidenceFacts] = {
    Evidence.GPU: EvidenceFacts(),
    Evidence.CPU: EvidenceFacts(
        mark="CPU",
        subject="vLLM on a CPU",
        banner="CPU: {release} on a CPU. Nothing about a GPU's speed follows from it.",
        actor="{release} on a CPU",
    ),
    Evidence.LAB: EvidenceFacts(
        mark="LAB",
        subject="LAB",
        simulated=True,
        no_throughput="No throughput is claimed: this is the LAB, where parts of vLLM are replaced",
        banner="LAB: {release} on a CPU, with parts of it replaced.",
        actor="{release} in the lab",
    ),
    Evidence.SCHEDULER: EvidenceFacts(
        mark="SCHEDULER ONLY",
        subject="SCHEDULER ONLY",
        simulated=True,
        no_throughput="No throughput is claimed: this is SCHEDULER ONLY, where no model computes",
        banner=(
            "SCHEDULER ONLY: {release} without a model: its own server, scheduler, KV cache "
            "manager and KV connector. Its answers prove nothing."
        ),
        actor="{release} without a model",
    ),
    Evidence.REHEARSAL: EvidenceFacts(
        mark="REHEARSAL",
        subject="REHEARSAL of vLLM",
        simulated=True,
        no_throughput=(
            "No throughput is claimed: this is a REHEARSAL, whose engine sleeps where a "
            "model would compute"
        ),
        banner=(
            "REHEARSAL: an engine of our own that imitates {release}. It shows scenario and "
            "harness at work and says nothing about vLLM."
        ),
        actor="The rehearsal's imitation of {release}",
    ),
    Evidence.UNKNOWN: EvidenceFacts(
        mark="UNKNOWN DEVICE",
        subject="vLLM on an unknown device",
        no_throughput="No throughput is claimed: the device of this server is not known",
        banner=(
            "UNKNOWN DEVICE: {release} was already running, and neither its version nor its log "
            "shows its device."
        ),
    ),
}


def facts_of(evidence: str | None) -> EvidenceFacts:
    """Return what reports print about `evidence`; the defaults for None, a run without a server."""
    return EVIDENCE[Evidence(evidence)] if evidence else EvidenceFacts()


def release_name(version: str | None, compiled: str | None = None) -> str:
    """Return a name such as `vLLM 0.33.0`.

    compiled: the release of its compiled parts, if it is another; the name then states it.
    """
    name = f"vLLM {version}" if version else "vLLM"
    return f"{name} (its Python over the compiled parts of {compiled})" if compiled else name


def banner(evidence: str, version: str | None, compiled: str | None = None) -> str:
    """Return the first line of a report about anything but a GPU; empty for a GPU.

    compiled: as in `release_name`.
    """
    return facts_of(evidence).banner.format(release=release_name(version, compiled))


def simulation_mark(evidence: str) -> str:
    """Return the mark of a simulation, such as ` (LAB)`, to print behind a claim; else ""."""
    facts = facts_of(evidence)
    return f" ({facts.mark})" if facts.simulated else ""
