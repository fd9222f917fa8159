"""Six faults of a server, and what each client makes of them: requests counted as failed, exit status, time to end, report."""

from __future__ import annotations

import json
from collections.abc import Mapping

from benchmarks.loadgen.clients import COMMAND, Client, Shape
from benchmarks.loadgen.rig import Run, run
from benchmarks.loadgen.server import FAULTS

SHAPE = Shape(streams=8, requests=24)
STALL_LIMIT = 5
"""Seconds without progress after which the command is told to see a hang."""
PATIENCE = 20.0
"""Seconds after its last token until a client is ended that waits for a stalled stream."""
_MEANING = {
    "killed": "server killed after 1,000 tokens",
    "cut": "clean end after 50 tokens: no finish_reason, usage, [DONE]",
    "error": "error event after 50 tokens",
    "fin": "connection closed after 50 tokens",
    "503": "503",
    "stall": "one stream stalls after 50 tokens",
}


def _affected(ran: Run, fault: str) -> int:
    """Return how many requests the fault hit. A killed server hits those in flight and, of a fixed number, those not begun."""
    if fault == "killed":
        return ran.shape.requests - sum(bool(one["sent"] == one["asked"]) for one in ran.record)
    return sum(bool(one["fault"]) for one in ran.record)


def _row(ran: Run, fault: str) -> dict[str, object]:
    """Return what a client with a report of each request made of a fault."""
    failed = None if ran.done is None else sum(bool(one["error"]) for one in ran.done)
    return {"affected": _affected(ran, fault), "failed": failed, "report": ran.done is not None, **_end(ran)}


def _end(ran: Run) -> dict[str, object]:
    last = ran.died or max(one["times"][-1] for one in ran.record if one["times"])
    return {"status": ran.status, "ended_s": ran.ended - last}


def _command_row(ran: Run) -> dict[str, object]:
    """Return what the command made of a fault. It stops at the first failure, so it counts those whose answers it has by then."""
    events = [json.loads(line) for line in ran.output.splitlines() if line.startswith("{")]
    stopped = [one for one in events if one["event"] == "measure-stopped"]
    outcome = next((one.get("outcome") for one in events if one["event"] == "trial-ended"), None)
    why = str(stopped[0]["why"]) if stopped else ""
    ended = any(one["event"] == "run-ended" for one in events)
    return {"noticed": bool(stopped), "outcome": outcome, "why": why, "report": ended, **_end(ran)}


def measure(clients: Mapping[str, Client]) -> dict[str, dict[str, dict[str, object]]]:
    """Return the row of each client under each fault."""
    found: dict[str, dict[str, dict[str, object]]] = {}
    for fault in FAULTS:
        for name, client in clients.items():
            extra = ["--throughput", "--answer-stall", str(STALL_LIMIT)] if name == COMMAND else []
            limit = PATIENCE + 10 if fault == "stall" else 60.0
            ran = run(client, SHAPE, limit=limit, extra=extra, server={"fault": fault})
            found.setdefault(fault, {})[name] = _command_row(ran) if name == COMMAND else _row(ran, fault)
            print(f"{fault}: {name}: {found[fault][name]}", flush=True)
    return found


def table(found: Mapping[str, Mapping[str, Mapping[str, object]]]) -> str:
    """Return the Markdown table."""
    names = list(next(iter(found.values())))
    lines = ["| fault | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for fault, rows in found.items():
        lines.append(f"| {_MEANING[fault]} | " + " | ".join(_cell(rows[name]) for name in names) + " |")
    return "\n".join(lines)


def _cell(row: Mapping[str, object]) -> str:
    end = "no end" if row["status"] is None else f"exit {row['status']}, {row['ended_s']:.1f} s"
    report = "" if row["report"] else ", no report"
    if "noticed" in row:
        return f"{'seen' if row['noticed'] or row['outcome'] not in ('clean', None) else '**not seen**'}; {end}{report}"
    counted = "-" if row["failed"] is None else f"{row['failed']} of {row['affected']}"
    return f"{counted}; {end}{report}"
