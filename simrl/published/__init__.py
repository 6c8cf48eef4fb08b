"""Published results, predicted: a ledger of inputs a paper, the schedules run on them, and a score.

Invariant: what a paper reports as an outcome (`published.csv`) is read by `score` alone; a prediction sees the ledger's inputs.
"""
