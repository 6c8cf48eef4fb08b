"""Importers: one file a source, each with one function that gives a validated
`simrl.trace.trace.Trace`."""
