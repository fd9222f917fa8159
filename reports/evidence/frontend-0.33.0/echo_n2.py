"""Streamed completion, n=2, echo, logprobs: child 1's prompt logprobs are lost when its first
output is merged behind child 0's second one."""
import asyncio, logging, numpy as np, torch
from types import SimpleNamespace
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion as Serving
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
PROMPT = [11, 12, 13, 14]
def request(rid, sp):
    return EngineCoreRequest(request_id=rid, external_req_id="r", prompt_token_ids=PROMPT, mm_features=None,
        sampling_params=sp, pooling_params=None, arrival_time=0, lora_request=None, cache_salt=None, data_parallel_rank=None)
def out(rid, token, first=False, last=False):
    lp = LogprobsLists(np.array([[token]]), np.array([[-1.0]]), np.array([1]))
    plp = LogprobsTensors(torch.tensor(PROMPT[1:])[:, None], -torch.ones(3, 1), torch.ones(3)) if first else None
    return EngineCoreOutput(rid, [token], new_logprobs=lp, new_prompt_logprobs_tensors=plp,
                            finish_reason=FinishReason.LENGTH if last else None)
async def main(steps, title):
    sp = SamplingParams(n=2, logprobs=0, prompt_logprobs=0, max_tokens=2, output_kind=RequestOutputKind.DELTA, detokenize=False)
    parent, queue = ParentRequest(request("p", sp)), RequestOutputCollector(sp.output_kind, "p")
    op = OutputProcessor(None, log_stats=False)
    for i in range(2):
        op.add_request(request(*parent.get_child_info(i)), "abcd", parent, i, queue)
    async def results():
        for step in steps:                    # one engine step, then the client's task runs, as in AsyncLLM
            op.process_outputs(step); res = queue.get_nowait(); yield 0, res
    serving = Serving.__new__(Serving); serving.__dict__.update(return_tokens_as_token_ids=True, enable_log_outputs=False,
        enable_force_include_usage=False, enable_prompt_tokens_details=False, system_fingerprint=None, log_error_stack=False)
    req = CompletionRequest(model="m", prompt=PROMPT, n=2, echo=True, logprobs=0, max_tokens=2, stream=True)
    print(title)
    async for line in serving.completion_stream_generator(req, [{}], results(), "cmpl", 0, "m", 1, None, SimpleNamespace()):
        print("  ", line.strip()[:330])
logging.disable(logging.CRITICAL)
a, b = "0_p", "1_p"
asyncio.run(main([[out(a, 1, True), out(b, 3, True)], [out(a, 2, last=True), out(b, 4, last=True)]], "both prompts end in one step:"))
asyncio.run(main([[out(a, 1, True)], [out(a, 2, last=True), out(b, 3, True)], [out(b, 4, last=True)]], "one step apart:"))
