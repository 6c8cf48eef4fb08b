"""Pictures: a file a subject, all matplotlib figures."""
