"""What a run will need before it is started: memory by component, time, cache size.

Nothing here imports the host: shapes come from a Hugging Face `config.json`, settings from the
recipe.
"""
