"""Play of vLLM's front end on both trees of a change. `explore --frontend` has the search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.releases.provision import Release
from vllm_repro.report.files import write_file
from vllm_repro_explore.frontend import FrontendSearch, play_frontend, script, script_name
from vllm_repro_explore.gate.change import Change, UnfitError
from vllm_repro_explore.gate.judge import Pairs

_FILES = (
    *("vllm/tool_parsers/", "vllm/reasoning/", "vllm/parser/"),
    *(f"vllm/v1/engine/{name}.py" for name in ("detokenizer", "logprobs", "output_processor")),
)
_MOST_S = 90.0
"""Seconds of play on each tree, at most; a third of the gate's time if that is less."""
_ANSWERS = 3000
_UNREAD = "not read as written"


def is_frontend(file: str) -> bool:
    """Return True for a file of vLLM's repository that the search of the front end plays."""
    return file.startswith(_FILES)


@dataclass(kw_only=True)
class FrontendScore:
    """Answers of the front end on both trees."""

    # answers that the base judged
    trials: int = 0
    # by failure: search, split and what is wrong
    pairs: dict[str, Pairs] = field(default_factory=dict)
    # smallest new failures, each with its script
    new: list[dict[str, Any]] = field(default_factory=list)

    @property
    def fixed(self) -> list[str]:
        """Return the failures of the base that end in 10 or more answers, and stay in none."""
        return [name for name, pairs in self.pairs.items() if pairs.fixed]

    @property
    def partly(self) -> list[str]:
        """Return the failures that end in some answers, and stay or change in others."""
        return [
            name
            for name, pairs in self.pairs.items()
            if pairs.better and (pairs.stays or pairs.other)
        ]

    @property
    def broken(self) -> list[str]:
        """Return the failures of answers that pass without the change."""
        return [name for name, pairs in self.pairs.items() if pairs.new]


def compare_frontend(
    change: Change, folder: Path, most_s: float, notify: Callable[[str], None]
) -> tuple[FrontendScore, Mapping[int, int], Mapping[int, int]]:
    """Play the same answers on both trees; return the score, and the runs of changed statements.

    Only parsers whose own code changes are played, if there are such. None are if the base lacks
    what the search imports. The files of `write_probes` lie in `folder`. Raises `UnfitError` if the
    changed vLLM cannot be imported, or makes a parser no more.
    """
    names = [file.name.removesuffix(".py").replace("/", ".") for file in change.files]
    searches = [FrontendSearch(version=change.base.version) for _ in range(2)]
    base, changed = searches

    def play(tree: str, release: Release, search: FrontendSearch, known: object) -> None:
        play_frontend(
            release,
            search,
            folder / f"{tree}-frontend.log",
            notify,
            probes=folder / f"{tree}-statements.json",
            modules=names,
            answers=_ANSWERS,
            seconds=min(_MOST_S, most_s / 3),
            known=known,
        )

    try:
        play("base", change.base, base, {})
    except Unsupported:
        return FrontendScore(), {}, {}
    try:
        known = {name: list(outcomes) for name, outcomes in base.outcomes.items()}
        play("changed", change.changed, changed, known)
    except (Unsupported, InfraError) as error:
        raise UnfitError(
            f"the changed vLLM cannot be imported: {error}", base=base.version, broken=True
        ) from error
    for name, why in changed.left_out.items():
        if name not in base.left_out:
            raise UnfitError(f"{name}: {why}", base=base.version, broken=True)
    score = score_of(base, changed)
    for finding in changed.distinct:
        path = folder / script_name(finding)
        write_file(
            path, script(finding, base.version), hint="free some space, or name another --out"
        )
        score.new.append(finding | {"script": str(path)})
    return score, base.runs, changed.runs


def score_of(base: FrontendSearch, changed: FrontendSearch) -> FrontendScore:
    """Return the counts over the answers that both trees played."""
    score, end = FrontendScore(), min(base.next, changed.next)
    for name, befores in base.outcomes.items():
        afters = changed.outcomes.get(name, {})
        seeds = [seed for seed in befores.keys() | afters.keys() if seed < end]
        for seed in seeds:
            before, after = befores.get(seed, {}), afters.get(seed, {})
            if before is None:  # the base itself does not read it
                continue
            splits = before.keys() | ({"any split"} if after is None else after.keys())
            for split in splits:
                _count(score.pairs, f"{name}, {split}", before.get(split), _at(after, split))
    score.trials = sum(counts["judged"] for counts in base.counts.values())
    return score


def _at(outcome: Mapping[str, str] | None, split: str) -> str | None:
    return _UNREAD if outcome is None else outcome.get(split)


def _count(pairs: dict[str, Pairs], name: str, before: str | None, after: str | None) -> None:
    """Count an answer that fails in at least one tree. None: it passes."""
    row = pairs.setdefault(f"{name}: {before or after}", Pairs())
    if before is None:
        row.new += 1
        return
    row.fresh_base += 1
    if after is None:
        row.ended += 1
    elif after == before:
        row.stays += 1
    else:
        row.other += 1
