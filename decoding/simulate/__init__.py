"""The simulator: the engine's scheduler, policies and KV memory, driven by a trace and a cost model."""
