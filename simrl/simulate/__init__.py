"""Checks that a scenario can exist, builds its actors, and runs it."""
