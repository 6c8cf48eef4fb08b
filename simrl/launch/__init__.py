"""What starts a run of a framework, read as text and made a scenario."""
