"""Which worker gets which sample, in which order, and when one moves. One file a rule."""
