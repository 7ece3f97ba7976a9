"""Creates an API key. Standard library only, because `scripts/api-key` runs before anything is
installed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import sys

METRICS = "@metrics"
"""Used in the keys file in place of a tenant."""
_TENANT = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,63}")


def new_key() -> str:
    return f"hk-{secrets.token_urlsafe(32)}"


def check(tenant: str) -> None:
    """`ValueError`: the tenant's name is not allowed; the message says why."""
    if tenant == "default":
        raise ValueError(
            "A tenant cannot be named 'default': that name is for requests without a key."
        )
    if tenant != METRICS and not _TENANT.fullmatch(tenant):
        raise ValueError(
            "A tenant's name has 1 to 64 letters, digits, '_', '.' and '-', and no '-' in front."
        )


def show(tenant: str) -> None:
    """Print a new key to standard error, and its line for the keys file to standard output; errors
    as of `check`.
    """
    check(tenant)
    key = new_key()
    print(f"key (it is shown only now): {key}", file=sys.stderr)
    print(f"{tenant} sha256:{hashlib.sha256(key.encode()).hexdigest()}")
