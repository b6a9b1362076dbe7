"""Namespaces: who may share KV of the same tokens."""

import hashlib

# (kind, value) pairs: what else the KV depends on, or who may share it. Tagged, so that a cache salt can't equal
# the name of an adapter.
type Namespace = tuple[tuple[str, str], ...]


def private_namespace(request_id: str) -> Namespace:
    """KV that nobody else may find: of a request that bypasses the prefix cache."""
    return (("private", request_id),)


def make_namespace(salt: str | None = None, adapter: str | None = None) -> Namespace:
    """The namespace of requests that share a cache salt and an adapter (by load generation, not by name)."""
    pairs: list[tuple[str, str]] = []
    if adapter is not None:
        pairs.append(("adapter", adapter))
    if salt is not None:  # hashed: it may be a secret, and goes to disk
        pairs.append(("salt", hashlib.blake2b(salt.encode(), digest_size=16).hexdigest()))
    return tuple(pairs)


def is_portable(namespace: Namespace) -> bool:
    """Whether the same namespace means the same to another process."""
    return not any(kind in ("private", "adapter") for kind, _ in namespace)
