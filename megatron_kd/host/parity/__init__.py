"""Prove that the host computes the model that transformers computes from the same directory.

`shrunken` makes a small copy of a model's configuration with every mechanism kept, and random
weights; `reference` runs it in transformers; `host_model` runs it on the host, on this run's ranks;
`comparison` says whether, and in which layer, they part; `proof` is what is compared when, and
`record` what was proven before.
"""
