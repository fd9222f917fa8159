"""How well `pytest scenarios -n 4` uses four GPUs: stub cards and stub servers (fixtures/gpu_stubs), no GPU.

Lower bound: the longest server, or the seconds of all cards divided by four, whichever is more. Times are the servers' own. The first
round has no history; the second starts with what took longest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_repro.scenario.catalogue import scenario_files

STUBS = Path(__file__).parents[1] / "fixtures" / "gpu_stubs"
BOOTS_S = (8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48)
"""Seconds of each boot, in the order of the files' names: the worst one, with the longest last."""
CARDS = 4


def scenarios(folder: Path) -> None:
    """Write one scenario for each boot."""
    folder.mkdir()
    text = next(path for path in scenario_files() if path.name == "min_tokens_stop_ids.py").read_text(encoding="utf-8")
    for number, seconds in enumerate(BOOTS_S):
        own = text.replace("Qwen/Qwen3-0.6B", f"org/boot-{seconds}s").replace("Needs(memory_gb=6)", "Needs(gpus=1)")
        own = own.replace('id="min-tokens-stop-ids"', f'id="boot-{number:02}"')
        (folder / f"boot_{number:02}.py").write_text(own, encoding="utf-8")


def measured(work: Path, number: int) -> str:
    """Run all scenarios once, and return a row of the table."""
    servers = work / f"servers-{number}"
    servers.mkdir()
    (work / "cards.json").write_text(json.dumps({"servers": str(servers)}), encoding="utf-8")
    env = os.environ | {
        "PATH": f"{STUBS}:{os.environ['PATH']}",
        "STUB_GPUS": str(work / "cards.json"),
        "STUB_SERVERS": str(servers),
        "VLLM_REPRO_REPORTS": str(work / "reports"),
    }
    words = ["scenarios", "-k", "near-miss", "--scenario-server", "process", "--scenario-weights", "real", "-n", "4"]
    words += ["--maxschedchunk", "1", "-q", "-p", "no:cacheprovider"]
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=work, env=env, check=True, stdout=subprocess.DEVNULL)
    served = [json.loads(path.read_text(encoding="utf-8")) for path in servers.glob("*.json")]
    lengths = [server["end"] - server["start"] for server in served]
    took = max(server["end"] for server in served) - min(server["start"] for server in served)
    bound = max(max(lengths), sum(lengths) / CARDS)
    order = "as named" if number == 1 else "longest first"
    return f"| {order} | {len(served)} | {bound:.1f} | {took:.1f} | {took / bound:.2f} |"


def main() -> None:
    """Print the table."""
    print("| order | trials | lower bound, s | from first start to last end, s | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        scenarios(Path(name) / "scenarios")
        for number in (1, 2):
            print(measured(Path(name), number), flush=True)


if __name__ == "__main__":
    main()
