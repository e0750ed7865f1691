"""vLLM, in the trainer's process or in one of its own."""

from tunesmith.config.engines import Adapters, EngineKind

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_APART = (*_ATTENTION, "gate_proj", "up_proj", "down_proj")
_JOINT = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")

KIND = EngineKind(
    "vllm",
    "vLLM",
    "tunesmith.run.specs.engines:vllm_spec",
    third_party=True,
    rounds_base=True,
    adapters=Adapters(
        ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
        modules={
            "gemma": _APART,
            "gemma2": _APART,
            "gemma3_text": _APART,
            "llama": _APART,
            "mistral": _APART,
            "phi3": _JOINT,
            "qwen2": _APART,
            "qwen3": _APART,
        },
        slow_on_cpu=True,
    ),
    spans_devices=True,
    speculates_elsewhere=True,
    fastest_on_gpus=True,
    records_experts=True,
    seeing=("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe"),
    install="pip install 'tunesmith[vllm]'",
    lacks=("biogpt", "mimo_v2_flash"),
    fixed_families={"gpt_oss": "its reload leaves experts and sinks as they were"},
    constrains=True,
    least_temperature=0.01,
    most_temperature=2.0,
)
