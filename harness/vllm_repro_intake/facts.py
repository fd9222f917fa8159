"""Facts of an issue's text that a scenario needs; uncertain ones with the words that state them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

from packaging.version import InvalidVersion, Version

from vllm_repro.command.command import ServeCommand
from vllm_repro_diagnosis.boot_facts import scheduler_dump
from vllm_repro_diagnosis.diagnosis import Diagnosis, Phase, diagnose
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_intake.commands import ReportedCommand, find_commands, least_likely_last
from vllm_repro_intake.requests import (
    COUNTS,
    Asked,
    Tried,
    answer_length,
    find_requests,
    find_tried,
)
from vllm_repro_intake.text import NOT, Block, clean, read_blocks, shortened, statements

Used = tuple[str, tuple[str, ...]]
"""A part of a sentence, and the words of it that were read."""


@dataclass(frozen=True)
class Stated:
    """A value, and the words of the text that it is taken from."""

    value: str
    words: str
    # of a release: True if the text says that it has the bug, False if it works or is older
    has_it: bool | None = None
    # what was read of the text
    used: tuple[Used, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that an issue's text states about the bug, as far as a scenario needs them."""

    title: str
    # `owner/repository#number`
    issue: str
    related: tuple[str, ...]
    # releases of vLLM, the most certain first
    versions: tuple[Stated, ...]
    # the most likely one first
    commands: tuple[ReportedCommand, ...]
    # commands that cannot be read
    unread: tuple[str, ...]
    # public name
    model: Stated | None
    # sizes with the names of config.json
    shape: dict[str, int | str]
    # count and kind as stated
    gpus: Stated | None
    # the text says that it runs without a GPU
    on_cpu: bool
    # number of nodes as stated; 0 if not
    nodes: int
    requests: tuple[Asked, ...]
    # flags tried with a clear result
    tried: tuple[Tried, ...]
    # statements on flags without a clear result
    unclear: tuple[str, ...]
    diagnosis: Diagnosis
    phase: Phase | None
    # `dies`, `hangs` or `errs`; empty if the text does not state it
    symptom: Stated
    # the one `max_tokens` of the text, or 0
    answer: int
    # the text says that answers are streamed
    streams: bool
    # the text in parts
    blocks: tuple[Block, ...]


_KIND_OF_ISSUE = r"\[(?:Bug|Usage|Installation|Performance|CI[^\]]*|Regression)\](?:\[[^\]]+\])*"
_OF_FORM = (
    r"(?i:\W*(?:(?:a|the|your|my|current|system|issue|bug|describe|steps|how|to) )*"
    r"(?:environment|setup|versions?|models?|bug|issue|report|description|summary|information"
    r"|reproduce|reproduction|before submitting[^\n]*)\W*(?=\n|\Z))"
)
"""A heading of a form for issues, which is no title."""
_TITLES = (
    re.compile(rf"{_KIND_OF_ISSUE}:?[ \t]*(?P<title>\S[^\n]{{5,}})"),
    re.compile(rf"\A\s*#{{1,6}} (?!{_OF_FORM})(?P<title>\S[^\n]{{5,}})"),
    re.compile(r"(?mi)^(?:Subject|Title): *(?:Re: *)*(?P<title>\S[^\n]{5,})"),
)
_TITLE_ENDS = re.compile(
    r"(?:\s*(?:\[\d+ (?:pull requests?|comments?)[^\]]*\]|· Issue #\d+.*|#\d{3,6}"
    r"|\(Issue #\d+\)))+\s*$"
)
_NO_TITLE = re.compile(
    rf"{_OF_FORM}|[`>({{\[|$#-]|\S+=|(?:export|nohup|curl|cd|source|import|from)\b"
    r"|vllm (?:serve|bench|-)"
    r"|(?:\S*/)?(?:python\S*|docker|podman|sudo|Traceback|File|INFO|WARNING|ERROR|DEBUG)\b"
    r"|\d{4}-\d\d|.*\| |.*[:：]\W*$"
    r"|(?i:(?:hi|hello|hey|dear|greetings|good \w+|thanks?)\b|你好|大家好)"
)
_REPOSITORY = r"[A-Za-z0-9][\w.-]{0,60}/[A-Za-z0-9][\w.-]{0,60}"
_ISSUE_URL = re.compile(
    rf"github\.com/(?P<repository>{_REPOSITORY})/(?P<kind>issues|pull|discussions)"
    r"/(?P<number>\d{1,6})"
)
_PAGE_NAME = re.compile(
    rf"(?<![\w/])(?P<repository>vllm-project/{_REPOSITORY.partition('/')[2]})(?: · issue"
    r" )?#(?P<number>\d{1,6})(?=Fetched| · |\s*$)"
)
_MOST_HEAD = 3
"""Lines of a text in which an address is that of the issue itself."""
_HEAD_NUMBER = re.compile(r"\A[^\n]*\n?[^\n]{0,200}(?:\(Issue |Issue |\s)#(?P<number>\d{3,6})\b")
_MENTIONED = re.compile(r"(?<![\w/&#])(?:vllm-project/vllm)?#(\d{4,6})\b")
_PRE = r"(?:[ .-]?(?:post|rc|dev)\.?\d+)*"
_VERSIONS = (
    re.compile(
        r"(?<![\w./:\[\]-])(?P<image>[\w./:\[\]-]{0,120}?)vllm-openai(?:-\w+)?"
        r":v(?P<version>\d+\.\d+[\w.]*)"
    ),
    re.compile(r"(?ai)(?<![a-z])vllm[_-]v?(?P<version>0\.\d+\.\d+)"),
    re.compile(rf"(?a)\bvllm ?==? ?v?(?P<version>\d+\.\d+[\w.+]*{_PRE})"),
    re.compile(
        r"(?ai)\bv?LLM\b[^\n.;,]{0,60}?(?<![\w.])v?(?P<version>0\.[1-9]\d?\.\d{1,2}[\w.+]*"
        rf"{_PRE})"
    ),
)
_RELEASE = rf"v?(?P<version>0\.[1-9]\d?\.\d{{1,2}}(?:{_PRE}|\.\d+)*)(?![\w.]*\d)"
_FOR_A_DEVICE = re.compile(r"(?i)\+(?:cu\d+|rocm[\d.]*|cpu|xpu)(?![\w.]*\w)")
"""The end of a release's name that names what it is built for."""
_OF_SOURCE = re.compile(
    r"(?i)\bv?llm\W+(?:(?:is|was|built|compiled|installed) )*(?:from|of) (?:source|git)\b"
    r"[^\w\n]{0,3}\btag v?$"
)
_NIGHTLY = re.compile(
    r"(?i)\b(?:nightly|main)[ (:]{1,3}(?:(?:build|image|wheel|of|for)[ (:]{1,3})*v?$"
)
_TITLE_VERSION = re.compile(rf"(?a)(?<![\w.])(?:v(?=0)|(?<=\bto )|(?<=[:(\]] )){_RELEASE}")
_BARE_VERSION = re.compile(
    rf"(?ai)(?:(?<![\w.])(?:\b(?:to|on|in|with|is|at|since|version|versión|versione"
    rf"|версия|release|tag|and|run|running|use|using) "
    rf"|[:(：（] ?|\A|(?<=[\n。])|(?<=[.!?;,✅✔❌✗✘] )|(?<=\bv))"
    rf"|\b(?:vllm|version|versión|versione|версия|release|build)\b[\"'`* ]*"
    rf"[:=|：][\"'`* ]*){_RELEASE}"
)
_LAST_OF_RANGE = re.compile(
    rf"(?ai)(?<![\w.])v?0\.[1-9]\d?\.\d{{1,2}}{_PRE}"
    rf" ?(?:~|～|-|–|—|/|\.\.+|,|&|to|through|and|or|until|至|到|→|[=-]+>) ?{_RELEASE}"
)
_SOURCE = re.compile(r"(?i)\b(?:install\w*|built|pulled|wheels?|image) from \S+ ")
"""Words after `from` that are no sign of an older release: "installed from PyPI"."""
_OLDER = re.compile(
    r"(?i)(?<!starting )(?<!start )\b(?:from|between|until|up to|before|prior to"
    r"|not (?:in|on|with)) v?$"
)
_LACKS = (
    r"(?:works?|worked|working|(?<!the )(?:fine|ok(?:ay)?|good)|stable|pass(?:es|ed)?|unaffected"
    r"|surviv\w+|lives|ran (?:for|fine|ok|well)|accepted|has no|has it not|goes away"
    r"|(?<!engine )(?<!server )(?<!core )gone"
    r"|(?<!re)solve[sd]?"
    r"|resolve[sd]?|fix(?:es|ed)?|avoid(?:s|ed)?|helps|cure[sd]?"
    r"|(?:going|went) back|downgrad\w+|revert\w+|roll\w+ back)"
)
_SHOWS = (
    r"(?:crash\w*|die[sd]?|dead|fail\w*|broken?|breaks|bad|hang(?:s|ing)?|affected|bug(?:gy)?|since"
    r"|(?<!'s a )(?<!was a )(?<!is a )regress\w*|(?:first )?seen|introduced|appear(?:s|ed)"
    r"|start(?:s|ed|ing) (?:with|in|from)"
    r"|errors?|segfaults?"
    r"|reproduc(?:es?|ed|ible)|same (?:crash|issue|error|problem|bug)|happens?|occurs?|wrong"
    r"|garbage|happened|occurred|triggers?|(?:has|have|had) (?:it|this|the (?:bug|issue|problem)))"
)
_NOT = (
    r"\b(?:not|never|without|cannot|no longer|no|\w+n[\u2019']t|(?:ca|do(?:es)?|did|is|was|wo)nt)"
    r" (?:(?:yet|be|been|any) )?"
)
OUTCOME = re.compile(
    rf"(?P<lacks>{_NOT}(?:{_SHOWS}|(?:such |more )?(?:problem|issue)s?)(?!\w)"
    r"|没有|不会|正常|✅|✔|(?:発生し|起き|落ち)ません"
    r"|問題(?:ない|ありません))"
    rf"|(?P<shows>{_NOT}(?:{_LACKS}|help|boot|start|run|serve|load|answer|respond)(?!\w)"
    r"|崩溃|报错|卡死|有问题|❌|✗|✘|落ち(?:る|ます)|没有用|無効)"
    rf"|(?<![\w-])(?:(?P<good>{_LACKS})|(?P<bad>{_SHOWS}))(?![\w-])",
    re.IGNORECASE,
)
"""What a release, or a GPU, does: it has the bug, or it has not."""
_BAD = ("shows", "bad")
_WORKS_NOT_ON = re.compile(
    rf"(?i)(?<!not )(?<!longer )\b{_LACKS}\b[^;\n]{{0,60}}? not (?:in|on|with|since) v?$"
)
_END = re.compile(r"(?i)\n|[.;!?]\s|[。；]|,? (?:but|while|whereas|however)\b")
_LIST = r"(?:(?:\s?(?:[,/&~～–—-]|and|or|to|through)\s?)+v?0\.\d+(?:\.\d+\w*)?)*"
_BEFORE_NEXT = r"(?i)v?0\.\d[\w.]*\s?(?:,|and\b|or\b)"
_BESIDE = re.compile(
    r"(?i)(?:[\s|:：()*`=→>+–—-]"
    r"|\b(?:is|was|are|were|ha[sd]|have|both|all|still|also|it|do(?:es)?|did)\b)*"
    rf"(?:{OUTCOME.pattern})"
    r"(?![\s:：(=*`]{1,3}(?:(?:in|on|with|since|from) )?v?0\.\d)"
)
"""An outcome beside a release: `0.21.0 (good)`, `| 0.21.0 | ok |`. A label of the next is none."""
_UNDER = re.compile(r"(?i)--|\d\.\d|\b(?:with(?:out)?|if|when|unless|using|on|and|before|than)\b|=")
"""Words of a condition, between a release and its outcome."""
_IN_LIST = re.compile(
    r"(?ai)(?:(?<=[\n|(:,;/~&–。，；、])|(?<=[-*•|(:,;/~&–.!?] )"
    r"|\b(?:and|or|to|both|tested|tried"
    rf"|{_LACKS}|{_SHOWS}) )[`*\"]*{_RELEASE}"
)
"""A release in a list, a cell or beside an outcome, of which the text states what it does."""
_PRODUCT = re.compile(
    r"(?ai)(?P<ours>\bv?LLM(?:-openai)?(?![\w-]))|flashinfer|transformers|triton|torch|nixl|lmcache"
    r"|compress|xgrammar|deepgemm|cuda|driver|llm-d|chart|helm|operator|stack|aibrix|kserve|\bray\b"
    r"|kubernetes|dynamo|sglang|guidellm|lm[-_ ]?eval|guidance|mooncake|\bucx|\brocm|\bnccl|\bpip\b"
    r"|\buv\b|ascend|vllm-(?:gaudi|spyre|metal|tpu|neuron|omni|fork)|proxy|router|gateway"
    r"|litellm|python|numpy|peft|outlines|tokenizers|modelopt|inductor"
)
_HUB_MODEL = re.compile(
    r"(?i)(?:模型|モデル|\bpretrained"
    r"|\bmodel(?:[ _](?:name|id|path|source)|url|Artifacts:(?:\s+\w+: \S+)*\s+name)?"
    r"|_(?:model|LLM)(?:_name|_id)?)(?:\*\*)?"
    r"(?:\s*[:=|：]+\s*|\s+(?:is|was)\s+|\s*[是为]\s*|[ \t]{2,}|\n[ \t]*value: *)"
    rf"[\"'`*\[]*(?P<model>{_REPOSITORY})(?![\w/])"
)
_NAMED_MODEL = re.compile(
    r"(?:(?i:\b(?:model|serv(?:e|ing)|r[au]n|running|us(?:e|ing)|deploy(?:ed|ing)?|load(?:ed|ing)?"
    r"|test(?:ed|ing)?|with|on|of|for)) |(?<=\w )\()"
    r"[\"'`*]*(?!\S+\.(?:py|sh|json|ya?ml|md|cpp?|cu)\b)"
    rf"(?P<model>(?=[\w.-]*/[\w.-]*\d){_REPOSITORY})(?![\w/])"
    rf"|[\"']model[\"'] ?[:=] ?[\"'](?P<body>{_REPOSITORY})[\"']"
)
_HUB_URL = re.compile(rf"(?:huggingface\.co/|\bhf://)(?P<model>{_REPOSITORY})(?![\w/])")
_SHAPE = re.compile(
    r"\b(num_attention_heads|num_key_value_heads|head_dim|num_hidden_layers"
    r"|full_attention_interval|vocab_size|max_position_embeddings)[\"']?\s*[:=]\s*(\d{1,8})\b"
)
_ARCHITECTURE = re.compile(r"architectures?[\"']?\s*[:=]\s*\[?[\"']?(\w+For\w+)")
KIND = (
    r"(?:NVIDIA |AMD |GeForce |Instinct |Tesla )*(?:RTX ?(?:PRO )?\d{4}(?: ?Ti)?(?: Blackwell|"
    r" Ada)?|[345]090|[345]0[6-9]0 ?[Tt]i|(?:RTX ?)?A[2456][05]00|GB[123]00|GB10|DGX Spark|H\d{2,3}"
    r"|A(?:10G?|16|30|40|100|800)|L(?:4|20|40[sS]?)|V100|T4|B\d{3}|(?:Arc )?(?:Pro )?B[5-7]0"
    r"|MI\d{3}X?)(?=s?\b)"
)
_GPUS = (
    re.compile(
        rf"(?a)(?<![\w.])(?P<count>[1-9]\d?|{'|'.join(COUNTS)}) ?[x×*张块枚卡]?"
        rf" ?(?P<kind>{KIND})",
        re.IGNORECASE,
    ),
    re.compile(
        rf"(?ai)(?<![\w-])(?P<kind>{KIND})(?:-\w+){{0,3}}(?: ?\([^()\n]{{1,10}}\))? ?[x×*]"
        r" ?(?P<count>[1-9]\d?)(?!\w|\.\d)"
    ),
    re.compile(rf"GPU \d+: (?P<kind>{KIND})"),
    re.compile(rf"(?a)\bGPUs?\b[^\n]{{0,30}}?(?<![\w-])(?P<kind>{KIND})"),
    re.compile(rf"(?a)(?<![\w-])(?P<kind>{KIND})"),
)
_UNTESTED = re.compile(rf"(?i)(?:\bnot|{NOT}|\bnever)(?: \w+)? (?:tested|tried)|\buntested")
_STREAMS = re.compile(
    r"(?i)\bstream[\"'`]?\s?[:=]\s?true\b"
    r"|(?<!-)\bstreaming (?:chat|completion|request|response|answer)"
    r"|流式|ストリーミング|\bgestreamt"
)
_WHOLE = re.compile(
    r"(?i)\bstream[\"'`]?\s?[:=]\s?false\b|\b(?:non-|not |no |without )streaming"
    r"|[非不无没关][^\n，。,]{0,3}流式|ストリーミング(?:な|し[なま])|\bnicht (?:\w+ )?gestreamt"
)
_WORKS = re.compile(
    r"(?i)(?!.*(?:\b(?:until|unless|except|not|no|never|only|before)\b|n['\u2019]t\b"
    rf"|\b{_SHOWS}\b|崩溃|报错))"
    r".*(?:\b(?:works|worked|fine|ok|okay|unaffected)\b|正常|没事).*"
)
"""A clause that only tells what works."""
_NO_GPU = re.compile(
    r"(?i)(?<!if )\b(?:no|without(?: an?y?)?) GPUs?(?=[\s.,;)]*(?:$|\n|[.,;)]))"
    r"|\bGPUs?[*\"` ]*[:=|][*\"` |]*(?:none|no)\b"
    r"|\bCPU[- ](?:build|backend|only)\b|\bvllm-openai-cpu\b|\bVLLM_CPU_KVCACHE_SPACE\b"
)
_ROLE = re.compile(r"(?i)\b(?:prefill|decode)")
"""The server of several that has the bug."""
_COUNT = rf"(?i:(?<![\w.])(?P<count>\d{{1,2}}|{'|'.join(COUNTS)})[ -])"
_NODES = re.compile(rf"{_COUNT}(?:[\w.]+[ -])?nodes\b")
_GPU_COUNT = re.compile(rf"(?!0){_COUNT}(?:NVIDIA |AMD )?GPUs?\b(?! (?:hit|block|KV|token|mem))")
_SYMPTOMS = (
    (
        "hangs",
        re.compile(
            r"(?i)\bhang(?:s|ing)?\b|\bstuck\b|(?<!might cause )deadlock|freez"
            r"|\bfroze|unresponsive|wait\w* forever"
            r"|\bnever (?:returns?|finish\w*|answer\w*|respond\w*|complet\w*"
            r"|serv\w+|starts? serv\w+|(?:gets?|becomes?|is) (?:ready|healthy|to the point))"
            r"|\b(?:stop|ceas)\w* (?:answering|responding|making progress)"
            r"|\b(?:does|do|did|is|are)(?: not|n'?t) (?:answer|respond|return|finish)(?:ing)?\b"
            r"|\bno (?:longer|more) (?:answer|respond|progress)"
            r"|卡死|卡住|无响应|没有响应|挂起|ハング|固ま|応答しな"
        ),
    ),
    (
        "errs",
        re.compile(
            r"(?i)gibberish|garbage|garbled|(?<!no )(?<!not )(?<!without )(?<!never )\bnans?\b"
            r"|wrong (?:\w+ )?(?:output|token|answer|result|log-?prob"
            r"|score|embedding|text|value)|incorrect|repeat(?:s|ed|ing) token|!!!!"
            r"|\b(?:outputs?|answers?|results?|responses?|tokens|scores?|logprobs|embeddings?)\b"
            r"[^.\n]{0,60}\b(?:is|are|was|were|become)"
            r" (?:\w+ )?(?:wrong|corrupt\w*|nonsense|broken|empty)"
            r"|\b(?:HTTP |status |returns? |an? |answers? )500\b|\b500 (?:Internal|error|status)"
            r"|\breturns? (?:no (?:data|answer|output|text|results?|tokens)|nothing|empty|null)\b"
            r"|\b(?:accuracy|gsm8k|scores?)\b[^.\n]{0,40}\b(?:drop|degrad|fall|lower)\w*"
            r"|\bmix(?:es|ed)? up\b"
            r"|\b(?:from|of|for) (?:the |an)?(?:wrong|other) (?:adapter|prompt|request|user)"
            r"|→ ?(?:HTTP )?500\b|Internal Server Error|乱码|文字化け"
            r"|\b(?:server|engine)\b[^.\n]{0,20} (?:stays|keeps|is still) (?:up|alive)"
        ),
    ),
)
_SURVIVES = re.compile(
    r"(?i)\b(?:engine|server|enginecore|process|it|vllm)\b[^.\n]{0,30}?\b(?:survives?|recovers?"
    r"|lives(?=\s*(?:[.,;]|$))"
    r"|(?:stays?|lives?|keeps?|is still) (?:up|on|alive|running|serving|healthy)"
    r"|is (?:fine|healthy)"
    r"|(?:does|did)(?: not|n'?t) (?:crash|die|go down))\b"
    r"|\b(?:next|later|following) requests?\b[^.\n]{0,20}\b(?:is|are|gets?) (?:served|answered)\b"
)
_CONDITION = re.compile(
    r"(?i)--|\b(?:with(?:out)?(?! (?:an? )?(?:HTTP|status|errors?|\d{3})\b)"
    r"|if|when|until|unless|instead|workaround|after (?:a )?restart"
    r"|downgrad\w*|remov\w+|disabl\w+|set(?:ting)?|on|in) |\b0\.\d+|\bV[01]\b"
    r"|\b(?:at|during) (?:start-?up|boot|launch)"
    r"|\b(?:prefill|decode|proxy|router|gateway|other|second)(?: \w+)?"
    r" (?:server|instance|node|one)\b"
)
"""Words by which a sentence tells of another set-up, or server, than the reported one."""
_CRASH = re.compile(
    r"crash|\b(?-i:(?!Dies? (?!(?:after|at|during|if|in|on|when|with)\b)"
    r"|die (?:[a-zäöüß]+e[nrs]? )*[A-ZÄÖÜ]))die[sd]?\b|\bdying\b|dead\b|DeadError"
    r"|assert|\bkill(?:s|ed)?\b|\bexit(?:s|ed)\b"
    r"|fail\w* to start|illegal memory|segfault|out of memory|\bOOM\b"
    r"|\babsturz|\bst(?:ü|ue)rz(?:t|en|te)\b|\babgest(?:ü|ue)rzt"
    r"|崩溃|挂掉|异常退出|落ち|クラッシュ",
    re.IGNORECASE,
)
_NO_CRASH = re.compile(
    rf"(?i)(?:\b(?:no(?:thing|body|ne)?|never|not|without)\b|{NOT})(?: \w+){{0,2}}?"
    r" (?:crash\w*|die[sd]?|dead|kill\w*|exit\w*|segfault\w*|asserts?|OOM)\b"
    r"|\bkill(?:s|ed|ing)? (?:it )?(?:with )?-\w+|\b(?:pkill|killall|SIGKILL)\b"
    r"|\b(?:I|we|you|user|(?:have|has|had|need(?:s|ed)?) to(?: be)?|must(?: be)?)"
    r" (?:\w+ )?kill(?:ed|s)?\b"
)
"""Words about a crash that did not happen, or about a process that the reporter killed."""
_BOOT = re.compile(
    r"\bstart-?up\b|\b(?:fails?|failed|unable|not) to start\b|\b(?:cannot|can't|won't)"
    r" start\b|\bboot|\blaunch|\binitiali[sz]|\bwarm-?up\b"
    r"|\bd[ée]marrage\b|\bbeim Start|\barran(?:que|car)\b"
    r"|启动(?:失败|报错|崩溃|时)|起動(?:時|失敗)",
    re.IGNORECASE,
)
_AT_BOOT = re.compile(
    r"(?i)(?<!not )(?<!n't )(?<!never )(?<!no )(?<!without )\b(?:crash|die|fail|exit)\w*"
    r"(?: \w+)? (?:at|in|on|during|while) (?:\w+ )?"
    r"(?:start-?up\b|boot|launch|initiali[sz]|warm-?up\b)"
)
"""A death at boot, in a sentence."""
_REQUEST = re.compile(
    r"\b(?:requests?|prompts?|chat completion|prefill|curl|inference|generat\w+|preempt\w*|endpoint"
    r"|concurren\w+|VUs|users|files at a time|under (?:load|[\w-]*perf|bench\w*|locust|k6)"
    r"|every (?:second|third|fourth|fifth|\d+\w\w) (?:run|time|call))\b"
    r"|\b(?:after|within) (?:\w+ ){0,2}\d[\d–-]* ?(?:s|sec\w*|min\w*|h|hours?)\b"
    r"(?!.*(?:boot|start|load|compil|init))",
    re.IGNORECASE,
)
"""Words of a sentence on a server that has booted."""


def read_facts(text: str, more: str = "", *, issue: str = "") -> Facts:
    """Return the facts of an issue's text.

    text: without secrets and private names. more: its comments, for what the text itself does not
    state. issue: its name, if known.
    """
    text, more = clean(text), clean(more)
    blocks = read_blocks(text)
    sentences = list(statements(blocks))
    model = _model(text)
    commands, unread = find_commands(blocks, model.value if model else "")
    if not commands and more:
        commands, unread = find_commands(read_blocks(more), model.value if model else "")
    diagnosis = diagnose(text)
    if diagnosis.root is None and more:
        diagnosis = diagnose(more)
    title = _title(text)
    symptom = _symptom(title, sentences)
    if role := _ROLE.search(symptom.words):
        commands = [
            replace(
                each, times=each.times + (role[0].lower() in each.above.partition("\n")[2].lower())
            )
            for each in commands
        ]
        commands.sort(key=least_likely_last)
    command = commands[0].command if commands else ServeCommand(flags=())
    tried, unclear = find_tried([*sentences, *statements(read_blocks(more))], command)
    issue = issue or _issue(text)
    # Clauses of what works tell nothing about the reported requests.
    told = "\n".join(
        each
        for each in re.split(r"\n|[,.;]\s|[，。；]|\b(?:but|while)\b", text)
        if not _WORKS.fullmatch(each)
    )
    requests = find_requests(
        blocks,
        sentences,
        scheduler_dump(read_lines(text)),
        _adapters(command, text),
        [each.command for each in commands],
    )
    return Facts(
        title=title,
        issue=issue,
        related=_related(f"{text}\n{more}", issue),
        versions=tuple(
            _versions(
                f"{command.container.image if command.container else ''}\n{text}", diagnosis, title
            )
        )
        or tuple(_versions(more, diagnosis)),
        commands=tuple(commands),
        unread=tuple(unread),
        model=model,
        shape=_shape(text),
        gpus=_gpus(text, diagnosis),
        on_cpu=diagnosis.evidence is Evidence.CPU
        or (_gpus(text, diagnosis) is None and _NO_GPU.search(text) is not None),
        nodes=_count(_NODES.search(text)),
        requests=tuple(requests),
        tried=tuple(tried),
        unclear=tuple(unclear),
        diagnosis=diagnosis,
        phase=diagnosis.phase or _phase(title, requests, sentences),
        symptom=symptom,
        answer=answer_length(text),
        streams=_STREAMS.search(told) is not None and _WHOLE.search(told) is None,
        blocks=tuple(blocks),
    )


def _symptom(title: str, sentences: Sequence[str]) -> Stated:
    """Return the behaviour that a text describes, such as `dies`, and its words; empty if none."""
    survives = [
        each
        for each in sentences
        if _SURVIVES.search(each)
        and not _CONDITION.search(each)
        and not _CRASH.search(_SURVIVES.sub("", each))
    ]
    for texts in ([title], sentences):
        for word, pattern in (("dies", _CRASH), *_SYMPTOMS):
            words = [each for each in texts if pattern.search(_NO_CRASH.sub(" ", each))]
            if words and not (word == "dies" and survives):
                return _of_words(word, words[0], pattern)
    return _of_words("errs", survives[0], _SURVIVES) if survives else Stated("", "")


def _of_words(value: str, words: str, pattern: re.Pattern[str]) -> Stated:
    """Return the behaviour of a sentence, of which the match of a pattern was read."""
    match = pattern.search(_NO_CRASH.sub(lambda other: " " * len(other[0]), words))
    used = ((words[max(0, match.start() - 25) :], (match[0],)),) if match else ()
    return Stated(value, shortened(words, 300), used=used)


def _phase(title: str, requests: Sequence[Asked], sentences: Sequence[str]) -> Phase | None:
    """Return the phase of the death that the words suggest: boot, request, or None."""
    if not requests and (_BOOT.search(title) or any(map(_AT_BOOT.search, sentences))):
        return Phase.BOOT
    return Phase.REQUEST if requests or any(map(_REQUEST.search, [title, *sentences])) else None


def _title(text: str) -> str:
    """Return the issue's title; empty if the text does not show one."""
    marked = next((match["title"] for rx in _TITLES if (match := rx.search(text))), None)
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    if marked is None and (_NO_TITLE.match(first) or len(first) > 150):
        return ""
    return shortened(_TITLE_ENDS.sub("", marked or first).strip("*_ "), 150)


def _issue(text: str) -> str:
    """Return the name of the issue itself; empty if the text only mentions others.

    It is in the head of the page, or in an address that the text begins with.
    """
    if match := _PAGE_NAME.search(text[:4_000]):
        return f"{match['repository']}#{match['number']}"
    first = "\n".join(text.strip().split("\n")[:_MOST_HEAD])
    if (match := _ISSUE_URL.search(first)) and match["kind"] == "issues":
        return f"{match['repository']}#{match['number']}"
    if ("[Bug]" in text[:400] or "Subject:" in text[:400]) and (
        match := _HEAD_NUMBER.match(text.lstrip())
    ):
        return f"vllm-project/vllm#{match['number']}"
    return ""


def _related(text: str, issue: str) -> tuple[str, ...]:
    """Return the names of up to 20 other issues that the text mentions."""
    mentions = [
        *((at.start(), f"{at['repository']}#{at['number']}") for at in _ISSUE_URL.finditer(text)),
        *((at.start(), f"vllm-project/vllm#{at[1]}") for at in _MENTIONED.finditer(text)),
    ]
    return tuple(
        name
        for name in dict.fromkeys(name.removesuffix(".") for _, name in sorted(mentions))
        if name != issue
    )[:20]


def _versions(text: str, diagnosis: Diagnosis, title: str = "") -> Iterator[Stated]:
    """Yield the releases that the text names, each once, that of the log or `collect_env` first.

    Those in which it works, or that were upgraded from, come last.
    """
    logged = _FOR_A_DEVICE.sub("", diagnosis.vllm_version or "")
    # Another release, which only prose names, is found below.
    form = r"(?im)(?:LLM engine \(|vLLM \(|^\W*version |server version |\bvLLM Version *: *)v?"
    stated = [Stated(logged, "")] if logged and re.search(form + re.escape(logged), text) else []
    matches = [match for rx in _VERSIONS for match in rx.finditer(text)]
    matches += [match for rx in (_TITLE_VERSION, _BARE_VERSION) for match in rx.finditer(title)]
    with_cells = f"{text}\n{_columns(text)}\n"
    bare = [match for rx in (_BARE_VERSION, _LAST_OF_RANGE) for match in rx.finditer(text)]
    bare += [match for match in _IN_LIST.finditer(with_cells) if _shows(match)[0] is not None]
    stated += _stated([*matches, *sorted(bare, key=lambda each: each.start("version"))], logged)
    senses = {
        each.value: {other.has_it for other in stated if other.value == each.value}
        for each in stated
    }
    # The release from which it was upgraded, or in which it works, comes last.
    clean = {value for value, known in senses.items() if False in known and True not in known}
    if not any(True in known for known in senses.values()):
        clean -= {each.value for each in stated if each.value == logged and not each.used}
    seen: set[str] = set()
    for release in sorted(
        stated,
        key=lambda each: (
            each.value in clean,
            {True, False} <= senses[each.value],
            "dev" in each.value and each.value != logged,
        ),
    ):
        with suppress(InvalidVersion):
            version = str(Version(release.value))
            if version not in seen and not any(each.startswith(f"{version}+") for each in seen):
                seen.add(version)
                known = senses[release.value] - {None}
                has_it = False if release.value in clean else True if known == {True} else None
                used = (
                    each.used[0]
                    for each in stated
                    if each.value == release.value and each.used and each.has_it in (None, has_it)
                )
                yield Stated(version, release.words, has_it, tuple(used))


def _stated(matches: Iterable[re.Match[str]], logged: str) -> Iterator[Stated]:
    """Yield the releases of vLLM among matches, with the words around each.

    logged: the release of the log, which needs no words.
    """
    for match in matches:
        if not _is_of_other_product(match):
            words = (
                match.string[: match.end()][-60:].rpartition("\n")[2]
                + re.split(r"\n|(?<=[.;!?])\s(?=[A-Z])", match.string[match.end() :][:60])[0]
            )
            version = _FOR_A_DEVICE.sub("", match["version"].rstrip(".").replace(" ", ""))
            has_it, used = _shows(match)
            # The row of a table's column is not in the text.
            words = "" if version == logged or "\x1f" in words else shortened(words)
            yield Stated(version, words, has_it, (used,))


def _columns(text: str) -> str:
    r"""Return a row, after `\x1f`, of each column of the tables whose head has releases."""
    columns: list[list[str]] = []
    head: list[list[str]] = []
    for line in text.split("\n"):
        cells = [cell.strip(" *`") for cell in line.split("|")] if "|" in line else []
        if (
            sum(re.fullmatch(r"(?i)(?:vllm )?v?0\.\d+\.\d+\S*", cell) is not None for cell in cells)
            > 1
        ):
            head = [[name] for name in cells]
            columns += head
        elif len(cells) == len(head):
            for column, cell in zip(head, cells, strict=True):
                column.append(cell)
        else:
            head = []
    return "\n".join(f"\x1f| {' | '.join(dict.fromkeys(column))} |" for column in columns)


def _is_of_other_product(match: re.Match[str]) -> bool:
    """Return True if a release is that of a chart, an image or a package, and not of vLLM.

    So is one that only names its nightly builds.
    """
    if (image := match.groupdict().get("image")) is not None:
        return not re.fullmatch(r"(?:\S*/)?vllm/|[^/]*[.:\]][^/]*/(?!lmcache)\S*|", image)
    before, after = match.string[: match.start("version")], match.string[match.end("version") :]
    named = re.match(r"(?i)\.? (?:of|from) (?!pip|uv|v?llm)", after)
    if named and _PRODUCT.match(match.string, match.end("version") + named.end()):
        return True
    if match["version"].replace(".", "").isdecimal() and (
        _NIGHTLY.search(before) or re.match(r"(?i)[ (-]{1,2}nightl", after)
    ):
        return True
    line = re.split(r"[\n,;,；。、]", before)[-1]
    if tag := re.search(r"(?a)(?P<image>[\w./\[\]-]*\w)[:@]v?$", line):
        return not re.search(
            r"(?ai)(?:^|vllm/|[.\]]\w*/)vllm(?:-openai)?$|version$|release$", tag["image"]
        )
    if named := re.search(r"(?im)^\W*name\W+([\w.-]+).*\n.*\Z", before):
        return named[1] != "vllm"
    products = [*_PRODUCT.finditer(line)]
    if not products or re.search(r"(?i)vllm[_-]v?$", line):
        return bool(
            re.search(r"(?i)\b(?:image|tag)\b\W*(?:(?:is|was|version)\b)?\W*v?$", line)
        ) and (_OF_SOURCE.search(before) is None)
    return not products[-1]["ours"] and not re.search(
        r"(?i) (?:on|in|at|since|with) ", line[products[-1].end() :]
    )


def _shows(match: re.Match[str]) -> tuple[bool | None, Used]:
    """Return what the words around a release or a GPU say, and the words: True if it has the bug.

    None without such words.
    """
    at, end = match.span("version" if "version" in match.re.groupindex else "kind")
    before = _END.split(_SOURCE.sub("", match.string[:at][-160:]))[-1]
    after = _END.split(match.string[at : end + 80].rstrip("."), maxsplit=1)[0][end - at :]
    whole, itself = f"{before}{match.string[at:end]}{after}", match.string[at:end]
    after = re.sub(rf"\A{_LIST}", "", after)
    if re.match(r"\s*\|", before):  # a row with several results
        outcomes = [*OUTCOME.finditer(after)]
        bad = max((each.lastgroup in _BAD for each in outcomes), default=None)
        return bad, (whole, (itself, *(each[0] for each in outcomes[:1])))
    outcome = _BESIDE.match(after)
    if (
        outcome is None
        and (_OLDER.search(before) or re.match(r" ?(?:→|[=-]+>) ?v?0\.\d", after))
        and not re.match(r" on(?:wards?)?\b|\+", after)
    ):
        return _WORKS_NOT_ON.search(match.string[:at]) is not None, (
            whole,
            (itself, *(each[0] for each in OUTCOME.finditer(before))),
        )
    if outcome is None and (labels := [*OUTCOME.finditer(before)]):
        between = re.sub(_BEFORE_NEXT, "", before[labels[-1].end() :])
        outcome = None if re.search(r"--|=|[,、]| and |^\s*/", between) else labels[-1]
    if outcome is None:
        outcome = OUTCOME.search(after)
        if outcome is None or _UNDER.search(after[: outcome.start()]):
            return None, (whole, (itself,))
    shown = outcome.lastgroup in _BAD
    if not shown and re.match(r"[^\n.;!]*\?", match.string[end : end + 80]):
        return None, (whole, (itself,))
    return shown, (whole, (itself, outcome[0]))


def _model(text: str) -> Stated | None:
    """Return the public name of the model (`org/name`) and the words that state it, or None."""
    match = next(
        filter(None, (rx.search(text) for rx in (_HUB_MODEL, _HUB_URL, _NAMED_MODEL))), None
    )
    name = match and (match["model"] or match["body"]).rstrip(".,")
    return Stated(name, shortened(match[0]), used=_all(match[0])) if match and name else None


def _all(words: str) -> tuple[Used, ...]:
    """Return words that were read, wherever they stand."""
    return ((words, (words,)),)


def _shape(text: str) -> dict[str, int | str]:
    """Return the model's sizes and architecture, by their names in config.json.

    One that the text states with two values is left out: a vision part may have the same name.
    """
    sizes = [
        *((name, int(number)) for name, number in dict.fromkeys(_SHAPE.findall(text))),
        *(("architecture", name) for name in dict.fromkeys(_ARCHITECTURE.findall(text))),
    ]
    return {name: size for name, size in sizes if [other for other, _ in sizes].count(name) == 1}


def _gpus(text: str, diagnosis: Diagnosis) -> Stated | None:
    """Return count, kind and memory of the GPUs as the text states them; None if it states none."""
    if diagnosis.evidence is Evidence.CPU:
        return None
    matches = (
        match
        for rx in _GPUS
        for match in rx.finditer(text)
        if _shows(match)[0] is not False and not _untested(match)
    )
    named = next(matches, None)
    if named is None:
        match = _GPU_COUNT.search(text)
        words = match[0] if match else ""
        return Stated(f"{_count(match)} x GPU", words, used=_all(words)) if match else None
    memory = re.match(
        r"(?:(?!CPU)[^\n.;]){0,20}?\b(\d{2,3}) ?(?:GB|GiB|G)\b(?!\W*(?:\w+ )?RAM)",
        text[named.end() :],
    )
    listed = len(set(re.findall(r"\bGPU \d+: (?=[A-Z])", text)))
    count = _count(named) if named.groupdict().get("count") else listed
    return Stated(
        f"{f'{count} x ' if count else ''}{shortened(named['kind'])}"
        f"{f' of {memory[1]} GB' if memory else ''}",
        shortened(re.split(r"\n|[;。]| with | and ", text[named.start() :][:80])[0], 80),
        used=_all(named[0]) + _all(f"{named[0]}{memory[0]}" if memory else named[0]),
    )


def _untested(match: re.Match[str]) -> bool:
    """Return True if the words around a match state that it was not tested."""
    before, after = (
        match.string[: match.start()].rpartition("\n")[2],
        match.string[match.start() :][:160],
    )
    ends = r"\n" if before.startswith("|") else r"[\n,;]|\.\s"
    return _UNTESTED.search(re.split(ends, before)[-1] + re.split(ends, after)[0]) is not None


def _adapters(command: ServeCommand, text: str) -> set[str]:
    """Return the names of LoRA adapters that the text loads."""
    return set(
        re.findall(
            r"(?:\"name\": ?\"|(?<!\S))([\w./-]+)(?==|\")",
            f"{command.get('--lora-modules') or ''} {command.get('--lora-modules-json') or ''}",
        )
    ) | set(re.findall(r"[\"']lora_name[\"'] ?: ?[\"']([\w./-]+)", text))


def _count(match: re.Match[str] | None) -> int:
    """Return the number in a match, in digits or as a word; 0 without a match."""
    return COUNTS.get(match["count"].lower()) or int(match["count"]) if match else 0


def parallel(command: ServeCommand) -> int:
    """Return the number of GPUs of a command: the product of its parallel sizes, 1 without any.

    0 if a size is no number, as one in a variable.
    """
    return prod(
        int(size) if re.fullmatch(r"[1-9]\d{0,3}", size) else 0
        for kind in ("tensor", "pipeline", "data", "prefill-context")
        if (size := command.get(f"--{kind}-parallel-size"))
    )
