"""A real RL run: a small GRPO trainer with rollouts from the replayer's engines, under the
project's own schedules."""
