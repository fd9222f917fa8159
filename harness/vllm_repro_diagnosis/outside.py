"""Reports of other programs than vLLM on the end of a server: shell, kubelet, kernel and others.

A killed process prints nothing, so such a line is the only trace of its end. Each row of the table
has who reports, what it means, and the wordings. A report on another program's end or life says
nothing about the server. One without any name counts, because nothing else can be meant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache


class Meaning(StrEnum):
    """State of a server by another program's report: killed, ended, in trouble, exited, running."""

    KILLED = "killed"  # a signal ended it, or the lack of memory
    ENDED = "ended"  # somebody ended it on purpose: a time limit, an eviction, a stop
    TROUBLE = "trouble"  # its device, node or probe failed, which may have ended it
    NOT_STARTED = "not-started"  # for want of an image, a node, a device or a volume
    EXITED = "exited"  # it ended, and the report does not state why
    UNSURE = "unsure"  # something ended that may be the server, by a name that tells nothing
    UNREACHABLE = "unreachable"  # a client gets no answer
    RUNNING = "running"  # it runs, or answers


@dataclass(frozen=True)
class Report:
    """Another program's report on the end of a server: who reports, and what it means."""

    reporter: str
    meaning: Meaning


_EXIT = (
    r"(?i:\b(?:exit(?:ed|s)?|restarting(?= \(\d))(?:[ _-]?(?:code|status))?[\"']?(?:\s+with)?"
    r"(?:\s+(?:non-zero\s+)?(?:exit\s+)?(?:code|status))?[\s:=(\"\[]{0,14}"
    r"|^make(?:\[\d+\])?: \*\*\* .*\bError )"
)
"""The words before an exit status: of shells, container engines, kubectl, CI and launchers.

A shell adds 128 to the number of a signal, Python negates it, and `timeout` exits with 124.
"""
_SIGNAL = (
    r"(?i:^(?=.*\b(?:killed|terminated|exited|died|dumped|interrupted|finished|received)\b)"
    r".*?(?:\bSIG|\bsignal[\s:=(\[<]{1,3}(?:SIG)?|\bcode=(?:killed|dumped), status=))"
)
_TRANSLATED = (
    "已杀死|已殺死|已砍掉|段错误|程式記憶體區段錯誤|已放弃|总线错误|強制終了|セグメンテーション違反"
    "|Getötet|Speicherzugriffsfehler|Processus arrêté|Erreur de segmentation|Убито"
    "|Ошибка сегментирования|Violación de segmento|죽었음"
)
"""A shell's words for a deadly signal in Chinese, Japanese, German, French, Russian and others."""
_OF_SCRIPT = r"\S+?[:：] ?(?:[^\W\d]+ ?\d+|第 ?\d+ ?行)[:：] *\d+ "
"""Where bash puts a signal in a script: `serve.sh: line 7: 2388 `, in the user's language."""
_DEADLY = (
    r"(?:Out Of Memory|Killed|Aborted|Bus error|Illegal instruction|Floating point exception"
    rf"|Segmentation fault|{_TRANSLATED})(?: ?[(（][^()（）]{{1,20}}[)）])?"
)
_DOUBT = (
    "but|yet|however|although|though|until|unless|if|whether|should|would|could|may|might|seems?"
    "|expect\\w*|hangs?|stuck|unresponsive|timed? ?out|before|earlier|previously|once|ago|yesterday"
    "|other (?:server|engine|pod|container)|another|second|client|no longer|aber nicht"
    "|with|without|when|while|on|old(?:er)?|new(?:er)?|version|release|v?\\d+\\.\\d+|downgrad\\w+"
    "|upgrad\\w+|eager|disabl\\w+|enabl\\w+|instead|except|locally|otherwise|whereas|despite"
)
"""Words of a sentence about another server, flag or time, although it says that all is well."""
_CONTRAST = (
    f"{_DOUBT}|not|no|never|nothing|refused|unreachable|timeouts?|dead|died|crash\\w*|kill\\w*|gone"
    "|restart\\w*|other|script|can|must|appears?|think|assume\\w*|hope|check|verify|ensure|formerly"
    "|used to|last|first|then|week|month|5\\d\\d|zombie|defunct|fail\\w*|roll\\w* ?back"
)
"""Words of a sentence that states more than that a server runs on now, or does not state it."""
_OURS = r"(?:vllm|python|pt_main|ray|VLLM)[\w:. -]*"
_NO_END = r"(?:did|does|has)(?: not|n't) (?:crash\w*|die|exit\w*|restart\w*)"
PROSE = "text"
"""Reporter of a sentence of a person."""
COMMAND = "command"
"""Reporter of a command that stops a server; above a log it may stop an earlier one."""
_ROWS: tuple[tuple[str, Meaning, str], ...] = (
    ("exit status", Meaning.KILLED, rf"{_EXIT}(?:13[245679]|-(?:[46-9]|11))(?!\d|\.\d)"),
    ("exit status", Meaning.ENDED, rf"{_EXIT}(?:124|129|130|131|143|-(?:[123]|15))(?!\d|\.\d)"),
    ("exit status", Meaning.EXITED, rf"^(?!\W*\"ExitCode\": 0).*{_EXIT}-?\d{{1,3}}(?!\d|\.\d)"),
    (
        "signal",
        Meaning.KILLED,
        # then a launcher written in Go
        (
            rf"{_SIGNAL}(?:KILL|SEGV|ABRT|BUS|ILL|FPE|11|[46-9])\b"
            r"|\bsignal: (?:killed|aborted|segmentation fault|bus error)(?: \(core dumped\))?$"
        ),
    ),
    ("signal", Meaning.ENDED, rf"{_SIGNAL}(?:HUP|INT|QUIT|TERM|15|[123])\b"),
    (
        "shell",
        Meaning.KILLED,
        (
            rf"^(?:{_OF_SCRIPT}|\S*sh: )?{_DEADLY}(?:\s{{4,}}.*)?$"
            rf"|^(?:\[\d+\]\s*[+-]?\s*(?:\d+\s+)?|\S*sh: |\d+ )(?i:{_DEADLY}|abort)(?:\s{{2,}}.*)?$"
            r"|^make(?:\[\d+\])?: \*\*\* .*\b(?:Killed|Segmentation fault|Aborted)"
        ),
    ),
    (
        "shell",
        Meaning.ENDED,
        (
            rf"^(?:{_OF_SCRIPT}|\S*sh: |\[\d+\]\s*[+-]?\s*(?:\d+\s+)?)?"
            r"(?:[Tt]erminated|[Hh]angup|已终止|已終止|Beendet)(?:\s{2,}.*)?$"
        ),
    ),
    (
        "container engine",
        Meaning.KILLED,
        (
            r"(?i)\bOOM[-_ ]?Killed\b(?![\"']?\s*[:=]\s*(?:false|0))|\bTaskOOM\b|\bcontainer oom\b"
            r"|\bSystemOOM\b|\bOOMKilling\b|victim process: (?:vllm|python)"
        ),
    ),
    (
        "kernel",
        Meaning.KILLED,
        (
            rf"\boom-kill:constraint=.*\btask={_OURS},|\boom_reaper: reaped process \d+ \({_OURS}\)"
            rf"|Memory cgroup out of memory: Killed process \d+ \((?i:vllm)"
            rf"|(?:^|\s|\])(?:traps: )?{_OURS}\[\d+\]:? (?:segfault at|general protection|trap )"
        ),
    ),
    (
        "systemd",
        Meaning.KILLED,
        (
            r"Failed with result '(?:oom-kill|signal|core-dump)'|killed by the OOM killer"
            r"|\(Result: (?:oom-kill|signal|core-dump)\)"
            r"|\bKilled \S*vllm\S* due to memory pressure"
            rf"|\bProcess \d+ \({_OURS}\) of user \d+ dumped core"
            rf"|sending SIG(?:TERM|KILL) to process \d+ (?:uid \d+ )?\"{_OURS}"
        ),
    ),
    (
        "systemd",
        Meaning.ENDED,
        (
            r"Failed with result '(?:timeout|watchdog)'|\bStopp(?:ing|ed) .*(?i:vllm)"
            r"|State 'stop-\w+' timed out|\bWatchdog timeout\b"
            r"|system (?:is going|will) .*(?:down|boot)"
        ),
    ),
    (
        COMMAND,
        Meaning.ENDED,
        (
            r"\b(?:kubectl delete|docker(?: compose)? (?:stop|down)|systemctl (?:stop|restart)"
            r"|scancel|ray stop)\b|^pod \"\S+\" deleted|^Stopped all \d+ Ray"
            r"|^(?:[$#%❯]|\S+@\S+[$#]) (?:sudo )?(?:p?kill|killall) "
        ),
    ),
    ("systemd", Meaning.EXITED, r": Main process exited, code=|Failed with result 'exit-code'"),
    ("supervisord", Meaning.EXITED, r"\bFATAL\s+Exited too quickly|\bBACKOFF\s+Exited too"),
    (
        "Slurm",
        Meaning.KILLED,
        (
            rf"\b(?:tasks? [\d,-]+|task): {_DEADLY}$|\boom[-_]kill event|\bStepId=\S+ oom"
            r"|(?i:exceeded (?:job|step) memory limit)|\bOUT_OF_ME(?:MORY\b|\+)"
        ),
    ),
    (
        "Slurm",
        Meaning.ENDED,
        (
            r"\bCANCELLED\b.{0,40} (?:AT|DUE TO|BY)\b|\bDUE TO (?:TIME LIMIT|PREEMPTION|NODE FAIL)"
            r"|\btasks? [\d,-]+: Terminated$|\bJob step aborted\b|\bforcing job termination\b"
            r"|^\d+\S*\s.*\s(?:TIMEOUT|PREEMPTED|NODE_FAIL|CANCELLED(?:\+| by \d+))(?:\s|$)"
        ),
    ),
    ("PBS or LSF", Meaning.KILLED, r"PBS: job killed: \S*mem|\bTERM_MEMLIMIT\b"),
    (
        "SGE or HTCondor",
        Meaning.KILLED,
        (
            r"(?i:\bjob\b.*\bexceeded .{0,30}\bh_(?:vmem|rss|data)\b)"
            r"|\bAbnormal termination \(signal \d+\)"
        ),
    ),
    (
        "SGE or HTCondor",
        Meaning.ENDED,
        (
            r"\bexceeded (?:hard|soft) (?:wallclock|cpu)(?: time)?\b|\bJob was (?:held|evicted)\b"
            r"|\bjob .{0,40}(?:wallclock|h_rt).{0,20} exceeded\b"
        ),
    ),
    (
        "PBS or LSF",
        Meaning.ENDED,
        r"PBS: job killed: |\bTERM_(?:RUNLIMIT|OWNER|ADMIN|PREEMPT|CPULIMIT)\b",
    ),
    (
        "Ray",
        Meaning.KILLED,
        (
            r"killed due to (?:the node running low on memory|memory pressure)|NODE_OUT_OF_MEMORY"
            r"|running low on memory\b|\bRay killed this worker\b"
            r"|^(?:\(raylet[^)]*\) )?A worker died or was killed while executing"
            r"|^\s*(?:ray\.exceptions\.)?ActorDiedError\b"
        ),
    ),
    (
        "container engine",
        Meaning.ENDED,
        (
            r"^ ?Container \S+\s+Stopp(?:ing|ed)$|^Gracefully stopping\.\.\."
            r"|\bcontainer kill .*\bsignal=(?:2|15)\b"
        ),
    ),
    ("Ray", Meaning.EXITED, r"\bWorker exit type: SYSTEM_ERROR\b"),
    ("Ray", Meaning.TROUBLE, r"\bmarked dead because\b|\braylet\b.*\bdied unexpectedly"),
    (
        "kubelet",
        Meaning.ENDED,
        (
            r"\bEvict(?:ed|ing|ion)\b|\bwas low on resource\b|\bPreempt(?:ed|ing)\b"
            r"|\bStopping container\b|\bMarking for deletion\b|\b(?:Node|Terminat)\w*Shutdown\b"
            r"|\bDeadlineExceeded\b|active on the node longer than the specified deadline"
            r"|failed (?:liveness|startup) probe, will be restarted"
        ),
    ),
    (
        "kubelet",
        Meaning.TROUBLE,
        r"\b(?:[Ll]iveness|[Ss]tartup) probe (?:failed|errored)|\bNodeNotReady\b|\bNodeLost\b",
    ),
    (
        "kubelet",
        Meaning.NOT_STARTED,
        (
            r"\b(?:ErrImage\w*Pull|ImagePullBackOff|InvalidImageName|CreateContainer\w*Error)\b"
            r"|\b(?:Failed to pull|Back-off pulling) image\b|\bFailed(?:Mount|CreatePodSandBox)\b"
            r"|\bFailedScheduling\b|\d+/\d+ nodes are available|\d+/\d+ +Pending\b"
        ),
    ),
    (
        "container engine",
        Meaning.NOT_STARTED,
        (
            r"^(?:docker|podman): Error response from daemon: |\bOCI runtime create failed\b"
            r"|\bnvidia-container-cli: \w+ error: "
        ),
    ),
    (
        "kubelet",
        Meaning.EXITED,
        r"\bCrashLoopBackOff\b|[Bb]ack-off restarting failed container|\d+/\d+ +Error +\d",
    ),
    (
        "cloud",
        Meaning.KILLED,
        (
            r"[Cc]ontainer killed due to memory usage|(?i:memory limit of .{1,40} exceeded)"
            r"|(?i:gone over (?:the )?(?:cgroup )?memory limit|memory usage exceeded)"
            r"|using too much memory and was terminated|crashed after using all available RAM"
        ),
    ),
    (
        "cloud",
        Meaning.ENDED,
        (
            r"(?i)\b(?:spot|preemptible) .{0,40}\b(?:interrupt|terminat|preempt|reclaim|evict)\w*"
            r"|\b(?:instance|machine|node|vm) .{0,40}\b(?:terminated|preempted|reclaimed)"
            r"|failed (?:ELB|container|load balancer) health checks|\btask stopped by\b"
            r"|\bthe (?:operation|job|run) was cancell?ed|exceeded the maximum execution time"
            r"|\bTerminate orphan process: pid \(\d+\) \((?:vllm|VLLM|python|pt_main)"
            r"|\brunner has received a shutdown signal|\bhit its timeout of \d|^Runner terminated\b"
        ),
    ),
    ("cloud", Meaning.EXITED, r"\bEssential container in task exited\b"),
    (
        "notebook",
        Meaning.EXITED,
        (
            r"(?i)\bkernel crashed while executing|\bkernel .{0,60}\b(?:appears to have|has) died"
            r"|^kernel (?:restarting|died)\b|\bdead kernel\b"
        ),
    ),
    (
        "NVIDIA driver",
        Meaning.TROUBLE,
        r"\bNVRM: (?:Xid|GPU .*fallen off the bus)|\bSXid\b|\bGPU (?:is lost|.{0,60}off the bus)",
    ),
    (
        "kernel",
        Meaning.TROUBLE,
        (
            r"\binvoked oom-killer\b|\bamdgpu\b.*(?:reset|timeout|fault)|\bKernel panic\b"
            r"|\bsoft lockup\b|\[Hardware Error\]|\bsystemd-shutdown\b"
        ),
    ),
    (
        "client",
        Meaning.UNREACHABLE,
        (
            r"^curl: \((?:7|28|52|56)\)|^(?:< ?)?HTTP/[\d.]+ 50[234]\b"
            r"|^(?!\[|.*NCCL).*(?i:connection ?refused)"
            r"|(?i:\bnothing (?:answers|responds|listens)|\bno longer (?:answer|respond|reachable)"
            r"|\bstop(?:s|ped) (?:answer|respond)ing)"
        ),
    ),
    (
        "process list",
        Meaning.RUNNING,
        (
            # Created and started at the same time, and never restarted.
            r"\b((?:\d+|An?|About an?) \w+) ago\s+Up \1\b(?! \((?:unhealthy|Paused))"
            r"|^(?!.* ago\s+Up ).*\sUp (?:\d+|About|Less)[\w ]*\b"
            r"(?:second|minute|hour|day|week)s?\b"
            r"(?! \((?:unhealthy|Paused))|\s(\d+)/\2\s+Running\s+0\b"
            r"|\bActive: active \(running\)|\"Running\": ?true\b|^\"Status\": ?\"running\""
            r"|\sRUNNING\s+pid \d+, uptime|^(?:< ?)?HTTP/[\d.]+ 200\b"
        ),
    ),
    (
        PROSE,
        Meaning.RUNNING,
        (
            rf"(?i)^(?!.*(?:\b(?:{_CONTRAST})\b|n't|\?|error))"
            r"(?!.*\b(?:all|any|each|every)\b.{0,20}\b(?:fails?|errors?)\b)"
            r".*\b(?:server|engine|vllm|it|pod|container)\b"
            r".{0,20}\b(?:still|keeps?) (?:runs?|running|up|alive|answer\w*|serv\w+|respond\w*"
            r"|generat\w+|works?|working)\b"
        ),
    ),
    (
        PROSE,
        Meaning.RUNNING,
        (
            rf"(?i)^(?!.*(?:\b(?:{_DOUBT})\b|\?))"
            r"(?=.*\b(?:normal(?:ly)?|fine|as usual|traffic|no restart"
            rf"|(?:following|next|other) requests|{_NO_END})\b)"
            r".*\b(?:server|engine|vllm|it|pod|container)\b.{0,20}\b(?:still|keeps?|continues to)"
            r" (?:runs?|running|up|alive|answer\w*|serv\w+|respond\w*|generat\w+|works?|working)\b"
            r"|(?:^|\W)Server läuft (?:noch|weiter|aber weiter)"
        ),
    ),
)


@cache
def _table() -> tuple[tuple[Report, re.Pattern[str]], ...]:
    """Return the rows by gravity; made at the first use, since it takes longer than a start."""
    return tuple(
        (Report(reporter, meaning), re.compile(wordings))
        for each in Meaning  # the gravest meaning counts
        for reporter, meaning, wordings in _ROWS
        if meaning is each
    )


# Cheap words first: nearly every line has none. Plain texts are found faster than expressions.
_WORDS = (
    *_TRANSLATED.lower().split("|"),
    *("已终止", "已終止", "beendet", "läuft"),
    *("kill", "exit", "restarting (", "oom", "signal", "sigterm", "terminat", "abort", "dump"),
    *(
        "segfault",
        "segmentation",
        "out of memory",
        "illegal inst",
        "bus error",
        "cancel",
        "evict",
        "probe",
    ),
    *(
        "preempt",
        "job was held",
        "xid",
        "off the bus",
        "died",
        "dead",
        "memory",
        "backoff",
        "back-off",
    ),
    *("time limit", "longer than", "interrupted", "health check", "stopp", "timed out", "timeout"),
    *("hangup", "reset", "panic", "lockup", "hardware", "shutdown", "running", "still", "keeps"),
    *(" up ", "http/", "error", "lost", "notready", "low on resource", "deletion", "floating"),
    *("trap", "protection", "system", "term_", "pbs", "reclaim", "spot", "out_of_me", "node_fail"),
    *("kubectl d", "docker ", " deleted", "curl: ", "ray stop", "refused", "answer", "respon"),
    *("imagepull", "pull image", "pulling image", "scheduling", "nodes are", "pending"),
    *("invalidimage", "failedmount", "failedcreate"),
    *("nothing", "all available ram", "kernel ", "exceeded", "orphan", "continues"),
)
_OTHER_UNIT = re.compile(r"(?i)(?!\S*vllm)\S+\.service: ")
"""A unit of another name may be another program."""
_PAST = re.compile(
    r"(?i)\b(?:earlier|previously|formerly|used to|in the past|yesterday"
    r"|(?:month|week|year)s? ago|last (?:week|month|year|time(?! period)|night)|before the|solved"
    r"|fixed|resolved|no longer|was never"
    r"|never (?:got|been|was|exited)|(?:did|was|were|has|had) ?(?:not|n't)|would"
    r"|if (?:the|it|you|we|I)\b)"
)
"""Words of a sentence about another time, or about what did not happen."""
_ADDRESS = re.compile(
    r"(?:host=['\"]|\b(?:to|reach) |//)(?!localhost|127\.|0\.0\.)([A-Za-z][\w-]*\.?[\w.-]*)"
    r"(?:', port=|:| port )(?!8\d{3}\b)\d"
)
"""The address of a server in an error of a client, unless it is local or has a port like 8000."""
_READS = re.compile(
    r"\W{0,3}(?:\S+@\S+\W+)?(?:sudo )?(?:"
    r"(?:docker|podman|nerdctl|crictl)(?: container)? (?:inspect|ps|events|logs|stats|info)\b"
    r"|(?:kubectl|oc|k)(?: -\S+(?: \S+)?)* (?:get|describe|logs|events|top)\b"
    r"|systemctl(?: --\S+)* (?:status|show)\b|(?:dmesg|journalctl|sacct|squeue)(?:$|\s+[-|>]|\s*\|)"
    r"|[ef]?grep [-'\"\w]|scontrol show\b)(?!:|.{0,20} (?:shows?|says?|reports?|told|prints?)\b)"
)
"""A typed command that only reads: its words are no report, its output may be one."""
_GUESSES = re.compile(r"There are some potential root causes|Some common causes include")
"""The beginning of Ray's list of possible causes, none of which it knows."""
_LONGEST = 600
"""Longest line that can be a report, in characters."""


def report_of(text: str) -> Report | None:
    """Return what another program reports of the server in a line without vLLM's prefix, or None.

    None if the line reports nothing, is about the past, or names a program that is known not to be
    the server. The meaning is `UNSURE` if the name is unknown. A report of trouble or of no answer
    always counts.
    """
    if len(text) > _LONGEST:
        return None
    lowered = text.lower()
    for word in _WORDS:
        if word in lowered:
            break
    else:
        return None
    if _READS.match(text):
        return None
    text = _GUESSES.split(text)[0].strip()
    report = next((known for known, wordings in _table() if wordings.search(text)), None)
    if report is None or report.meaning is Meaning.TROUBLE:
        return report
    if report.meaning is Meaning.EXITED and text.startswith("##[error]Process completed"):
        return Report(report.reporter, Meaning.UNSURE)  # of any step of the job
    if report.meaning is Meaning.UNREACHABLE:
        address = _ADDRESS.search(text)
        return report if address is None or _is_server(address[1]) else None
    named = of_other_program(text)
    if _PAST.search(re.sub(_NO_END, "", text)) or (
        named and (report.meaning is Meaning.RUNNING or _OTHER.search(text))
    ):
        return None
    if named and report.meaning is not Meaning.NOT_STARTED:
        return Report(report.reporter, Meaning.UNSURE)
    return Report("systemd", Meaning.EXITED) if _OTHER_UNIT.match(text) else report


# ── the program that a report is on ─────────────────────────────────────────

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
    r"|llama-server|train\w*|ptxas|cicc|nvcc|cc1plus|compiler|watchdog|autoscaler|database|db)"
    r"(?![a-z])"
    r"|http\.server|_(?:bench|client|test|eval)\b|\btest_\w+\.py|ollama|litellm|webui|benchmark"
)
"""Names of programs that run beside a server."""
_NOBODY = re.compile(
    r"(?i)(?:an?|the|this|process(?:es)?|worker|container|command|jobs?|tasks?|program|server|it"
    r"|service|step|pod|child|main|instance|run|all|up|start|(?:/\S*/)?(?:python[\d.]*|env"
    r"|(?:ba|z|fi)?sh)|batch|extern|exec|nohup|rank|exit(?:ed)?|status|code|state|signal|which"
    r"|that|in|id|ago|was|is|has|will|die|oom|kill|killed|failed|instance|engine|runtime|to|on|with"
    r"|and|sha256:\S*|[0-9a-f]*|on-failure|no|always|unless-stopped|overlay2?|gpu\d*|[\d.:]+"
    r"|localhost\S*|[\W_]*)"
)
"""Words that name no program."""
_NAMES = re.compile(
    # a job of a shell
    r"(?:^|[\s+\]])(?i:killed|terminated|abort(?:ed)?|hangup|bus error|(?:exit|done) \d+"
    rf"|segmentation fault|illegal instruction|{_TRANSLATED})"
    r"(?: ?[(（][^()（）]{1,20}[)）])?\s{2,}(?!Exit|Reason|Signal|\d)"
    r"(\S.*)|\bJob \d+, '([^']+)'|\bCommand '(.+?)' (?:died|returned)"
    r"|^make\S* \*\*\* \[(?:\S+:\d+: )?([\w-]+)\]"
    # process managers
    r"|\bApp \[([^\]:]+)|\b(?:exited|stopped|spawned): ([\w.-]+)"
    r"|^([\w:.@-]+)\s+(?:RUNNING|EXITED|STOPPED|FATAL|BACKOFF)\s"
    r"|(?:^|\bStopp(?:ing|ed) )(\S+)\.service\b"
    # a pod, a job of Slurm, events and tables of containers
    r"|(?:^|\s)(?:pod/)?([a-z][\w.-]*)\s+\d+/\d+\s"
    r"|^\d+(?:[._]\w+)?\s+(\S+)\s.*\b(?:OUT_OF_ME|TIMEOUT|PREEMPTED|NODE_FAIL|CANCELLED)"
    r"|\b(?:image|name|container|pod)=[\\\"]*([\w./:@-]+)"
    r"|\"(?:Names?|Path|Image|Command|Service)\":\s*\"/?([^\"]+)"
    r"|^([\w.-]+?)(?:\.\d+)?(?:\.\w+)?\s+\"task:|\b(?:[Cc]ontainer|(?<!by )[Pp]od) (?:\w+/)?"
    r"([a-z]\w*[-_.\d][\w.-]*)|^([\w./:@-]+)\s+(?:(?:Exited|Restarting) \(|Up (?:\d|About|Less))"
    r"|^(?:[0-9a-f]{4,12}\s+|(?=\S+\s{2}))([\w./:@-]+)\s.*"
    r"(?:(?:Exited|Restarting) \(|Up (?:\d|About)).*?(\S+)$"
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
    r"\s*[:=]\s*\"?/?([^\s\",]+)|^\W{0,3}(\S+)\.service - |^[^\w\s]?\s*(?:\S+[$#] )?curl .*?(\S+)$"
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


def names_other_only(text: str) -> bool:
    """Return True if a text names a program that runs beside a server, and no vLLM."""
    return _OTHER.search(text) is not None and "vllm" not in text.lower()


def of_other_program(text: str) -> bool:
    """Return True if a report names programs, and none of them is the server."""
    parts = [part for match in _NAMES.finditer(text) for part in match.groups() if part]
    if names := [part for part in parts if not _NOBODY.fullmatch(part)]:
        return not any(map(_is_server, names))
    words = subject[1] if (subject := _SUBJECT.search(text)) else text
    return _OTHER.search(words) is not None and _SERVER.search(words) is None


def names_server(text: str) -> bool | None:
    """Return True if a line names the server as the subject of the lines around it.

    Such a line is `Name: vllm-0`. False: it names another program. None: it names nothing.
    """
    if len(text) > _LONGEST:
        return None
    if (prompt := PROMPT.match(text)) and prompt[1]:
        return _is_server(prompt[1])
    match = _CONTEXT.search(text)
    name = next(filter(None, match.groups()), "") if match else ""
    if "curl" in text and name:
        return _OF_VLLM.search(name) is not None and _OTHER.search(name) is None
    return None if _NOBODY.fullmatch(name) or name.isupper() else _is_server(name)
