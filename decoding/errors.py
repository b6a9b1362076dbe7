"""Errors of the engine's callers."""

from specax.model.errors import SpecaxError


class InvalidRequestError(SpecaxError, ValueError):
    """A request or a setting is wrong; raised at submission, before anything is taken for it."""


class CapacityError(SpecaxError):
    """A request is well-formed but can never be served with this engine's memory."""
