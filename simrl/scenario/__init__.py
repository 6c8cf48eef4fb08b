"""Scenarios, frozen and validated: made of a YAML file, overrides and variations."""
