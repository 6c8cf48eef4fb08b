"""Published results, predicted: a ledger of inputs for each paper, the schedules run on them, and a score.

Invariant: a paper's reported outcomes (`published.csv`) are read by `score` alone; a prediction sees the ledger's inputs.
"""
