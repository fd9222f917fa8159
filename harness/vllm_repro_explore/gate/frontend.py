"""Play of vLLM's front end on both trees of a change. `explore --frontend` has the search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_repro.errors import Unsupported
from vllm_repro.releases.provision import Release
from vllm_repro.report.files import write_file
from vllm_repro_explore.frontend import FrontendSearch, play_frontend, script, script_name
from vllm_repro_explore.gate.change import Change, UnfitError, module_of
from vllm_repro_explore.gate.judge import Pairs

_FILES = (
    *("vllm/tool_parsers/", "vllm/reasoning/", "vllm/parser/"),
    *(f"vllm/v1/engine/{name}.py" for name in ("detokenizer", "logprobs", "output_processor")),
    *(f"vllm/v1/engine/{name}.py" for name in ("coordinator", "parallel_sampling")),
)
_MOST_S = 90.0
"""Seconds of play on each tree, at most; a third of the gate's time if that is less."""
_ANSWERS = 3000


def is_frontend(file: str) -> bool:
    """Return True for a file of vLLM's repository that the search of the front end plays."""
    return file.startswith(_FILES)


@dataclass(kw_only=True)
class FrontendScore:
    """Counts of a gate over the answers of the front end that both trees played."""

    # answers that the base judged
    trials: int = 0
    # by failure: search, split and what is wrong
    pairs: dict[str, Pairs] = field(default_factory=dict)
    # smallest new failures, each with its script
    new: list[dict[str, Any]] = field(default_factory=list)
    # why nothing was played although the change touches the front end
    unfit: str = ""

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
    what the search needs. The files of `write_probes` lie in `folder`. Raises `UnfitError` if the
    changed vLLM cannot be imported or makes a parser no more, and `InfraError`.
    """
    modules = [module_of(file.name) for file in change.files if is_frontend(file.name)]
    base, changed = (FrontendSearch(version=change.base.version) for _ in range(2))

    def play(tree: str, release: Release, search: FrontendSearch, **options: Any) -> None:
        play_frontend(
            release,
            search,
            folder / f"{tree}-frontend.log",
            notify,
            probes=folder / f"{tree}-statements.json",
            answers=_ANSWERS,
            seconds=min(_MOST_S, most_s / 3),
            **options,
        )

    try:
        play("base", change.base, base, modules=modules)
    except Unsupported:
        return FrontendScore(unfit=base.unfit), {}, {}
    known = {name: list(outcomes) for name, outcomes in base.outcomes.items()}
    try:
        play("changed", change.changed, changed, known=known, exactly=list(base.counts))
    except Unsupported as error:
        raise _unfit(changed.unfit, base.version) from error
    for name, why in changed.left_out.items():
        if name in base.counts:
            raise _unfit(f"{name}: {why}", base.version)
    score = score_of(base, changed)
    for finding in changed.distinct:
        if failure_name(finding) not in score.broken:
            continue
        path = folder / script_name(finding)
        text = script(finding, f"{base.version} with {change.name}")
        write_file(path, text, hint="free some space, or name another --out")
        score.new.append(finding | {"script": str(path)})
    return score, base.runs, changed.runs


def _unfit(why: str, base: str) -> UnfitError:
    """Return the error for a changed front end that cannot be made; its own code is at fault.

    Another package that the base does not have is no fault of it.
    """
    lacks = "ModuleNotFoundError" in why and "'vllm" not in why
    return UnfitError(f"the changed vLLM cannot be imported: {why}", base=base, broken=not lacks)


def failure_name(finding: Mapping[str, Any]) -> str:
    """Return the name of a finding in `pairs`."""
    return f"{finding['name']}, {finding['split']}: {finding['wrong']}"


def score_of(base: FrontendSearch, changed: FrontendSearch) -> FrontendScore:
    """Return the counts over the answers that both trees played."""
    score = FrontendScore()
    for name in sorted(base.ends.keys() & changed.ends.keys()):
        befores, afters = base.outcomes.get(name, {}), changed.outcomes.get(name, {})
        end = min(base.ends[name], changed.ends[name])
        unread = {seed for seed, outcome in befores.items() if outcome is None and seed < end}
        score.trials += end - 1 - len(unread)
        for seed in {seed for seed in befores.keys() | afters.keys() if seed < end} - unread:
            before, after = befores.get(seed) or {}, afters.get(seed, {})
            if after is None:
                after = dict.fromkeys(before or ["whole"], "not read as written")
            for split in sorted(before.keys() | after.keys()):
                _count(score.pairs, name, before.get(split), after.get(split))
    return score


def _count(pairs: dict[str, Pairs], name: str, before: str | None, after: str | None) -> None:
    """Count an answer that fails in at least one tree. None: it passes."""
    row = pairs.setdefault(f"{name}, {before or after}", Pairs())
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
