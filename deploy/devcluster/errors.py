"""Everything that devcluster reports to a person: one line each, with the exit code.

DevclusterError         1   something that should work did not
|-- UsageError          2   a name, number or option that cannot be
|-- PreconditionError   3   not root, a package or a kernel feature is missing
|-- NotFound            5   no such cluster or node
`-- ProgramFailed       1   a program that was called said no
"""

from collections.abc import Sequence

WORDS_OF_A_COMMAND = 6


class DevclusterError(Exception):
    """One line for a person; `exit_code` is what the shell gets."""

    exit_code = 1


class UsageError(DevclusterError):
    """A name, number or option that cannot be; nothing was changed."""

    exit_code = 2


class PreconditionError(DevclusterError):
    """The machine lacks something; the message names it and what to do."""

    exit_code = 3


class NotFound(DevclusterError):
    """There is no cluster or node of this name."""

    exit_code = 5


class ProgramFailed(DevclusterError):
    """A program ended with an error, or not in time."""

    def __init__(self, argv: Sequence[str], why: str) -> None:
        shown = " ".join(argv[:WORDS_OF_A_COMMAND])
        more = " ..." if len(argv) > WORDS_OF_A_COMMAND else ""
        super().__init__(f"{shown}{more}: {why}")
