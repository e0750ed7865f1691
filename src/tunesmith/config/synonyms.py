"""Names that other frameworks (TRL, verl, OpenRLHF, transformers) use, and what they are called here."""

from __future__ import annotations

_WORDS = {
    "run_dir": "output_dir save_path",
    "model.path": "model_name_or_path pretrain",
    "model.dtype": "bf16 fp16 torch_dtype",
    "model.chat_template": "chat_template_path",
    "model.quantize": "load_in_4bit load_in_8bit",
    "lora.rank": "lora_r lora_rank use_peft",
    "lora.alpha": "lora_alpha",
    "lora.targets": "lora_target_modules target_modules",
    "lora.dropout": "lora_dropout",
    "data.train": "dataset dataset_name train_dataset",
    "data.eval": "eval_dataset",
    "data.prompt": "input_key",
    "data.completion": "output_key",
    "data.loss_on": "assistant_only_loss completion_only_loss",
    "data.max_prompt_tokens": "max_prompt_length",
    "data.max_tokens": "max_len max_length max_seq_length",
    "reward.functions": "reward_funcs",
    "reward.weights": "reward_weights",
    "reward.models": "reward_model_path reward_pretrain",
    "reward.remote": "remote_rm_url",
    "reward.answer": "label_key",
    "environment.path": "agent_func_path environment_factory",
    "environment.max_turns": "max_assistant_turns max_tool_calling_iterations",
    "algorithm.advantage": "adv_estimator advantage_estimator",
    "algorithm.loss": "loss_type policy_loss",
    "algorithm.aggregation": "loss_agg_mode loss_type",
    "algorithm.clip_low": "clip_ratio clip_ratio_low cliprange eps_clip epsilon",
    "algorithm.clip_high": "clip_ratio clip_ratio_high cliprange eps_clip epsilon epsilon_high",
    "algorithm.dual_clip": "clip_ratio_c",
    "algorithm.kl_coef": "beta init_kl_coef kl_coeff kl_loss_coef",
    "algorithm.kl_estimator": "kl_loss_type kl_penalty",
    "algorithm.kl_in": "use_kl_in_reward use_kl_loss",
    "algorithm.entropy_coef": "entropy_coeff",
    "algorithm.gae_lambda": "lam",
    "algorithm.value_clip": "cliprange_value",
    "algorithm.mask_truncated": "mask_truncated_completions",
    "algorithm.dynamic_filter": "dynamic_filtering filter_groups",
    "algorithm.stop_properly": "stop_properly_penalty_coef",
    "algorithm.reference_every": "ref_model_sync_steps",
    "critic.path": "critic_pretrain",
    "critic.value_coef": "value_loss_coef vf_coef",
    "critic.lr": "critic_learning_rate",
    "critic.freeze_actor_steps": "critic_warmup freezing_actor_steps",
    "rollout.prompts_per_step": "rollout_batch_size train_batch_size",
    "rollout.group_size": "n_samples_per_prompt num_generations",
    "rollout.max_new_tokens": "max_completion_length max_response_length response_length",
    "rollout.temperature": "temp",
    "rollout.oversample": "gen_batch_size",
    "train.steps": "max_steps total_training_steps",
    "train.epochs": "max_epochs num_episodes num_train_epochs total_epochs",
    "train.batch_size": "ppo_mini_batch_size train_batch_size",
    "train.passes_per_batch": "num_iterations ppo_epochs",
    "train.lr": "actor_learning_rate learning_rate",
    "train.schedule": "lr_scheduler lr_scheduler_type",
    "train.warmup_steps": "lr_warmup_steps",
    "train.warmup_ratio": "lr_warmup_ratio lr_warmup_steps_ratio warmup_proportion",
    "train.betas": "adam_beta1 adam_beta2 adam_betas",
    "train.eps": "adam_epsilon",
    "train.max_grad_norm": "clip_grad max_norm",
    "train.ema_decay": "ema_beta",
    "eval.every": "eval_steps eval_strategy test_freq",
    "system.max_tokens_per_microbatch": "ppo_max_token_len_per_gpu",
    "system.engine": "use_vllm",
    "system.engine_process": "vllm_mode",
    "system.engines": "data_parallel_size vllm_num_engines",
    "system.kv_memory": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "system.max_running": "max_num_seqs",
    "system.max_prefill_tokens": "max_num_batched_tokens",
    "system.vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "system.vllm.memory_share": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "system.vllm.max_batched_tokens": "max_num_batched_tokens",
    "system.vllm.chunked_prefill": "enable_chunked_prefill",
    "system.vllm.prefix_caching": "enable_prefix_caching",
    "system.vllm.eager": "enforce_eager",
    "monitor.sinks": "report_to",
    "monitor.every": "logging_steps",
    "checkpoint.every": "save_freq save_steps",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.resume": "resume_from_checkpoint",
    "rm.loss": "loss_type",
    "dpo.precompute_reference": "precompute_ref_log_probs",
    "dpo.loss": "ipo loss_type",
    "dpo.nll_coef": "nll_loss_coef rpo_alpha",
    "kto.precompute_reference": "precompute_ref_log_probs",
    "kto.desirable_weight": "desirable_loss_weight",
    "kto.undesirable_weight": "undesirable_loss_weight",
    "prm.separator": "placeholder_token step_separator",
    "prm.good": "reward_tokens",
    "prm.bad": "reward_tokens",
}
"""What the others call each key. A word that stands at several keys says them all, in this order."""

RENAMED: dict[str, list[str]] = {}
"""Synonym → the dotted key or keys that say the same."""
for _key, _words in _WORDS.items():
    for _word in _words.split():
        RENAMED.setdefault(_word, []).append(_key)

_WITHOUT = {
    "losses are always computed in float32": "compute_fp32_loss",
    "the attention kernel is chosen by the hardware": "attn_implementation flash_attn",
    "it is part of algorithm.advantage: 'grpo' divides by the deviation, 'dr_grpo' does not": "scale_rewards",
    "sequences are always packed without padding, up to system.max_tokens_per_microbatch": (
        "packing packing_samples padding_free use_dynamic_batch use_dynamic_bsz"
    ),
    "micro-batch sizes are derived from memory and never change the result; the optimizer's batch is "
    "train.batch_size, in samples": (
        "gradient_accumulation_steps log_prob_micro_batch_size micro_batch_size micro_rollout_batch_size "
        "micro_train_batch_size per_device_eval_batch_size per_device_train_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu"
    ),
}
WITHOUT_EQUIVALENT = {word: why for why, words in _WITHOUT.items() for word in words.split()}
"""Synonym → why there is no such key."""
