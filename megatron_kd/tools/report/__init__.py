"""What a run did, for a person: tables, loss curves, a generated sentence, comparisons between
runs.
"""
