"""What a check of Redis can find. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Trouble(StrEnum):
    """What is wrong, as far as it decides which setting to look at."""

    NAME = "name"
    """DNS answers that there is no such name."""
    DNS = "dns"
    """DNS does not answer."""
    SILENT = "silent"
    """Nothing answers at the address."""
    REFUSED = "refused"
    """The address answers that nobody listens there."""
    SENTINEL = "sentinel"
    """No Sentinel knows a primary of this name."""
    TLS = "tls"
    """One side speaks TLS and the other does not, or the certificate is not trusted."""
    LOGIN = "login"
    """Redis rejects the user or the password."""
    PERMISSION = "permission"
    """The user may not do what it has to."""
    BUSY = "busy"
    """Redis is there, but does not serve yet, or not any more."""

    @property
    def passes(self) -> bool:
        """Whether it may end by itself, because Redis or the network may only be late."""
        return self not in (Trouble.LOGIN, Trouble.PERMISSION)


@dataclass(frozen=True, slots=True)
class Finding:
    """A trouble and its description, which holds no password."""

    trouble: Trouble
    what: str


@dataclass(frozen=True, slots=True)
class Usable:
    """Redis can be used. `warnings` say what an operator should change all the same."""

    warnings: tuple[str, ...] = ()
