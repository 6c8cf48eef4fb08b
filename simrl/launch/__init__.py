"""Launches of frameworks, read as text and made scenarios."""
