"""Training: how long an update takes, and new weights to the rollout workers, and the memory they
need."""
