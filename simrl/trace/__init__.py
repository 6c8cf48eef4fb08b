"""Rollouts to generate: prompts and responses, recorded, imported or drawn."""
