"""Sources of profiles: one file a source, each returns a `TableProfile`."""
