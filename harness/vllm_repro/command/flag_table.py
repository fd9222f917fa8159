"""What is known of vLLM's server flags: how they are written, and which release has them, as far as it was
looked up.

How they are written agrees with the parsers of 0.20.2, 0.28.0, 0.29.0 and 0.32.0.

As to releases: rows with one release name the first of the releases compared (0.19.1, 0.20.2, 0.21.0, 0.22.1,
0.23.0, 0.24.0, 0.25.1, 0.26.0, 0.27.1, 0.28.0 to 0.32.0) that has a flag, or lacks it again. The other rows
come from the parsers of 0.20.2, 0.28.0, 0.29.0 and 0.32.0 and say no more than those four do. Names are
without dashes; a switch's `--no-` form is not listed.
"""

from __future__ import annotations

__all__ = [
    "ADDED",
    "FIRST_SEEN",
    "JSON_FLAGS",
    "JSON_IN_BRACES",
    "MULTI_VALUED",
    "NEVER_DEFINED",
    "REMOVED",
    "SEEN_THROUGHOUT",
    "SHORT_FORMS",
    "SWITCHES",
    "SWITCH_PREFIXES",
    "VALUED_IN_SPITE_OF_PREFIX",
    "VALUE_OPTIONAL",
]

SHORT_FORMS: dict[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-ep": "--enable-expert-parallel",
    "-dc": "--diffusion-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
    "-asc": "--api-server-count",
    "-q": "--quantization",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-O": "--optimization-level",
    "-h": "--help",
}

MULTI_VALUED = frozenset(
    {
        "--allowed-media-domains",
        "--api-key",
        "--collect-detailed-traces",
        "--cpu-offload-params",
        "--cudagraph-capture-sizes",
        "--ignore-patterns",
        "--kv-cache-dtype-skip-layers",
        "--logits-processors",
        "--lora-modules",
        "--lora-target-modules",
        "--numa-bind-cpus",
        "--numa-bind-nodes",
        "--offload-params",
        "--served-model-name",
        "--sleep-preserve-parameter-names",
    }
)
"""Flags that take every word up to the next flag."""

JSON_FLAGS = frozenset(
    {
        "--additional-config",
        "--allowed-headers",
        "--allowed-methods",
        "--allowed-origins",
        "--attention-config",
        "--compilation-config",
        "--default-chat-template-kwargs",
        "--ec-transfer-config",
        "--eplb-config",
        "--hf-overrides",
        "--ir-op-priority",
        "--kernel-config",
        "--kv-events-config",
        "--kv-transfer-config",
        "--mm-processor-kwargs",
        "--model-loader-extra-config",
        "--override-generation-config",
        "--pooler-config",
        "--profiler-config",
        "--reasoning-config",
        "--speculative-config",
        "--structured-outputs-config",
        "--weight-transfer-config",
    }
)

JSON_IN_BRACES = frozenset(
    {
        "--aux-output-config",
        "--diffusion-config",
        "--ec-manager-config",
        "--engram-config",
        "--fault-tolerance-config",
        "--limit-mm-per-prompt",
        "--logging-config",
        "--media-io-kwargs",
        "--quantization-config",
        "--watermark-config",
    }
)
"""Flags that take JSON, and in some releases, or for some values, plain words: what begins with a brace is
JSON."""

SWITCHES = frozenset(
    {
        "--aggregate-engine-logging",
        "--allow-credentials",
        "--allow-deprecated-quantization",
        "--async-scheduling",
        "--calculate-kv-scales",
        "--cohere-is-reasoning-model",
        "--cudagraph-metrics",
        "--data-parallel-external-lb",
        "--data-parallel-hybrid-lb",
        "--data-parallel-multi-port-external-lb",
        "--dcp-q-replicate",
        "--enforce-eager",
        "--exclude-tools-when-tool-choice-none",
        "--fail-on-environ-validation",
        "--fully-sharded-loras",
        "--grpc",
        "--headless",
        "--help",
        "--interleave-mm-strings",
        "--jit-monitor-verbose",
        "--kv-cache-metrics",
        "--kv-sharing-fast-prefill",
        "--language-model-only",
        "--log-error-stack",
        "--long-prefill-token-threshold-adaptive",
        "--mm-device-do-normalize",
        "--mm-encoder-only",
        "--numa-bind",
        "--ray-workers-use-nsight",
        "--return-sampling-mask",
        "--return-tokens-as-token-ids",
        "--scheduler-reserve-full-isl",
        "--skip-mm-profiling",
        "--skip-tokenizer-init",
        "--sleep-mode-offload-cudagraph",
        "--specialize-active-lora",
        "--swa-bounded-replay",
        "--tokens-only",
        "--trust-remote-code",
        "--trust-request-chat-template",
        "--trust-request-mm-kwargs",
        "--use-fp64-gumbel",
        "--use-replayssm",
        "--use-tqdm-on-load",
    }
)
SWITCH_PREFIXES = ("--enable-", "--disable-", "--no-")
VALUED_IN_SPITE_OF_PREFIX = frozenset({"--disable-access-log-for-endpoints"})
VALUE_OPTIONAL = frozenset({"--hf-token"})
"""Flags that stand alone or with a value."""

ADDED: dict[str, str] = {
    "0.20": "mamba-backend numa-bind numa-bind-cpus numa-bind-nodes ir-op-priority",
    "0.22": "spec-method spec-model spec-tokens linear-backend quantization-config",
    "0.24": "watermark prefill-schedule-interval device-ids jit-monitor-verbose",
    "0.26": "max-num-scheduled-tokens prefix-match-unit",
    "0.27": "enable-fault-tolerance",
    "0.28": "return-sampling-mask",
    "0.29": "max-num-queued-reqs max-num-queued-tokens prefix-cache-retention-interval",
    "0.30": "watermark-config sparse-indexer-topk-backend",
    "0.31": "device-memory-utilization log-level logging-config max-num-active-seqs swa-bounded-replay",
    "0.32": "custom-histogram-buckets enable-shm-tensor-arena",
}
"""By release: flags that it brought."""

REMOVED: dict[str, str] = {
    "0.27": "max-num-partial-prefills max-long-partial-prefills",
    "0.28": "calculate-kv-scales override-attention-dtype",
}
"""By release: flags that it no longer has."""

NEVER_DEFINED: dict[str, str] = {
    "disable-log-requests": "--no-enable-log-requests",
    "swap-space": "",
    "use-v2-block-manager": "",
}
"""Flags of old recipes that no release from 0.19.1 to 0.32.0 defines, with what to write instead; empty:
leave it out."""

FIRST_SEEN: dict[tuple[str, str], str] = {
    ("0.20.2", "0.28.0"): """
        cohere-format cohere-is-reasoning-model cpu-distributed-timeout-seconds
        data-parallel-multi-port-external-lb data-parallel-supervisor-port diffusion-config
        dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
        dp-supervisor-probe-timeout-s ec-manager-config enable-bf16x3-router-gemm enable-cumem-allocator
        enable-mixed-moe-lora-format enable-moe-shared-loras enable-per-request-metrics
        fault-tolerance-config fingerprint-mode fingerprint-value jit-monitor-mode kda-prefill-backend
        mamba-ssu-algorithm mm-device-do-normalize mm-encoder-attn-dtype mm-encoder-fp8-scale-path
        mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-hasher-algorithm
        mm-ipc-gpu-memory-gb mm-processor-device model-class-overrides replayssm-buffer-len
        safetensors-prefetch-block-size safetensors-prefetch-num-threads use-fp64-gumbel use-replayssm
        video-pruning-method
    """,
    ("0.28.0", "0.29.0"): """
        dcp-q-replicate enable-batch-sharded-sampling enable-trace-replay
        per-request-spec-decode-metrics sse-keep-alive-interval
    """,
    ("0.29.0", "0.32.0"): """
        anthropic-disabled-thinking-effort aux-output-config dp-sync-interval elastic-ep-max-dp-size
        enable-hc-sp enable-mamba-shared-prefix-checkpoint enable-nccl-comm-suspend enable-scale-out
        engram-config grpc-port kda-decode-backend long-prefill-token-threshold-adaptive
        max-lora-cls-labels sleep-mode-offload-cudagraph sleep-preserve-parameter-names
        tool-strict-level trust-request-mm-kwargs
    """,
}
"""By pair of releases: flags that the first of them lacks and the second has; which one between them brought
it was not looked up."""

SEEN_THROUGHOUT = """
    additional-config aggregate-engine-logging all2all-backend allow-credentials
    allow-deprecated-quantization allowed-headers allowed-local-media-path allowed-media-domains
    allowed-methods allowed-origins api-key api-server-count async-scheduling attention-backend
    attention-config block-size chat-template chat-template-content-format code-revision
    collect-detailed-traces compilation-config config config-format convert cp-kv-cache-interleave-size
    cpu-offload-gb cpu-offload-params cudagraph-capture-sizes cudagraph-metrics data-parallel-address
    data-parallel-backend data-parallel-external-lb data-parallel-hybrid-lb data-parallel-rank
    data-parallel-rpc-port data-parallel-size data-parallel-size-local data-parallel-start-rank
    dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size
    decode-context-parallel-size default-chat-template-kwargs default-mm-loras
    disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input
    disable-custom-all-reduce disable-fastapi-docs disable-hybrid-kv-cache-manager disable-log-stats
    disable-nccl-for-dp-synchronization disable-sliding-window disable-uvicorn-access-log
    distributed-executor-backend distributed-timeout-seconds download-dir dtype ec-transfer-config
    enable-auto-tool-choice enable-chunked-prefill enable-dbo enable-elastic-ep enable-ep-weight-filter
    enable-eplb enable-expert-parallel enable-flash-late-interaction enable-flashinfer-autotune
    enable-force-include-usage enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs
    enable-log-requests enable-logging-iteration-details enable-lora
    enable-mamba-cache-stochastic-rounding enable-mfu-metrics enable-mm-embeds enable-offline-docs
    enable-prefix-caching enable-prompt-embeds enable-prompt-tokens-details enable-request-id-headers
    enable-return-routed-experts enable-server-load-tracking enable-sleep-mode enable-ssl-refresh
    enable-tokenizer-info-endpoint enable-tower-connector-lora enforce-eager eplb-config
    exclude-tools-when-tool-choice-none expert-placement-strategy fail-on-environ-validation
    fully-sharded-loras gdn-prefill-backend generation-config gpu-memory-utilization grpc
    h11-max-header-count h11-max-incomplete-event-size headless help hf-config-path hf-overrides
    hf-token host ignore-patterns interleave-mm-strings io-processor-plugin kernel-config kv-cache-dtype
    kv-cache-dtype-skip-layers kv-cache-memory-bytes kv-cache-metrics kv-cache-metrics-sample
    kv-events-config kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill kv-transfer-config
    language-model-only limit-mm-per-prompt load-format log-config-file log-error-stack
    logits-processors logprobs-mode long-prefill-token-threshold lora-dtype lora-modules
    lora-target-modules mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds
    mamba-ssm-cache-dtype master-addr master-port max-cpu-loras max-cudagraph-capture-size max-log-len
    max-logprobs max-lora-rank max-loras max-model-len max-num-batched-tokens max-num-seqs
    max-parallel-loading-workers media-io-kwargs middleware mm-encoder-attn-backend mm-encoder-only
    mm-encoder-tp-mode mm-processor-cache-gb mm-processor-cache-type mm-processor-kwargs
    mm-shm-cache-max-object-size-mb mm-tensor-ipc model model-impl model-loader-extra-config moe-backend
    nnodes node-rank num-gpu-blocks-override offload-backend offload-group-size offload-num-in-group
    offload-params offload-prefetch-step optimization-level otlp-traces-endpoint
    override-generation-config performance-mode pipeline-parallel-size pooler-config port
    prefill-context-parallel-size prefix-caching-hash-algo profiler-config pt-load-map-location
    quantization ray-workers-use-nsight reasoning-config reasoning-parser reasoning-parser-plugin
    renderer-num-workers response-role return-tokens-as-token-ids revision root-path runner
    safetensors-load-strategy scheduler-cls scheduler-reserve-full-isl scheduling-policy seed
    served-model-name show-hidden-metrics-for-version shutdown-timeout skip-mm-profiling
    skip-tokenizer-init specialize-active-lora speculative-config ssl-ca-certs ssl-cert-reqs
    ssl-certfile ssl-ciphers ssl-keyfile stream-interval structured-outputs-config tensor-parallel-size
    tokenizer tokenizer-mode tokenizer-revision tokens-only tool-call-parser tool-parser-plugin
    tool-server trust-remote-code trust-request-chat-template ubatch-size uds use-tqdm-on-load
    uvicorn-log-level video-pruning-rate weight-transfer-config worker-cls worker-extension-cls
"""
"""In all four parsers."""
