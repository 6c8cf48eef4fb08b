"""The actors of a run in SimPy: workers, trainer, rewarder, recorder, faults."""
