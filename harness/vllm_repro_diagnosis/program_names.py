"""Names of programs in and around reports from outside: vLLM's server, or another program.

A report on another program's end or life says nothing about the server. A report without any name
counts, because nothing else can be meant.
"""

from __future__ import annotations

import re

_SURE = re.compile(r"(?i)\bvllm['\", ]+serve\b|\bapi_server\b|VLLM::|vllm-openai")
"""Command lines and images of the server, which may also hold words of other programs."""
_SERVER = re.compile(
    r"(?i)vllm|(?<![a-z])llms?(?![a-z])|(?<![a-z][_-])(?<![a-z])serv(?:e|er|ing)(?![a-z])|uvicorn"
    r"|model|inference|predictor|(?<![a-z][_-])(?<![a-z])engine|qwen|llama|mi[sx]tral|deepseek"
    r"|gemma|gpt-?oss|glm|kimi|granite|(?:start|launch|run|entrypoint)[\w-]*\.sh"
)
"""Names of vLLM, of a server of a model, and of scripts that start one."""
_OTHER = re.compile(
    r"(?i)(?<![a-z])(?:nginx|redis|postgres\w*|mysql|mongo\w*|kafka|rabbitmq|prometheus|grafana"
    r"|loki|traefik|envoy|haproxy|caddy|istio\w*|gateway|ingress|router|prox(?:y|ies)|web-?ui|ui"
    r"|frontend|qdrant|milvus|chroma\w*|weaviate|minio|etcd|celery|locust|bench\w*|clients?"
    r"|load[ _-]?(?:gen\w*|test\w*)|load\.py|pytest|evaluat\w*|lm_eval|curl|wrk|k6|jupyter\w*"
    r"|notebook|exporter|sidecar|download\w*|chrome|firefox|laptop|browser|llama[._-]?cpp"
    r"|llama-server|train\w*|ptxas|cicc|nvcc|cc1plus|compiler|watchdog|autoscaler|database|db)(?![a-z])"
    r"|http\.server|_(?:bench|client|test|eval)\b|\btest_\w+\.py|ollama|litellm|webui|benchmark"
)
"""Names of programs that run beside a server."""
_NOBODY = re.compile(
    r"(?i)(?:an?|the|this|process(?:es)?|worker|container|command|jobs?|tasks?|program|server|it"
    r"|service|step|pod|child|main|instance|node|run|all|up|start|(?:/\S*/)?(?:python[\d.]*|env"
    r"|(?:ba|z|fi)?sh)|batch|extern|exec|nohup|rank|exit(?:ed)?|status|code|state|signal|which"
    r"|that|in|id|ago|was|is|has|will|die|oom|kill|killed|failed|instance|engine|runtime|to|on|with|and"
    r"|sha256:\S*|[0-9a-f]*|on-failure|no|always|unless-stopped|overlay2?|gpu\d*|[\d.:]+"
    r"|localhost\S*|[\W_]*)"
)
"""Words that name no program."""
_NAMES = re.compile(
    # a job of a shell
    r"(?:^|[\s+\]])(?i:killed|terminated|abort(?:ed)?|hangup|bus error|(?:exit|done) \d+"
    r"|segmentation fault|illegal instruction)(?: \(core dumped\))?\s{2,}(?!Exit|Reason|Signal|\d)"
    r"(\S.*)|\bJob \d+, '([^']+)'|\bCommand '(.+?)' (?:died|returned)"
    r"|^make\S* \*\*\* \[(?:\S+:\d+: )?([\w-]+)\]"
    # process managers
    r"|\bApp \[([^\]:]+)|\b(?:exited|stopped|spawned): ([\w.-]+)"
    r"|^([\w:.@-]+)\s+(?:RUNNING|EXITED|STOPPED|FATAL)\s|(?:^|\bStopp(?:ing|ed) )(\S+)\.service\b"
    # a pod, a job of Slurm, events and tables of containers
    r"|(?:^|\s)(?:pod/)?([a-z][\w.-]*)\s+\d+/\d+\s"
    r"|^\d+(?:[._]\w+)?\s+(\S+)\s.*\b(?:OUT_OF_ME|TIMEOUT|PREEMPTED|NODE_FAIL|CANCELLED)"
    r"|\b(?:image|name|container|pod)=[\\\"]*([\w./:@-]+)"
    r"|\"(?:Names?|Path|Image|Command|Service)\":\s*\"/?([^\"]+)"
    r"|^([\w.-]+?)(?:\.\d+)?(?:\.\w+)?\s+\"task:|\b(?:[Cc]ontainer|(?<!by )[Pp]od) (?:\w+/)?"
    r"([a-z]\w*[-_.\d][\w.-]*)|^([\w./:@-]+)\s+(?:Exited \(|Up (?:\d|About|Less))"
    r"|^(?:[0-9a-f]{4,12}\s+|(?=\S+\s{2}))([\w./:@-]+)\s.*(?:Exited \(|Up (?:\d|About)).*?(\S+)$"
    r"|\bProcess \d+ \(([^)]+)\)"
    # the first word of a line, if it looks like a name
    r"|^(\w*[-_./\d][\w./-]*) (?:finished|exited|ended|terminated|died|failed) "
)
_SUBJECT = re.compile(
    r"((?:[\w./-]+ ){1,3})(?:(?:was|were|got|gets|is|has been|had|then|also) ){0,2}"
    r"(?:OOM[- ]?[Kk]illed|killed|exited|exits|received|terminated|died|ended|finished|crashed)\b"
)
"""The words before the verb of a sentence."""
_CONTEXT = re.compile(
    r"^[\s>*<-]*\"?(?:[Nn]ame|[Pp]od|[Cc]ontainer|Path|[Ii]mage|Unit|Host|[Ss]erver)\"?"
    r"\s*[:=]\s*\"?/?([^\s\",]+)|^\W* ?(\S+)\.service - |^[^\w\s]?\s*(?:\S+[$#] )?curl .*?(\S+)$"
    r"|\b(?:inspect|status|describe pods?)[ /]+([a-z][\w.-]*)$"
)
"""Lines that name the program of the lines below them, and that of a response or of `inspect`."""
PROMPT = re.compile(
    r"^(?:[$#%❯]|\S+@\S+[$#]) "
    r"((?:python[\d.]*|uv|poetry|locust|wrk|k6|ab|hey|guidellm|aiperf)\b.*)?"
)
"""A prompt, with the command if it is of a program that may be a client."""
_OF_VLLM = re.compile(r"/(?:health|v1/|metrics|version|ping|generate|tokenize)|localhost|127\.0\.0")
"""Addresses that vLLM answers."""


def _is_server(name: str) -> bool:
    """Return True if this is a name or command line of vLLM or of a server of a model."""
    return bool(_SURE.search(name) or (_SERVER.search(name) and not _OTHER.search(name)))


def of_other_program(text: str) -> bool:
    """Return True if a report names programs, and none of them is the server."""
    parts = [part for match in _NAMES.finditer(text) for part in match.groups() if part]
    if names := [part for part in parts if not _NOBODY.fullmatch(part)]:
        return not any(map(_is_server, names))
    words = subject[1] if (subject := _SUBJECT.search(text)) else text
    return _OTHER.search(words) is not None and _SERVER.search(words) is None


def names_server(text: str) -> bool | None:
    """Return whether a line names the server as what the lines around it report on.

    False: it names another program. None: it names nothing.
    """
    if (prompt := PROMPT.match(text)) and prompt[1]:
        return _is_server(prompt[1])
    match = _CONTEXT.search(text)
    name = next(filter(None, match.groups()), "") if match else ""
    if "curl" in text and name:
        return _OF_VLLM.search(name) is not None and _OTHER.search(name) is None
    return None if _NOBODY.fullmatch(name) or name.isupper() else _is_server(name)
