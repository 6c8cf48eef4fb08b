"""Continuous batching as vLLM V1 schedules it, exact to the forward pass, over arrays in compiled
kernels."""
