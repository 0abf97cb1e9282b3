"""Runtimes: they turn requests into batches, run the model, and hand back results."""
