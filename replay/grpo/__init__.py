"""A real RL run: a small GRPO trainer whose rollouts come from the replayer's engines, under the project's own schedules."""
