"""Pipelines: who waits for whom. One file a rule, each a generator function that runs on a
simulated or a wall clock."""
