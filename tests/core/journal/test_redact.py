from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.report.journal_fields import TEXT_FIELDS, Field, planted, text_fields
from tests.planted_outputs import leaks, shown
from tests.secrets_planted import PLANTS, PRIVATE, SECRETS, Plant
from vllm_repro.journal.journal import Journal, read
from vllm_repro.journal.log_excerpts import PAGE_SIZES, ExcerptSizes, read_excerpts
from vllm_repro.journal.private_names import without_private_names
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.journal.secrets import without_secrets
from vllm_repro.report.files import FORMATS, render
from vllm_repro.report.model import RunReport
from vllm_repro.report.script import no_script
from vllm_repro.report.summary import summary
from vllm_repro.scenario.catalogue import all_scenarios

REDACTOR = Redactor(
    [("/home/me/work/checkout", "."), ("/home/me", "~")],
    ["gpu-box"],
    {"plainvalue": "VLLM_API_KEY"},
    ["max"],
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://user:p@ss/w@proxy.corp:3128", "http://[redacted:login]@[host]:3128"),
        ("/home/me/work/checkout/.venv/bin/python", "./.venv/bin/python"),
        ("/home/me/.cache/x", "~/.cache/x"),
        ("/home/mercury/x is not /home/me", "/home/[user]/x is not ~"),
        # two processes print on one line
        ("see leaks.html/home/me/work/checkout/a", "see leaks.html./a"),
        ("it/home/me/.pyenv/x.py:254", "it~/.pyenv/x.py:254"),
        ("gpu-box:12:13 [0] NCCL INFO", "[host]:12:13 [0] NCCL INFO"),
        (
            "--model /mnt/max/m, file:///mnt/nfs/max/m, /scratch/max",
            "--model /mnt/[user]/m, file:///mnt/nfs/[user]/m, /scratch/[user]",
        ),
        ("a key plainvalue anywhere", "a key [redacted:VLLM_API_KEY] anywhere"),
        # An account may be named as a word or a package.
        ("max() arg is an empty sequence, --max-model-len 9, max_seqs", None),
        ("/usr/lib/python3/dist-packages/max/core.py, site-packages/max/a.py", None),
        ("/mnt/maxwell/m, /mnt/max-1/m, 3/max", None),
    ],
)
def test_secrets_and_private_names_go(text: str, expected: str | None) -> None:
    assert REDACTOR.text(text) == (expected or text)


@pytest.mark.parametrize(
    ("line", "means"),
    [
        (
            "vllm-repro run '/home/me/a scenario.py' --seed 1",
            "vllm-repro run /home/you/a scenario.py --seed 1",
        ),
        (
            "vllm-repro run /home/me/a.py --patch '/home/me/a; b.diff'",
            "vllm-repro run /home/you/a.py --patch /home/you/a; b.diff",
        ),
        ("vllm-repro run '/home/me/checkout/a b.py'", "vllm-repro run ./a b.py"),
        ("vllm-repro run \"it's in\" '/home/me/x y'", "vllm-repro run it's in /home/you/x y"),
    ],
)
def test_a_command_without_names_still_means_the_same_to_a_shell(line: str, means: str) -> None:
    redactor = Redactor([("/home/me/checkout", "."), ("/home/me", "$HOME")])
    shown = subprocess.run(
        ["sh", "-c", f"echo {redactor.command(line)}"],
        env={"HOME": "/home/you"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.rstrip("\n") == means


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            ["vllm", "--api-key", "sekrit", "and more", "--port", "1", "X_TOKEN=a b"],
            [
                *("vllm", "--api-key", "[redacted:api-key]", "[redacted:api-key]"),
                *("--port", "1", "X_TOKEN=[redacted:x-token]"),
            ],
        ),
        (
            ["--hf-token", "other", "--port", "1"],
            ["--hf-token", "[redacted:hf-token]", "--port", "1"],
        ),
        ({"a": ["/home/me/x", 1, None]}, {"a": ["~/x", 1, None]}),
        ({"env": {"HF_TOKEN": "x", "N": 1}}, {"env": {"HF_TOKEN": "[redacted:hf-token]", "N": 1}}),
        ({"b": ("AKIAIOSFODNN7EXAMPLE",)}, {"b": ["[redacted:aws-key]"]}),
    ],
)
def test_every_text_of_a_structure_is_read(data: object, expected: object) -> None:
    assert REDACTOR.deep(data) == expected


def test_a_journal_keeps_private_names() -> None:
    of_the_journal = Redactor(names=False)
    for name in PRIVATE.values():
        assert of_the_journal.text(name.written) == name.written


def test_secrets_of_an_environment_are_known_by_name() -> None:
    environ = {
        "VLLM_API_KEY": "plainvalue",
        "HF_TOKEN": "EMPTY",
        "SHORT_KEY": "1234567",  # a word of every log
        "MAX_TOKENS": "123456789",
        "TOKENIZERS_PARALLELISM": "false-ish",
    }
    assert known_secrets(environ) == {"plainvalue": "VLLM_API_KEY"}


_PLANTS = [*SECRETS.values(), *PRIVATE.values()]
_AROUND = st.text(st.sampled_from("ab 1.,;:='\"{}[]()/\\-_@\n"), max_size=12)


@settings(max_examples=100)
@given(st.lists(st.tuples(_AROUND, st.sampled_from(_PLANTS)), min_size=1, max_size=4), _AROUND)
def test_twice_is_once_and_nothing_is_left(parts: list[tuple[str, Plant]], end: str) -> None:
    text = " ".join(f"{before} {plant.written}" for before, plant in parts) + " " + end
    once = REDACTOR.text(text)
    assert REDACTOR.text(once) == once
    for _, plant in parts:
        assert plant.hidden not in once


PIECES = """
    a _ - a- a_ token cookie -u ['-- pypi- :// a:b@
    --api-key host= eyJ 1.1.1.1. ' /home/ : [ x@
""".split()  # noqa: SIM905  # shorter than a list


@pytest.mark.parametrize("piece", [*PIECES, " --api-key ", "bearer ", "basic "])
def test_time_is_linear_in_the_length_of_a_text(piece: str) -> None:
    def seconds(size: int) -> float:
        text = piece * (size // len(piece)) + " token host curl bearer"  # each pattern is tried
        started = time.process_time()
        REDACTOR.text(text)
        return time.process_time() - started

    assert seconds(200_000) < 40 * max(seconds(20_000), 0.02)


def test_a_secret_that_begins_with_another_goes_whole() -> None:
    redactor = Redactor(secrets={"abcdefgh": "A_TOKEN", "abcdefghijkl": "B_TOKEN"}, names=False)
    assert "ijkl" not in redactor.text("it said abcdefghijkl twice: abcdefgh")


def test_a_host_goes_where_it_is_a_whole_name() -> None:
    redactor = Redactor(hosts=["gpubox"])
    for others in ("gpubox2", "my-gpubox", "gpubox-7", "mygpubox", "a.gpubox"):
        assert others in redactor.text(f"ask {others}: now")
    for text in ("gpubox: x", "at gpubox.", "http://gpubox:8000/"):
        assert "gpubox" not in redactor.text(text)


HARMLESS = [
    "max_tokens=16, --tokenizer x --max-num-batched-tokens 8192, 35.1 tokens/s, tokens: 12",
    (
        "hf_overrides={}, hf_text_config, hf_token=None, eos_token='<|im_end|>',"
        " TOKENIZERS_PARALLELISM=false"
    ),
    (
        "max_tokens: 8, stop_token_ids=[1, 2], prompt_tokens=100, token=42,"
        " VLLM_MOE_TOKENS_PER_CHUNK=64"
    ),
    "token = next(ids); key=lambda x: x, cache_key=abc, KeyError: 'x'",
    "VLLM_API_KEY=${VLLM_API_KEY} PWD=/workspace HF_TOKEN_PATH=/x",
    (
        "Invalid API key: ask for one; a Bearer of bad news; bearer authentication is on; Basic"
        " tests. Basic usage"
    ),
    "docker run -u 1000:1000 x; curl -u 1000:1000",
    "nvidia-curand-cu12==10.3.5.147, pypi-attestations-0.0.21, npm_config_registry=x",
    "turboquant_attn.py:747 stays, and so do 08:24:30 and c10d::add",
]
PUBLIC = [
    "tcp://*:5557 binds all addresses",
    "127.0.0.1:8000 ::1 [::]:8000 http://localhost:8000/v1 http://0.0.0.0:8000 --host 0.0.0.0",
    "https://github.com/vllm-project/vllm/issues/1 https://docs.vllm.ai/x http://pytorch.org/",
    "nvidia-curand-cu12==10.3.5.147, driver 535.104.05, cublas 12.1.3.1, mask 255.255.0.0",
    "turboquant_attn.py:747, 08:24:30, c10d::add, torch::autograd::a, abc:def:1",
    (
        "vllm/vllm-openai@sha256:0123abcd, ipc:///tmp/5f, google.protobuf.internal.decoder,"
        " threading.local"
    ),
    "ghost=a localhost=b host=None, --hostfile x",
]
_NPM, _PYPI = "npm_" + "aB3dE5gH7j" * 4, "pypi-" + "AgEIcHlwaS5v" * 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf_abcdefghijklmnop", "[redacted:hf-token]"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [redacted:authorization]"),
        ("Authorization: Token abcdef", "Authorization: Token [redacted:authorization]"),
        ("got Bearer sekritword", "got Bearer [redacted:credentials]"),
        ("proxy: Basic dXNlcjpwYXNz", "proxy: Basic [redacted:credentials]"),
        (
            "vllm serve m --api-key sekrit --port 1",
            "vllm serve m --api-key [redacted:api-key] --port 1",
        ),
        ("--api-key one 'number two' --port 1", "--api-key [redacted:api-key] --port 1"),
        ("--api-key=sekrit", "--api-key=[redacted:api-key]"),
        (
            "argv: ['--api-key', 'x', 'y', '--port', '1']",
            "argv: ['--api-key', '[redacted:api-key]', '--port', '1']",
        ),
        ('["--api-key", "x"]', '["--api-key", "[redacted:api-key]"]'),
        ("['--api-key=x', '--port', '1']", "['--api-key=[redacted:api-key]', '--port', '1']"),
        (
            "HF_TOKEN=abc VLLM_API_KEY=x y",
            "HF_TOKEN=[redacted:hf-token] VLLM_API_KEY=[redacted:vllm-api-key] y",
        ),
        ("env=HF_TOKEN=abc", "env=HF_TOKEN=[redacted:hf-token]"),
        ("os.environ['HF_TOKEN'] = 'abc'", "os.environ['HF_TOKEN'] = '[redacted:hf-token]'"),
        (
            "AWS_SECRET_ACCESS_KEY='a b' y",
            "AWS_SECRET_ACCESS_KEY='[redacted:aws-secret-access-key]' y",
        ),
        ("MY_PASSPHRASE=x", "MY_PASSPHRASE=[redacted:my-passphrase]"),
        ("DB_PASS=x DB_PWD=y", "DB_PASS=[redacted:db-pass] DB_PWD=[redacted:db-pwd]"),
        ("VLLM_AUTH_HEADER: x", "VLLM_AUTH_HEADER: [redacted:vllm-auth-header]"),
        ("token=x", "token=[redacted:token]"),
        ('{"token": "x"}', '{"token": "[redacted:token]"}'),
        ("Cookie: a=b; c=d", "Cookie: [redacted:cookie]"),
        ("curl -H 'Cookie: a=b; c=d' -k", "curl -H 'Cookie: [redacted:cookie]' -k"),
        ("curl -u user:pw http://x", "curl -u [redacted:login] http://x"),
        ("curl --user 'user:p w' x", "curl --user '[redacted:login] w' x"),
        ("{'api_key': ['a', 'b'], 'port': 1}", "{'api_key': [redacted:api-key], 'port': 1}"),
        ("cookies={'session': 'x'}", "cookies=[redacted:cookies]"),
        (r"{\"HF_TOKEN\": \"abc\"}", r"{\"HF_TOKEN\": \"[redacted:hf-token]\"}"),
        ("https://h/x?a=1&access_token=x&b=2", "https://h/x?a=1&access_token=[redacted:query]&b=2"),
        ("https://h/x?sig=x", "https://h/x?sig=[redacted:query]"),
        (_NPM, "[redacted:package-token]"),
        (_PYPI, "[redacted:package-token]"),
        (
            "-----BEGIN PRIVATE KEY-----\nMII\n-----END PRIVATE KEY-----\nx",
            "[redacted:private-key]\nx",
        ),
        (
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQ=\n-----END PGP PRIVATE KEY BLOCK-----",
            "[redacted:private-key]",
        ),
        *((text, text) for text in HARMLESS),
    ],
)
def test_secrets_go(text: str, expected: str) -> None:
    assert without_secrets(text) == expected


@given(
    st.sampled_from(
        ["HF_TOKEN", "MY_PASSPHRASE", "api_key", "DB_PASS", "x-api-key", "client_secret"]
    ),
    st.text("abcXYZ019-_./+", min_size=1, max_size=12).filter(lambda value: value.strip("-=/.")),
    st.sampled_from(
        [
            "{0}={1}",
            "-e {0}={1} x",
            "env: {0}: {1}",
            "{{'{0}': '{1}'}}",
            '{{"{0}": "{1}", "n": 1}}',
            "['{0}={1}']",
        ]
    ),
)
def test_the_value_of_a_secret_name_goes_in_each_form(name: str, value: str, form: str) -> None:
    shown = without_secrets(form.format(name, f"S{value}S"))
    assert f"S{value}S" not in shown
    assert name in shown


@given(
    st.lists(
        st.sampled_from([*HARMLESS, "INFO 11-20 [core.py:1]", '  File "x.py", line 3, in f']),
        max_size=4,
    )
)
def test_lines_of_a_harmless_log_stay(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            r"/Users/jane/x C:\Users\jane\x /nfs/home/jo/y",
            r"/Users/[user]/x C:\Users\[user]\x /nfs/home/[user]/y",
        ),
        ("tcp://10.0.0.5:4123 from 192.168.7.7", "tcp://[address]:4123 from [address]"),
        ("peer 93.184.216.34:49160", "peer [address]:49160"),
        ("on fd00:1234::77:1, ::ffff:a00:5", "on [address], [address]"),
        ("on 2606:2800:220:1::1 and [3fff::1]:80", "on [address] and [[address]]:80"),
        (
            "http://gpu17.prod:8000/v1, https://[fd00::1]/",
            "http://[host]:8000/v1, https://[address]/",
        ),
        ("--host gpu17 --master-addr=node-a", "--host [host] --master-addr=[host]"),
        (
            "VLLM_HOST_IP=node-a, HOSTNAME=box, 'node_ip': 'n1'",
            "VLLM_HOST_IP=[host], HOSTNAME=[host], 'node_ip': '[host]'",
        ),
        ("node-a17:1234:1250 [0] NCCL INFO", "[host]:1234:1250 [0] NCCL INFO"),
        ("to [node-b18]:29500", "to [[host]]:29500"),
        (
            "vllm-0.infer.svc.cluster.local, ip-10-9-8-7.ec2.internal, a1.local",
            "[host], [host], [host]",
        ),
        ("jo@box:~/work$ vllm; Jo <jo.d@corp.example>", "[user]@[host]:~/work$ vllm; Jo <[email]>"),
        *((text, text) for text in PUBLIC),
    ],
)
def test_private_names_go(text: str, expected: str) -> None:
    assert (without_private_names(text), without_private_names(expected)) == (expected, expected)


SCRIPTED = next(scenario for scenario in all_scenarios() if not no_script(scenario))


def outputs(made: RunReport) -> Iterator[tuple[str, str]]:
    """Return every rendering of a report by name."""
    for form in FORMATS:
        yield form, render(made, form, SCRIPTED)
    yield "terminal", summary(made)


@pytest.mark.parametrize("group", range(12))
def test_each_kind_planted_where_texts_come_from(group: int) -> None:
    """Plant five or six at a time: rendering takes long, and longer texts would be cut."""
    assert list(leaks(outputs, PLANTS[group::12])) == []


@settings(max_examples=50)
@given(
    TEXT_FIELDS,
    st.sampled_from(PLANTS),
    st.sampled_from(["{0} {1}", "{1}", "{0}\n{1}\n", "{0} '{1}', x", "({1})", "{0}={1}"]),
)
def test_no_field_of_a_journal_lets_one_through(field: Field, plant: Plant, form: str) -> None:
    for name, text in outputs(planted(*field, lambda was: form.format(was, plant.written))):
        assert plant.hidden not in text, name


def test_the_plants_would_be_seen() -> None:
    """Check that the search can fail: without redaction the plants appear."""
    names = {name for name, _ in outputs(planted(*text_fields()[0], str))}
    assert names == {"md", "html", "json", "junit", "python", "terminal"}
    assert shown(outputs, "harmlesspayload", names) == names


@settings(max_examples=30)
@given(
    st.sampled_from([PAGE_SIZES, replace(PAGE_SIZES, whole=0)]),
    st.lists(st.sampled_from(PLANTS), min_size=1, max_size=6),
    st.integers(0, 40_000),
    st.integers(0, 40_000),
)
def test_no_part_of_a_log_lets_one_through(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: ExcerptSizes,
    plants: list[Plant],
    before: int,
    after: int,
) -> None:
    """Place log windows anywhere, also inside a key."""
    folder = tmp_path_factory.mktemp("log")
    middle = "\n".join(plant.written for plant in plants)
    filling = "x" * (before // 2) + " " + "y\n" * (before // 4)
    text = (
        f"{middle}\n{filling}\n{middle} ERROR {middle}\n{'z ' * after}\nAssertionError:"
        f" {middle}\n{'w' * after}\n{middle}"
    )
    (folder / "a.log").write_text(text, encoding="utf-8")
    log = read_excerpts(folder, "a.log", Redactor(), "AssertionError", sizes)
    assert log is not None
    for plant in plants:
        assert all(plant.hidden not in one.text for one in log.excerpts)


def test_the_journal_keeps_a_marker_in_the_place_of_a_secret(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        for plant in SECRETS.values():
            journal.write(
                "answer",
                error=plant.written,
                deep={"argv": ["vllm", plant.written], "path": "/home/me/x"},
            )
    lines = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    for plant, line, entry in zip(
        SECRETS.values(), lines, read(tmp_path / "journal.jsonl").entries, strict=True
    ):
        assert plant.hidden not in json.dumps(entry.fields)
        assert plant.hidden not in line
        assert "[redacted:" in line
        assert "/home/me/x" in line  # later commands need it


def test_a_journal_from_elsewhere_does_not_open_other_files(tmp_path: Path) -> None:
    (tmp_path / "outside.log").write_text("ERROR secret", encoding="utf-8")
    run = tmp_path / "run"
    run.mkdir()
    with contextlib.suppress(OSError):  # not every file system has links
        (run / "link.log").symlink_to("../outside.log")
    for name in ("../outside.log", str(tmp_path / "outside.log"), "link.log", "absent.log", "."):
        assert read_excerpts(run, name, Redactor(), None) is None


def test_a_host_and_a_user_have_the_names_in_the_journal() -> None:
    recording, place, way = next(
        field for field in text_fields() if field[2] == ("trigger", "evidence", 0)
    )
    entries = list(recording.entries)
    entries[0] = replace(
        entries[0], fields={**entries[0].fields, "hosts": ["quietname"], "users": ["jane"]}
    )
    made = planted(
        replace(recording, entries=tuple(entries)),
        place,
        way,
        lambda was: f"{was} on quietname in /mnt/jane",
    )
    assert all("quietname" not in text and "/mnt/jane" not in text for _, text in outputs(made))
