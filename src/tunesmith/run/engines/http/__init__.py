"""SGLang's servers, which are started separately."""

from tunesmith.config.engines import EngineKind

KIND = EngineKind(
    "sglang",
    "SGLang",
    "tunesmith.run.specs.http_engines:served_spec",
    served=True,
    third_party=True,
    unaltered_only=(
        "SGLang returns log-probabilities of the whole distribution, not of a truncated one, "
        "penalises repetition of the completion but not of the prompt, and may stop at a stop "
        "string before min_new_tokens"
    ),
    launch=(
        "python -m sglang.launch_server --model-path {path} --port {port} "
        "--enable-deterministic-inference"
    ),
)
