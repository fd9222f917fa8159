"""Fake keys and private names that tests plant into journals and logs."""

from __future__ import annotations

from dataclasses import dataclass

_LETTERS = "aB3dE5gH7jK9mN1pQ3sT5vX7zB9dF1hJ3kL5nP7r"


@dataclass(frozen=True)
class Plant:
    """written: text with the secret. hidden: what must not appear in the output."""

    written: str
    hidden: str


def _bare(text: str) -> Plant:
    return Plant(text, text)


SECRETS = {
    "hf": _bare(f"hf_{_LETTERS[:34]}"),
    "openai": _bare(f"sk-proj-{_LETTERS}_{_LETTERS}"),
    "anthropic": _bare(f"sk-ant-api03-{_LETTERS}"),
    "github": _bare(f"ghp_{_LETTERS[:36]}"),
    "github-fine": _bare(f"github_pat_11ABC_{_LETTERS}"),
    "gitlab": _bare(f"glpat-{_LETTERS[:20]}"),
    "aws-id": _bare("ASIAIOSFODNN7EXAMPLE"),
    "aws-secret": Plant(
        "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI"
    ),
    "google": _bare("AIzaSyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q"),
    "google-oauth": _bare("ya29.a0AfH6SMBx1y2z3a4b5c6d7e8f9"),
    "nvidia": _bare(f"nvapi-{_LETTERS}"),
    "azure": Plant(f"AccountKey={_LETTERS}==;", _LETTERS),
    "slack": _bare("xoxb-123456789012-abcdefghijklmnopqrstuvwx"),
    "webhook": Plant("https://hooks.slack.com/services/T00/B00/XyZzYxWvU", "XyZzYxWvU"),
    "docker": _bare(f"dckr_pat_{_LETTERS[:27]}"),
    "groq": _bare(f"gsk_{_LETTERS}"),
    "jwt": _bare("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"),
    "pem": Plant(
        "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n-----END PRIVATE KEY-----",
        "MIIEvQIBADANBgkq",
    ),
    "login": Plant("http://someuser:hunter2pass@proxy:3128", "hunter2pass"),
    "login-user": Plant("http://someuser:hunter2pass@proxy:3128", "someuser"),
    "redis": Plant("redis://:topsecretword@redis-1:6379/0", "topsecretword"),
    "query": Plant("https://b.s3.amazonaws.com/x?X-Amz-Signature=0123abcd4567", "0123abcd4567"),
    "flag": Plant("vllm serve m --api-key sekritword --port 1", "sekritword"),
    "flag-equals": Plant("--api-key=sekritword2", "sekritword2"),
    "flag-token": Plant("--hf-token tokenword", "tokenword"),
    "bearer": Plant("Authorization: Bearer abcDEF123ghi", "abcDEF123ghi"),
    "basic": Plant("Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNz"),
    "environment": Plant("HF_TOKEN=envword", "envword"),
    "environment-quoted": Plant("WANDB_API_KEY='envword with spaces'", "with spaces"),
    "json": Plant('"HUGGING_FACE_HUB_TOKEN": "jsonword"', "jsonword"),
    "repr": Plant(
        "non-default args: {'api_key': ['reprword', 'secondword'], 'port': 8000}", "secondword"
    ),
    "yaml": Plant("password: yamlword", "yamlword"),
    "argv": Plant("argv: ['--api-key', 'argvword', '--port', '1']", "argvword"),
    "cookie": Plant("Cookie: session=cookieword; other=1", "cookieword"),
    "token": Plant("token=shortword", "shortword"),
    "pass": Plant("DB_PASS=password1", "password1"),
    "pwd": Plant("MYSQL_PWD=pwdword", "pwdword"),
    "bearer-letters": Plant("Bearer onlyletters", "onlyletters"),
    "curl": Plant("curl -u user:curlword x", "curlword"),
    "npm": _bare(f"npm_{_LETTERS[:36]}"),
    "pypi": _bare(f"pypi-AgEI{_LETTERS}"),
    "pgp": Plant("-----BEGIN PGP MESSAGE-----\nhQEMA\n-----END PGP MESSAGE-----", "hQEMA"),
    "webhook-name": Plant("SLACK_WEBHOOK=hookword", "hookword"),
    "auth-header": Plant("VLLM_AUTH_HEADER=headerword", "headerword"),
}

PRIVATE = {
    "home": Plant("/home/janedoe/models/x", "janedoe"),
    "mac": Plant("/Users/janedoe2/models", "janedoe2"),
    "windows": Plant(r"C:\Users\janedoe3\models", "janedoe3"),
    "network-home": Plant("/nfs/home/janedoe4/x", "janedoe4"),
    "url-host": Plant("http://gpu17.prod:8000/v1", "gpu17"),
    "tcp": Plant("distributed_init_method=tcp://10.11.12.13:41234", "10.11.12.13"),
    "address": Plant("connected to 192.168.77.88", "192.168.77.88"),
    "worker": Plant("(Worker pid=1, ip=172.20.3.4) boom", "172.20.3.4"),
    "public-peer": Plant("INFO: 93.184.216.34:49160 - POST", "93.184.216.34"),
    "ipv6": Plant("listening on fd00:1234::77:1", "fd00:1234"),
    "nccl": Plant("node-a17:1234:1250 [0] NCCL INFO Bootstrap", "node-a17"),
    "c10d": Plant("failed to connect to [node-b18]:29500 (errno: 111)", "node-b18"),
    "internal": Plant("resolved vllm-0.infer.svc.cluster.local", "vllm-0.infer"),
    "ec2": Plant("on ip-10-9-8-7.ec2.internal", "ip-10-9-8-7"),
    "hostname": Plant("HOSTNAME=trainbox", "trainbox"),
    "prompt": Plant("janedoe5@boxname:~/work$ vllm serve", "janedoe5@boxname"),
    "email": Plant("Jane <jane.doe6@corp.example>", "jane.doe6"),
}

PLANTS = [*SECRETS.values(), *PRIVATE.values()]
