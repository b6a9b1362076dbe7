"""The engine: requests, scheduling, batches, sampling; the programs that use it."""
