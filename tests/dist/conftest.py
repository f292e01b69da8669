"""Makes this directory importable: tests below it say `from gloo import run_ranks`."""
