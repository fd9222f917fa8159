from __future__ import annotations

import pytest

from vllm_repro.journal.private_names import without_private_names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            r"/Users/jane/x C:\Users\jane\x /nfs/home/jo/y",
            r"/Users/[user]/x C:\Users\[user]\x /nfs/home/[user]/y",
        ),
        ("tcp://10.0.0.5:4123 from 192.168.7.7", "tcp://[address]:4123 from [address]"),
        ("peer 93.184.216.34:49160", "peer [address]:49160"),
        ("on fd00:1234::77:1, ::ffff:a00:5", "on [address], [address]"),
        ("on 2606:2800:220:1::1 and [3fff::1]:80", "on [address] and [[address]]:80"),
        (
            "http://gpu17.prod:8000/v1, https://[fd00::1]/",
            "http://[host]:8000/v1, https://[address]/",
        ),
        ("--host gpu17 --master-addr=node-a", "--host [host] --master-addr=[host]"),
        (
            "VLLM_HOST_IP=node-a, HOSTNAME=box, 'node_ip': 'n1'",
            "VLLM_HOST_IP=[host], HOSTNAME=[host], 'node_ip': '[host]'",
        ),
        ("node-a17:1234:1250 [0] NCCL INFO", "[host]:1234:1250 [0] NCCL INFO"),
        ("to [node-b18]:29500", "to [[host]]:29500"),
        (
            "vllm-0.infer.svc.cluster.local, ip-10-9-8-7.ec2.internal, a1.local",
            "[host], [host], [host]",
        ),
        ("jo@box:~/work$ vllm; Jo <jo.d@corp.example>", "[user]@[host]:~/work$ vllm; Jo <[email]>"),
    ],
)
def test_private_names_go(text: str, expected: str) -> None:
    assert (without_private_names(text), without_private_names(expected)) == (expected, expected)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:8000 ::1 [::]:8000 http://localhost:8000/v1 http://0.0.0.0:8000 --host 0.0.0.0",
        "https://github.com/vllm-project/vllm/issues/1 https://docs.vllm.ai/x http://pytorch.org/",
        "nvidia-curand-cu12==10.3.5.147, driver 535.104.05, cublas 12.1.3.1, mask 255.255.0.0",
        "turboquant_attn.py:747, 08:24:30, c10d::add, torch::autograd::a, abc:def:1",
        (
            "vllm/vllm-openai@sha256:0123abcd, ipc:///tmp/5f, google.protobuf.internal.decoder,"
            " threading.local"
        ),
        "ghost=a localhost=b host=None, --hostfile x",
    ],
)
def test_public_names_stay(text: str) -> None:
    assert without_private_names(text) == text
