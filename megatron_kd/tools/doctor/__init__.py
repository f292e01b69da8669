"""Check a machine, and a recipe on it, before time is spent; every fault comes with its remedy."""
