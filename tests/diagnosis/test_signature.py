from __future__ import annotations

from dataclasses import replace

import pytest

from tests.diagnosis.recordings import pasted, recording
from vllm_repro_diagnosis.diagnosis import Phase, diagnose
from vllm_repro_diagnosis.signature import How, Signature, compare, failed_nodes, quotes

TQ = Signature(
    exception="AssertionError",
    message=(
        "Workspace is locked but allocation from '{file}:{line}:_continuation_prefill' requires {asked} MB, "
        "current size is {locked} MB."
    ),
    frames=("_prefill_attention", "_continuation_prefill", "get_simultaneous", "_ensure_workspace_size"),
    phase=Phase.REQUEST,
)
MTP = Signature(
    exception="RuntimeError",
    message="Cannot copy between CPU and CUDA tensors during CUDA graph capture",
    frames=("_prefill_attention",),
    phase=Phase.BOOT,
)
DSV4 = Signature(
    exception="AssertionError",
    message=(
        "Workspace is locked but allocation from '{file}:{line}:_forward_prefill' requires {asked} MB, "
        "current size is {locked} MB."
    ),
    frames=("_forward_prefill", "get_simultaneous", "_ensure_workspace_size"),
    phase=Phase.REQUEST,
)
SCO = Signature(
    exception="AssertionError",
    frames=("get_new_blocks", "popleft_n"),
    phase=Phase.REQUEST,
    source="assert curr_block is not None",
)
MIN_TOKENS = Signature(
    exception="IndexError",
    message="index {} is out of bounds for dimension 1 with size {}",
    frames=("apply_logits_processors", "apply"),
    phase=Phase.REQUEST,
)
ALL = {"tq": TQ, "mtp": MTP, "dsv4": DSV4, "sco": SCO, "min-tokens": MIN_TOKENS}


@pytest.mark.parametrize(
    ("text", "belongs"),
    [
        (pasted("tq-chunked-prefill"), "tq"),
        (pasted("tq-mtp-cudagraphs"), "mtp"),
        (pasted("dsv4-tp2"), "dsv4"),
        (pasted("sco-hybrid"), "sco"),
        (recording("v0.28.0-min-tokens"), "min-tokens"),
        (recording("v0.32.0-fault-workspace-mp-inflight"), None),
        (recording("v0.32.0-fault-scheduler-inflight"), None),
        (recording("v0.32.0-killed-inflight"), None),
        (recording("v0.32.0-two-ranks-worker1-killed-head"), None),
        (recording("v0.32.0-boot"), None),
    ],
)
def test_each_death_matches_its_own_signature_and_no_other(text: str, belongs: str | None) -> None:
    diagnosis = diagnose(text)
    hows = {name: compare(signature, diagnosis).how for name, signature in ALL.items()}
    assert hows == {name: How.MATCH if name == belongs else How.OTHER for name in ALL}


def test_the_numbers_of_the_message_are_captured() -> None:
    captured = compare(TQ, diagnose(pasted("tq-chunked-prefill"))).captured
    assert captured == {"file": "turboquant_attn.py", "line": "720", "asked": "16.00", "locked": "1.02"}
    captured = compare(DSV4, diagnose(pasted("dsv4-tp2"))).captured
    assert (captured["asked"], captured["locked"]) == ("21.80", "21.62")


def worker_block(exception: str, message: str, *functions: str) -> str:
    lines = ["WorkerProc hit an exception.", "Traceback (most recent call last):"]
    for function in ("worker_busy_loop", "execute_model", *functions):
        lines += [f'  File "/venv/site-packages/vllm/v1/worker/x.py", line 1, in {function}', f"    call_{function}()"]
    lines.append(f"{exception}: {message}" if message else exception)
    return "\n".join(f"(Worker_TP0 pid=9) ERROR 11-20 08:13:11 [multiproc_executor.py:948] {line}" for line in lines)


def engine_wrapper(message: str) -> str:
    lines = [
        "EngineCore encountered a fatal error.",
        "Traceback (most recent call last):",
        '  File "/venv/site-packages/vllm/v1/engine/core.py", line 1, in run_engine_core',
        "    engine_core.run_busy_loop()",
        '  File "/venv/site-packages/vllm/v1/executor/multiproc_executor.py", line 1, in get_response',
        "    raise RuntimeError(",
        f"RuntimeError: Worker failed with error '{message}', please check the stack trace above for the root cause",
    ]
    return "\n".join(f"(EngineCore pid=5) ERROR 11-20 08:13:11 [core.py:1197] {line}" for line in lines)


LOCKED = (
    "Workspace is locked but allocation from '{where}' requires 0.76 MB, current size is 0.00 MB. "
    "Workspace growth is not allowed after locking."
)


@pytest.mark.parametrize("block", [True, False], ids=["with the worker's block", "only quoted by EngineCore"])
def test_a_wrapped_death_matches_with_and_without_the_workers_own_lines(block: bool) -> None:
    message = LOCKED.format(where="turboquant_attn.py:747:_continuation_prefill")
    text = engine_wrapper(message)
    if block:
        text = worker_block("AssertionError", message, *TQ.frames) + "\n" + text
    comparison = compare(TQ, diagnose(text))
    assert comparison.how is How.MATCH, comparison.why
    assert comparison.captured["asked"] == "0.76"


@pytest.mark.parametrize(
    ("where", "functions"),
    [
        (
            "turboquant_attn.py:879:_decode_attention",
            ("_decode_attention", "get_simultaneous", "_ensure_workspace_size"),
        ),
        ("deepseek_v4_attention.py:1457:_forward_prefill", DSV4.frames),
        ("b12x.py:354:_run_compressed_mla", ("_run_compressed_mla", "get_simultaneous", "_ensure_workspace_size")),
    ],
)
@pytest.mark.parametrize("block", [True, False])
def test_cousins_of_the_workspace_assertion_are_not_it(where: str, functions: tuple[str, ...], block: bool) -> None:
    message = LOCKED.format(where=where)
    text = engine_wrapper(message)
    if block:
        text = worker_block("AssertionError", message, *functions) + "\n" + text
    assert compare(TQ, diagnose(text)).how is How.OTHER


CONTINUED = LOCKED.format(where="turboquant_attn.py:747:_continuation_prefill")
WHOLE = worker_block("AssertionError", CONTINUED, *TQ.frames)
KEY = Signature(exception="KeyError", message="{} missing")


@pytest.mark.parametrize(
    ("signature", "text", "why"),
    [
        (TQ, WHOLE, "class, message and frames agree"),
        (TQ, engine_wrapper(CONTINUED), "the message agrees; the frames are not known"),
        (KEY, "KeyError: c1a missing", "class and message agree"),
        (replace(KEY, message="{}"), "KeyError: c1a missing", "only the class agrees"),
        (TQ, "", "no exception of this death is known"),
        (replace(TQ, not_in_message=("0.76 MB",)), WHOLE, "the message holds “0.76 MB”, which excludes this bug"),
        (TQ, WHOLE.replace("Workspace is", "It is"), "the message differs"),
        (
            SCO,
            worker_block("AssertionError", "words", "get_new_blocks", "popleft_n"),
            "this exception has a message and the bug's has none; it failed at `call_popleft_n()`",
        ),
        (
            replace(TQ, frames=("first", "last")),
            worker_block("ValueError", CONTINUED),
            "ValueError is not AssertionError; the frames do not go first → last",
        ),
        (TQ, WHOLE.replace("vllm/v1/worker", "mine/v1"), "it failed in mine/v1/x.py, outside of vLLM"),
        (replace(TQ, phase=Phase.BOOT), WHOLE, "it died in phase request, not boot"),
    ],
)
def test_why_it_matches_or_does_not(signature: Signature, text: str, why: str) -> None:
    assert compare(signature, diagnose(text)).why == why


def test_a_match_may_end_at_any_frame() -> None:
    text = worker_block("KeyError", "a missing", "last")
    for name in ("worker_busy_loop", "execute_model", "last"):
        assert compare(replace(KEY, frames=(name,)), diagnose(text)).how is How.MATCH


def test_a_message_alone_is_recognized_by_16_fixed_characters() -> None:
    for fixed, enough in (("of sixteen chars", True), ("of fifteen char", False)):
        signature = Signature(exception="ValueError", message=fixed + "{hole}")
        assert quotes(signature, f"it is\n {fixed}: 5") is enough
        assert not quotes(signature, "other")


def test_half_of_it_is_near() -> None:
    message = CONTINUED
    other_way = worker_block("AssertionError", message, "forward", "get_simultaneous")
    assert compare(TQ, diagnose(other_way)).how is How.NEAR
    other_words = worker_block("AssertionError", "something else", *TQ.frames)
    assert compare(TQ, diagnose(other_words)).how is How.NEAR
    other_class = worker_block("ValueError", message, *TQ.frames)
    assert compare(TQ, diagnose(other_class)).how is How.NEAR
    assert compare(TQ, diagnose(other_class)).captured["asked"] == "0.76"
    only_words = worker_block("ValueError", message, "forward")
    assert compare(TQ, diagnose(only_words)).how is How.OTHER


def test_the_same_text_from_another_place_is_only_near() -> None:
    text = worker_block("RuntimeError", MTP.message + " unless pinned.", "_dummy_run", "_suppress_token_ids")
    assert compare(MTP, diagnose(text)).how is How.NEAR


def test_another_phase_is_only_near() -> None:
    assert compare(TQ, diagnose(pasted("tq-chunked-prefill"))).how is How.MATCH
    at_boot = replace(TQ, phase=Phase.BOOT)
    assert compare(at_boot, diagnose(pasted("tq-chunked-prefill"))).how is How.NEAR


def test_the_near_relatives_of_the_bare_assertion() -> None:
    steps = ("schedule", "allocate_slots", "get_new_blocks")
    exhausted = worker_block("ValueError", "Cannot get 5 free blocks from the pool", *steps)
    hits = worker_block("AssertionError", "Expected 512 hit tokens, got 0", "schedule", "update_state_after_alloc")
    bare_elsewhere = worker_block("AssertionError", "", "schedule", "allocate_slots")
    for text in (exhausted, hits, bare_elsewhere):
        assert compare(SCO, diagnose(text)).how is How.OTHER
    other_line = pasted("sco-hybrid").replace("curr_block is not None", "self.num_free_blocks >= n")
    assert compare(SCO, diagnose(other_line)).how is How.NEAR
    assert compare(SCO, diagnose("AssertionError: with words")).how is How.OTHER


def test_an_excluded_text_rules_it_out() -> None:
    signature = replace(MIN_TOKENS, not_in_message=("with size 4096",))
    assert compare(signature, diagnose(recording("v0.28.0-min-tokens"))).how is How.OTHER


def test_white_space_quotes_and_line_breaks_do_not_count() -> None:
    text = pasted("dsv4-tp2").replace("'", "\u2019").replace("requires ", "requires\n   ")
    assert compare(DSV4, diagnose(text)).how is How.MATCH


@pytest.mark.parametrize("message", ["{a} and {a}", "open {", "close }", "{0a}"])
def test_a_template_that_cannot_be_read_is_refused_where_it_is_declared(message: str) -> None:
    with pytest.raises(ValueError, match="template"):
        Signature(exception="ValueError", message=message)


def test_braces_can_be_said() -> None:
    signature = Signature(exception="KeyError", message="{{{key}}} missing")
    assert compare(signature, diagnose("KeyError: {c1a} missing")).captured == {"key": "c1a"}


FORWARD_PREFILL = replace(DSV4, message="Workspace is locked", frames=("_forward_prefill",))
PASTED = 'Traceback (most recent call last):\n  File "vllm/a.py", line 1, in _forward_prefill\nAssertionError: Workspace is locked\n'
LOST = "(MainProcess pid=3964) ERROR 11-20 15:00:00 [multiproc_executor.py:315] "
CLOSED = 'Traceback (most recent call last):\n  File "vllm/b.py", line 1, in all_reduce\nRuntimeError: Connection closed by peer\n'


@pytest.mark.parametrize(
    ("head", "other", "ranks"),
    [
        (
            CLOSED,
            LOST + "Worker proc VllmWorker-1 died unexpectedly (exit code: None), shutting down executor.\n",
            (1,),
        ),
        (LOST + "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)\n", CLOSED, (0,)),
        (PASTED, PASTED, (0, 1)),
        (CLOSED, PASTED, (1,)),
        (PASTED, CLOSED, (0,)),
        # With two workers a node the second node's first one is worker 2, and its log is that of node 1.
        (CLOSED, LOST + "Worker proc VllmWorker-2 died unexpectedly, shutting down executor.\n", (1,)),
        (CLOSED, "", (0,)),
        ("", "", ()),
    ],
)
def test_nodes_that_a_death_began_with(head: str, other: str, ranks: tuple[int, ...]) -> None:
    assert failed_nodes({0: diagnose(head), 1: diagnose(other)}, FORWARD_PREFILL) == ranks


def test_one_node_has_no_failed_nodes() -> None:
    assert failed_nodes({}, FORWARD_PREFILL) == ()
