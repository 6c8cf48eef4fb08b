"""The commands, for the command line and for `import simrl`."""
