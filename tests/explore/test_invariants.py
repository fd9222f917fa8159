"""Invariants of block accounting, templates of messages, and the pytest file of a finding."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.errors import UsageError
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.workload import completion
from vllm_repro_explore.case import Case, Request, Setup
from vllm_repro_explore.finding import template
from vllm_repro_explore.program.vllm_repro_driver.invariants import at_rest, books, listed_twice
from vllm_repro_explore.program.vllm_repro_driver.kv_events import KVIndex
from vllm_repro_explore.scenario_setup import draw_for
from vllm_repro_explore.scheduler_test import finding_test, scenario_test


def block(number: int, count: int = 0, *, null: bool = False) -> Any:
    return SimpleNamespace(block_id=number, ref_cnt=count, is_null=null, next_free_block=None)


def pool(blocks: list[Any], free: list[Any], counter: int | None = None) -> Any:
    head, tail = block(-1), block(-1)
    chain = [head, *free, tail]
    for one, following in itertools.pairwise(chain):
        one.next_free_block = following
    queue = SimpleNamespace(
        fake_free_list_head=head,
        fake_free_list_tail=tail,
        num_free_blocks=len(free) if counter is None else counter,
    )
    return SimpleNamespace(blocks=blocks, free_block_queue=queue)


def broken(
    blocks: list[Any], free: list[Any], counter: int | None = None, **held: list[Any]
) -> set[str]:
    managers = (SimpleNamespace(req_to_blocks=held),)
    return {name for name, _ in books({"gpu": pool(blocks, free, counter)}, managers)}


def test_books_that_agree_break_nothing() -> None:
    null, one, two, three = block(0, -7, null=True), block(1, 2), block(2), block(3, 1)
    assert broken([null, one, two, three], [two], a=[one, null, three], b=[one]) == set()


def test_each_disagreement_has_a_name() -> None:
    null, one, two = block(0, null=True), block(1), block(2)
    assert broken([null, one, two], [one, two], counter=3) == {"gpu-free-count"}
    assert broken([null, one, two], [one]) == {"gpu-lost"}
    assert broken([null, one, block(2, 1)], [one], a=[one]) == {"gpu-held-and-free"}
    held = block(1, 1)
    assert broken([null, held, two], [held, two]) == {"gpu-free-and-held"}
    assert broken([null, block(1, -1), two], [two]) == {"gpu-negative-count"}
    # A list that turns back to its beginning.
    turning = pool([null, one, two], [one, two])
    two.next_free_block = one
    assert "gpu-free-list-broken" in {name for name, _ in books({"gpu": turning}, ())}


def test_a_block_listed_twice_is_named_by_direction() -> None:
    found = list(listed_twice([("store", [4, 5, 4]), ("load", [1, 2])]))
    assert found == [("store-listed-twice", "a store lists 3 blocks, 2 distinct")]


def _stored(*hashes: str, tokens: int | None = None) -> Any:
    words = [0] * (4 * len(hashes) if tokens is None else tokens)
    return SimpleNamespace(
        medium="GPU", group_idx=0, block_hashes=hashes, token_ids=words, block_size=4
    )


def _removed(*hashes: str) -> Any:
    return SimpleNamespace(medium="GPU", group_idx=0, block_hashes=hashes)


@pytest.mark.parametrize(
    ("events", "cached", "names"),
    [
        ([_stored("a", "b"), _removed("a")], "b", set()),
        ([_stored("a"), SimpleNamespace()], "", set()),
        ([_stored("a")], "", {"events-stale"}),
        ([_stored("a")], "ab", {"events-missing"}),
        ([_stored("a"), _stored("a"), _removed("a")], "a", {"events-early"}),
        ([_stored("a"), _stored("a"), _removed("a")], "", set()),
        ([_stored("a", tokens=8)], "a", {"events-tokens"}),
    ],
)
def test_an_index_of_events_equals_the_pool(
    events: list[Any], cached: str, names: set[str]
) -> None:
    index = KVIndex()
    index.publish(SimpleNamespace(events=events))
    blocks = SimpleNamespace(_cache={(0, block): "" for block in cached})
    held = SimpleNamespace(kv_event_queue=[], cached_block_hash_to_block=blocks)
    assert {name for name, _ in index.check(held, lambda key: key)} == names


def test_events_may_be_right_for_routers_that_count_or_for_the_others() -> None:
    index = KVIndex()
    index.publish(SimpleNamespace(events=[_stored("a"), _stored("a"), _removed("a")]))
    blocks = SimpleNamespace(_cache={(0, "a"): ""})
    held = SimpleNamespace(kv_event_queue=[], cached_block_hash_to_block=blocks)
    assert [name for name, _ in index.check(held, lambda key: key)] == ["events-early"]
    blocks._cache.clear()
    assert [name for name, _ in index.check(held, lambda key: key)] == ["events-counted"]


def test_an_event_of_a_connector_is_published_in_its_step() -> None:
    index = KVIndex()
    for published in (True, False):
        events = index.of_connector() if published else index.of_connector()[1:]
        index.publish(SimpleNamespace(events=[*events, _stored("a")]))
        lost = [name for name, _ in index.check_connector()]
        assert lost == ([] if published else ["events-of-connector"])


def test_at_rest_nothing_is_held() -> None:
    null, one = block(0, 1, null=True), block(1, 1)
    found = dict(
        at_rest(
            {"gpu": pool([null, one], [])}, (SimpleNamespace(req_to_blocks={"a": [one], "b": []}),)
        )
    )
    assert set(found) == {"gpu-leak", "request-leak"}
    assert "1 of 2 blocks" in found["gpu-leak"]
    assert found["request-leak"].endswith(": a")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            (
                "allocation from 'turboquant_attn.py:720:_continuation_prefill' requires 16.00 MB,"
                " current size is 1.02 MB"
            ),
            (
                "allocation from 'turboquant_attn.py:757:_continuation_prefill' requires 2.00 MB,"
                " current size is 0.26 MB"
            ),
        ),
        (
            "'deepseek_v4_attention.py:1454:_forward_prefill' requires 24.89 MB",
            "'deepseek_v4_attention.py:1457:_forward_prefill' requires 21.80 MB",
        ),
        (
            "Tried to allocate 88 MiB, 42 MiB is free",
            "Tried to allocate 2.00 GiB, 1,024 MiB is free",
        ),
        ("peer [127.0.0.1]:63194 at 0x7f3fa0d40c08", "peer [10.0.0.2]:80 at 0x1"),
        ("cannot open /home/a/vllm/vllm/envs.py", "cannot open /opt/site-packages/vllm/envs.py"),
    ],
)
def test_two_prints_of_one_bug_have_one_template(one: str, other: str) -> None:
    assert template(one) == template(other)


def test_identifiers_survive_the_masking() -> None:
    masked = template(
        "'deepseek_v4_attention.py:1457:_forward_prefill' fp8_e5m2 v1/worker gpu_model_runner"
        " 21.80 MB"
    )
    assert (
        masked == "'deepseek_v4_attention.py:{line}:_forward_prefill' fp8_e5m2 v1/worker"
        " gpu_model_runner {n}"
    )
    assert template("modular_kernel.py:1096") != template("other_kernel.py:1096")


@given(st.text(max_size=200))
@settings(max_examples=100)
def test_masking_twice_is_masking_once(text: str) -> None:
    assert template(template(text)) == template(text)


CONNECTORS = ("", "SimpleCPUOffloadConnector", "OffloadingConnector", "MultiConnector")
LATE = ((Request(40, 2, 8, 1, 3), Request(30, 2, 8)),)


def finding(
    case: Case, kind: str = "death", site: str = "AssertionError in popleft_n"
) -> dict[str, Any]:
    return {"kind": kind, "site": site, "detail": "seen", "known": None, "case": case.as_json()}


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (name.name.partition(".")[0], name.asname or name.name) for name in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (str(node.module).partition(".")[0], name.asname or name.name)
                for name in node.names
            )


def names_of(text: str) -> tuple[set[str], set[str]]:
    """Return the names that a test uses and those that it defines; check what it imports."""
    tree = ast.parse(text)
    modules, names = map(set, zip(*imports(tree), strict=True))
    assert modules - sys.stdlib_module_names == {"torch", "vllm"}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names <= used | {"planning"}
    kinds = (ast.ClassDef, ast.FunctionDef)
    return used, {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize(
    "name", ["sco-lazy-starves", "sco-lazy-never-rests", "sco-window-loads-wait", "sco-hybrid"]
)
def test_it_is_short(name: str) -> None:
    lines = scenario_test(find(name)).splitlines()
    assert sum(map(bool, map(str.strip, lines))) <= 150
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("waves", [((Request(100, 8),),), LATE])
@pytest.mark.parametrize("more", [{}, {"asynchronous": True, "runner": 2}, {"draft": 3}])
def test_it_needs_vllm_and_torch_alone_and_has_what_it_uses(
    connector: str, waves: Any, more: dict[str, Any]
) -> None:
    used, _ = names_of(
        finding_test(finding(Case(Setup(connector=connector, **more), waves, 1)), "0.32.0")
    )
    flags = {
        "TRANSFER": bool(connector),
        "DRAFT": bool(more.get("draft")),
        "RequestStatus": waves is LATE,
    }
    assert {name: name in used for name in flags} == flags


@pytest.mark.parametrize(
    ("name", "request_", "parts"),
    [
        (
            "priority-uncomputed-blocks",
            "dict(prompt=64, answer=8, after=0.1)",
            "plan compute",
        ),
        (
            "session-preempted-at-turn-end",
            "dict(prompt=49, answer=1, after=0.2, parts=[(2, 30), (3, 0)])",
            "plan",
        ),
        (
            "session-drafts-outlive-turn",
            "dict(prompt=64, answer=6, parts=[(2, 1), (4, 1), (5, 0)])",
            "plan",
        ),
        (
            "async-streaming-stop",
            "dict(prompt=40, answer=16, parts=[(0, 30), (1, 0)], stop=77)",
            "plan",
        ),
        (
            "kv-abort-reported-twice",
            "abort=0.3, transfer={'load_after_end': 100, 'save': 200})",
            "plan LateConnector",
        ),
        ("kv-load-rejected", "dict(prompt=45, answer=51, transfer={'reject': True})", "Begun"),
        (
            "kv-load-rejected-cached",
            "dict(prompt=2112, answer=16, shared=2112)",
            "compute LateConnector",
        ),
        ("multi-connector-second-report", "transfer={'load': 5})", "LateConnector"),
        ("nixl-failed-fetch-reserves", "'remote_engine_id': 'gone'", "Fetches OffloadingCopies"),
        ("nixl-failed-fetch-waits", "'remote_engine_id': 'prefill'", "Fetches plan"),
        ("nixl-fetch-loses-token", "'do_remote_decode': True", "Fetches compute"),
        ("nixl-mamba-preempted-for-ever", "dict(prompt=32, answer=2)", "Fetches"),
        ("nixl-mamba-prompt-twice", "dict(prompt=65, answer=1, shared=65", "Fetches"),
        (
            "offloading-reset-running",
            "dict(after=1, reset={'reset_running_requests': True})",
            "OffloadingCopies plan",
        ),
        (
            "offloading-waiting-leaves",
            "dict(prompt=200, answer=8, after=1, abort=1)",
            "OffloadingCopies plan",
        ),
    ],
)
def test_the_scheduler_alone_runs_a_scenario(name: str, request_: str, parts: str) -> None:
    text = scenario_test(find(name))
    assert request_ in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 120
    _, defined = names_of(text)
    makes_up = {"plan", "compute", "LateConnector", "Begun", "Fetches", "OffloadingCopies"}
    assert set(parts.split()) <= defined & makes_up


@pytest.mark.parametrize("seed", range(1, 40))
def test_it_has_every_request_of_the_case(seed: int) -> None:
    case = draw_for(Setup(connector="SimpleCPUOffloadConnector"), seed)
    text = finding_test(finding(case), "0.32.0")
    (waves,) = (
        line
        for line in ast.parse(text).body
        if isinstance(line, ast.Assign) and "WAVES" in ast.unparse(line)
    )
    played = eval(ast.unparse(waves.value))
    plain = {"shared": 0, "after": 0, "abort": -1}
    assert (
        Case.numbered(
            case.setup, [[Request(**plain | one) for one in wave] for wave in played], case.seed
        )
        == case
    )


def test_what_has_none_says_so() -> None:
    case = Case(Setup(), ((Request(100, 8),),), 1)
    for one in (
        finding(case, "corrupted", "store-listed-twice"),
        finding(case, "stuck", "one step never ends"),
    ):
        with pytest.raises(UsageError, match="no test shows this finding"):
            finding_test(one, "0.32.0")
    hybrid = find("sco-hybrid")
    with pytest.raises(UsageError, match="changes vLLM's source"):
        scenario_test(hybrid, hybrid.arm("patched"))
    words = replace(hybrid, workload=(completion(prompt="hello"),))
    with pytest.raises(UsageError, match="does not state the length"):
        scenario_test(words)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dsv4-tp2", "flags that are not played: .*--nnodes"),
        ("dsv4-cpu-first-request", "compressed, sparse layers, whose blocks"),
        ("grammar-after-valid", "sends structured_outputs, which the scheduler alone"),
        ("image-longer-than-threshold", "sends messages, which the scheduler alone"),
        ("tq-chunked-prefill", "flags that are not played: .*--kv-cache-dtype"),
    ],
)
def test_a_scenario_without_a_test_names_the_reason(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"{name} .*{why}"):
        scenario_test(find(name))
