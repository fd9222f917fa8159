"""TurboQuant KV cache with speculative decoding repeats itself: the captured graph does not read the KV cache.

https://github.com/vllm-project/vllm/issues/53180
Releases with the bug: >=0.24.0; without: none known.

    pip install openai vllm==0.24.0    # needs: 2 GPUs, 24 GB each
    python repro.py [--model NAME_OR_FOLDER] [further flags of vllm serve]
    python repro.py --url http://127.0.0.1:8000

Exit status: 1 the engine died or hangs, 0 it lived, 2 neither is certain.
Prompts of a stated length are random token ids, and chats of a stated length are sent as completions.

Made from a run of vllm-repro. The script itself was not run. LAB: vLLM 0.24.0's own code on a CPU, with its CUDA parts replaced.
    vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls: the CPU platform answers CPU_ATTN for every cache
    vllm.triton_utils.importing.TritonPlaceholder: vLLM's stand-in for the module triton lacks next_power_of_2 in some releases
    vllm.v1.attention.ops.triton_turboquant_store._tq_fused_store_mse: a Triton kernel, and there is no Triton driver for this CPU
    vllm.v1.attention.ops.triton_turboquant_store._tq_fused_store_fp8: a Triton kernel, and there is no Triton driver for this CPU
    vllm.v1.attention.ops.triton_turboquant_decode._tq_decode_stage1: a Triton kernel, and there is no Triton driver for this CPU
    vllm.v1.attention.ops.triton_turboquant_decode._tq_full_dequant_kv: a Triton kernel, and there is no Triton driver for this CPU
    vllm.v1.attention.ops.triton_turboquant_decode._fwd_kernel_stage2: a Triton kernel, and there is no Triton driver for this CPU
    vllm.v1.attention.backends.turboquant_attn._tq_full_dequant_kv: a Triton kernel, and there is no Triton driver for this CPU
    torch.cuda.graphs.graph: there is no CUDA graph to capture
    torch.cuda.graphs.CUDAGraph: there is no CUDA graph to replay
    vllm.platforms.cpu.CpuPlatform.check_and_update_config: the CPU platform wipes the graph mode and the capture sizes
    vllm.platforms.interface.Platform.support_static_graph_mode: the CPU platform answers that it has no graphs
    vllm.v1.worker.cpu_worker.CPUWorker.init_device: the GPU worker makes the workspace manager there, the CPU worker makes none
    vllm.v1.worker.cpu_worker.CPUWorker.determine_available_memory: the GPU worker captures the largest graphs there, to learn what memory they take
    vllm.v1.worker.cpu_worker.CPUWorker.compile_or_warm_up_model: the GPU worker captures graphs at its end and so locks the workspace, the CPU worker does not
    vllm.v1.worker.cpu_model_runner.CPUModelRunner.__init__: on a CPU all tensors lie in one memory
    vllm.v1.worker.cpu_model_runner.CPUModelRunner._postprocess_tensors: on a CPU the two halves of a buffer are made one tensor
    vllm.v1.worker.cpu_model_runner.CPUModelRunner.load_model: the GPU runner wraps the model for graphs, the CPU runner does not
    vllm.v1.worker.cpu_model_runner.CPUModelRunner.get_model: it gives the wrapped model
    torch.library.Library.impl: torch looks no further than the call of a custom operator
    vllm.utils.cpu_triton_utils._FuncWrapper: vLLM's CPU versions of the sampler's kernels know fewer arguments than some releases pass, and no server that drafts boots there
    torch.cuda.graphs.is_current_stream_capturing: it asks the CUDA driver
    torch.cuda.synchronize: it asks the CUDA driver
    torch.accelerator.synchronize: it asks an accelerator
    torch.accelerator.empty_cache: it asks an accelerator
    torch.cuda.memory.mem_get_info: it asks the CUDA driver
    vllm.v1.worker.gpu_model_runner.graph_capture: it opens a CUDA stream
    vllm.compilation.cuda_graph.weak_ref_tensors: it frees memory of the graphs' pool
The lab replaced these parts, and served a small model; this script does neither.
"""

import argparse, contextlib, os, random, re, shlex, signal, socket, subprocess, sys, time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import openai
except ImportError:
    print("pip install openai")
    sys.exit(2)

MODEL = 'Lorbus/Qwen3.6-27B-int4-AutoRound'
ENV = {}
COMMAND = r'''
vllm serve Lorbus/Qwen3.6-27B-int4-AutoRound --tensor-parallel-size 2 --kv-cache-dtype turboquant_k8v4
    --max-model-len 32768 --max-num-seqs 1 --speculative-config '{"method":"mtp","num_speculative_tokens":3}'
'''
# One list is sent at the same time. A number is a pause in seconds.
STEPS = [
    [dict(name='chat', tokens=100, max_tokens=16, temperature=0, stream=True)],
]
REPORTED = 'wrong answers, which this script prints and does not judge'
AT_BOOT = []
STALL_S = 600  # a request without an answer for this long is a hang
SETTLE_S = 5  # the engine may die in the step after the last answer
IDS = range(1000, 3000)  # token ids of generated prompts: no special tokens of a vocabulary
NOT_SENT = ("name", "path", "tokens", "shared", "conversation", "may_fail")
USUAL = ("model", "prompt", "messages", "max_tokens", "temperature", "stream")
LOG = Path("repro.log")
LINE_HEAD = re.compile(r"^(\([^)]*pid=\d+\) )?((ERROR|INFO|WARNING) \S+ \S+ \[[^]]*\] ?)?")
EXCEPTION = re.compile(r"(?!(INFO|WARNING|ERROR|DEBUG):)[A-Za-z_][\w.]*(: |$)")
CANARY = dict(name="one more token", prompt=[1000], max_tokens=1)


def token_ids(request, position):
    """Return a prompt of the stated length. The same seed gives the same first tokens, for the prefix cache."""
    shared = random.Random("shared").choices(IDS, k=request.get("shared", 0))
    own = random.Random(request.get("conversation", position))
    return shared + own.choices(IDS, k=request["tokens"] - len(shared))


def send(server, request, position=""):
    """Send a request. Return "ok", "failed", or "hang". The refusal of an unusual field is an answer."""
    client, url, model = server
    body = {name: value for name, value in request.items() if name not in NOT_SENT} | {"model": model}
    if "tokens" in request:
        body["prompt"] = token_ids(request, position)
    path, stream = request.get("path", "/v1/completions"), body.get("stream", False)
    result = "ok"
    try:
        answer = client.post(url + path, body=body, cast_to=object, stream=stream, stream_cls=openai.Stream[object])
        chunks = list(answer) if stream else [answer]
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
        messages = (choice.get("delta") or choice.get("message") or {} for choice in choices)
        texts = [choice.get("text") or message.get("content") or "" for choice, message in zip(choices, messages)]
        what = f"answered {''.join(texts)[:80]!r}"
    except openai.APITimeoutError:
        result, what = "hang", f"no answer within {STALL_S} s"
    except openai.APIStatusError as error:
        what = f"HTTP {error.status_code}: {str(error.body)[:300]}"
        named = error.status_code == 400 and any(name in what for name in body if name not in USUAL)
        result = "ok" if named or error.status_code in request.get("may_fail", ()) else "failed"
    except (openai.OpenAIError, OSError) as error:  # a connection that ends, or an error event of a stream
        result, what = "failed", f"{type(error).__name__}: {error}"
    print(f"  {request['name']}: {what}", flush=True)
    return result


def healthy(url):
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=10).status == 200
    except OSError:
        return False


def gone(url, process):
    """Return True if the server ended, or if /health fails twice in five seconds."""
    for wait in (SETTLE_S, 0):
        if process and process.poll() is not None:
            return True
        if healthy(url):
            return False
        time.sleep(wait)
    return True


def root_exception(begin=0):
    """Return the last line of the first traceback of an engine process, or of any, behind byte `begin` of the log."""
    lines = LOG.read_bytes()[begin:].decode(errors="replace").splitlines()
    for process in ("(EngineCore", "(Worker", "(VllmWorker"), "":
        inside = False
        for line in lines:
            text = LINE_HEAD.sub("", line.rstrip()) if line.startswith(process) else " "
            inside = inside or text.startswith("Traceback (most recent call last)")
            if inside and EXCEPTION.match(text):
                return text
    return "no traceback in the log"


def check(server, process):
    """Send the requests. Return what happened and the exit status."""
    begin, results = LOG.stat().st_size if process else 0, []
    for number, step in enumerate(STEPS):
        if isinstance(step, float):
            time.sleep(step)
        else:
            with ThreadPoolExecutor(len(step)) as pool:
                positions = [f"{number}.{index}" for index in range(len(step))]
                results += pool.map(lambda request, position: send(server, request, position), step, positions)
        if gone(server[1], process):
            break
    time.sleep(SETTLE_S)
    results.append(send(server, CANARY))
    if gone(server[1], process):
        return f"The engine died: {root_exception(begin) if process else 'see its log'}", 1
    if "hang" in results:
        return "The engine hangs", 1
    return ("The engine lives, and a request failed", 2) if "failed" in results else ("The engine lives", 0)


def run(url, process):
    while not healthy(url):
        if process is None:
            return f"No server answers at {url}", 2
        if process.poll() is not None:
            found = root_exception()
            return f"The server did not start: {found}", 1 if AT_BOOT and all(part in found for part in AT_BOOT) else 2
        time.sleep(1)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="[redacted:api-key]", max_retries=0, timeout=STALL_S)
    return check((client, url, client.models.list().data[0].id), process)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


parser = argparse.ArgumentParser(epilog="Further flags go to `vllm serve`.")
parser.add_argument("--url", help="a server that was started with the flags below")
parser.add_argument("--port", default=free_port(), help="of the server to start (default: a free one)")
parser.add_argument("--model", default=MODEL, help="name or folder (default: %(default)s)")
options, flags = parser.parse_known_args()
process = None
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end the server
try:
    if options.url is None:
        words = [options.model if word == MODEL else word for word in shlex.split(COMMAND)]
        words += ["--host", "127.0.0.1", "--port", f"{options.port}", *flags]
        to_log = {"stdout": LOG.open("w"), "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, env=os.environ | ENV, start_new_session=True, **to_log)
    url = options.url or f"http://127.0.0.1:{options.port}"
    what, status = run(url.rstrip("/").removesuffix("/v1"), process)
    print(f"{what}.\nReported: {REPORTED}")
except Exception as error:  # a fault of this script is no answer
    print(f"{type(error).__name__}: {error}")
    status = 2
finally:
    for sign in (signal.SIGTERM, signal.SIGKILL) if process else ():
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, sign)
            process.wait(30)
sys.exit(status)
