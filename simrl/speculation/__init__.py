"""Speculation: how a worker decodes several tokens a pass. One file a rule, each a state machine
without a clock or an engine.

Invariant: nothing here knows whether a pass was simulated or real.
"""
