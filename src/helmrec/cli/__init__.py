"""The command line: one module a command, and `main`, which puts them together."""
