"""vLLM, in the trainer's process or in one of its own."""

from tunesmith.config.engines import EngineKind

KIND = EngineKind(
    "vllm",
    "vLLM",
    "tunesmith.run.placement.engines:vllm_spec",
    third_party=True,
    spans_devices=True,
    speculates_elsewhere=True,
    fastest_on_gpus=True,
    install="pip install 'tunesmith[vllm]'",
    least_temperature=0.01,
)
