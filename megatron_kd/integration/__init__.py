"""Old addresses. Checkpoints written before the package was arranged in rooms name a class here;
nothing else belongs here, and nothing of ours imports it.
"""
