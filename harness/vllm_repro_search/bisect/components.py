"""Components of a bisection: vLLM and packages of it, each between a good and a bad version."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from packaging.version import Version

from vllm_repro.errors import UsageError
from vllm_repro.releases.known import NEWEST
from vllm_repro.releases.sources import WITH, parse_source
from vllm_repro_search.bisect.boots import Bisection
from vllm_repro_search.bisect.candidates import Candidate, refuse_wrong_order
from vllm_repro_search.bisect.component_plan import (
    Cause,
    Combination,
    ComponentAnswer,
    ComponentPlan,
)
from vllm_repro_search.bisect.plan import BootResult, Side
from vllm_repro_search.plan import SearchState

VLLM = "vllm"


class Component(NamedTuple):
    """A component of a bisection, and its versions."""

    name: str
    # from the good end to the bad end
    versions: Sequence[Candidate]

    def text(self, place: int) -> str:
        """Return the component with one of its versions, as in `xgrammar 0.2.7`."""
        return f"{self.name} {self.versions[place].label.removeprefix(f'{self.name}==')}"


class ComponentBisection(Bisection, frozen=True, kw_only=True):
    """Record of a bisection over vLLM, its `candidates`, and over versions of packages."""

    # by name; oldest first
    packages: dict[str, tuple[str, ...]]

    @property
    def components(self) -> list[Component]:
        """Return vLLM, perhaps of a single version, and the packages."""
        packages = [
            Component(name, [Candidate(text, text) for text in _exact(name, versions)])
            for name, versions in self.packages.items()
        ]
        step = -1 if self.find_fix else 1
        return [
            Component(name, versions[::step])
            for name, versions in (Component(VLLM, self.candidates), *packages)
        ]

    @property
    def sizes(self) -> Combination:
        """Return how many versions each component has."""
        return tuple(len(component.versions) for component in self.components)

    @property
    def plan(self) -> ComponentPlan:  # type: ignore[override]  # its candidates are combinations
        """Return the plan after the boots so far."""
        labels = [[version.label for version in row.versions] for row in self.components]
        results = [
            BootResult(
                tuple(map(list.index, labels, boot.candidate.split(WITH))),
                boot.side,
            )
            for boot in self.boots
        ]
        plan = ComponentPlan(sizes=self.sizes, rate=self.rate, confidence=self.confidence)
        return plan.after(*results)

    def candidate(self, place: Combination) -> Candidate:  # type: ignore[override]  # as `plan`
        """Return the vLLM to boot: one version, with a version of each package."""
        parts = [row.versions[number] for row, number in zip(self.components, place, strict=True)]
        return Candidate(
            WITH.join(part.label for part in parts), WITH.join(part.source for part in parts)
        )

    def wrong_end(self, state: SearchState) -> str:
        """Return the label of the end that is not as named."""
        good, bad = self.plan.ends
        return self.candidate(good if state is SearchState.GOOD_END_WRONG else bad).label

    def answers(self, known: ComponentAnswer) -> list[str]:  # type: ignore[override]  # as `plan`
        """Return the vLLMs of the answer: the first bad one, or the first fixed one."""
        firsts = known.left[0].firsts if known.state is SearchState.FOUND else ()
        versions = self.components[0].versions  # of vLLM, which is the first component
        # a search for a fix goes backwards: the version before the first bad one has it
        back = 1 if self.find_fix else 0
        return [versions[first - back].label for component, first in firsts if component == 0]

    def names(self, places: Iterable[int]) -> list[str]:
        """Return the names of these components that have several versions."""
        return [self.components[place].name for place in places if self.sizes[place] > 1]

    def firsts(self, cause: Cause) -> list[tuple[str, str, str]]:
        """Return for each component of a cause its name, first bad version and last good one."""
        rows = ((self.components[place], first) for place, first in cause.firsts)
        return [(row.name, row.text(first), row.text(first - 1)) for row, first in rows]

    def causes_left(self, known: ComponentAnswer) -> list[str]:
        """Return the components that may be the cause, with the versions that may be the first."""

        def kind(cause: Cause) -> tuple[bool, list[int]]:
            return cause.together, [place for place, _ in cause.firsts]

        texts = []
        for (together, places), alike in groupby(sorted(known.left, key=kind), key=kind):
            firsts = zip(*(dict(cause.firsts).values() for cause in alike), strict=True)
            spans = []
            if len(places) > 2:
                texts.append("three or more together")
                continue
            for place, row in zip(places, firsts, strict=True):
                low, high = (
                    self.components[place].text(end - self.find_fix) for end in (min(row), max(row))
                )
                spans.append(low if low == high else f"{low} to {high.partition(' ')[2]}")
            texts.append((" together with " if together else ", or alone ").join(spans))
        return list(filter(None, texts))

    def shown(self, cause: Cause, side: Side) -> str:
        """Return the label of a boot that shows a cause: few bad versions died, many lived."""
        boots = [
            boot.candidate
            for boot in self.plan.results
            if boot.side == side and cause.fails(boot.candidate) is (side == Side.BAD)
        ]
        return self.candidate((min if side == Side.BAD else max)(boots, key=_badness)).label

    def derived(self) -> dict[str, Any]:
        """Return what bisection.json has beside the fields, such as the answer and what is left."""
        known = self.plan.answer()
        bad_key, good_key = (
            ("last_bad", "first_good") if self.find_fix else ("first_bad", "last_good")
        )
        answer = (
            [
                {"component": name, bad_key: bad, good_key: good}
                for name, bad, good in self.firsts(known.left[0])
            ]
            if known.state is SearchState.FOUND
            else None
        )
        return {
            "state": known.state,
            "answer": answer,
            "together": known.left[0].together if answer else None,
            "left": self.causes_left(known),
            "probability": round(known.probability, 6),
            "untested": self.names(known.untested),
        }


def _badness(combination: Combination) -> tuple[int, int]:
    """Return the sort key: how many components have a bad version, then how far they are."""
    return sum(map(bool, combination)), sum(combination)


def parse_components(texts: Sequence[str], *, find_fix: bool) -> dict[str, str]:
    """Return the versions of each `--component`, from good to bad: those of a package as A,B,C.

    A..B of a package names all that pip lists between; that of vLLM stays as it is. Raises
    `UsageError`.
    """
    components: dict[str, str] = {}
    for text in texts:
        name, _, written = text.partition("=")
        name = re.sub("[-_.]+", "-", name.strip()).lower()
        separator = ".." if ".." in written else ","
        versions = [version.strip() for version in written.split(separator)]
        if not all(versions) or len(versions) < 2 or (separator == ".." and len(versions) > 2):
            raise UsageError(
                f"--component {text} has no good and bad version",
                hint="write xgrammar=0.2.5..0.2.8, or xgrammar=0.2.5,0.2.6,0.2.8 from good to bad",
            )
        if name in components:
            raise UsageError(f"--component names {name} twice", hint="name each component once")
        if name != VLLM:
            for exact in _exact(name, versions):
                parse_source(f"{NEWEST}{WITH}{exact}")  # raises if it is no such package
            good, bad = versions[0], versions[-1]
            refuse_wrong_order(bad, good, find_fix=find_fix, owner=f"{name}'s ")
            low, high = sorted((good, bad), key=Version)
            known = _listed(name) if separator == ".." else versions
            inside = {text for text in known if Version(low) < Version(text) < Version(high)}
            ordered = [low, *sorted(inside, key=Version), high][:: -1 if find_fix else 1]
            if separator == "," and len({*versions}) < len(versions):
                raise UsageError(
                    f"--component {text} names a version twice", hint="name each version once"
                )
            if separator == "," and ordered != versions:
                raise UsageError(
                    f"the versions of {name} are not in order, from good to bad",
                    hint=f"write {name}={','.join(ordered)}",
                )
            versions, separator = ordered, ","
        components[name] = separator.join(versions)
    return components


def _exact(name: str, versions: Sequence[str]) -> list[str]:
    return [f"{name}=={version}" for version in versions]


def _listed(name: str) -> list[str]:
    """Return the versions of a package in pip's index. Raises `UsageError` without such a list."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions"]
    try:
        done = subprocess.run(
            [*command, name], capture_output=True, text=True, check=False, timeout=60
        )
        line = re.search(r"(?m)^Available versions: (.+)$", done.stdout)
        why = (done.stderr.strip().splitlines() or ["it names none"])[-1]
    except subprocess.TimeoutExpired:
        line, why = None, "no answer within 60 s"
    if not line:
        raise UsageError(
            f"pip lists no versions of {name}: {why}",
            hint=f"name them, from good to bad: --component {name}=A,B,C",
        )
    return line[1].split(", ")
