"""A test rig: the host's own training loop on a CPU. Inert where a GPU is used.

`activate` and `is_active` in `backend` are its door; `layers` and `import_stand_ins` are behind it.
"""
