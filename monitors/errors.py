"""Errors of this package.

    MonitorsError
    +-- SignatureTableInvalid   the signature table cannot be used as it is written

Sources that fail raise nothing: they answer `Unknown` with the reason.
"""

from __future__ import annotations


class MonitorsError(Exception):
    """Base of all errors that this package raises."""


class SignatureTableInvalid(MonitorsError):
    """A signature table names an unknown word, lacks a key or holds a broken pattern."""
