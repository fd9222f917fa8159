"""Result of a gate: the answer, its evidence and the next step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_repro.report.document import plain_text
from vllm_repro.report.junit import element, xml_text
from vllm_repro_explore.finding import known
from vllm_repro_explore.frontend import quoted, received, summary_of
from vllm_repro_explore.gate.change import Change, why_unplayed
from vllm_repro_explore.gate.frontend import FrontendScore, is_frontend
from vllm_repro_explore.gate.judge import Answer, Key, Pairs, Score, key_of
from vllm_repro_explore.gate.lines import Place
from vllm_repro_explore.gate.play import Proof
from vllm_repro_explore.summary import case_lines

_FOLDER = Path(__file__).with_name("templates")
_SEARCH = Path(__file__).parents[1] / "templates"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class FunctionRuns:
    """How often the changed statements of a function ran."""

    name: str
    # runs in the base and with the change, of the statement that ran most
    before: int
    after: int
    # why it is not played; empty if it ran
    why: str = ""


@dataclass(kw_only=True)
class GateResult:
    """Answer of a gate with its evidence, for all formats."""

    # None if it cannot be played
    change: Change | None
    # value of `--fixes`
    named: str
    score: Score
    proofs: Sequence[Proof]
    # answers of the front end; none if the change does not touch it
    frontend: FrontendScore = field(default_factory=FrontendScore)
    # why it cannot be played; broken: its own code is at fault
    unfit: str = ""
    broken: bool = False
    # as the user named it
    title: str = ""
    base_version: str = ""
    duration_s: float = 0.0
    # command that repeats the gate
    again: str = ""
    # for each proof its pytest file; None if such a test does not show it
    tests: Sequence[str | None] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the change as the user named it."""
        return self.change.name if self.change else self.title

    @property
    def version(self) -> str:
        """Return the version of the base."""
        return self.change.base.version if self.change else self.base_version

    @property
    def functions(self) -> list[FunctionRuns]:
        """Return the changed functions; those that ran come first. Empty without a change."""
        if self.change is None:
            return []
        score, rows = self.score, dict[str, list[int]]()
        for places, runs, side in (
            (self.change.before, score.runs_before, 0),
            (self.change.after, score.runs_after, 1),
        ):
            for number, place in enumerate(places):
                row = rows.setdefault(_label(place), [0, 0])
                row[side] = max(row[side], runs[number])
        return sorted(
            (
                FunctionRuns(
                    name=name,
                    before=before,
                    after=after,
                    why="" if before or after else self._why(name),
                )
                for name, (before, after) in rows.items()
            ),
            key=lambda row: bool(row.why),
        )

    def _why(self, label: str) -> str:
        """Return why a changed function did not run."""
        file = label.partition("::")[0]
        imported = self.change and any(
            self.score.runs_after[number]
            for number, place in enumerate(self.change.after)
            if place.file == file
        )
        if not imported and self.change and file in self.change.added:
            return "a new file that nothing imports"
        if is_frontend(file) and (self.frontend.trials or self.frontend.unfit):
            return self.frontend.unfit or f"no answer of {self.frontend.trials} reached it"
        if imported or file.startswith(("vllm/v1/core/", "vllm/v1/engine/core.py")):
            return f"no case of {self.score.trials} reached it"
        return why_unplayed(file)

    @property
    def ran_changed_code(self) -> bool:
        """Return True if a changed statement ran in a played case or at import, in either tree."""
        return any(not row.why for row in self.functions)

    @property
    def answer(self) -> Answer:
        """Return the answer; a new failure or broken code counts before all else."""
        if self.proofs or self.broken or self.frontend.broken:
            return Answer.BREAKS
        if self.unfit or self.change is None:
            return Answer.CANNOT_TELL
        if self.score.partly or self.frontend.partly or (self.named and not self._base_fails):
            return Answer.CANNOT_TELL
        if self.score.fixed or self.frontend.fixed:
            return Answer.FIXES
        if self.change.only_words or self.ran_changed_code:
            return Answer.NO_DIFFERENCE
        return Answer.CANNOT_TELL

    @property
    def _base_fails(self) -> bool:
        """Return True if a case or an answer failed as released."""
        every = (*self.score.pairs.values(), *self.frontend.pairs.values())
        return any(pairs.ended or pairs.stays or pairs.other for pairs in every)

    @property
    def why(self) -> str:
        """Return the reason of the answer in one sentence."""
        score = self.score
        match self.answer:
            case Answer.BREAKS if self.broken:
                return self.unfit
            case Answer.BREAKS if self.proofs:
                return f"{self.proofs[0].failure.finding}"
            case Answer.BREAKS:
                return "; ".join(map(self._answers, self.frontend.broken))
            case Answer.FIXES:
                ends = map(self._answers, self.frontend.fixed)
                return "; ".join([*map(self._ended, score.fixed), *ends])
            case Answer.NO_DIFFERENCE if self.change and self.change.only_words:
                return "only comments, docstrings, or files without code of the engine differ"
            case Answer.NO_DIFFERENCE:
                played = [f"{score.trials:,} cases"] if score.trials else []
                if self.frontend.trials:
                    played.append(f"{self.frontend.trials:,} answers of the front end")
                return f"nothing fails newly in {' and '.join(played)}"
        if self.unfit:
            return self.unfit
        if score.partly or self.frontend.partly:
            halves = map(self._answers, self.frontend.partly)
            return "; ".join([*map(self._ended, score.partly), *halves])
        if self.named and not self._base_fails:
            return f"no case near {self.named} fails without the change"
        return "none of the changed code was played"

    def _answers(self, name: str) -> str:
        """Return a failure of the front end with its counts of answers."""
        return f"{name} {counts_text(self.frontend.pairs[name])} answers"

    def _ended(self, key: Key) -> str:
        """Return in words what becomes of a failure of the base."""
        pairs, (kind, site, where) = self.score.pairs[key], key
        site = f"{site} ({where})" if where else site
        text = f"{kind}: {site} ends in {pairs.ended:,} cases"
        others = (
            f"stays in {pairs.stays:,}" if pairs.stays else "",
            f"becomes another failure in {pairs.other:,}" if pairs.other else "",
            f"comes up in {pairs.new:,} others" if pairs.new else "",
        )
        left = ", ".join(part for part in others if part)
        return f"{text}, {left}" if left else text

    @property
    def known_failures(self) -> list[tuple[str, str]]:
        """Return (failure, counts) of those that stay, or that come up in cases the base passes."""
        proven = {key_of(proof.failure.finding, proof.drawn.case) for proof in self.proofs}
        return [
            (f"{kind}: {site}" + (f" ({where})" if where else ""), counts_text(pairs))
            for (kind, site, where), pairs in self.score.pairs.items()
            if pairs.stays or (pairs.new and (kind, site, where) not in proven)
        ]

    @property
    def next_step(self) -> str:
        """Return what to do now."""
        match self.answer:
            case Answer.BREAKS if self.proofs and self.tests and self.tests[0]:
                return f"pytest {self.tests[0]}"
            case Answer.BREAKS if self.proofs:
                return "the smallest case is above; findings.jsonl has it as JSON"
            case Answer.BREAKS if self.frontend.new:
                return f"python {self.frontend.new[0]['script']}"
            case Answer.BREAKS:
                return "mend the line, then repeat the command"
            case Answer.FIXES if self.frontend.fixed:
                return "read the other failures below; a server decides about models"
            case Answer.FIXES:
                return "a server decides: vllm-repro run SCENARIO --patch the diff"
            case Answer.NO_DIFFERENCE:
                return "not a proof: more cases with --for 30m, or --from another seed"
        if self.unfit:
            return "--base names the vLLM that the change was made for"
        return "try it on a server: vllm-repro run SCENARIO --patch the diff"


def counts_text(pairs: Pairs) -> str:
    """Return in how many cases a known failure stays, ends and comes up."""
    return f"stays in {pairs.stays:,}, ends in {pairs.ended:,}, comes up in {pairs.new:,}"


def _label(place: Place) -> str:
    """Return a changed function as file::name; the top of a module as its file."""
    return f"{place.file}::{place.function}" if place.function else place.file


def terminal(result: GateResult) -> str:
    """Return the lines for the terminal."""
    return _rendered("gate.txt", result)


def page(result: GateResult) -> str:
    """Return the gate as one page of Markdown."""
    return _rendered("gate.md", result, text=terminal(result)) + "\n"


def _rendered(template: str, result: GateResult, **values: Any) -> str:
    """Return the text of a template, filled with the result."""
    return plain_text(
        template,
        _FOLDER,
        result=result,
        score=result.score,
        cost=result.score.cost(),
        known=known,
        case_lines=case_lines,
        top=result.score.origins.most_common(4),
        counts_text=counts_text,
        summary_of=summary_of,
        received=received,
        quoted=quoted,
        **values,
    )


def as_json(result: GateResult) -> dict[str, Any]:
    """Return the content of gate.json."""
    score, cost = result.score, result.score.cost()
    return {
        "schema": SCHEMA,
        "answer": result.answer.value,
        "why": result.why,
        "next": result.next_step,
        "change": result.name,
        "base": result.version,
        "evidence": "engine",
        "fixes": result.named or None,
        "trials": score.trials,
        "invalid": score.invalid,
        "reached": score.reached,
        "reached_by": dict(score.origins),
        "functions": [
            {
                "name": row.name,
                "runs_before": row.before,
                "runs_after": row.after,
                "not_played": row.why or None,
            }
            for row in result.functions
        ],
        "not_played": dict(result.change.unplayed) if result.change else {},
        "new_failures": [
            proof.failure.as_json()
            | {
                "origin": proof.drawn.origin,
                "line": proof.failure.finding.place or None,
                "changed_lines": [f"{place.file}:{place.line}" for place in proof.ran],
                "base_passes_near": proof.neighbours,
                "test": test,
            }
            for proof, test in zip(result.proofs, result.tests, strict=False)
        ],
        "failures": [
            {
                "kind": kind.value,
                "site": site,
                "connector": where or None,
                "ended": pairs.ended,
                "stays": pairs.stays,
                "other": pairs.other,
                "new": pairs.new,
                "fixed": pairs.fixed,
            }
            for (kind, site, where), pairs in score.pairs.items()
        ],
        "frontend": {
            "answers": result.frontend.trials,
            "failures": {
                name: {
                    "ended": pairs.ended,
                    "stays": pairs.stays,
                    "other": pairs.other,
                    "new": pairs.new,
                }
                for name, pairs in result.frontend.pairs.items()
            },
            "new_failures": result.frontend.new,
        },
        "differences": score.differences(),
        "cost": None
        if cost is None
        else {
            "us_per_step_before": round(cost.before, 1),
            "us_per_step_after": round(cost.after, 1),
            "ratio": round(cost.ratio, 3),
            "low": round(cost.low, 3),
            "high": round(cost.high, 3),
            "slower": cost.slower,
        },
        "duration_s": round(result.duration_s, 1),
        "reproduce": result.again,
    }


def as_junit(result: GateResult) -> str:
    """Return JUnit XML with one test case: a failure if the change breaks something."""
    children = []
    if result.answer is Answer.BREAKS:
        children.append(
            element("failure", {"message": result.why, "type": "breaks"}, terminal(result))
        )
    elif result.answer is Answer.CANNOT_TELL:
        children.append(element("skipped", {"message": result.why}))
    case = element(
        "testcase",
        {"classname": "vllm-repro.gate", "name": result.name, "time": f"{result.duration_s:.1f}"},
        children=children,
    )
    counts = {
        "tests": "1",
        "failures": str(int(result.answer is Answer.BREAKS)),
        "skipped": str(int(result.answer is Answer.CANNOT_TELL)),
    }
    suite = element("testsuite", {"name": "gate", **counts}, children=[case])
    return xml_text(element("testsuites", counts, children=[suite]))
