#!/usr/bin/env bash
# GRPO on mathematics with verl's FSDP: Qwen3-8B on two nodes of eight H100s.
set -xeuo pipefail

NNODES=${NNODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
DATA_DIR=${DATA_DIR:-$HOME/data/math}

if [ -f "$HOME/.wandb" ]; then
    source "$HOME/.wandb"
fi

prompts=128
responses=8
max_prompt=$((1024 * 2))
max_response=$((1024 * 16))
sp=2
tp=2
offload=True
tokens_per_gpu=$(((max_prompt + max_response) / sp))

DATA=(
    data.train_files="$DATA_DIR/train.parquet"
    data.val_files="$DATA_DIR/test.parquet"
    data.train_batch_size=$prompts
    data.max_prompt_length=$max_prompt
    data.max_response_length=$max_response
)

ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=$((prompts / 4))
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens_per_gpu
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=$sp
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.fsdp_config.param_offload=$offload
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=$offload
    +actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32
)

ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=$responses
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.tensor_model_parallel_size=$tp
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.max_num_batched_tokens=$((max_prompt + max_response))
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$((2 * tokens_per_gpu))
)

if [ "$NNODES" -gt 1 ]; then
    ROLLOUT+=(actor_rollout_ref.rollout.max_num_seqs=512)
fi

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" \
    custom_reward_function.path="$(dirname "$0")/reward.py" \
    trainer.nnodes="$NNODES" \
    trainer.n_gpus_per_node="$GPUS_PER_NODE" \
    trainer.total_epochs=3 \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.logger='["console","wandb"]' "$@"
