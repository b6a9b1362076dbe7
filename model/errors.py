"""The root of specax's errors. Each also is a ValueError where the caller's input is at fault.

They live in the lowest room that raises them; `specax` re-exports all of them.
"""


class SpecaxError(Exception):
    """Base of every error that specax raises on purpose."""


class CheckpointError(SpecaxError, ValueError):
    """A checkpoint, tokenizer or model configuration can't be used; the message says which part and why."""
