"""Streamed /v1/responses drops the logprobs of every token whose text is held back (here the
first two of the three tokens of an emoji); the not streamed answer has them all."""
import asyncio, logging
from types import SimpleNamespace as NS
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses as Serving
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
STEPS = [([5], "Hi ", None), ([6], "", None), ([7], "", None), ([8], "😀", None), ([9], "!", "length")]
def output(ids, text, finish):
    c = CompletionOutput(0, text, ids, None, [{i: Logprob(-float(i), 1, f"<{i}>")} for i in ids], finish_reason=finish)
    return RequestOutput("r", "p", [1, 2], None, [c], finish is not None)
async def contexts(ctx, outputs):
    for o in outputs: ctx.append_output(o); yield ctx
async def main():
    s = Serving.__new__(Serving)
    s.__dict__.update(use_harmony=False, enable_log_outputs=False, request_logger=None, return_tokens_as_token_ids=False,
                      enable_per_request_metrics=False, response_store={}, tool_server=None, response_store_lock=asyncio.Lock())
    r = ResponsesRequest(model="m", input="x", include=["message.output_text.logprobs"], store=False)
    sp = SamplingParams(max_tokens=5, logprobs=0)
    ctx = SimpleContext()
    whole = output([i for ids, *_ in STEPS for i in ids], "".join(t for _, t, _ in STEPS), "length")
    full = await s.responses_full_generator(r, sp, contexts(ctx, [whole]), ctx, "m", None, NS())
    part = full.output[0].content[0]
    print("not streamed:", repr(part.text), [x.token for x in part.logprobs])
    ctx, text, got = SimpleContext(), "", []
    async for e in s.responses_stream_generator(r, sp, contexts(ctx, [output(*x) for x in STEPS]), ctx, "m", None, NS()):
        if e.type == "response.output_text.delta": text += e.delta; got += [x.token for x in e.logprobs]
    print("streamed:    ", repr(text), got)
logging.disable(logging.CRITICAL); asyncio.run(main())
