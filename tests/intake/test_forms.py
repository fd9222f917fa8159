"""Forms of a statement that a draft reads, or quotes in a GAP, and never completes."""

from __future__ import annotations

import re

import pytest

from tests.golden_files import missing
from tests.intake.texts import SERVE, checked, drafted
from vllm_repro.journal.redact import Redactor
from vllm_repro_intake.text import with_public_stores

CODE = "```\n{}\n```"
"""Lines of code in an issue."""
RUN = "vllm serve org/model --port 8000"
BODY = '{"prompt": "hi", "max_tokens": 5}'
URL = "http://box:8000/v1/completions"
SMI = (
    "Mon Nov 30 01:52:40 2026\n+------+\n| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05 |\n"
    "| N/A   33C    P0    70W / 700W |      0MiB / 81559MiB |      0%      Default |\n+-----+"
)
PAIR = "Prefill:\n```\nvllm serve a/b1 --port 1\n```\n\nDecode:\n```\nvllm serve a/b1 --port 2\n```"
TWO = """
```
services:
  {}:
    image: vllm/x:v1
    command: --model a/b1
  {}:
    image: vllm/x:v2
    command: --model a/b1
```
"""
COLUMNS = "| | 0.24.0 | 0.25.0 |\n|---|---|---|\n| 4 | ok | ok |\n| 9 | ok | crash |"
DEATH = "(EngineCore_DP0 pid=9) ERROR 02-11 12:13:14 [core.py:941] KeyError: 'x'"
BENCH = f"{SERVE}\n\n```\nvllm bench serve --random-input-len 96"
FORMS = {
    "variables of a shell": [
        ('A="--seed 1"\nA="$A --enforce-eager"\nvllm serve a/b $A', "--seed 1;--enforce-eager", ""),
        ('A="--seed 1"\nA+=" -tp 2"\nvllm serve a/b ${A}', "--seed 1;-tp 2", ""),
        ('A=(\n  --seed 1\n  -tp 2\n)\nvllm serve a/b "${A[@]}"', "--seed 1;-tp 2", ""),
        ("vllm serve a/b --port ${P:-8123}", "--port 8123", "GAP: no value of"),
        ('vllm serve a/b --seed 1 "$@"', "--seed 1", "$@'"),
        (
            'A="--seed 1"\nif [ $1 = x ]; then\n  A="$A --headless"\nfi\nvllm serve a/b $A',
            "--seed 1;not read: “A=",
            "\n          --headless",
        ),
        ("vllm serve a/b --seed 1 $MORE", "no value of the variable MORE was read", "'$MORE'"),
    ],
    "what check refuses": [
        (
            "export PYTHONUNBUFFERED=1\nvllm serve a/b --seed 0",
            "--seed 0;GAP: left out: PYTHONUNBUFFERED=1, which is not known as a variable of vLLM",
            "remove it",
        ),
        (
            "docker run -e X_Y=7 vllm/vllm-openai:v0.24.0 --model a/b",
            "GAP: left out: X_Y=7, which is not known",
            "remove it",
        ),
        ("export MODEL=a/b1\nvllm serve $MODEL --seed 0", "serve a/b1", "left out"),
        ("vllm serve a/b --swap-space 8", "but older ones may define it: check refuses", "leave"),
        ("vllm serve a/b --disable-log-requests", "but older ones may define it", "write --no"),
    ],
    "variables of collect_env": [
        (
            "LD_LIBRARY_PATH=/x\nVLLM_A=1\nNCCL_CUMEM_ENABLE=0\nCUDA_VERSION=12.8\n```\n```\n"
            + RUN,
            "not read: “VLLM_A=1 ⏎ NCCL_CUMEM_ENABLE=0”",
            "12.8",
        ),
    ],
    "values that a shell computes": [
        (
            "vllm serve a/b --max-model-len $((32*1024))",
            "--max-model-len 32768",
            "",
        ),
        ("vllm serve a/b --max-model-len=$(( 2 * 512 ))", "--max-model-len=1024", ""),
        (
            "vllm serve a/b --max-model-len ${LEN} --seed 1",
            "--seed 1;no value of the variable LEN was read: left out",
            "\n          --max-model-len",
        ),
        ("vllm serve a/b --enable-prefix-caching false --seed 1", "--no-enable-prefix-caching", ""),
        ("vllm serve a/$M --seed 1", "no value of $M was read", ""),
        ("vllm serve a/b --port '<your port>'", "no value of <your port> was read", ""),
        ('vllm serve a/b --chat-template "<s>{{ x }}"', "<s>{{ x }}", "of <s>"),
        ("K=3\nvllm serve a/b --max-num-seqs $((K * 16))", "--max-num-seqs 48", ""),
        (
            "vllm serve a/b --data-parallel-size $((NODES * 4)) --seed 1",
            "--seed 1;no value of $((NODES * 4)) was read",
            "",
        ),
        (
            "vllm serve a/b --max-model-len $(( N*2 )) --seed 1",
            "--seed 1;variable N was read: left out",
            "\n          --max-model-len",
        ),
        ("vllm serve a/b --max-model-len 50", "prompt=25", "prompt=100"),
    ],
    "commands in strings and logs": [
        (
            'port = 81\ncmd = f"vllm serve a/b --port {port} --seed 1"',
            "--port 81;--seed 1",
            "{port}",
        ),
        ("os.system('VLLM_A=1 vllm serve a/b --seed 1')", "VLLM_A=1;--seed 1", "1')"),
        ('run = """\\\nvllm serve a/b \\\n  --seed 1\n"""', "--seed 1", '1"""'),
        ("DEBUG 01-02 03:04:05 a.py:9] vllm serve a/b --seed 1", "--seed 1", "GAP: no command"),
        ("+ vllm serve a/b --seed 1", "--seed 1", "GAP: no command"),
    ],
    "files and lists of options": [
        (
            "max-model-len: 990\nenable-prefix-caching: true\nseed: 3",
            "--max-model-len 990;--enable-prefix-caching;--seed 3",
            "GAP: not read",
        ),
        (
            "model: a/b\nasync_scheduling: false\nspeculative_config: {method: mtp}",
            '--model a/b;--no-async-scheduling;--speculative-config \'{"method": "mtp"}\'',
            "",
        ),
        (
            "- vllm\n- serve\n- a/b\n- --enable-chunked-prefill\n- 'false'\n- --seed\n- '1'",
            "a/b;--no-enable-chunked-prefill;--seed 1",
            "",
        ),
        (
            "args: [--model, a/b, --enforce-eager, 'true', --seed, '1']",
            "--enforce-eager;--seed 1",
            "--enforce-eager true \\",
        ),
    ],
    "a look at the machine": [
        *(
            (f"{look}\nvllm serve a/b1 --seed 1", "a/b1;--seed 1", "GAP: not read")
            for look in (
                f"$ nvidia-smi\n{SMI}",
                f"docker run --rm --gpus all nvidia/cuda:12.4 nvidia-smi\n{SMI}",
                "docker run --gpus all nvidia/cuda:12.4 nvidia-smi -L",
                "nvidia-smi --query-gpu=name --format=csv",
                "docker exec -it x nvidia-smi && rocm-smi",
            )
        ),
    ],
    "commands of other programs": [
        ("model: a/b-1\nray start --head \\\n  --block \\\n  --seed 1", "", "\n          --seed"),
        ("Model: a/b-1\npython x.py \\\n  --epochs 3", "not read", "\n          --epochs"),
        ("model: a/b-1\nsrun x \\\n  --seed 2 \\\n  --port 9", "", "\n          --port"),
        ("vllm bench latency --model a/b --input-len 7 -tp 2", "-tp 2;prompt=7", "\n  --input-len"),
        ("vllm bench throughput --model a/b --seed 2 --n 3", "--seed 2", "\n          --n 3"),
        ("python benchmarks/benchmark_latency.py --model a/b -tp 2", "-tp 2", "input-len"),
    ],
    "units, shells and services": [
        (
            "[Service]\nEnvironment=VLLM_A=1\nExecStart=/x/vllm serve a/b -tp 2",
            "VLLM_A=1;-tp 2",
            "",
        ),
        ('[Service]\nEnvironment="VLLM_A=b c"\nExecStart=-/x/vllm serve a/b1 --seed 1', "b c", ""),
        *(
            (f"[Service]\n{unit}\nRestartSec=10\nUser=llm", f"{shown};--seed 1;-tp 2", "GAP: not")
            for unit, shown in (
                ("ExecStart=/x/vllm serve a/b1 \\\n  --seed 1 \\\n  -tp 2", "a/b1"),
                ("ExecStart = /x/vllm serve \\\n  a/b1 --seed 1 \\\n  -tp 2", "a/b1"),
                ("ExecStart=/usr/bin/env VLLM_A=1 \\\n vllm serve a/b1 --seed 1 -tp 2", "VLLM_A=1"),
                ("ExecStart=/bin/bash -c 'vllm serve a/b1 \\\n  --seed 1 -tp 2'", "a/b1"),
                (
                    'Environment="VLLM_A=1" VLLM_B=2\nExecStart=vllm serve a/b1 --seed 1 -tp 2',
                    "B=2",
                ),
            )
        ),
        (
            "docker run -e VLLM_A=1 `\n vllm/vllm-openai:v0.20.0 `\n --model a/b -tp 2",
            "VLLM_A=1",
            "`",
        ),
        ("args:\n- --model=a/b\n...\n- --seed=1", "--model=a/b;--seed=1", ""),
        ("FROM vllm/vllm-openai:v0.20.0\nENV VLLM_A=1\nCMD --model a/b", "VLLM_A=1;0.20.0", ""),
        ('FROM vllm/x:v1\nENTRYPOINT ["vllm", "serve"]\nCMD ["a/b-1"]', "a/b-1", ""),
        (
            "vllm:\n  command: --model a/b\n  environment:\n    NCCL_A: ${A:-1}",
            "NCCL_A=1",
            "=${A",
        ),
        ("vllm:\n  command: --model a/b\n  environment:\n    NCCL_A: 1", "NCCL_A=1", ""),
        (
            "x:\n  modelURL: a/b\n  vllmConfig:\n    enablePrefixCaching: false\n    maxNumSeqs: 9",
            "--no-enable-prefix-caching;--max-num-seqs 9",
            "",
        ),
        (
            "repository: vllm/vllm-openai\ntag: v0.20.0\nargs: [--model, a/b, --seed, '1']",
            "vllm/vllm-openai:v0.20.0;--seed 1",
            "",
        ),
        (
            "modelURL: a/b\nvllmConfig:\n  maxNumSeqs: 9\n  extraArgs: ['--seed', '1']",
            "serve a/b;--max-num-seqs 9;--seed 1",
            "",
        ),
        ('LLM(model=os.environ.get("M", "a/b"), seed=3)', "serve a/b;--seed=3", "literal"),
        ("A=1; export VLLM_B=2\nvllm serve a/b --seed 1", "VLLM_B=2;--seed 1", ""),
        ('name = "a/b"\nn = 2\nLLM(model=name, tensor_parallel_size=n)', "a/b;-tp=2", "literal"),
        ('import os\nos.environ["VLLM_A"] = "1"\nLLM("a/b", seed=3)', "VLLM_A=1", ""),
    ],
    "requests": [
        (
            f"{RUN}\ncurl localhost:8001/v1/completions -d '{BODY}'",
            "goes to localhost:8001",
            "request(",
        ),
        (f"{RUN}\ncurl http://box:9/v1/completions -d '{BODY}'", "GAP: not sent", "request("),
        (
            f"{RUN}\ncurl [::1]:8000/v1/completions -d '{BODY}'",
            'request(path="/v1/comp',
            "not sent",
        ),
        (
            f"{RUN}\nfor i in $(seq 1 8); do\n  curl box:8000/v1/completions -d '{BODY}' &\ndone",
            "together(;request 8",
            "request 9;not read: “for",
        ),
        (
            f"{RUN}\nfor i in {{1..3}}; do curl box:8000/v1/completions -d '{BODY}'; done",
            "request 3",
            "together(",
        ),
        (
            f"{RUN}\nfor i in {{1..300}}; do curl box:8000/v1/completions -d '{BODY}' & done",
            "not read: “for i in {1..300}",
            "request 65",
        ),
        (
            f"{RUN}\nfor i in 1 2; do\n  curl box:8000/v1/completions -d '{BODY}' &\ndone",
            "together(;request 2",
            "request 3",
        ),
        # a loop that has ended
        (
            f"{RUN}\nfor i in 1 2; do curl {URL} -d '{BODY}' & done\ncurl {URL} -d '{BODY}'",
            "request 3",
            "request 4",
        ),
        (
            f"{RUN}\nfor i in 1 2; do curl {URL} -d '{BODY}' &\ndone; wait\ncurl {URL} -d '{BODY}'",
            "request 3",
            "request 4",
        ),
        (
            f"{RUN}\nfor i in {{1..2}}; do curl {URL} -d '{BODY}' &done\ncurl {URL} -d '{BODY}'",
            "request 3",
            "request 4",
        ),
        (
            f"{RUN}\nfor i in 1 2; do curl {URL} -d '{BODY}'; done; curl {URL} -d '{BODY}'",
            "request 3",
            "request 4",
        ),
        (
            f"{RUN}\nfor i in 1 2; do curl {URL} -d '{BODY}' & curl {URL} -d '{BODY}' & done",
            "request 4",
            "request 5",
        ),
        # other methods of Python clients, and bodies of several parts
        (
            f"{RUN}\nhttpx.stream('POST', '{URL}', json={BODY})",
            '{"prompt": "hi", "max_tokens": 5}',
            "not read",
        ),
        (
            f'{RUN}\nrequests.request("POST", "{URL}", json={BODY})',
            '{"prompt": "hi", "max_tokens": 5}',
            "not read",
        ),
        (
            f"{RUN}\nasync with session.request(method='POST', url='{URL}', json={BODY}):",
            '{"prompt": "hi", "max_tokens": 5}',
            "not read",
        ),
        (
            f"{RUN}\nrequests.request('GET', 'http://box:8000/v1/models')",
            "chat(",
            "\n        request(",
        ),
        (
            f"{RUN}\nA = {BODY}\nhttpx.post('{URL}', json={{**A, 'n': 7}})",
            '{"prompt": "hi", "max_tokens": 5, "n": 7}',
            "not read",
        ),
        (
            f"{RUN}\nA = {BODY}\nhttpx.post('{URL}', json=A | {{'n': 7}})",
            '{"prompt": "hi", "max_tokens": 5, "n": 7}',
            "not read",
        ),
        (
            f"{RUN}\nhttpx.post('{URL}', json={{**args, 'n': 7}})",
            "no request of the text was read;not read: “httpx.post(",
            "request(",
        ),
        # files that only the reporter has
        (
            f"{RUN} --enable-lora --lora-modules sql=/adapters/sql b=/adapters/b",
            "GAP: /adapters/sql is on the reporter's machine;GAP: /adapters/b is on",
            "",
        ),
        (
            """vllm serve a/b --lora-modules '{"name": "x", "path": "~/lora/x"}'""",
            "GAP: ~/lora/x is on the reporter's machine",
            "",
        ),
        (
            "vllm serve a/b --chat-template=./tool.jinja --root-path /api --download-dir=/models",
            "GAP: ./tool.jinja is on the reporter's machine",
            "GAP: /",
        ),
        (
            f"""{RUN}\ncurl box:8000/v1/load_lora_adapter -d '{{"lora_path": "/adapters/y"}}'""",
            "GAP: request 1: /adapters/y is on the reporter's machine",
            "",
        ),
        (
            "vllm serve a/b --chat-template /home/ana/x.jinja",
            "GAP: /home/[user]/x.jinja is on the reporter's machine",
            "",
        ),
        (
            f'{RUN}\ncurl box:8000/v1/completions -d \'{{"prompt": "/no_think hi"}}\'',
            '"/no_think hi"',
            "reporter's machine",
        ),
        (
            f"{RUN}\n$ curl box:8000/v1/completions -d @- <<'X'\n{BODY}\nX\n$ date",
            'request(path="/v1/completions", body={"prompt": "hi", "max_tokens": 5}',
            "request 2",
        ),
        (
            f"{RUN}\ncurl box:8000/v1/completions -d $'" + '{"prompt": "a\\\\nb"}' + "'",
            "{\"prompt\": 'a\\nb'}",
            "\\\\n",
        ),
        (
            f'{RUN}\nflag = True\nclient.completions.create(prompt="hi", stream=flag)',
            '"stream": True',
            "not a literal",
        ),
    ],
}
PROSE = {
    "releases": [
        ("Helm chart version: 0.7.1, vLLM 0.24.0", "==0.24.0", "==0.7.1"),
        ("Operator Version: 0.7.1", "no release was read", "==0.7.1"),
        ("image ghcr.io/x/llm-d-cuda:v0.5.1", "no release was read", "==0.5.1"),
        ("Name: xgrammar\nVersion: 0.1.17", "no release was read", "==0.1.17"),
        ("lmcache/vllm-openai:v0.3.9 has it", "no release was read", "==0.3.9"),
        ("vLLM 0.24.1 rc2", "==0.24.1rc2", ""),
        ("vLLM 0.24.0 (nightly) dies.", "no release was read;vLLM 0.24.0 (nightly)", "==0.24.0"),
        ("vLLM 0.24.0. 0.23.0 fine / 0.25.0 not", "==0.24.0;older: 0.23.0", "older: 0.25.0"),
        ("vLLM v0.24.0 ~ v0.27.1", "==0.24.0;0.27.1", ""),
        ("Regression from 0.24.0 to 0.25.0", "==0.25.0", "==0.24.0"),
        ("0.24.0 works.", "no release was read", "==0.24.0"),
        *(
            (f"{text}. It dies.", f"no release was read;{text}", "==0.24.0")
            for text in (
                "vLLM 0.24.0 nightly",
                "It is a nightly build (0.24.0)",
                "On main (0.24.0)",
            )
        ),
        *(
            (f"vLLM 0.24.0+{device} dies", '"==0.24.0"', "a build between")
            for device in ("cu130", "rocm7.0", "cpu")
        ),
        ("It dies on main, 0.24.0 and 0.25.0.", "==0.24.0", "no release was read"),
        ("vLLM 0.24.0+g1a2b3c4 dies", "==0.24.0+g1a2b3c4;is a build between", ""),
        ("vLLM 0.24.0rc1.dev4+g1 dies, nightly 0.24.0", "==0.24.0rc1.dev4+g1", "the bug: 0.24.0"),
        ("vLLM 0.25.0, whereas 0.24.0 is fine", "==0.25.0", ""),
        ("vLLM 0.25.0 dies (works fine on v0.24.0).", "works, or is older: 0.24.0", ""),
        ("vllm-ascend 0.13.0rc1 dies", "no release was read", "==0.13.0"),
        ("The vllm-gaudi plugin 0.12.0 dies", "no release was read", "==0.12.0"),
        ("Installed from PyPI (vllm 0.24.0).", "==0.24.0", "works, or is older"),
        ("vLLM built from source, tag v0.24.0, on a box", "==0.24.0", "no release was read"),
        ("The vllm chart from git, tag v0.24.0, on a box", "no release was read", "==0.24.0"),
        ("The chart's values, tag v0.24.0, on a box", "no release was read", "==0.24.0"),
        ("vllm installed from wheel 0.24.0", "==0.24.0", "works, or is older"),
        ("Run 0.25.0. Setting VLLM_A=1 helps.", "GAP: not read: “Setting VLLM_A=1 helps.”", ""),
    ],
    "lists of releases": [
        *(
            (f"It dies.\n\n{text}", 'bad="==0.24.0";works, or is older: 0.23.0', "")
            for text in (
                "Works: 0.22.2, 0.23.0\nBroken: 0.24.0, 0.24.1",
                "**Good versions**: v0.22.2 / v0.23.0\n\n**Bad**: v0.24.0",
                "Last good: 0.23.0, first bad: 0.24.0.",
                "I tested 0.22.2 (good), 0.23.0 (good) and 0.24.0 (bad).",
                "- 0.23.0: works\n- 0.24.0: crashes\n- 0.24.1: crashes",
                "0.23.0 – OK; 0.24.0 – crash",
                "0.23.0 is fine, 0.24.0 breaks: its rerank endpoint returns 500",
                "0.23.0 good / 0.24.0 bad",
                "It works on 0.23.0 but not on 0.24.0.",
                "Works in 0.23.0, and not in v0.24.0",
                "0.23.0 → 0.24.0 is a regression.",
                "Not affected: 0.22.2 and 0.23.0. Affected: 0.24.0 to 0.24.1.",
                "| 0.23.0 | ok |\n| 0.24.0 | crash |",
                "| 0.23.0 | ok | ok |\n| 0.24.0 | ok | crash |",
                "| | 0.23.0 | 0.24.0 |\n|---|---|---|\n| x | ok | crash |",
                "0.23.0 ✅, 0.24.0 ❌",
                "First seen in 0.24.0. Good: 0.22.0/0.23.0.",
                "Regression since 0.24.0, which is not in 0.23.0.",
                "Downgrading to 0.23.0 solves it. We run v0.24.0.",
                "0.24.0 and 0.24.1 do not work. 0.23.0 does not crash.",
                "It ran for 3 days on 0.23.0 and crashes in minutes on 0.24.0.",
                "It is on 0.24.0, 0.24.1 and 0.25.0, but not on 0.23.0.",
                "I see it with 0.24.0 (0.23.0 had no such problem).",
                "It hangs with 0.24.0. 0.23.0 没有问题。",
            )
        ),
        (
            "Regression between v0.23.0 and v0.24.0; 0.23.0 is good.",
            "==0.24.0",
            "has the bug: 0.23",
        ),
        ("Image: rocm/vllm:rocm6.4_vllm_0.24.0", "==0.24.0", "no release was read"),
        (
            "It has a different crash on 0.24.0. 0.23.0 isn't affected.",
            "==0.24.0;older: 0.23.0",
            "",
        ),
        ("A recent bug in 0.24.0. It doesnt happen in 0.23.0.", "==0.24.0;older: 0.23.0", "named"),
        ("It works with 0.5.1 of sglang. vLLM 0.24.0 dies.", "==0.24.0", "older: 0.5.1"),
        ("It works with 0.6.2 from flashinfer. vLLM 0.24.0 dies.", "==0.24.0", "older: 0.6.2"),
        ("版本：0.24.0、0.24.1 都有问题，0.23.0 正常。", "has the bug: 0.24.1;older: 0.23.0", ""),
        (
            "v0.23.0: ✔️\nv0.24.0: ✘\nv0.24.1: ✘",
            "==0.24.0;also has the bug: 0.24.1;older: 0.23.0",
            "",
        ),
        (
            "It dies: on a box, 0.24.0. It has 80 % of 0.23.0 before it dies.",
            "==0.24.0",
            "named: 0.23",
        ),
        ("It appeared in 0.24.0. Going back to 0.23.0 cures it.", "==0.24.0;older: 0.23.0", ""),
        ("reg.corp.io/llm/vllm-openai:v0.24.0 dies.", "==0.24.0", "no release was read"),
        ("vllm 0.24.0 from pip dies.", "==0.24.0", "no release was read"),
        ("It uses vllm-0.24.0-cp312.whl.", "==0.24.0", "no release was read"),
        ("It hangs. 0.24.0 on a box.", "==0.24.0", "no release was read"),
        ("It dies. Broken in 0.24.0–0.26.0.", "==0.24.0;also has the bug: 0.26.0", "older"),
        ("Upgrading from 0.24.0 to 0.25.0 did not help.", "==0.25.0", "older: 0.25"),
        ("With 0.24.0 and --enforce-eager it works.", "==0.24.0", "older: 0.24"),
        ("Is it fixed in 0.25.0? I use vllm 0.24.0. It dies.", "==0.24.0", "older: 0.25.0"),
        ("flash-attn 0.3.1 works. vLLM 0.24.0 dies.", "==0.24.0", "older: 0.3.1"),
        ("It dies. Not reproducible on A100, only on H100.", "reported on H100", "reported on A"),
        ("Works on L40S. On 2x H200 it dies.", "reported on 2 x H200", "reported on L"),
    ],
    "the rest of a sentence": [
        *(
            (f"It dies. {text}", f"GAP: not read: “{rest}”", "")
            for text, rest in (
                ("With --enforce-eager it works, but takes 40 s.", "With … it …, but takes 40 s."),
                ("With --enforce-eager it works on an A100.", "With … it … on an A100."),
                ("It survives with --enforce-eager, not at night.", "It … with …, not at night."),
                ("Fine with --enforce-eager, in int8.", "Fine with --enforce-eager, in int8."),
            )
        ),
        *(
            (f"{text}", f"GAP: not read: “{rest}”", "")
            for text, rest in (
                ("It crashes after 20 minutes.", "It … after 20 minutes."),
                ("It hangs if two adapters are loaded.", "It … if two adapters are loaded."),
                ("It crashes, but never with bf16.", "It …, but never with bf16."),
                ("It dies with FLASH_ATTN.", "It … with FLASH_ATTN."),
                ("It dies on an L4. L40S is the same.", "L40S is the same."),
                ("vLLM 0.24.0在18张卡上崩溃。", "vLLM …在18张卡上…。"),
                ("It dies with AWQ weights.", "It … with AWQ weights."),
                ("A 600-token prompt kills it after 7 runs.", "A … it after 7 runs."),
                ("It crashes with 8 GPUs; with 4 no crash.", "It … with …; with 4 no crash."),
                ("vLLM 0.24.0 crashes every 30 s.", "vLLM … every 30 s."),
                ("It runs on 4xH100 with 300 s timeouts.", "It runs on … with 300 s timeouts."),
            )
        ),
        ("It crashes after 20 min. With --enforce-eager it works.", "lives", "read: “With"),
        ("Send two requests of 3,000 tokens each.", "prompt=3000", "read: “S"),
        ("It crashes on 4x H100 with vLLM 0.24.0.", "==0.24.0", "read: “I"),
    ],
    "values of variables": [
        ("```\nVLLM_A=FAST vllm serve a/b1\n```\nThis is slow: VLLM_A=SLOW", "VLLM_A=SLOW”", ""),
        (
            "```\n- name: VLLM_A\n  value: 'SLOW'\n```",
            "not read: “- name: VLLM_A value: 'SLOW'",
            "",
        ),
        ("| VLLM_A | SLOW |", "not read: “| VLLM_A | SLOW |”", ""),
        ("It dies. With BACKEND=FAST it starts.", "“With BACKEND=FAST it starts.”", ""),
        ("It dies. Output of the other one is wrong, too.", "“Output of the other", ""),
        ("It dies. Outlines gives garbage.", "“Outlines gives garbage.”", ""),
        ("It dies. ignore_eos=true is on.", "not read: “ignore_eos=true is on.”", ""),
        (
            "```\n# works\nvllm serve a/b1\n# crashes\nvllm serve a/b2\n```",
            "not read: “# works … # crashes”",
            "",
        ),
        ("It dies: ValueError: bad. Setting 17 of them works.", "“Setting 17 of them works.”", ""),
        ("It fails (IndexError: bad). Torch 2.9.7 works.", "not read: “Torch 2.9.7 works.”", ""),
        ("```\nautoPull: false\nseed: 1\n```", "not read: “autoPull: false", ""),
        ("We set `VLLM_A` to `SLOW`.", "not read: “We set `VLLM_A` to `SLOW`.”", ""),
        ("```\nenvironment:\n  VLLM_A: SLOW\n```", "VLLM_A: SLOW”", ""),
    ],
    "private names": [
        ("It logs to /data/jdoe/log.txt 7 times.", "/data/[user]/log.txt 7", "jdoe"),
        (
            "It logs to /mnt/nas/team-a/models/x1.bin 7 times.",
            "/mnt/[user]/[user]/models/x1",
            "team",
        ),
        ("It has 7 files in /nfs/homes/jdoe.", "/nfs/homes/[user]", "jdoe"),
        (r"It has 7 files in D:\jdoe\models\x1.", r"D:\[user]\models", "jdoe"),
        ("```\n[jdoe@gpu17 ~]$ date 77\n```", "[[user]@[host] ~]$ date 77", "jdoe"),
        ("```\njdoe@gpu17:/x$ date 77\n```", "[user]@[host]:/x$ date 77", "gpu17"),
        (f"```\ncurl gpu17:8000/v1/completions -d '{BODY}'\n```", "request(", "gpu17"),
        (
            f"```\ncurl gpu17.x.org:8000/v1/completions -d '{BODY}'\n```".replace(
                "hi", "/raid/al/x1"
            ),
            '{"prompt": "/raid/[user]/x1"',
            "gpu17",
        ),
        (
            f"```\ncurl [::1]:8000/v1/completions -d '{BODY}'\n```".replace(
                "hi", "http://10.1.2.3/a"
            ),
            "GAP: request 1: http://[address]/a has a host that is left out here: name",
            "10.1",
        ),
        ("Bob (phone +1 555 010 9999) saw 7 of them on 0.24.0.", "phone [phone]) saw 7", "9999"),
        ("Call 7 times, Tel. 030/1234567.", "Tel. [phone]", "1234567"),
        ("7次，联系电话：138-0013-8000。", "联系电话：[phone]", "8000"),
        ("Phone: 0170 1234567. It dies.", "", "1234567"),
        ("It dies on gpu-prod-03.bigcorp.com 7 times.", "on [host] 7 times", "bigcorp"),
        ("It dies on n17.cluster.uni-x.de 7 times.", "on [host] 7 times", "uni"),
        ("Models are in /data/models/hub 7 times.", "/data/models/hub 7", "[user]"),
    ],
    "letters": [
        *(
            (text, "", "GAP: not read")
            for text in (
                "Hi all, hello team 2!",
                "Dear vLLM team of 2026,",
                "Thanks in advance, you are 100% great!",
                "Best regards,\nJane Doe\nTel: +49 170 1234567\nRoom 204",
                "Mobile: 0170 1234567",
                "Call me: +49 (170) 123-4567.",
                "Sent from my iPhone 15",
            )
        ),
        ("Hi, we run 17 images and it dies.", "“Hi, we run 17 images and it ….”", ""),
        ("Thanks, it works with 300 tokens.", "“Thanks, it works with 300 tokens.”", ""),
    ],
    "results": [
        ("It never crashes, but answers are wrong.", "errs)", "dies)"),
        ("It does not answer; I kill -9 it.", "by the words of the text;hangs)", "dies)"),
        ("The server stops responding.", "hangs)", "dies)"),
        ("几个小时后卡死。", "hangs)", "dies)"),
        ("The call might cause deadlock. It dies.", "dies)", "hangs)"),
        ("/rerank returns no data.", "errs)", "dies)"),
        ("Accuracy drops to 0.62.", "errs)", "dies)"),
        ("With it, gsm8k falls to 40 %.", "errs)", "dies)"),
        ("The pod never gets ready.", "hangs)", "dies)"),
        ("The server never becomes ready.", "hangs)", "dies)"),
        ("/rerank with top_n=5 → 500", "errs)", "dies)"),
        ("The output is garbage. Nothing crashes.", "errs)", "dies)"),
        ("It returns wrong logprobs.", "errs);GAP: only a failed request counts as wrong", "dies)"),
        ("The scores are wrong.", "errs);GAP: only a failed request counts as wrong", "dies)"),
        ("It gives wrong prompt embeddings.", "errs);output=checks(…) compares", "dies)"),
        ("Some calls return HTTP 500.", "errs)", "GAP: only"),
        (
            "One in ten of the vectors is NaN. Two out of three of the calls have it.",
            "errs);text: “One in ten of the vectors is NaN.”;read: “Two out of three",
            "dies)",
        ),
        ("It dies. There is no NaN.", "dies)", "errs)"),
        (
            "```\nresp, err := c.CreateEmbeddings(ctx, openai.Request{Input: inputs})\n```",
            'its body was not read: “CreateEmbeddings(;path="/v1/embeddings"',
            "chat(",
        ),
    ],
    "second conditions": [
        ("It dies. TP=8 with `--enforce-eager` works.", "GAP: tried", "lives"),
        (
            "It dies. With `--enforce-eager` and one request at a time it works.",
            "GAP: tried",
            "lives",
        ),
        ("It dies. VLLM_A=1 with --enforce-eager is fine.", "GAP: tried", "lives"),
        ("It dies. With `--max-concurrency 3` it survived.", "GAP: tried", "lives"),
        ("It dies. With --enforce-eager it starts normally.", "lives", "GAP: tried"),
        ("It dies. With --enforce-eager it passes.", "lives", "GAP: tried"),
        ("It dies. Never finishes with --enforce-eager.", "dies, with_flags", "lives"),
        *(
            (f"It freezes. {text}", "prefix-caching;lives, with_flags(;hangs)", "GAP: tried")
            for text in (
                "When I disable the prefix caching, freeze not comes.",
                "When I disable prefix caching, it does not freeze.",
                "If I turn off prefix caching the freeze is gone.",
                "With prefix caching switched off and without prefix caching no freeze.",
            )
        ),
        ("It dies. I disable our cache, all right.", "read: “I disable our cache, all right", ""),
    ],
    "variables of collect_env without a fence": [
        ("LD_LIBRARY_PATH=/x\nVLLM_A=1\nPATH=/y", "read: “LD_LIBRARY_PATH=/x VLLM_A=1 PATH=/y", ""),
    ],
    "when it dies": [
        *(
            (
                f"{CODE.format(DEATH)}\n\n{text}",
                "guess from the words of the text: request",
                "when the",
            )
            for text in (
                "It is not on boot but on the first preemption!",
                "After 2-3 minutes:",
                "It is at 24 users.",
                "It happens every third run.",
            )
        ),
        (CODE.format(DEATH), "GAP: when the engine dies was not read", "guess from the words"),
        (
            f"{CODE.format(DEATH)}\n\nAfter 2 minutes of loading weights.",
            "GAP: when the engine dies was not read",
            "guess from the words",
        ),
    ],
    "exceptions apart from their lines": [
        (
            CODE.format(DEATH + '\n  File "vllm/v1/x.py", line 7, in get_finished'),
            'the frames are those of all lines of files;frames=["get_finished"]',
            "no frames",
        ),
        (
            (
                'HTTP 500:\n\n```\nTraceback (most recent call last):\n  File "vllm/x.py", line 7,'
                " in f\n    g()\nTypeError: bad\n```"
            ),
            "not in this file, as the reported arm errs: the exception TypeError in f: bad",
            "signature",
        ),
    ],
    "expected and answered": [
        ("It dies.\n\nExpected: the text of before.", "read: “Expected: the text of before", ""),
        ("It dies.\n\nActual result: some other text.", "read: “Actual result: some other", ""),
        *(
            (f"It dies.\n\n{text}", f"GAP: not read: “{quoted}”", "")
            for text, quoted in (
                ("> Does num_spec 1 work?\n\nYes.", "> Does num_spec 1 work? Yes."),
                ("Does num_spec 1 work?\nNo.", "Does num_spec 1 work? No."),
                (
                    "Is it alike without it? No, not at all.",
                    "Is it alike without it? No, not at all.",
                ),
                ("### Expected behavior\n\nAll alike.", "Expected behavior: All alike."),
                ("**a**: num_spec 1?\n**b**: works", "**a**: num_spec 1? **b**: works"),
                ("`XError: bad` **a**: num_spec 1?\nb: yes", "**a**: num_spec 1? b: yes"),
            )
        ),
    ],
    "requests below a header": [
        (
            (
                f"```http\nPOST http://box:8000/v1/completions HTTP/1.1\nHost: box\n\n{BODY}\n```"
                "\n\nAll of 20 runs."
            ),
            f'path="/v1/completions", body={BODY};not read: “All of 20 runs.”',
            "chat(",
        ),
        (
            (
                "A (50 of them, one by one):\n\n```\nPOST /v1/completions\n{'prompt': [1, 2]}"
                "\n```\n\nB:\n\n```\nPOST /v1/embeddings\nHost: x\n\n{'input': 'x'}\n```"
            ).replace("'", '"'),
            (
                'path="/v1/completions", body={"prompt": [1, 2]};path="/v1/embeddings", body={'
                '"input": "x"};not read: “A (50 of them, one by one):”'
            ),
            "chat(",
        ),
        (
            (
                "```\nconst a = await client.chat.completions.create({\n  messages: [\n    { role:"
                ' "system", content: "Be kind." },\n  ],\n  n: 7,\n```'
            ),
            'messages: [ ⏎ { role: "system", content: "Be kind." }, … n: 7',
            "",
        ),
    ],
    "ranges and numbers": [
        (
            "The system prompt has 6k tokens and is shared.",
            "read: “The system prompt has 6k tokens",
            "6000",
        ),
        ("60 requests in flight, between 2k and 9k tokens.", "[2000, 9000];spread=True", ""),
        ("Calls of 1,000-15,000 tokens.", "spread=True;GAP: the number of requests", ""),
        ("50 users, prompts from 1k ~ 3k tokens.", "[1000, 3000];spread=True", ""),
        ("More than 50 users, prompts from 1k ~ 3k tokens.", "at_once(51, prompt=[1000, 30", ""),
        ("No more than 50 users, prompts from 1k ~ 3k tokens.", "at_once(50, prompt=[1000", ""),
        ("At least 50 users, prompts from 1k ~ 3k tokens.", "at_once(50, prompt=[1000, 30", ""),
        ("4096 input tokens, 256 output tokens.", "prompt=4096, max_tokens=256", ""),
        ("并发数37，重启45次。", "37;45", ""),
        (
            "Dies at 32 concurrent requests, input tokens 1024, 2048 and 4096, output tokens 512.",
            "at_once(32, prompt=[1024, 2048, 4096], max_tokens=512)",
            "",
        ),
        (
            "It starts 9 simulated conversations. Each prompt has 5K to 9K tokens.",
            "at_once(9, prompt=[5000, 9000]",
            "",
        ),
        ("16 users with ISL 1k-8k, OSL 256.", "[1000, 8000], max_tokens=256, spread=True", ""),
        ("Input length: 700 / 900, output length of 3.", "prompt=900, max_tokens=3", ""),
        ("Prompts of 15-20 tokens: fine.", "GAP: no prompt size was read", "prompt=[15"),
        ("A prompt of 5 tokens vs one of 80 tokens.", "GAP: no prompt size was read", "prompt=5"),
        ('A prompt of 600 tokens with `"n": 3`.', "GAP: request 1: the field n of", ""),
        ("Send it twice.", "GAP: not read: “Send it twice.”", ""),
        ("A user closes the tab.", "GAP: not read: “A user closes the tab.”", ""),
        ("Abort it in mid-stream.", "GAP: not read: “Abort it in mid-stream.”", ""),
        ("The client disconnects early.", "GAP: not read: “The client disconnects", ""),
        ("```\nreturn  # cancels the request\n```", "GAP: not read: “return # cancels", ""),
        ("## Request (a couple of times)\n\nSend it.", "(a couple of times)”", ""),
        ("1. Start it\n2. `curl x` 17 times", "`curl x` 17 times", "“2.”"),
    ],
    "models and GPUs": [
        ("GPU: L40S × 2（48GB）", "2 x L40S of 48 GB", ""),
        ("4*4090 24G", "4 x 4090 of 24 GB", ""),
        ("显卡：4张A800 80G", "4 x A800 of 80 GB", ""),
        ("It has two 5070 Ti cards.", "2 x 5070 Ti", "no GPU was read"),
        ("4x H100s, 80 GB each", "4 x H100", ""),
        ("Seen on MI300X.", "reported on MI300X:", "1 x MI300X"),
        ("1x V100", "1 x V100", "gpu_memory_gb"),
        ("1x A100, 16 vCPU, 64 GB RAM", "1 x A100:", "gpu_memory_gb"),
        ("A100 machine with 64 GB of RAM", "reported on A100:", "gpu_memory_gb"),
        ("nvidia rtx4090 x8", "8 x nvidia rtx4090", ""),
        ("4090(24gb) * 2", "2 x 4090", ""),
        ("GPU: none, a CPU build", "Needs(gpus=0);Dummy(", "changes="),
        ("There is no GPU.", "Needs(gpus=0)", "no GPU was read"),
        ("No GPU memory is left.", "no GPU was read", "Needs(gpus=0)"),
        ("H100, and a CPU-only router", "reported on H100", "Needs(gpus=0)"),
        ("H20-3e ×8", "reported on 8 x H20", ""),
        ("The app streams (stream=True).", "stream=True", "stream=False"),
        ("Streaming requests die, non-streaming requests too.", "stream=False", "stream=True"),
        ("2x B70", "2 x B70", "no GPU was read"),
    ],
    "parts that no command has": [
        ("```\n- name: LMCACHE_AB\n  value: x\n- name: MY_URL\n  value: y\n```", "MY_URL", ""),
        ("```\n- name: LMCACHE_AB\n  value: x\n```", "not read: “- name: LMCACHE_AB", ""),
        (
            "```\nlmcacheConfig:\n  enabled: true\n```",
            "not read: “lmcacheConfig: ⏎ enabled: true”",
            "",
        ),
        ("It runs in `corp/fork:1.2-b3` there.", "corp/fork:1.2-b3", ""),
    ],
}
WHOLE = [
    # a tiny model that takes what the requests send
    (
        f"{RUN} --limit-mm-per-prompt '{{\"image\": 2}}'",
        'family="blip2", heads=4, kv_heads=4',
        "",
    ),
    (
        f'{RUN}\n\ncurl box:8000/v1/rerank -d \'{{"query": "a", "documents": [""]}}\'',
        'request(path="/v1/rerank";GAP: no tiny model ranks or scores',
        "",
    ),
    (
        f"{RUN}\n\nrequests.post('http://box:8000/v1/embeddings', json=dict(input=text * n))",
        'request(path="/v1/embeddings"',
        "chat(",
    ),
    (f"{RUN}\n\nIt dies. Three of these at the same time are enough.", "“Three of these at", ""),
    (f"{RUN}\n\n```\ntimeout 2 curl -sN http://box/v1/completions &\n```", "“timeout 2 curl", ""),
    (
        f"{RUN}\n\nIt dies. With `--no-enable-prefix-caching` the answers are always right.",
        'arm("no-enable-prefix-caching", lives',
        "",
    ),
    # "nt" at the end of a noun is no "not"
    (f"{RUN}\n\nThe client crashes the engine.", "by the words of the text: “The client", ""),
    (f"{RUN}\n\nIt doesnt crash.", 'arm("reported", errs)', "dies"),
    (f"{RUN}\n\n4x RTX A6000. It dies.", "reported on 4 x RTX A6000: ", ""),
    (
        f"{RUN} --max-model-len 4096\n\nA prompt of 4095 tokens kills it.",
        "chat(prompt=4095, max_tokens=1",
        "left out",
    ),
    *(
        (TWO.format(first, second), f"vllm/x:{image};not taken: “", "several commands")
        for first, second, image in (("good", "bad", "v2"), ("broken", "ok", "v1"))
    ),
    (TWO.format("prefill", "decode") + "\n\nThe decode server dies.", "vllm/x:v2", "several"),
    ("On vLLM 0.24.0: vllm serve a/b1 --seed 1\n\nIt dies.", "--seed 1", "no command"),
    ("vllm serve a/b1 --seed 1   (vLLM 0.24.0, on a box)\n\nIt dies.", "--seed 1", "no command"),
    ("vllm serve a/b1 --seed 1 (as root)\n\nIt dies.", "--seed 1", "no command"),
    # the server that has the bug
    *(
        (f"# The {role} server dies\n\n{PAIR}", f"--port {port};not taken: “", "several commands")
        for role, port in (("prefill", 1), ("decode", 2), ("Decode", 2))
    ),
    ("VLLM_A=10.1.2.3 vllm serve a/b1", "GAP: VLLM_A names a place of the reporter", "10.1"),
    ("vllm serve a/b1 --master-addr 10.1.2.3", "GAP: --master-addr names a machine", "10.1"),
    *(
        (f"{first}\n\n{SERVE}", "no title was read", 'title="' + first[:2])
        for first in ("Works:", "Hi all,", "Here is my command:")
    ),
    *(
        (f"{text}\n\nIt dies.", f"VLLM_A=SLOW \\\\\n;{quoted}", "VLLM_A=FAST \\")
        for text, quoted in (
            (
                (
                    "Works:\n```\nexport VLLM_A=FAST\nvllm serve a/b1\n```\nFails:\n```\n"
                    "export VLLM_A=SLOW\nvllm serve a/b1\n```"
                ),
                "not taken: “export VLLM_A=FAST vllm serve a/b1”",
            ),
            (
                (
                    "Fails:\n```\nVLLM_A=SLOW vllm serve a/b1\n```\n\n"
                    "Works:\n```\nVLLM_A=FAST vllm serve a/b1\n```"
                ),
                "not taken: “VLLM_A=FAST vllm serve a/b1”",
            ),
            ("`VLLM_A=SLOW vllm serve a/b1`\n\nWith VLLM_A=FAST it works.", "“With VLLM_A=FAST it"),
        )
    ),
    # another command has another shell
    (
        "Works:\n```\nexport VLLM_A=1\nvllm serve a/b1\n```\nFails:\n```\nvllm serve a/b1\n```",
        "not taken: “export VLLM_A=1 vllm serve a/b1”",
        "VLLM_A=1 \\",
    ),
    (
        f"# It dies after 17 images on H100\n\n{SERVE}",
        "GAP: not read: “It … after 17 images on …”",
        "",
    ),
    (f"[Bug]: Crash in 0.24.0 with 5 adapters\n\n{SERVE}", "“… in … with 5 adapters”", ""),
    (
        "```\nvllm serve --config a.yaml --seed 2\n```\n\n```\nmodel: a/b1\nseed: 1\nport: 16\n```",
        "--model a/b1;--seed 2;--port 16;from the file of --config",
        "\n          --seed 1",
    ),
    ("### It dies\n\n`vllm serve a/b1 --seed 1`", 'title="It dies"', ""),
    *(
        (
            f"# [Bug]: 0.24.0 is fine, 0.25.0 breaks{rest}\n\n{SERVE}\n\n{COLUMNS}",
            f"==0.25.0;works, or is older: 0.24.0: “0.24.0 is fine, 0.25.0 breaks{rest}”",
            "0.25.0: ok",
        )
        for rest in ("", ": rerank returns 500")
    ),
    (
        f"{SERVE}\n\n{COLUMNS}",
        "==0.25.0;# works, or is older: 0.24.0\n;not read: “| 4 | ok | ok |”",
        "has the bug",
    ),
    # what a CPU refuses
    ("vllm serve a/b --tensor-parallel-size=2", 'without("-tp", why="a CPU refuses it")', ""),
    ("vllm serve a/b -dp 2 --seed 1", 'changes=[without("--data-parallel-size", why=', "-tp"),
    ("vllm serve a/b --quantization fp8", 'changes=[without("--quantization", why=', ""),
    # what is without an effect in the command, and what is not in it
    (
        "vllm serve a/b --enable-prefix-caching\n\n`--no-enable-prefix-caching` makes both equal.",
        "GAP: not read: “`--no-enable-prefix-caching` makes both equal.”",
        "",
    ),
    (
        "vllm serve a/b --async-scheduling\n\nBoth are equal under --no-async-scheduling.",
        "GAP: not read: “Both are equal under --no-async-scheduling.”",
        "",
    ),
    (
        "It dies.\n\n`docker run -p 8001:8000 -v ~/x:/x vllm/vllm-openai:v0.24.0 --model a/b`",
        "",
        "GAP: not read",
    ),
    (
        "It dies:\n\n    podman run --name x -p 81:8000 vllm/vllm-openai:v0.24.0 --model a/b",
        "",
        "GAP: not read",
    ),
    ("`vllm serve /m/b1 --seed 1`\n\n模型：a/b1", '"a/b1"', "unknown/unknown"),
    ("Server Command：  VLLM_A=1 vllm serve a/**b1** --seed 1", "VLLM_A=1;serve a/b1;--seed 1", ""),
    ("The launch cmd: vllm serve a/b --seed 1", "--seed 1", ""),
    ("## Your current environment\n\nexport VLLM_A=1\n\nvllm serve a/b -tp 2", "VLLM_A=1", ""),
    (
        "sudo docker run \\\n\n  -e VLLM_A=1 \\\n\n  vllm/x:v1 \\\n\n  --model a/b",
        "VLLM_A=1;--model a/b",
        "cannot be read",
    ),
    ("vllm serve a/b \\\n\n--seed 1 \\\n\n--port 9\n\nIt dies.", "--seed 1;--port 9", "It dies.\n"),
    (
        "env:\n- name: OUR_MODEL_NAME\n  value: a/b-1\n- name: X_Y\n  value: 1",
        "serve a/b-1;X_Y",
        "",
    ),
    (
        (
            "# It dies\n\nvllm serve a/b -tp 2\n\nSee\n"
            "https://github.com/vllm-project/vllm/issues/12345"
        ),
        "no issue number was read;related=",
        'issue="vllm',
    ),
    (
        "docker run reg.corp.internal:5000/vllm:v0.23.0 --model a/b --served-model-name ${NAME}",
        (
            "GAP: the image is of a private registry: --image names another one"
            ";GAP: no value of ${NAME} was read"
        ),
        "reg.corp",
    ),
    # words of one language that look like those of another
    (
        f"# Absturz bei Last\n\n{SERVE}\n\nDie Prompts sind lang, und die neuen Anfragen warten.",
        "by the words of the text: “Absturz bei Last”",
        "text: “Die",
    ),
    (
        f"{SERVE}\n\n并发 20，输入长度 400 到 900 token，输出 256 token，流式。",
        "at_once(20, prompt=[400, 900], max_tokens=256;GAP: the text states streamed",
        "",
    ),
    (f"{SERVE}\n\n非流式。A prompt of 500 tokens.", "stream=False", "stream=True"),
    # what was not tried, and what another engine does
    (f"{SERVE}\n\n- one A6000\n\n| 2x A6000 | not tested |", "A6000", "2 x A6000"),
    (f"{SERVE}\n\nServer dies with 7 streams; V0 engine is fine.", '"reported", dies', "errs"),
    (f"{SERVE}\n\nIt dies under load. It does not crash at startup.", '"reported", dies', "errs"),
    (f"{SERVE}\n\n关闭流式后正常。流式请求会崩溃。A prompt of 300 tokens.", "stream=True", ""),
    (
        f"{SERVE}\n\nstream=True works, stream=False crashes: 300 prompt tokens.",
        "=False",
        "m=True,",
    ),
    (f"{SERVE}\n\nV1 only.", "not read: “V1 only.”", ""),
    (
        f"{SERVE}\n\nWith tag v0.10.1 the same values run for days.",
        "not read: “With tag v0.10.1",
        "",
    ),
    (f"{SERVE}\n\nDecode asserts, prefill keeps running.", "“Decode asserts, prefill keeps", ""),
    (f"{SERVE}\n\nA new server gives the right text.", "“A new server gives", ""),
    (f"{SERVE}\n\nEvery half hour the core stops.", "“Every half hour the core stops", ""),
    (f"{SERVE}\n\nThis one dies at start-up.", "GAP: no traceback of the engine was read", ""),
    (f"{SERVE}\n\nThis one dies at start-up:\n\nValueError: bad dtype", 'phase="boot"', ""),
    # a loop over adapters, keys of a schema, and texts of prompts
    (
        (
            f"{CODE.format(RUN)}\n\n```\nfor a in de fr; do\n  curl {URL} -d "
            r'"{\"model\": \"$a\", \"prompt\": \"x\"}"'
            "\ndone\n```\n\nAnswers mix up."
        ),
        "request 1: $a stands for a value;not read: “for a in de fr; do”;errs",
        "",
    ),
    (
        (
            f"{CODE.format(RUN)}\n\n```\ncurl {URL} -d "
            '\'{"prompt": "x", "a": {"$defs": 1, "$ref": "#"}}\'\n```'
        ),
        '"$defs": 1',
        "stands for a value",
    ),
    (
        (
            f'{CODE.format(RUN)}\n\n```\nqs = ["What is A?"]\nfor q in qs:\n'
            "    client.completions.create(prompt=q)\n```"
        ),
        'not read: “qs = ["What is A?"]',
        "",
    ),
    # a body alone, and an endpoint alone
    (
        f'{SERVE}\n\nFor /v1/embeddings:\n\n```\n{{"input": "hi"}}\n```',
        'path="/v1/embeddings", body={"input": "hi"}',
        "",
    ),
    (
        f'{SERVE}\n\n```\n{{"messages": [{{"role": "user", "content": "hi"}}]}}\n```',
        'path="/v1/chat/completions", body={"messages"',
        "",
    ),
    (
        f"{SERVE}\n\nIt dies after some embedding requests.",
        'request 1: its body was not read;"/v1/embeddings", body={"input": "hello"}',
        "",
    ),
    # guesses, and the trigger that follows from the sizes
    ('LLM(model="a/b", seed=os.getpid())', "the value of 'seed' in that call is not a", ""),
    *(
        (f'{name}(model="a/b", seed=1)', f"the command is from Python call of {name}: “", "")
        for name in ("LLM", "EngineArgs", "AsyncEngineArgs")
    ),
    (
        "vllm serve /models/x --enforce-eager\n\nModel: org/public",
        'the public model: “Model: org/public”;"org/public",',
        "",
    ),
    (
        f"{SERVE} --max-model-len 1000\n\nA prompt of 5000 tokens kills it.",
        "left out, as it exceeds --max-model-len 1000: a prompt of 5,000;chat(prompt=100,",
        "prompt=5000",
    ),
    (
        f"{SERVE}\n\nWith --enforce-eager it works sometimes, still crashes at night.",
        "“With --enforce-eager it works sometimes, still crashes at night.”",
        "with_flags",
    ),
    (f"{SERVE}\n\nA prompt of 5000 tokens, in chunks.", "chunked_prefill(chunks=2),", ""),
    (f"{SERVE}\n\nA prompt of 5000 tokens.", " trigger=unstated(),", ""),
    (f"{SERVE}\n\nA prompt of 4096 tokens.", " trigger=unstated(),", ""),
    ("vllm serve a/b\n\nA prompt of 50 tokens.", " trigger=unstated(),", ""),
]
LOADS = [
    (f"{BENCH} --num-prompts 3\n```", 3),
    (f"{BENCH} --num-prompts 30 --max-concurrency 2\n```", 2),
    (f"{BENCH} --num-prompts 30 --request-rate 2\n```", 1),
    (f"{BENCH} --num-prompts 4 --request-rate inf\n```", 4),
]


@pytest.mark.parametrize(
    ("text", "shown", "absent"),
    [
        *((CODE.format(text), *rest) for rows in FORMS.values() for text, *rest in rows),
        *((f"{SERVE}\n\n{text}", *rest) for rows in PROSE.values() for text, *rest in rows),
        *WHOLE,
    ],
)
def test_forms(text: str, shown: str, absent: str) -> None:
    made = drafted(text)
    checked(made)
    file = made.text[made.text.index("scenario = ") :]
    assert missing(re.sub(r"--tensor-parallel-size", "-tp", file), *shown.split(";")) == []
    assert not absent or absent not in file


@pytest.mark.parametrize(("text", "count"), LOADS)
def test_the_load_of_a_benchmark(text: str, count: int) -> None:
    assert drafted(text).text.count("completion(prompt=96") == count


def test_a_public_store_is_no_host() -> None:
    text = with_public_stores("s3://Qwen3-8B hf://org/m1 s3://corp-data/x", Redactor().text)
    assert ("s3://Qwen3-8B" in text, "hf://org/m1" in text, "corp-data" in text) == (
        True,
        True,
        False,
    )
