from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.commands import write_script
from tests.conftest import Harness
from tests.golden_files import assert_golden
from vllm_repro import __main__ as command
from vllm_repro.cli import CORE_VERBS, main, verbs
from vllm_repro.command.parse import parse
from vllm_repro.errors import Unsupported
from vllm_repro.features import additions
from vllm_repro.running.job import Job
from vllm_repro.scenario.catalogue import all_scenarios, find
from vllm_repro.servers.compose_services import compose_file
from vllm_repro.verdict.verdict import Expect

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def fixed_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def without_features(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install no feature."""
    monkeypatch.setattr("vllm_repro.features.entry_points", lambda **_: ())
    for cached in (additions, verbs):
        cached.cache_clear()
    yield
    for cached in (additions, verbs):
        cached.cache_clear()


def test_a_feature_replaces_no_verb_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    added = {"run": ("other.run", "another"), "else": ("other.else", "a verb more")}
    monkeypatch.setattr("vllm_repro.cli.additions", lambda _: ["other"])
    monkeypatch.setattr("vllm_repro.cli.load", lambda *_: added)
    assert verbs.__wrapped__() == {**CORE_VERBS, "else": added["else"]}
    assert list(verbs.__wrapped__()) == [*CORE_VERBS, "else"]


def help_of(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"] if verb else ["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "example:\n  vllm-repro " in text
    assert [line for line in text.splitlines() if len(line) > 100 and line[0] != " "] == []
    return text


@pytest.mark.features
@pytest.mark.usefixtures("without_features")
@pytest.mark.parametrize("verb", ["", *CORE_VERBS])
def test_help_of_the_core_is_what_was_reviewed(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_golden(f"help-{verb or 'top'}.txt", help_of(verb, capsys))


@pytest.mark.features
def test_help_of_each_feature_is_what_was_reviewed(capsys: pytest.CaptureFixture[str]) -> None:
    top = help_of("", capsys)
    for verb in sorted({*verbs()} - {*CORE_VERBS}):
        package = verbs()[verb][0].partition(".")[0]
        assert_golden(
            f"help-{verb}.txt", help_of(verb, capsys), package.removeprefix("vllm_repro_")
        )
        assert f"\n    {verb}" in top


@pytest.mark.features
@pytest.mark.parametrize(("verb", "kind"), [("show", "show_forms"), ("report", "report_forms")])
def test_help_names_the_forms_of_features(
    verb: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(verb, capsys)
    assert [form for form in additions(kind) if form not in text] == []


@pytest.mark.features
@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("from vllm_repro.cli import main; main(['--help'])", 6),
        ("from vllm_repro.cli import main; main(['list'])", 90),
        ("from vllm_repro.cli import main; main(['show', 'tq-chunked-prefill'])", 70),
        ("import vllm_repro", 1),
    ],
)
def test_what_is_not_needed_is_not_imported(code: str, most: int) -> None:
    """Check start-up by imported modules instead of time."""
    script = (
        f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {code}"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = done.stderr.split()
    heavy = {
        "beartype",
        "docker",
        "httpx",
        "jinja2",
        "openai",
        "pandas",
        "rich",
        "yaml",
        "vllm_repro.running",
    }
    assert heavy.isdisjoint(loaded)
    below = {"vllm_repro", "vllm_repro_diagnosis", "vllm_repro_lab"}
    ours = {name for name in loaded if name.startswith("vllm_repro")}
    assert [name for name in ours if "." in name and name.partition(".")[0] not in below] == [], (
        "modules of features"
    )
    assert sum(name.partition(".")[0] == "vllm_repro" for name in loaded) <= most


_UNTIL_THE_FIRST_REQUEST = """
import os, sys
def seen(event, details):
    if event == "socket.connect" and isinstance(details[1], tuple):
        os.write(1, " ".join(sys.modules).encode())
        os._exit(0)
sys.addaudithook(seen)
words = "run min-tokens-stop-ids --server attach --url http://127.0.0.1:9"
sys.argv = ["vllm-repro", *words.split()]
from vllm_repro.__main__ import main
sys.exit(main())
"""


def test_a_run_imports_little_before_its_first_request(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _UNTIL_THE_FIRST_REQUEST]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert {"httpx", "vllm_repro"} <= imported
    heavy = {
        "click",
        "docker",
        "jinja2",
        "openai",
        "pandas",
        "pygments",
        "rich",
        "tenacity",
        "unidiff",
        "yaml",
    }
    assert not imported & heavy
    assert not {
        "vllm_repro.report.html",
        "vllm_repro.releases.provision",
        "packaging.requirements",
    } & {*done.stdout.split()}


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["run", "tq-chunked-prefil"], 64, "did you mean tq-chunked-prefill"),
        (["diagnose"], 64, "nothing to diagnose"),
        (["diagnose", "server.log", "--pid", "1"], 64, "a log and a server"),
        (["diagnose", "--url", "localhost:8000"], 64, "is not an http URL"),
        (["diagnose", "--pid", "999999999"], 64, "there is no process 999999999 here"),
        (["show", "tq"], 64, "did you mean tq-chunked-prefill or tq-"),
        (["show", "46014"], 64, "2 scenarios have the issue 46014"),
        (
            ["show", "tq-chunked-prefill", "--as", "docker", "--vllm", "0.24.0 with x==1"],
            64,
            "an image has a release, not 0.24.0 with x==1",
        ),
        (["run", "tq-chunked-prefill", "--arm", "eagr"], 64, "did you mean eager"),
        (["run"], 64, "SCENARIO"),
        (["rum", "tq-chunked-prefill"], 64, "did you mean run?"),
        (["run", "tq-chunked-prefill", "--sever", "lab"], 64, "did you mean --server?"),
        (["run", "tq-chunked-prefill", "--server", "dokcer"], 64, "did you mean docker?"),
        (["run", "tq-chunked-prefill", "--trials", "0"], 64, "is no number of boots from 1 to 200"),
        (
            ["run", "tq-chunked-prefill", "--trials", "201"],
            64,
            "is no number of boots from 1 to 200",
        ),
        (["run", "tq-chunked-prefill", "--url", "ftp://x"], 64, "is not an http URL"),
        (
            ["run", "tq-chunked-prefill", "--url", "http://127.0.0.1:9/v1/"],
            2,
            "no server responds at http://127.0.0.1:9",
        ),
        (["run", "tq-chunked-prefill", "--server", "attach"], 64, "needs a URL"),
        (
            ["run", "min-tokens-stop-ids", "--server", "process", "--model", "/nowhere/at/all"],
            64,
            "there is no folder",
        ),
        (
            [
                "run",
                "min-tokens-stop-ids",
                "--server",
                "process",
                "--vllm",
                "0.28.0",
                "--model",
                "/",
            ],
            64,
            "has no config.json",
        ),
        (["run", "min-tokens-stop-ids", "--server", "docker"], 2, "no Docker Engine answers"),
        (
            ["run", "tq-chunked-prefill", "--vllm", "banana"],
            64,
            "is not the number of a vLLM release",
        ),
        (
            ["run", "tq-chunked-prefill", "--server", "rehearsal", "--vllm", "0.99.0"],
            64,
            "not 0.99.0",
        ),
        (["run", "tq-chunked-prefill", "--answer-stall", "-1"], 64, "is no number of seconds"),
        (
            ["run", "tq-chunked-prefill", "--server", "rehearsal", "--image", "x"],
            64,
            "--image has no meaning",
        ),
        (
            ["run", "tq-chunked-prefill", "--server", "rehearsal", "--url", "http://127.0.0.1:1"],
            64,
            "--url has no meaning",
        ),
        (
            ["run", "tq-chunked-prefill", "--server", "rehearsal", "--out", "/proc/nowrite"],
            64,
            "cannot write to",
        ),
        (
            ["run", "tq-chunked-prefill", "--server", "rehearsal", "--patch", "x.diff"],
            64,
            "use --server docker or process or lab",
        ),
        (
            ["show", "min-tokens-stop-ids", "--arm", "patched", "--vllm", "0.0.1"],
            2,
            "vLLM 0.0.1 is not in the cache",
        ),
        (
            ["show", "min-tokens-stop-ids", "--arm", "patched", "--as", "docker"],
            2,
            "no Docker Engine answers",
        ),
        (["report", "/nowhere"], 64, "no journal at"),
        (["check", "/nowhere.py"], 64, "there is no"),
        (["diagnose", "/nowhere.log"], 64, "cannot read"),
        (["show", "tq-chunked-prefill", "--arm", "x"], 64, "It has: reported"),
    ],
)
def test_wrong_usage_says_what_is_wrong_and_what_to_do(
    harness: Harness, words: list[str], status: int, message: str, tmp_path: Path
) -> None:
    done = harness(*words, env={"DOCKER_HOST": f"unix://{tmp_path}/no-engine.sock"})
    assert done.status == status, done.err
    assert message in done.err
    assert "next:" in done.err
    assert len(done.err.splitlines()) <= 3
    assert "Traceback" not in done.err
    assert done.folder is None, "a run that cannot begin leaves no folder"


def test_a_working_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = (
        f"rmdir {gone}; exec {sys.executable} -P -m vllm_repro run tq-chunked-prefill --server"
        f" rehearsal --out {tmp_path}"
    )
    done = subprocess.run(
        ["sh", "-c", command], cwd=gone, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 64
    assert (
        done.stderr
        == "vllm-repro: the working folder is gone\n  next: change into one that is there: cd ~\n"
    )


@pytest.mark.parametrize(
    ("moment", "words", "number"),
    [
        ("import", ["list"], signal.SIGINT),
        ("parse", ["--version"], signal.SIGINT),
        ("import", ["list"], signal.SIGTERM),
    ],
)
def test_a_signal_before_anything_has_begun_is_quiet(
    tmp_path: Path, moment: str, words: list[str], number: signal.Signals
) -> None:
    wait = f"import time; open({str(tmp_path / 'there')!r}, 'w').close(); time.sleep(60)\n"
    if moment == "import":
        (tmp_path / "packaging.py").write_text(
            wait, encoding="utf-8"
        )  # in place of a library that is imported on the way
    else:
        text = (
            f"import argparse\ndef print_it(*_):\n    {wait}\nargparse._VersionAction.__call__ ="
            " print_it\n"
        )
        (tmp_path / "sitecustomize.py").write_text(text, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_repro", *words],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # tests in the background have it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "there").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == 130


def test_the_installed_command_is_the_tested_one() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        scripts = tomllib.load(file)["project"]["scripts"]
    assert scripts == {"vllm-repro": f"{command.__name__}:{command.main.__name__}"}


def test_a_bug_without_an_imitation_is_inconclusive(harness: Harness, tmp_path: Path) -> None:
    path = written(tmp_path, "vllm#41726", "vllm#39702")
    words = ("--server", "rehearsal", "--vllm", "0.24.0", "--arm", "reported")
    done = harness("run", str(path), *words, env={"PATH": os.defpath})
    assert (done.report["verdict"], done.status) == ("inconclusive", 2)
    assert "does not imitate" in done.report["because"]
    assert done.report["reproduce"].startswith(f"vllm-repro run {path} --server rehearsal")


def test_a_fault_of_the_harness_has_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vllm_repro.cli.list_.columns", lambda *_: 1 // 0)
    assert main(["list"]) == 70
    text = capsys.readouterr().err
    assert "ZeroDivisionError" in text.partition("a fault of the harness itself")[0]
    assert text.endswith("  next: please report it with the traceback above\n")


def test_a_scenario_with_a_typo_is_named_with_its_line(harness: Harness, tmp_path: Path) -> None:
    path = tmp_path / "a folder" / "bad_one.py"
    path.parent.mkdir()
    path.write_text('"""A bug."""\n\nscenario = Scenaro(id="bad-one")\n', encoding="utf-8")
    done = harness("run", str(path))
    assert f"{path}:3: unknown name 'Scenaro'; did you mean 'Scenario'?" in done.err
    assert f"next: vllm-repro check '{path}'" in done.err
    assert (done.status, harness("check", str(path)).status) == (64, 1)


@pytest.mark.parametrize("word", ["title", "titel"])
def test_check_states_when_more_mistakes_may_follow(
    harness: Harness, tmp_path: Path, word: str
) -> None:
    """A wrong word hides mistakes between the parts, here two arms of one name."""
    path = written(tmp_path, '"eager",', '"reported",', "title=", f"{word}=")
    done = harness("check", str(path))
    seen = (done.status, "reported" in done.out, "correct these and check again" in done.err)
    assert seen == (1, word == "title", word != "title")


def written(folder: Path, *words: str, name: str = "tq_chunked_prefill.py") -> Path:
    """Write a scenario of the package with changes: old and new words in turn."""
    text = (ROOT / "scenarios" / name).read_text(encoding="utf-8")
    for old, new in zip(words[::2], words[1::2], strict=True):
        text = text.replace(old, new, 1)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def own_bug(folder: Path) -> None:
    """Write a scenario with the id own-bug."""
    path = written(folder, "min-tokens-stop-ids", "own-bug", name="min_tokens_stop_ids.py")
    path.rename(folder / "own_bug.py")


def test_check_notes_flags_that_load_code(harness: Harness, tmp_path: Path) -> None:
    flags = ("--max-num-seqs 1", "--max-num-seqs 1 --middleware evil.module")
    done = harness("check", str(written(tmp_path, *flags)))
    note = "note: vLLM loads code or uses files of this host with --middleware evil.module\n"
    assert (done.status, note in done.out) == (0, True)
    assert harness("check", str(ROOT / "scenarios" / "tq_chunked_prefill.py")).out == ""


def test_list_and_show_print_data(harness: Harness) -> None:
    rows = json.loads(harness("list", "--json").out)
    (row,) = (row for row in rows if row["scenario"] == "tq-chunked-prefill")
    facts = (row["issue"], row["first_bad"], row["first_good"], row["needs"]["gpus"])
    assert facts == ("vllm-project/vllm#41726", "0.21.0", "0.24.0", 1)
    shown = json.loads(harness("show", "tq-chunked-prefill", "--arm", "eager", "--json").out)
    assert re.match("vllm serve Qwen/Qwen3.5-9B.*--enforce-eager", shown["command"], re.DOTALL)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_list_is_as_wide_as_the_terminal(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    head, *lines = harness("list").out.splitlines()
    assert head.split("  ")[0] == "scenario"
    assert max(map(len, lines)) <= width
    details = harness("list", "-v").out.splitlines()
    assert [line for line in details if len(line) > width and "/" not in line] == []
    assert width < 80 or any(re.match(r"dsv4-tp2 .* a branch only +-$", line) for line in lines)
    assert width < 80 or any(
        re.match(r"tq-chunked-prefill .* 0.21.0 to 0.23.0 +GPU$", line) for line in lines
    )


def test_list_names_the_forms_that_show_has(harness: Harness) -> None:
    forms = {row["scenario"]: row["forms"] for row in json.loads(harness("list", "--json").out)}
    assert f"  show --as {', '.join(forms['sco-hybrid'])}\n" in harness("list", "-v").out
    for name in ("sco-hybrid", "min-tokens-stop-ids", "kv-load-rejected", "async-streaming-stop"):
        for form in ("lab", "python", "curl", *additions("show_forms")):
            done = harness("show", name, "--as", form)
            assert (done.status == 0) is (form in forms[name]), (name, form, done.err)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("docker", "docker run(?=.*--gpus 1)(?=.*vllm/vllm-openai:v0.23.0)"),
        ("compose", ".*- --kv-cache-dtype"),
        ("python", ".*\nSTEPS = \\["),
    ],
)
def test_show_has_forms(harness: Harness, form: str, words: str) -> None:
    assert re.match(words, harness("show", "tq-chunked-prefill", "--as", form).out, re.DOTALL)


@pytest.mark.parametrize("style", ["serve", "docker"])
def test_show_prints_the_reported_flags(style: str, harness: Harness) -> None:
    shown = parse(harness("show", "tq-chunked-prefill", "--as", style).out)
    local = [name for name in ("--host", "--port") if shown.has(name)]
    assert shown.without(*local).flags == find("tq-chunked-prefill").reported().flags


def test_the_compose_file_is_what_the_scenarios_say() -> None:
    assert (ROOT / "docker-compose.yml").read_text(encoding="utf-8") == compose_file(), (
        "make compose"
    )
    services = yaml.safe_load(compose_file())["services"]
    assert set(services) == {scenario.id for scenario in all_scenarios()}
    assert all(
        port.startswith("127.0.0.1:") for body in services.values() for port in body["ports"]
    )


def test_doctor_says_what_can_run(harness: Harness, tmp_path: Path) -> None:
    found = json.loads(harness("doctor", "--json", env={"VLLM_REPRO_CACHE": str(tmp_path)}).out)
    assert {"machine", "docker", "cached releases", "tq-chunked-prefill"} <= {
        finding["what"] for finding in found
    }


def test_json_goes_to_standard_output_alone(harness: Harness) -> None:
    done = harness(
        "run", "min-tokens-stop-ids", "--server", "rehearsal", "--arm", "near-miss", "--json"
    )
    assert json.loads(done.out)["verdict"] == "inconclusive"
    assert done.status == 0, "the arm did what it is declared to do"


def test_an_unusual_expectation_is_in_the_command_to_repeat(harness: Harness) -> None:
    asked = ("run", "min-tokens-stop-ids", "--server", "rehearsal", "--vllm", "0.29.0")
    assert (
        harness(*asked, "--expect", "crash").report["reproduce"].endswith("--expect crash --seed 1")
    )
    done = harness(*asked)
    assert "--expect" not in done.report["reproduce"]
    assert f"again:   {done.report['reproduce']}\n" in done.out, "without --out"


def test_only_the_terminal_repeats_the_output_folder(harness: Harness, tmp_path: Path) -> None:
    out = tmp_path / "else where"
    words = ["run", "min-tokens-stop-ids", "--server", "rehearsal", "--arm", "near-miss", "--out"]
    done = harness(*words, str(out))
    again = done.out.partition("again:   ")[2]
    assert again.endswith(f" --seed 1 --out '{out}'\n")
    report = json.loads(
        (out / "min-tokens-stop-ids/latest/report.json").read_text(encoding="utf-8")
    )
    assert f"{report['reproduce']} --out '{out}'\n" == again


@pytest.mark.parametrize(
    ("words", "expect"),
    [
        ((), Expect.DECLARED),
        (("--patch", "x.diff"), Expect.ALIVE),
        (("--patch", "x.diff", "--expect", "declared"), Expect.DECLARED),
    ],
)
def test_a_patch_is_expected_to_live_by_default(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expect: Expect
) -> None:
    jobs: list[Job] = []

    def take(job: Job, *_: object) -> None:
        jobs.append(job)
        raise Unsupported("enough")

    monkeypatch.setattr("vllm_repro.cli.run.run_one", take)
    main(["run", "tq-prefix-hit-unreserved", "--server", "lab", *words])
    assert [job.expect for job in jobs] == [expect]


def test_make_takes_folders_of_scenarios() -> None:
    words = ["make", "--dry-run", "repro-own-bug", "SCENARIOS=one two"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert (
        "vllm-repro run --expect any --scenarios one --scenarios two own-bug --server auto\n"
        in done.stdout
    )


_COMPLETED = """
eval "$(vllm-repro completion bash)"
function=$(complete -p vllm-repro | sed -E 's/.* -F ([^ ]+) .*/\\1/')
for line; do
    COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9 COMP_KEY=9 COMPREPLY=()
    COMP_CWORD=$(($(wc -w <<<"${line}x") - 1))
    read -ra COMP_WORDS <<<"$line"
    "$function" vllm-repro "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    echo "${COMPREPLY[@]}"
done
"""


def test_bash_completes_it(tmp_path: Path) -> None:
    """Complete all lines in one shell: each start of the command takes a tenth of a second."""
    tools, own = tmp_path / "bin", tmp_path / "own"
    own.mkdir()
    own_bug(own)
    write_script(tools / "vllm-repro", f'exec {sys.executable} -m vllm_repro "$@"')
    completions = {
        "vllm-repro diag": ["diagnose"],
        "vllm-repro run --server d": ["docker"],
        "vllm-repro run min-": ["min-tokens-stop-ids"],
        f"vllm-repro run --scenarios {own} own-": ["own-bug"],
        "vllm-repro run min-tokens-stop-ids --arm ": ["reported", "near-miss", "patched"],
        f"vllm-repro check {own}/own": [f"{own}/own_bug.py"],
        "vllm-repro run --scenarios /nowhere own-": [],
    }
    words = ["bash", "-c", _COMPLETED, "bash", *completions]
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(
        words, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    shown = [line.split() for line in done.stdout.splitlines()]
    assert dict(zip(completions, shown, strict=True)) == completions, done.stderr


def test_a_command_to_repeat_names_the_folders_of_scenarios(
    harness: Harness, tmp_path: Path
) -> None:
    """Also those of the variable, for another shell.

    A report names the variable: a folder is of one machine.
    """
    own_bug(tmp_path)
    words = ["run", "own-bug", "--server", "rehearsal", "--arm", "near-miss"]
    for option, variable in ((["--scenarios", str(tmp_path)], ""), ([], str(tmp_path))):
        done = harness(*words, *option, env={"VLLM_REPRO_SCENARIOS": variable})
        assert " --scenarios $VLLM_REPRO_SCENARIOS " in done.report["reproduce"]
        again = next(line for line in done.out.splitlines() if line.startswith("again:"))
        assert f" --scenarios {tmp_path} " in again
        assert harness(*again.split()[2:], env={"VLLM_REPRO_SCENARIOS": ""}).status == 0
