"""A grammar that xgrammar refuses crashes the engine once another grammar has been used.

The first request with a grammar fixes xgrammar as the backend of the process. A later grammar that
fails xgrammar's check in the API server makes `auto` choose another backend there, but EngineCore
compiles it with xgrammar all the same. The error is raised in the scheduler loop and crashes the
engine for all clients. 0.26.0 answers 500 and lives.
"""

from vllm_repro.vocabulary import *

BAD_GRAMMAR = {"grammar": 'root ::= "a"\nroot ::= "b"'}

scenario = Scenario(
    id="grammar-after-valid",
    issue="vllm-project/vllm#43920",
    title="A malformed grammar after a valid one kills the engine",
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
    try_with="0.25.1",
    defect=source_line(
        "vllm/v1/structured_output/__init__.py",
        "StructuredOutputManager.grammar_init",
        "if self.backend is None:",
    ),
    workload=[
        completion(
            name="good grammar",
            prompt="hello",
            max_tokens=4,
            structured_outputs={"grammar": 'root ::= "a" | "b"'},
        ),
        completion(
            name="bad grammar",
            prompt="hello",
            max_tokens=4,
            structured_outputs=BAD_GRAMMAR,
            may_fail=[500],
        ),
    ],
    trigger=sent_with(name="bad grammar", structured_outputs=BAD_GRAMMAR),
    signature=signature(
        phase="request",
        exception="RuntimeError",
        message="{where} EBNF parser error at line {line}, column {column}: {reason}",
        frames=["_check_grammar_completion", "_create_grammar"],
    ),
    arms=[
        arm("reported", dies),
        arm(
            "valid-only",
            untriggered,
            workload=[
                completion(
                    name="ordinary completion",
                    prompt="hello",
                    max_tokens=4,
                    structured_outputs={"grammar": 'root ::= "a" | "b"'},
                )
            ],
            why="no grammar that xgrammar refuses",
        ),
    ],
)
