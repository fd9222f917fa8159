"""Commands as pasted: prompts, fences, quotes, line continuations, containers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import psutil
import pytest

from tests.core.servers.docker_helpers import running
from vllm_repro.command import flag_table
from vllm_repro.command.command import ReportedContainer, ServeCommand
from vllm_repro.command.flags import Flag, canonical, flag_mistakes, parse_number
from vllm_repro.command.parse import parse
from vllm_repro.errors import CommandError
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import ServerChoice, open_site

REPORTED = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parents[2] / "data" / "commands").glob("*.txt"))
    if path.stem != "42085"  # a compose file's list of arguments
}


@pytest.mark.parametrize(
    "text",
    [
        "$ vllm serve org/m --max-model-len 4096 \\\n  --enforce-eager",
        "(venv) me@box:~/src$ vllm serve org/m --max-model-len 4096 --enforce-eager",
        "```bash\nsudo vllm serve org/m --max-model-len 4096 --enforce-eager\n```",
        "> vllm serve org/m\n> --max-model-len 4096\n> --enforce-eager",
        "vllm serve org/m # the model\n# and the flags\n--max-model-len 4096 --enforce-eager",
        "vllm serve org/m --max-model-len\n4096\n--enforce-eager",
        "cd / && vllm serve org/m --max-model-len 4096 --enforce-eager 2>&1 | tee log",
        "nohup /opt/bin/vllm serve org/m --max-model-len 4096 --enforce-eager > log 2>&1 &",
        "vllm serve org/m \u2013-max-model-len 4096 \u2014enforce-eager",
        "vllm serve org/m --max_model_len 4096 --enforce_eager\ncurl localhost:8000/health",
        "python3 -m vllm.entrypoints.openai.api_server org/m --max-model-len 4096 --enforce-eager",
        "bash -c 'vllm serve org/m --max-model-len 4096 --enforce-eager'",
        "podman run --rm -it -p8000:8000 image:1 org/m --max-model-len 4096 --enforce-eager",
        *(
            f"{look}\nvllm serve org/m --max-model-len 4096 --enforce-eager"
            for look in ("docker run --rm x nvidia-smi -L", "docker run x pip list", "nvidia-smi")
        ),
        "docker run --entrypoint vllm image:1 serve org/m --max-model-len 4096 --enforce-eager",
        "docker run --gpus all\nimage:1 org/m --max-model-len 4096\n--enforce-eager",
        "docker run i bash -lc 'true && vllm serve org/m --max-model-len 4096 --enforce-eager'",
        (
            "docker run --entrypoint sh i -c 'exec vllm serve org/m --max-model-len 4096"
            " --enforce-eager'"
        ),
        (
            "vllm serve org/m --max-model-len 4096 --enforce-eager\n\nvllm serve org/m"
            " --max-model-len=4096 --enforce-eager"
        ),
    ],
)
def test_all_are_the_same_command(text: str) -> None:
    command = parse(text)
    assert command.model_argument == "org/m"
    assert command.flags == (
        Flag(name="--max-model-len", values=("4096",)),
        Flag(name="--enforce-eager"),
    )


def test_a_reported_placeholder_and_short_form_stay() -> None:
    command = parse(REPORTED["41700"])
    assert command.get("--master-addr") == "<HEAD_IP>"
    assert command.number("--tensor-parallel-size") == 2
    assert "-tp" in command.argv()
    assert "--headless" not in command.argv()


@pytest.mark.parametrize("name", REPORTED)
def test_backslashes_make_no_difference(name: str) -> None:
    text = REPORTED[name]
    bare = text.replace("\\\n", "\n")
    lines = bare.rstrip("\n").splitlines()
    with_backslashes = "".join(f"{line} \\\n" for line in lines if not line.startswith("#"))
    assert parse(bare) == parse(text)
    assert parse(with_backslashes) == parse(text)
    assert parse(with_backslashes.replace("\\\n", "\\  \r\n")) == parse(text)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("'a b'", "a b"),
        ('"a \\"b\\" \\$c \\d"', 'a "b" $c \\d'),
        ("a\\ b'c'\"d\"", "a bcd"),
        ("'a;b'", "a;b"),
        ("a&b", "a&b"),
        ("<HEAD IP>", "<HEAD IP>"),
        ("$(hostname -i)", "$(hostname -i)"),
        ("a#b", "a#b"),
        ("'\n% a'", "\n% a"),
    ],
)
def test_words_lose_their_quotes(word: str, text: str) -> None:
    assert parse(f"vllm serve m --chat-template {word} --port 1").get("--chat-template") == text


def test_variables_come_from_assignments_exports_and_env() -> None:
    text = "export A=1\nB='x y'\nsudo -E env C=3 D= vllm serve m --port 1"
    assert parse(text).env == (("A", "1"), ("B", "x y"), ("C", "3"), ("D", ""))


def test_docker_options_that_a_reproduction_needs_are_read() -> None:
    command = parse(
        "docker run -d --gpus '\"device=0,1\"' --ipc=host --shm-size 16g -e HF_TOKEN -eA=b --init"
        " --ulimit memlock=-1 --network host --name v --runtime nvidia -v /a:/b"
        " --mount type=bind,source=/a,target=/b --cap-add SYS_PTRACE --privileged img:1 --model m"
    )
    assert command.container == ReportedContainer(
        image="img:1",
        gpus="device=0,1",
        env=(("HF_TOKEN", "$HF_TOKEN"), ("A", "b")),
        shm_size="16g",
        ipc="host",
        ulimits=("memlock=-1",),
    )


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("vllm serve m\n--chat-template 'a\n--port 1", 2, "never closed"),
        ("\npip install vllm", 2, "no server command"),
        ("vllm serve m --port 1\nvllm serve m --port 2", 2, "two different server commands"),
        ("docker run --gpus all -p 1:1", 1, "names no image"),
        ("docker run --gpus", 1, "has no value"),
        ("docker run i bash -c 'echo vllm'", 1, "starts no vLLM server"),
        ("vllm serve m \\\n --port 1 2", 2, "belongs to no flag"),
        ("vllm serve m --enforce-eager true", 1, "belongs to no flag"),
        ("vllm serve a b", 1, "belongs to no flag"),
        ("vllm serve a \\\n --model b", 2, "two models"),
        ("vllm serve --model", 1, "has no value"),
        ("vllm serve m\n--port 1\n--max-model-len long", 3, "not a whole number"),
        ('vllm serve m\n--speculative-config {"method":"mtp"}', 2, "is not JSON"),
    ],
)
def test_errors_point_at_the_line(text: str, line: int, message: str) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        parse(text)
    assert caught.value.line == line
    assert caught.value.hint


def test_short_forms_and_levels_have_long_names() -> None:
    command = parse("vllm serve m -tp 2 -O3 -cc.cudagraph_mode none -q fp8")
    assert command.get("--tensor-parallel-size") == "2"
    assert command.get("-O") == command.get("--optimization-level") == "3"
    assert command.get("--compilation-config.cudagraph_mode") == "none"
    assert command.argv() == ("m", "-tp", "2", "-O3", "-cc.cudagraph_mode", "none", "-q", "fp8")
    assert command == parse(
        "vllm serve m --tensor-parallel-size=2 --optimization-level 3"
        " --compilation-config.cudagraph_mode=none --quantization fp8"
    )


def test_several_values_stay_together() -> None:
    command = parse("vllm serve m --served-model-name a b --cudagraph-capture-sizes 1 2 4 --port 1")
    assert command.get("--served-model-name") == "a b"
    assert command.flags[1].values == ("1", "2", "4")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("25.6k", 25600),
        ("1m", 10**6),
        ("2G", 2 * 1024**3),
        ("-1", -1),
    ],
)
def test_numbers_as_vllm_reads_them(text: str, number: int) -> None:
    assert parse(f"vllm serve m --max-model-len {text}").number("max_model_len") == number


@pytest.mark.parametrize("text", ["4096 tokens", "25.6K", "many", "", "1.5", None])
def test_other_numbers_are_refused(text: str | None) -> None:
    with pytest.raises(CommandError, match="not a whole number"):
        parse_number("--max-num-seqs", text)


def test_auto_length_and_numbers_with_units_inside_json_are_read() -> None:
    assert parse("vllm serve m --max-model-len auto").get("--max-model-len") == "auto"
    text = 'vllm serve m --kv-transfer-config \'{"cpu_bytes_to_use": 80m, "x": "8q"}\''
    assert parse(text).get("--kv-transfer-config") is not None


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("'{\u201ca\u201d: 1}'", "typographic"),
        ('{"a": 1}', "single quotes"),
        ("'{\"a\": '", "closed"),
    ],
)
def test_wrong_json_comes_with_advice(value: str, hint: str) -> None:
    with pytest.raises(CommandError, match="is not JSON") as caught:
        parse(f"vllm serve m --hf-overrides {value}")
    assert hint in caught.value.hint


TYPOS = (
    ("--enforce-eagr", "--enforce-eager"),
    ("--max-modle-len 5", "--max-model-len"),
    ("--no-enable-prefix-cachng", "--no-enable-prefix-caching"),
    ("--prot 1", "--port"),
    ("--compilaton-config.mode 3", "--compilation-config"),
)
OLD = "not defined in any release.*"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        *((REPORTED[name], "^$") for name in REPORTED),
        *(
            (f"vllm serve m {typed}", f"^{typed.split()[0]}: probably a typo of {meant}$")
            for typed, meant in TYPOS
        ),
        *(
            (f"vllm serve m {flags}", f"^{flags.split()[0]}: has no value$")
            for flags in (
                "--scheduling-policy",
                "--seed --enforce-eager",
                "--served-model-name --seed 1",
            )
        ),
        # Flags of old recipes come with advice.
        (
            "vllm serve m --disable-log-requests",
            f"^--disable-log-requests: {OLD}write --no-enable-log-requests",
        ),
        ("vllm serve m --swap-space 4", f"^--swap-space: {OLD}leave it out"),
        # Other flags pass.
        *(
            (f"vllm serve m {flags}", "^$")
            for flags in (
                "--of-a-plugin",
                "--no-trust-remote-code",
                "--compilation-config.cudagraph_mode none -cc.nonsense 1",
                "--seed 0 --chat-template=",
                "--enforce-eager --no-enable-prefix-caching --hf-token",
                "--compilation-config.cudagraph_mode",
            )
        ),
    ],
)
def test_mistakes_of_flags(command: str, shown: str) -> None:
    found = flag_mistakes(parse(command).flags)
    assert len(found) == (shown != "^$")
    assert re.search(shown, "".join(found))


def test_table_is_consistent() -> None:
    spelled = {
        *flag_table.SHORT_FORMS.values(),
        *flag_table.SWITCHES,
        *flag_table.MULTI_VALUED,
        *flag_table.VALUED_IN_SPITE_OF_PREFIX,
        *flag_table.VALUE_OPTIONAL,
    }
    assert spelled <= flag_table.KNOWN
    assert not flag_table.KNOWN & set(flag_table.NEVER_DEFINED)
    assert all(
        canonical(name) == name and not name.startswith("--no-") for name in flag_table.KNOWN
    )


ISSUES = Path(__file__).parents[2] / "data" / "commands"
OURS = {"--host", "--port", "--master-addr", "--master-port"}
"""Addresses of the reporter's machine."""


def flags(command: ServeCommand) -> dict[str, tuple[str, ...]]:
    return {flag.name: flag.values for flag in command.flags if flag.name not in OURS}


def reported(issue: str) -> ServeCommand:
    text = (ISSUES / f"{issue}.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    # a compose file's list of arguments; the model stands elsewhere in the issue
    if lines[0].startswith("- "):
        words = [line.removeprefix("- ") for line in lines]
        return parse("vllm serve reported " + " ".join(f"'{word}'" for word in words))
    return parse("\n".join(lines))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("scenario", "issue"),
    [
        ("tq-chunked-prefill", "41726"),
        ("tq-mtp-cudagraphs", "40807"),
        ("dsv4-tp2", "41700"),
        ("sco-hybrid", "42085"),
    ],
)
async def test_the_flags_of_the_issue_are_those_of_the_process(
    tmp_path: Path, scenario: str, issue: str
) -> None:
    declared = find(scenario)
    assert len(flags(reported(issue))) > 5
    assert flags(declared.reported()) == flags(reported(issue))
    site = open_site(
        declared, ServerOptions(server="rehearsal"), ServerChoice(ServerKind.REHEARSAL, ""), print
    )

    _, server = site.server(declared, declared.arms[0], 1, tmp_path / "log", "run")
    words: list[str] = []
    async with running(server) as facts:
        while not words:  # empty for a moment after exec
            words = psutil.Process(facts.pid).cmdline()
    process = parse(shlex.join(["vllm", *words[words.index("serve") :]]))
    assert flags(process) == flags(declared.reported())
