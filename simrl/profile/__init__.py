"""Durations of forward passes: grids of step times, their sources, and the hardware."""
