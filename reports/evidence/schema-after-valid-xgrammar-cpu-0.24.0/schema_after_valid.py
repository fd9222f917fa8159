"""A schema that xgrammar refuses crashes the engine once another grammar has been used.

The bug of `grammar-after-valid` with a JSON schema whose pattern has an inline flag. xgrammar
refuses it before 0.2.6 and takes it since, so the outcome depends on xgrammar at one vLLM.
"""

from vllm_repro.vocabulary import *

SCHEMA = {"json": {"type": "string", "pattern": "(?i)abc"}}

scenario = Scenario(
    id="schema-after-valid",
    issue="vllm-project/vllm#43920",
    title="A refused JSON schema after a valid grammar kills the engine",
    command="""
        vllm serve Qwen/Qwen3-0.6B
        --dtype float32
        --max-model-len 2048
        --enforce-eager
    """,
    model=public_model(
        "Qwen/Qwen3-0.6B",
        max_position=131072,
        tiny_will_do=True,
        why="the bug is in the compilation of grammars and does not depend on weights",
    ),
    needs=Needs(),
    status=Status(bad=">=0.19.1,<0.26.0", good=">=0.26.0"),
    try_with="0.24.0",
    workload=[
        completion(
            name="good grammar",
            prompt="hello",
            max_tokens=4,
            structured_outputs={"grammar": 'root ::= "a" | "b"'},
        ),
        completion(
            name="schema",
            prompt="hello",
            max_tokens=4,
            structured_outputs=SCHEMA,
            may_fail=[500],
        ),
    ],
    trigger=sent_with(name="schema", structured_outputs=SCHEMA),
    signature=signature(
        phase="request",
        exception="RuntimeError",
        message="{where} Regex parsing error at position {column}: {reason}",
        frames=["_check_grammar_completion", "_create_grammar"],
    ),
    arms=[arm("reported", dies)],
)
