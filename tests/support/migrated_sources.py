"""Whole sources in the style of each framework."""

from __future__ import annotations

OPENRLHF = """
set -x
# a comment with a quote: don't
GROUP=4
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/w"}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 \\
   --pretrain org/base \\
   --remote_rm_url http://127.0.0.1:5000/get_reward \\
   --save_path runs/ppo --save_steps -1 \\
   --micro_train_batch_size 8 --train_batch_size 128 \\
   --rollout_batch_size 256 --n_samples_per_prompt ${GROUP} \\
   --max_epochs 1 --num_episodes 2 \\
   --prompt_max_len 1024 --generate_max_len 512 \\
   --zero_stage 3 --bf16 \\
   --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 \\
   --init_kl_coef 0.02 --advantage_estimator gae --lambd 0.95 \\
   --prompt_data org/prompts --input_key question --apply_chat_template \\
   --packing_samples --adam_offload --aux_loss_coef 0.01 \\
   --use_wandb {token} --gradient_checkpointing
"""


VERL = """
train_file=$HOME/gsm8k/train.parquet
n=8; mini=64
len=$((1024 * 2))
args=(
    algorithm.adv_estimator=grpo
    actor_rollout_ref.actor.ppo_mini_batch_size=${mini}   # prompts
)
if [ "$n" = "8" ]; then
  lr=2e-6
else
  lr=1e-3
fi
python3 -m verl.trainer.main_ppo "${args[@]}" \\
    data.train_files=$train_file data.train_batch_size=128 \\
    data.max_prompt_length=512 data.max_response_length=${len} \\
    data.truncation='left' \\
    actor_rollout_ref.model.path=org/base \\
    actor_rollout_ref.actor.optim.lr=$lr \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((len * 2)) \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.rollout.n=$n \\
    +actor_rollout_ref.rollout.temperature=0.9 \\
    critic.optim.lr=1e-5 critic.optim.weight_decay=0.5 \\
    algorithm.use_kl_in_reward=False \\
    trainer.logger='["console","wandb"]' trainer.nnodes=1 trainer.n_gpus_per_node=8 \\
    trainer.save_freq=20 trainer.test_freq=-1 trainer.total_epochs=3 \\
    trainer.experiment_name=$EXPERIMENT $@ 2>&1 | tee log
"""


GRPO = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

data = load_dataset("org/math", split="train")

def correct(completions, answer, **kwargs):
    raise SystemExit("a script is never run")

args = GRPOConfig(
    output_dir="runs/grpo", learning_rate=2e-6, per_device_train_batch_size=4, gradient_accumulation_steps=8,
    num_generations=8, max_completion_length=256, beta=0.04, epsilon=0.1, loss_type="dr_grpo", num_iterations=2,
    scale_rewards=False, bf16=True, max_steps=200, temperature=choose(), report_to="wandb", optim="adamw_8bit",
)
trainer = GRPOTrainer(
    model="org/base", reward_funcs=[correct], args=args, train_dataset=data.shuffle(),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]),
)
"""


ACCELERATED = """
accelerate launch --num_processes 4 trl/scripts/dpo.py \\
    --dataset_name org/pairs --dataset_config clean --model_name_or_path org/base \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_train_epochs 2 \\
    --learning_rate 5.0e-7 --beta 0.2 --loss_type hinge --no_remove_unused_columns --eval_strategy no \\
    --label_smoothing_factor 0.1
"""


OLD_PPO = """
from trl import PPOConfig
config = PPOConfig(
    model_name="org/base", learning_rate=1.41e-5, batch_size=128, mini_batch_size=16, gradient_accumulation_steps=1,
    ppo_epochs=4, init_kl_coef=0.2, cliprange=0.2, log_with="wandb", seed=1,
)
"""


STATESET = """
from stateset_agents.training import GSPOConfig
config = GSPOConfig(
    model_name="org/base", num_generations=6, num_prompts_per_batch=4, learning_rate=1e-5, clip_range_left=3e-4,
    clip_range_right=4e-4, max_completion_length=300, output_dir="out", use_lora=True, lora_r=8,
)
"""


SFT_VERL = """
torchrun --standalone --nnodes=1 --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=train.parquet data.train_batch_size=64 data.micro_batch_size_per_gpu=4 data.max_length=512 \\
    optim.lr=1e-4 model.partial_pretrain=org/base trainer.total_epochs=2 model.lora_rank=32
"""


SFT_OPENRLHF = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --data.dataset org/a,org/b --data.dataset_probs 0.25,0.75 \\
   --data.input_key question --data.output_key response --data.max_len 1024 \\
   --train.batch_size 64 --train.micro_batch_size 2 --train.max_epochs 3 \\
   --model.model_name_or_path org/base --adam.lr 5e-6 --ds.lora.rank 0
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""


ASYNC = """
python -m verl.experimental.fully_async_policy.fully_async_main \\
    algorithm.adv_estimator=grpo data.train_files=d.parquet data.train_batch_size=0 data.gen_batch_size=1 \\
    actor_rollout_ref.model.path=org/base actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 rollout.total_rollout_steps=51200 rollout.total_epochs=10 \\
    async_training.require_batches=4 async_training.staleness_threshold=0.1 async_training.partial_rollout=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True trainer.n_gpus_per_node=4 \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=512 \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5
"""
