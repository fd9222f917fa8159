from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rehearsal import BANNER
from tests.conftest import Harness
from tests.golden_files import assert_golden, assert_refused
from vllm_repro.cli.diagnose import advice
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.scenario.ledger import ledger_values
from vllm_repro.scenario.matching import Match
from vllm_repro_diagnosis.signature import How

ROOT = Path(__file__).parents[3]

DATA = Path(__file__).parents[2] / "data"
PASTED = DATA / "pasted" / "tq-chunked-prefill.txt"
COMMAND = [sys.executable, "-m", "vllm_repro", "diagnose"]


@pytest.mark.parametrize(
    ("compress", "reads"),
    [(gzip.compress, "zcat"), (bz2.compress, "bzcat"), (lzma.compress, "xzcat")],
)
def test_a_compressed_log_is_told_how_to_be_read(
    harness: Harness, tmp_path: Path, compress: Callable[[bytes], bytes], reads: str
) -> None:
    log = tmp_path / "my server.log"
    log.write_bytes(compress(PASTED.read_bytes()))
    done = harness("diagnose", str(log), "--json", "--exit-code", "--scenarios", str(tmp_path))
    assert done.status == 64
    assert (
        f"{reads} '{log}' | vllm-repro diagnose - --scenarios {tmp_path} --json --exit-code\n"
        in done.err
    )
    with log.open("rb") as file:
        piped = subprocess.run(
            [*COMMAND, "-"], stdin=file, capture_output=True, text=True, check=False
        )
    assert piped.returncode == 64
    assert "is compressed" in piped.stderr


def test_no_name_and_no_standard_input_are_wrong_usage(harness: Harness) -> None:
    done = harness("diagnose", "")
    assert (done.status, "no file is named" in done.err) == (64, True)
    closed = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert closed.returncode == 64
    assert "standard input is closed" in closed.stderr


DEAD = (
    "(APIServer pid=1) INFO 11-20 08:24:20 [api_utils.py:1] vLLM API server version 0.23.0\n"
    "(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1138] EngineCore encountered a fatal error.\n"
)
LAB = "LAB: vllm_repro_lab replaces parts of this vLLM (mechanism turboquant)\n"
SCHEDULER = "SCHEDULER ONLY: vllm_repro_lab replaces parts of this vLLM (mechanism scheduler)\n"
OBSERVED = (
    '(EngineCore pid=9) INFO 11-20 08:24:29 [offload.py:45] LAB observed store {"event": 3}\n'
)
REPLAY = (
    'Traceback (most recent call last):\n  File "/x/vllm/v1/engine/core.py", line 1, in step\n   '
    ' f()\n  File "/x/vllm_repro_lab/graphs.py", line 2, in replay\n    g()\nRuntimeError: LAB:'
    " cannot replay\n"
)
QUOTED = (
    "(APIServer pid=1) INFO 11-20 08:24:21 [logger.py:1] Received request a: prompt:"
    f" '{LAB.strip()}'\n"
)


@pytest.mark.parametrize(
    ("log", "evidence", "first"),
    [
        (
            f"{BANNER.format(version='0.23.0')}\n{DEAD}",
            "rehearsal",
            "REHEARSAL: an engine of our own that imitates vLLM 0.23.0.",
        ),
        (
            f"{LAB}{DEAD}",
            "lab",
            "LAB: vLLM 0.23.0 on a CPU, with parts of it replaced.",
        ),
        (
            f"{SCHEDULER}{DEAD}{OBSERVED}",
            "scheduler",
            "SCHEDULER ONLY: vLLM 0.23.0 without a model",
        ),
        (f"{DEAD}{OBSERVED}", "lab", "LAB: vLLM 0.23.0 on a CPU"),
        (f"{DEAD}Application startup complete.\n{LAB}{DEAD}", "lab", "LAB: vLLM 0.23.0 on a CPU"),
        (f"{QUOTED}{DEAD}", "unknown", "died: "),
        (
            REPLAY,
            "lab",
            "LAB: vLLM on a CPU",
        ),
    ],
)
def test_a_log_of_a_simulation_is_called_one(
    harness: Harness, tmp_path: Path, log: str, evidence: str, first: str
) -> None:
    file = tmp_path / "server.log"
    file.write_text(log, encoding="utf-8")
    assert harness("diagnose", str(file)).out.startswith(first)
    assert json.loads(harness("diagnose", str(file), "--json").out)["evidence"] == evidence


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_full_disk_is_the_hosts_trouble(words: list[str]) -> None:
    for environment in ({}, {"PYTHONUNBUFFERED": "1"}):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [*COMMAND, str(PASTED), *words],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **{k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
                    **environment,
                },
                check=False,
            )
        assert done.returncode == 2, done.stderr
        assert "No space left on device" in done.stderr
        assert "fault of the harness" not in done.stderr
        assert "Exception ignored" not in done.stderr


def test_a_terminal_without_unicode_shows_the_rest(harness: Harness) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    log = 'Traceback (most recent call last):\n  File "vllm/x.py", line 1, in f\nValueError: a…b\n'
    assert "a\\u2026b" in harness("diagnose", "-", env=ascii_only, stdin=log).out
    found = json.loads(harness("diagnose", str(PASTED), "--json", env=ascii_only).out)
    assert "…" in found["why"]


def test_a_key_in_the_message_of_an_exception_is_not_printed(harness: Harness) -> None:
    log = (
        'Traceback (most recent call last):\n  File "vllm/v1/engine/core.py", line 1, in'
        " run\nValueError: bad --api-key sekrit\n"
    )
    for words in (("-",), ("-", "--json")):
        done = harness("diagnose", *words, stdin=log)
        assert "sekrit" not in done.out + done.err
        assert "ValueError" in done.out


def test_the_advice_on_each_known_death() -> None:
    known = all_scenarios()
    dying = [one for one in known if one.signature is not None]
    advised = [
        "\n  ".join((one.id, *advice(Match(one, How.MATCH), known, f"run {one.id}")))
        for one in dying
    ]
    assert_golden("advice.txt", "\n".join(advised) + "\n")


def test_json_has_what_the_last_lines_advise(harness: Harness) -> None:
    diagnosis = json.loads(harness("diagnose", str(PASTED), "--json").out)
    assert {"exception", "message", "frames", "wrapped", "vllm_version"} <= diagnosis.keys()
    assert (diagnosis["died"], diagnosis["phase"]) == (True, "request")
    (match,) = diagnosis["matches"]
    (price,) = match.pop("prices")
    title = match.pop("title")
    assert match == ledger_values("tq-chunked-prefill") | {
        "scenario": "tq-chunked-prefill",
        "how": "match",
        "issue": "vllm-project/vllm#41726",
        "url": "https://github.com/vllm-project/vllm/issues/41726",
        "ranges": {"bad": ">=0.21.0,<0.24.0", "good": ">=0.24.0"},
        "reported_again": "",
        "fixed_in": "0.24.0",
        "lives_with": ["with --enforce-eager", "with --compilation-config.cudagraph_mode none"],
        "other_bugs": [
            "tq-mtp-wrong-tokens",
            "tq-prefix-hit-unreserved",
            "tq-shared-step-loses-prefix",
        ],
        "run": "vllm-repro run tq-chunked-prefill",
    }
    lines = harness("diagnose", str(PASTED)).out.splitlines()
    assert lines[0] == f"match: tq-chunked-prefill ({match['issue']}): {title}: {match['url']}"
    assert lines[1].startswith(f"do: fixed in 0.24.0; or with --enforce-eager (price: {price})")
    assert lines[2] == "died: line 11, phase: request, 1 death"
    *_, fixed, first, second, third, lives, costs, see = lines
    assert fixed.strip().startswith(f"fixed in {match['fixed_in']}. That release or a later one")
    assert [line.split()[0] for line in (first, second, third)] == match["other_bugs"]
    assert lives.strip() == f"lives: {'; or '.join(match['lives_with'])}"
    assert costs.strip() == f"price: {price}"
    assert "--enforce-eager) gives 0." in price
    assert see.strip() == f"to see it: {match['run']}"


def test_a_whole_log_of_docker_ends_with_three_lines_of_advice(harness: Harness) -> None:
    log = (DATA / "recordings" / "v0.28.0-min-tokens.log").read_text(encoding="utf-8")
    as_docker = "".join(
        f"2026-11-20T08:24:{20 + n // 1000}.{n:09}Z {line}\n"
        for n, line in enumerate(log.splitlines())
    )
    for text in (log, as_docker):
        done = harness("diagnose", "-", "--exit-code", stdin=text)
        assert done.status == 1
        assert done.out.splitlines()[-3:] == [
            "  fixed in 0.29.0",
            "  lives: with no known change of flags, only with a patch of vLLM",
            "  to see it: vllm-repro run min-tokens-stop-ids",
        ]


def test_the_first_death_of_several_logs_counts(harness: Harness, tmp_path: Path) -> None:
    peer, alive, cause = (tmp_path / name for name in ("rank1.log", "rank2.log", "rank0.log"))
    peer.write_text(DEAD, "utf-8")
    alive.write_text(DEAD.partition("\n")[0] + "\n", "utf-8")
    fatal = "(EngineCore pid=9) ERROR 11-20 08:24:31 [core.py:1138] "
    cause.write_text(DEAD + f"{fatal}ValueError: no --api-key sekrit\n", "utf-8")
    done = harness("diagnose", "--exit-code", *map(str, (peer, alive, cause)))
    assert done.status == 1
    assert f"of {cause}, " in done.out.splitlines()[2]
    assert f"\n{peer}: died: " in done.out
    assert f"\n{alive}: cannot tell: " in done.out
    assert "sekrit" not in done.out
    assert harness("diagnose", "--exit-code", str(alive), str(alive)).status == 2


@pytest.mark.parametrize(
    ("message", "searched"),
    [
        ("CUDA error: misaligned address", "CUDA+error+misaligned+address"),
        (
            "CUDA out of memory. Tried to allocate 1.47 GiB.",
            "CUDA+out+of+memory+Tried+to+allocate+GiB",
        ),
        (
            "CUDA error 700 at /csrc/a.cuh:453 'an illegal access', x=9",
            "CUDA+error+at+an+illegal+access",
        ),
        # whole words, of which an issue may lack none
        (
            "CUDA graphs of " + "much longer " * 7 + "messages",
            "CUDA+graphs+of" + "+much+longer" * 5 + "+much",
        ),
    ],
)
def test_the_next_step_of_an_unknown_death(harness: Harness, message: str, searched: str) -> None:
    core = "(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1138] "
    log = f"{DEAD.partition(chr(10))[0]}\n{core}RuntimeError: {message}\n"
    done = harness("diagnose", "-", "--json", stdin=log)
    found = json.loads(done.out)
    search, intake, driver = found["next"]
    assert search.endswith(f"issues?q=is%3Aissue+RuntimeError+{searched}")
    assert intake.endswith("vllm-repro intake -")
    assert "dmesg" in driver
    assert (found["line"], found["time"], found["deaths"]) == (2, "11-20 08:24:30", 1)
    lines = harness("diagnose", "-", stdin=log).out.splitlines()
    assert lines[1] == f"next: {'; '.join(found['next'])}"


@pytest.mark.parametrize(
    ("error", "searched"),
    [
        (
            'python3: /s/Layout.cpp:47: T ns::getOrder(A): Assertion `!a && "no layout"\' failed.',
            "search .*=is%3Aissue.Layout.cpp.getOrder.no.layout",
        ),
        (
            '/b/Index.cu:11: operator(): block: [3,0,0] Assertion `i < s && "is outside"` failed.',
            "search .*=is%3Aissue.Index.cu.is.outside",
        ),
        ("free(): invalid size", "search .*=is%3Aissue.free.invalid.size"),
        (
            "(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1] KeyError: 'r-1'",
            "make a scenario.*",
        ),
    ],
)
def test_what_to_search_for_a_death(harness: Harness, error: str, searched: str) -> None:
    core = "(EngineCore pid=9) ERROR 11-20 08:24:31 "
    log = f"{error}\n{core}[m.py:1] Worker proc VllmWorker-1 died unexpectedly, shutting down.\n"
    found = json.loads(harness("diagnose", "-", "--json", stdin=log).out)
    assert re.fullmatch(searched, found["next"][0])


@pytest.mark.parametrize("name", ["dgx-spark-local-llm-laguna-int4-start.log", "my server.log"])
def test_the_next_command_names_the_whole_file(harness: Harness, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("RuntimeError: Engine core initialization failed. See root cause above.\n")
    assert f"vllm-repro intake {shlex.quote(str(file))}" in harness("diagnose", str(file)).out


def test_a_crash_that_is_reported_again_after_its_fix(harness: Harness) -> None:
    log = (DATA / "logs" / "match-prose-release.log").read_text("utf-8")
    first, second, *_ = harness("diagnose", "-", stdin=log).out.splitlines()
    assert first.startswith("near: offloading-two-groups ")
    again = "do: declared fixed in 0.24.0; but .*/50454 is open: the same crash in 0.25.1"
    assert re.match(again, second)


@pytest.mark.parametrize("lives", [1, 3, 40])
def test_each_life_that_died_is_counted(harness: Harness, lives: int) -> None:
    ready = "(APIServer pid=1) INFO:     Application startup complete.\n"
    boot, fatal = DEAD.splitlines(keepends=True)
    log = "".join(boot.replace(":20", f":{n:02}") + ready + fatal for n in range(lives))
    assert json.loads(harness("diagnose", "-", "--json", stdin=log).out)["deaths"] == lives


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("INFO:     Application startup complete.\nINFO:     Shutting down\n", 0),
        (None, 1),
        ("INFO:     Application startup complete.\n", 2),
        ("nothing of interest\n", 2),
    ],
)
def test_the_exit_status_on_request(harness: Harness, text: str | None, status: int) -> None:
    source = str(PASTED) if text is None else "-"
    assert harness("diagnose", "--exit-code", source, stdin=text or "").status == status
    assert harness("diagnose", source, stdin=text or "").status == 0


def test_scenarios_of_ones_own_are_matched(harness: Harness, tmp_path: Path) -> None:
    text = (ROOT / "scenarios" / "tq_chunked_prefill.py").read_text(encoding="utf-8")
    (tmp_path / "own_bug.py").write_text(
        text.replace("tq-chunked-prefill", "own-bug"), encoding="utf-8"
    )
    for words, env in (
        (("--scenarios", str(tmp_path)), {"VLLM_REPRO_SCENARIOS": ""}),
        ((), {"VLLM_REPRO_SCENARIOS": str(tmp_path)}),
    ):
        found = json.loads(harness("diagnose", str(PASTED), "--json", *words, env=env).out)[
            "matches"
        ]
        assert {match["scenario"] for match in found} == {"tq-chunked-prefill", "own-bug"}
    assert (
        harness(
            "list", "--scenarios", str(tmp_path / "gone"), env={"VLLM_REPRO_SCENARIOS": ""}
        ).status
        == 64
    )


def test_a_process_without_vllm_is_no_server(harness: Harness) -> None:
    with subprocess.Popen(["sleep", "60"]) as program:
        done = harness("diagnose", "--pid", str(program.pid))
        program.kill()
    assert_refused(done, f"process {program.pid} is none of a vLLM server", "VLLM::EngineCore")
