"""Makes this directory importable, so that every test below it can say `from gloo import run_ranks`."""
