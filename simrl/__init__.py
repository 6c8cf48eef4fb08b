"""simrl: a trace-driven simulator of LLM reinforcement-learning post-training."""

__version__ = "0.1.0"
