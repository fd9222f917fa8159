"""A background response whose generation raises stays "queued" for ever; the exception is lost."""
import asyncio, logging
from types import SimpleNamespace as NS
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses as Serving
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineGenerateError
async def raising(ctx, error):
    if isinstance(error, str):                        # the engine ends the request with finish_reason="error"
        ctx.append_output(RequestOutput("r", "p", [1], None, [CompletionOutput(0, "", [], None, None, finish_reason=error)], True))
    else: raise error                                 # what AsyncLLM.generate raises on its first step
    yield ctx
async def main():
    for error in (VLLMValidationError("Grammar error: look-around is not supported"), EngineGenerateError(), "error"):
        s = Serving.__new__(Serving)
        s.__dict__.update(use_harmony=False, enable_log_outputs=False, request_logger=None, enable_per_request_metrics=False,
                          response_store={}, tool_server=None, response_store_lock=asyncio.Lock(), background_tasks={})
        r = ResponsesRequest(model="m", input="x", background=True, store=True)
        sp, ctx = SamplingParams(max_tokens=5), SimpleContext()
        s.response_store[r.request_id] = ResponsesResponse.from_request(
            r, sp, model_name="m", created_time=0, output=[], status="queued", usage=None)      # as _create_responses does
        task = asyncio.create_task(s._run_background_request(r, sp, raising(ctx, error), ctx, "m", None, NS(), 0))
        await asyncio.wait([task])
        got = await s.retrieve_responses(r.request_id, None, False)
        print(f"{error!r:70} task: {task.exception()!r:.60}  GET -> {got.status}")
logging.disable(logging.CRITICAL); asyncio.run(main())
