"""The one error that this package raises. It has the fields that every error of the project has; what its
code means and which exit code it leads to stands in the catalogue of `supplychain.errors`, which joins them.
"""

from __future__ import annotations


class SbomError(Exception):
    """A bill of materials cannot be made, read or accepted: code, what, where, expected and found, and what
    to do next.
    """

    def __init__(
        self,
        code: str,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(f"{code}: {what}")
        self.code = code
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.next_step = next_step
