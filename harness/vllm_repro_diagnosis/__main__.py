"""`python -m vllm_repro_diagnosis FILE`: print why the engine of a server log died.

It needs no package but this. `vllm-repro diagnose` also names the matching scenarios.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

from vllm_repro_diagnosis.diagnosis import Diagnosis, diagnose
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_diagnosis.output import as_lines, as_values


def main() -> None:
    """Print the diagnosis of the file that the command line names; exit 2 if it cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_repro_diagnosis", description="Print why a vLLM engine died."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "file", metavar="FILE", help="a log or a pasted traceback; - for standard input"
    )
    arguments = parser.parse_args()
    try:
        diagnosis = _read(arguments.file)
    except OSError as error:
        parser.error(f"cannot read {arguments.file}: {error.strerror}")
    if arguments.json:
        print(json.dumps(as_values(diagnosis), indent=2))
    else:
        print("\n".join(as_lines(diagnosis)))


def _read(name: str) -> Diagnosis:
    """Return the diagnosis of a log file; `-` is standard input. Raises `OSError`."""
    if name == "-":
        stdin = sys.stdin.buffer
        return diagnose(stdin if isinstance(stdin, io.BufferedReader) else read_lines(stdin))
    with Path(name).open("rb") as file:
        return diagnose(file)


if __name__ == "__main__":
    main()
