"""Body fields and flags of an installed vLLM, read from a minimal package; `check --vllm`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_package import fake_release
from vllm_repro.cli import main
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.releases.request_fields import request_fields, server_flags
from vllm_repro.releases.sources import Source
from vllm_repro.resources import scenario_folder

ARGUMENTS = """
import argparse
FlexibleArgumentParser = argparse.ArgumentParser
def make_arg_parser(parser): return parser
"""
SCENARIO = (scenario_folder() / "min_tokens_stop_ids.py").read_text(encoding="utf-8")


def app_of(*fields: str, parameters: str = "args, supported_tasks=None", last: str = "") -> str:
    body: dict[str, object] = {
        "content": {"application/json": {"schema": {"properties": {name: {} for name in fields}}}}
    }
    page = {
        "paths": {"/v1/completions": {"post": {"requestBody": body}}},
        "components": {"schemas": {}},
    }
    return "\n".join(
        (
            "print('INFO: a line of the log')",
            f"class App:\n    def openapi(self): return {page}",
            f"def build_app({parameters}): return App()",
            last,
        )
    )


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of `vllm.entrypoints` of the one release in the cache, 0.23.0."""
    folder = tmp_path / "packages" / "vllm" / "entrypoints"
    (folder / "openai").mkdir(parents=True)
    (folder / "openai" / "cli_args.py").write_text(ARGUMENTS, encoding="utf-8")
    release = replace(fake_release("0.23.0", tmp_path), python=Path(sys.executable))
    monkeypatch.setattr(
        "vllm_repro.releases.provision.ReleaseCache.get",
        lambda _, source: release if source == release.source else None,
    )
    return folder


def test_the_app_of_the_release_names_its_fields(installed: Path) -> None:
    (installed / "openai" / "api_server.py").write_text(
        app_of("prompt", parameters="args"), encoding="utf-8"
    )
    assert request_fields(Source(release="0.23.0")) == {"/v1/completions": {"prompt"}}
    (installed / "launchers").mkdir()
    for name, text in (("app", app_of("newer")), ("cli_args", ARGUMENTS)):
        (installed / "launchers" / f"{name}.py").write_text(text, encoding="utf-8")
    assert request_fields(Source(release="0.23.0")) == {"/v1/completions": {"newer"}}


def test_a_release_that_does_not_show_them_is_refused(installed: Path) -> None:
    with pytest.raises(Unsupported, match="No module named"):
        request_fields(Source(release="0.23.0"))
    (installed / "openai" / "api_server.py").write_text(
        app_of(last="raise SystemExit(3)"), encoding="utf-8"
    )
    with pytest.raises(Unsupported, match="it has no schema"):
        request_fields(Source(release="0.23.0"))
    with pytest.raises(InfraError, match="is not in the cache"):
        request_fields(Source(release="0.24.0"))


def test_a_field_that_the_release_does_not_read_is_a_problem(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "min_tokens_stop_ids.py"
    path.write_text(SCENARIO, encoding="utf-8")
    server = installed / "openai" / "api_server.py"
    server.write_text(app_of("min_tokens", "stop_token_ids"), encoding="utf-8")
    assert main(["check", str(path), "--vllm", "0.23.0"]) == 0
    assert capsys.readouterr().out == ""
    server.write_text(app_of("stop_token_ids"), encoding="utf-8")
    assert main(["check", str(path), "--vllm", "0.23.0", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)
    assert {one["text"].partition(": ")[2] for one in problems} == {
        "the release does not read 'min_tokens', so its sent_with(…) can never be met there"
    }
    assert SCENARIO.splitlines()[problems[0]["line"] - 1].strip().startswith("workload=")
    assert main(["check", str(path)]) == 0


PARSER = """
import argparse
FlexibleArgumentParser = argparse.ArgumentParser
def make_arg_parser(parser):
    parser.add_argument("--max-model-len", "-m")
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction)
    return parser
"""


def test_the_parser_of_the_release_names_its_flags(installed: Path) -> None:
    (installed / "openai" / "cli_args.py").write_text(PARSER, encoding="utf-8")
    defined = {
        "-h",
        "--help",
        "--max-model-len",
        "-m",
        "--async-scheduling",
        "--no-async-scheduling",
    }
    assert server_flags(Source(release="0.23.0")) == frozenset(defined)
    for unpublished in ("0.24.0", "0.20.2rc1.dev35+g4845aee6b"):
        assert server_flags(Source(release=unpublished)) is None
    (installed / "openai" / "cli_args.py").write_text("raise SystemExit(3)", encoding="utf-8")
    assert server_flags(Source(release="0.23.0")) is None
