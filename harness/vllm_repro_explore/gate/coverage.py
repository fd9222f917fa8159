"""Which mixes and scenarios run which functions of vLLM, recorded for a release.

    .venv/bin/python -m vllm_repro_explore.gate.coverage 0.33.0

plays a few cases of each start and writes `maps/0.33.0.json` beside this module: for each function
that some of them run, the share of the cases of each start that do. `gate` plays first where the
changed functions run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_repro.releases.provision import Release, provision
from vllm_repro.releases.sources import Source
from vllm_repro_explore.driver import Driver, driver_model
from vllm_repro_explore.gate.choose import Start
from vllm_repro_explore.gate.lines import Place, function_places
from vllm_repro_explore.gate.starts import general_starts

FOLDERS = ("vllm/v1", "vllm/distributed/kv_transfer", "vllm/distributed/kv_events.py")
_MAPS = Path(__file__).with_name("maps")
_CASES = 12
_EVERYWHERE = 0.8
"""Share of the cases of each start from which on a function is no reason to prefer one."""

ShareMap = Mapping[str, Mapping[str, float]]
"""For each function, as file::name, the share of a start's cases that run it."""


def read_map(version: str) -> ShareMap:
    """Return the map of the newest release up to a version, else of the newest release of all.

    Return an empty map if the version cannot be parsed, or if there is no map.
    """
    maps = {file.stem: file for file in _MAPS.glob("*.json")}
    try:
        release = Version(version.partition("+")[0])
    except InvalidVersion:
        return {}
    older = [name for name in maps if Version(name) <= release] or list(maps)
    if not older:
        return {}
    recorded = json.loads(maps[max(older, key=Version)].read_text(encoding="utf-8"))
    starts: Sequence[str] = recorded["starts"]
    return {
        name: {starts[int(place)]: share for place, share in row.items()}
        for name, row in recorded["functions"].items()
    }


def shares(known: ShareMap, functions: Collection[str]) -> dict[str, float]:
    """Return for each start the mean share of its cases that run one of the functions.

    Functions that the map does not have are left out of the mean; empty if it has none.
    """
    rows = [known[name] for name in functions if name in known]
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)
    return {name: value / len(rows) for name, value in total.items()}


def record(release: Release, starts: Sequence[Start], cases: int = _CASES) -> dict[str, object]:
    """Play cases of each start and return the content of a release's map; log to standard error.

    A function that most cases of every start run is left out.
    """
    files = sorted(
        path
        for name in FOLDERS
        for path in ([release.packages / name] if name.endswith(".py") else ())
        or (release.packages / name).rglob("*.py")
    )
    places: list[Place] = []
    for path in files:
        name = str(path.relative_to(release.packages))
        places += function_places(name, path.read_text(encoding="utf-8"))
    runs: dict[int, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, place in enumerate(places):
            lines[place.file].append((place.line, number))
        (folder / "statements.json").write_text(json.dumps(lines), encoding="utf-8")
        log, probes = folder / "driver.log", folder / "statements.json"
        with Driver(release, driver_model(), log, probes=probes) as driver:
            for start in starts:
                for _ in range(cases):
                    for number in driver.play(start.next().case).reached:
                        runs[number][start.name] += 1
                print(f"{start.name}: {len(runs)} functions so far", file=sys.stderr)
    names = [start.name for start in starts]
    functions = {
        f"{places[number].file}::{places[number].function}": {
            names.index(start): round(count / cases, 2) for start, count in sorted(row.items())
        }
        for number, row in sorted(runs.items())
        if len(row) < len(names) or min(row.values()) < _EVERYWHERE * cases
    }
    return {
        "release": release.version,
        "cases": cases,
        "functions_in_all": len(places),
        "starts": names,
        "functions": functions,
    }


def main(versions: Sequence[str]) -> None:
    """Record and write the map of each release that the arguments name."""
    _MAPS.mkdir(exist_ok=True)
    for version in versions:
        content = record(provision(Source(release=version)), general_starts({}))
        text = json.dumps(content, separators=(",", ":")).replace('},"', '},\n"')
        (_MAPS / f"{version}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
