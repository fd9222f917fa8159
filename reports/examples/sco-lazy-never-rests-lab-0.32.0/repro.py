"""Simple CPU offload, lazy mode: an engine without requests copies the same blocks to the CPU forever and never goes idle.

Not reported; nearest is https://github.com/vllm-project/vllm/issues/37160
Releases with the bug: >=0.30.0; without: none known.

    pip install openai vllm==0.32.0    # needs: 1 GPU, 4 GB each
    python repro.py [--model NAME_OR_FOLDER] [further flags of vllm serve]
    python repro.py --url http://127.0.0.1:8000

Exit status: 1 the engine died or hangs, 0 it lived, 2 neither is certain.
Prompts of a stated length are random token ids, and chats of a stated length are sent as completions.

Made from a run of vllm-repro. The script itself was not run. LAB: vLLM 0.32.0's own code on a CPU, with its CUDA parts replaced.
    vllm.v1.simple_kv_offload.worker.DmaCopyBackend: it copies with cuMemcpyBatchAsync, on CUDA streams
    vllm.v1.simple_kv_offload.worker.torch: torch.cuda.Stream, torch.cuda.current_stream and torch.Event need CUDA
    vllm.v1.simple_kv_offload.worker.PIN_MEMORY: memory is pinned with cudaHostRegister
    vllm.v1.core.block_pool.BlockPool.get_num_free_blocks: to see the list of free blocks run out
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

MODEL = 'Qwen/Qwen3-0.6B'
ENV = {}
COMMAND = r'''
vllm serve Qwen/Qwen3-0.6B --max-model-len 960 --block-size 32 --num-gpu-blocks-override 31 --enable-chunked-prefill
    --max-num-batched-tokens 256 --max-num-seqs 8 --enable-prefix-caching
    --kv-transfer-config '{"kv_connector":"SimpleCPUOffloadConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":58720256,"lazy_offload":true}}'
'''
# One list is sent at the same time. A number is a pause in seconds.
STEPS = [
    [dict(name='first', tokens=400, max_tokens=8, temperature=0, ignore_eos=True)],
    [dict(name='second', tokens=400, max_tokens=8, temperature=0, ignore_eos=True)],
    [dict(name='third', tokens=400, max_tokens=8, temperature=0, ignore_eos=True)],
    'idle within 30',
]
REPORTED = 'an engine that keeps working with no request left'
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


def cpu_seconds(session):
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            words = file.read_text().rpartition(")")[2].split()
            ticks += (int(words[11]) + int(words[12])) * (int(words[3]) == session)
    return ticks / os.sysconf("SC_CLK_TCK")


def never_idle(process, within):
    """Return True if the server, without any request, has no five seconds without work."""
    end, least = time.monotonic() + within, 5.0
    while time.monotonic() < end and least >= 0.5:
        before = cpu_seconds(process.pid)
        time.sleep(5)
        least = cpu_seconds(process.pid) - before
    return least >= 0.5


def check(server, process):
    """Send the requests. Return what happened and the exit status."""
    begin, results = LOG.stat().st_size if process else 0, []
    for number, step in enumerate(STEPS):
        if isinstance(step, float):
            time.sleep(step)
        elif isinstance(step, str):
            if process is None:
                return "Whether a server goes idle cannot be seen with --url", 2
            if never_idle(process, float(step.removeprefix("idle within "))):
                return "The engine never goes idle", 1
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
