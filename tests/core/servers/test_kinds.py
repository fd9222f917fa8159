"""Registry of server kinds: total over the enum, and every named site exists."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from vllm_repro.pytest_plugin import _SERVERS
from vllm_repro.servers.kinds import KINDS, ServerKind, kinds
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import Site, site_class
from vllm_repro_diagnosis.evidence import EVIDENCE, Evidence

DOCS = Path(__file__).parents[3] / "docs" / "architecture.md"


def test_every_kind_and_every_evidence_has_its_facts() -> None:
    assert (list(KINDS), list(EVIDENCE)) == (list(ServerKind), list(Evidence))


@pytest.mark.parametrize("kind", ServerKind)
def test_each_kind_names_a_site_and_options_that_exist(kind: ServerKind) -> None:
    site = site_class(kind)
    assert issubclass(site, Site)
    assert site.kind is kind
    assert getattr(site, "evidence", None) is kind.facts.evidence
    assert kind.facts.options <= {field.name for field in fields(ServerOptions)}


def test_pytest_offers_each_kind_that_the_harness_starts() -> None:
    """The plugin cannot import the registry: it is loaded in every run of pytest."""
    assert list(_SERVERS) == ["auto", *kinds(lambda facts: facts.started)]


def test_the_docs_list_each_kind_with_its_summary() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for kind in ServerKind:
        assert f"| `{kind}` | {kind.facts.summary} |" in text
