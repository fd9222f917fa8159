from __future__ import annotations

from dataclasses import replace

import pytest

from tests.diagnosis.logs import pasted, recording
from vllm_repro_diagnosis.diagnosis import Phase, diagnose
from vllm_repro_diagnosis.signature import How, Signature, compare, failed_nodes, quotes

TQ = Signature(
    exception="AssertionError",
    message=(
        "Workspace is locked but allocation from '{file}:{line}:_continuation_prefill' requires "
        "{asked} MB, current size is {locked} MB."
    ),
    frames=(
        "_prefill_attention",
        "_continuation_prefill",
        "get_simultaneous",
        "_ensure_workspace_size",
    ),
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
        "Workspace is locked but allocation from '{file}:{line}:_forward_prefill' requires "
        "{asked} MB, current size is {locked} MB."
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
def test_a_death_matches_only_its_signature(text: str, belongs: str | None) -> None:
    diagnosis = diagnose(text)
    hows = {name: compare(signature, diagnosis).how for name, signature in ALL.items()}
    assert hows == {name: How.MATCH if name == belongs else How.OTHER for name in ALL}


def logged(prefix: str, *lines: str) -> str:
    return "\n".join(prefix + line for line in lines)


X_PY = "/venv/site-packages/vllm/v1/worker/x.py"


def worker_block(exception: str, message: str, *functions: str) -> str:
    frames = [
        f'  File "{X_PY}", line 1, in {function}\n    call_{function}()'
        for function in ("worker_busy_loop", "execute_model", *functions)
    ]
    return logged(
        "(Worker_TP0 pid=9) ERROR 11-20 08:13:11 [multiproc_executor.py:948] ",
        *("WorkerProc hit an exception.", "Traceback (most recent call last):"),
        *"\n".join(frames).splitlines(),
        f"{exception}: {message}" if message else exception,
    )


def engine_wrapper(message: str) -> str:
    return logged(
        "(EngineCore pid=5) ERROR 11-20 08:13:11 [core.py:1197] ",
        *("EngineCore encountered a fatal error.", "Traceback (most recent call last):"),
        '  File "/venv/site-packages/vllm/v1/engine/core.py", line 1, in run_engine_core',
        "    engine_core.run_busy_loop()",
        f"RuntimeError: Worker failed with error '{message}', please check the stack trace above",
    )


LOCKED = (
    "Workspace is locked but allocation from '{}' requires 0.76 MB, current size is 0.00 MB. "
    "Workspace growth is not allowed after locking."
)
CONTINUED = LOCKED.format("turboquant_attn.py:747:_continuation_prefill")
WHOLE = worker_block("AssertionError", CONTINUED, *TQ.frames)
OTHER_CLASS = worker_block("ValueError", CONTINUED, *TQ.frames)
KEY = Signature(exception="KeyError", message="{} missing")
KEY_DEATH = worker_block("KeyError", "a missing", "last")
PASTED_TQ, PASTED_SCO = pasted("tq-chunked-prefill"), pasted("sco-hybrid")
STEPS = ("schedule", "allocate_slots", "get_new_blocks")


@pytest.mark.parametrize(
    ("signature", "text"),
    [
        (TQ, WHOLE),
        (TQ, WHOLE + "\n" + engine_wrapper(CONTINUED)),
        (TQ, engine_wrapper(CONTINUED)),
        (TQ, PASTED_TQ),
        # A match may end at any frame.
        (replace(KEY, frames=("worker_busy_loop",)), KEY_DEATH),
        (replace(KEY, frames=("execute_model",)), KEY_DEATH),
        (replace(KEY, frames=("last",)), KEY_DEATH),
        # White space, quotes and line breaks do not count.
        (DSV4, pasted("dsv4-tp2").replace("'", "\u2019").replace("requires ", "requires\n   ")),
    ],
)
def test_a_match(signature: Signature, text: str) -> None:
    assert compare(signature, diagnose(text)).how is How.MATCH


@pytest.mark.parametrize(
    ("signature", "text"),
    [
        (TQ, worker_block("AssertionError", CONTINUED, "forward", "get_simultaneous")),
        (TQ, worker_block("AssertionError", "something else", *TQ.frames)),
        (TQ, OTHER_CLASS),
        (replace(TQ, phase=Phase.BOOT), PASTED_TQ),
        # The same text from another place.
        (MTP, worker_block("RuntimeError", MTP.message + " unless.", "_dummy_run", "_suppress")),
        (SCO, PASTED_SCO.replace("curr_block is not None", "self.num_free_blocks >= n")),
    ],
)
def test_half_of_it_is_near(signature: Signature, text: str) -> None:
    assert compare(signature, diagnose(text)).how is How.NEAR


@pytest.mark.parametrize(
    ("signature", "text"),
    [
        (TQ, worker_block("ValueError", CONTINUED, "forward")),
        # Relatives of the bare assertion.
        (SCO, worker_block("ValueError", "Cannot get 5 free blocks from the pool", *STEPS)),
        (SCO, worker_block("AssertionError", "Expected 512 hit tokens, got 0", "schedule")),
        (SCO, worker_block("AssertionError", "", "schedule", "allocate_slots")),
        (SCO, "AssertionError: with words"),
        (replace(MIN_TOKENS, not_in_message=("size 4096",)), recording("v0.28.0-min-tokens")),
        # Relatives of the workspace assertion, with and without the worker's lines.
        *(
            (TQ, block + engine_wrapper(LOCKED.format(f"{file}:{functions[0]}")))
            for file, functions in (
                ("turboquant_attn.py:879", ("_decode_attention", *TQ.frames[2:])),
                ("deepseek_v4_attention.py:1457", DSV4.frames),
                ("b12x.py:354", ("_run_compressed_mla", *TQ.frames[2:])),
            )
            for message in [LOCKED.format(f"{file}:{functions[0]}")]
            for block in ("", worker_block("AssertionError", message, *functions) + "\n")
        ),
    ],
)
def test_another_death(signature: Signature, text: str) -> None:
    assert compare(signature, diagnose(text)).how is How.OTHER


@pytest.mark.parametrize(
    ("signature", "text", "captured"),
    [
        (TQ, PASTED_TQ, {"file": "turboquant_attn.py", "line": "720", "asked": "16.00"}),
        (TQ, PASTED_TQ, {"locked": "1.02"}),
        (DSV4, pasted("dsv4-tp2"), {"asked": "21.80", "locked": "21.62"}),
        (TQ, WHOLE, {"asked": "0.76"}),
        (TQ, engine_wrapper(CONTINUED), {"asked": "0.76"}),
        (TQ, OTHER_CLASS, {"asked": "0.76"}),
        (replace(KEY, message="{{{key}}} missing"), "KeyError: {c1a} missing", {"key": "c1a"}),
    ],
)
def test_named_holes_are_captured(
    signature: Signature, text: str, captured: dict[str, str]
) -> None:
    assert captured.items() <= compare(signature, diagnose(text)).captured.items()


@pytest.mark.parametrize(
    ("signature", "text", "why"),
    [
        (TQ, WHOLE, "class, message and frames agree"),
        (TQ, engine_wrapper(CONTINUED), "the message agrees; the frames are not known"),
        (KEY, "KeyError: c1a missing", "class and message agree"),
        (replace(KEY, message="{}"), "KeyError: c1a missing", "only the class agrees"),
        (TQ, "", "no exception of this death is known"),
        (
            replace(TQ, not_in_message=("0.76 MB",)),
            WHOLE,
            "the message holds “0.76 MB”, which excludes this bug",
        ),
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
        (
            TQ,
            WHOLE.replace("vllm/v1/worker", "mine/v1"),
            "it failed in mine/v1/x.py, outside of vLLM",
        ),
        (replace(TQ, phase=Phase.BOOT), WHOLE, "it died in phase request, not boot"),
    ],
)
def test_why_it_matches_or_does_not(signature: Signature, text: str, why: str) -> None:
    assert compare(signature, diagnose(text)).why == why


def test_a_message_alone_is_recognized_by_16_fixed_characters() -> None:
    for fixed, enough in (("of sixteen chars", True), ("of fifteen char", False)):
        signature = Signature(exception="ValueError", message=fixed + "{hole}")
        assert quotes(signature, f"it is\n {fixed}: 5") is enough
        assert not quotes(signature, "other")


@pytest.mark.parametrize("message", ["{a} and {a}", "open {", "close }", "{0a}"])
def test_a_wrong_template_is_refused_when_declared(message: str) -> None:
    with pytest.raises(ValueError, match="template"):
        Signature(exception="ValueError", message=message)


FORWARD_PREFILL = replace(DSV4, message="Workspace is locked", frames=("_forward_prefill",))
HEAD = "Traceback (most recent call last):\n"
PASTED = (
    f'{HEAD}  File "vllm/a.py", line 1, in _forward_prefill\nAssertionError: Workspace is locked\n'
)
LOST = "(MainProcess pid=3964) ERROR 11-20 15:00:00 [multiproc_executor.py:315] "
CLOSED = (
    f'{HEAD}  File "vllm/b.py", line 1, in all_reduce\nRuntimeError: Connection closed by peer\n'
)


@pytest.mark.parametrize(
    ("head", "other", "ranks"),
    [
        (
            CLOSED,
            LOST + "Worker proc VllmWorker-1 died unexpectedly (exit code: None), shutting down.\n",
            (1,),
        ),
        (LOST + "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)\n", CLOSED, (0,)),
        (PASTED, PASTED, (0, 1)),
        (CLOSED, PASTED, (1,)),
        (PASTED, CLOSED, (0,)),
        # With two workers a node, worker 2 is the first of node 1.
        (
            CLOSED,
            LOST + "Worker proc VllmWorker-2 died unexpectedly, shutting down executor.\n",
            (1,),
        ),
        (CLOSED, "", (0,)),
        ("", "", ()),
    ],
)
def test_nodes_that_a_death_began_with(head: str, other: str, ranks: tuple[int, ...]) -> None:
    assert failed_nodes({0: diagnose(head), 1: diagnose(other)}, FORWARD_PREFILL) == ranks


def test_one_node_has_no_failed_nodes() -> None:
    assert failed_nodes({}, FORWARD_PREFILL) == ()
