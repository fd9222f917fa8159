"""How much of the time of `explore --engine` is vLLM's own: EngineCore's construction, requests and steps, without our worker and checks.

Run by the harness's Python it draws cases and starts itself again on that of the release. Both figures come from one run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="0.33.0", metavar="RELEASE")
    parser.add_argument("--cases", type=int, default=600, metavar="N", help="all mixes in turn, from seed 1 on")
    given = parser.parse_args()

    from vllm_repro.releases.provision import provision
    from vllm_repro_explore.draw import MIXES, draw
    from vllm_repro_explore.driver import Driver, driver_model

    release, mixes = provision(given.vllm), tuple(MIXES)
    cases = [draw(seed, mixes[seed % len(mixes)]).as_json() for seed in range(1, given.cases + 1)]
    subprocess.run(
        [str(release.python), __file__, "measure"],
        input=json.dumps(cases).encode(),
        env=Driver(release, driver_model(), Path("unused")).environment(),
        check=True,
    )


def measure(cases: list[dict[str, Any]]) -> None:
    from vllm_repro_driver import executor, play  # type: ignore[import-not-found]  # a folder of its own on PYTHONPATH

    player: Any = play
    spent: defaultdict[str, float] = defaultdict(float)

    def timed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapper(*given: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **more)
            finally:
                spent[name] += time.perf_counter() - began

        return wrapper

    construct = timed(player.boot, "boot")

    def boot(case: Any) -> Any:
        engine = construct(case)
        engine.step_fn = timed(engine.step_fn, "steps")
        return engine

    for name in ("execute_model", "sample_tokens", "take_draft_token_ids"):
        setattr(executor.FakeExecutor, name, timed(getattr(executor.FakeExecutor, name), "worker"))
    player.boot = boot
    player._Player._add = timed(player._Player._add, "requests")
    for case in cases[:20]:
        player.play(case)
    spent.clear()
    began = time.perf_counter()
    steps = sum(player.play(case).get("steps", 0) for case in cases[20:])
    whole, count = time.perf_counter() - began, len(cases) - 20
    own = spent["boot"] + spent["requests"] + spent["steps"] - spent["worker"]
    print(f"{count} cases, {steps} steps: {whole / count * 1000:.1f} ms a case, {own / whole:.2f} of it vLLM's own")


if __name__ == "__main__":
    measure(json.load(sys.stdin)) if sys.argv[1:] == ["measure"] else main()
