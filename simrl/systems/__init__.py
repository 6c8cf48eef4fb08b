"""The recipes of published systems: pipeline, dispatch and speculation, with the paper each comes
from."""
