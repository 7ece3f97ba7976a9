"""The TLS context of all connections to Redis and to Sentinels. Reading the system's certificates
takes some 40 ms, and during an outage connections are opened many times a second.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading

_Stamp = tuple[int, int, int]
_made: dict[str, tuple[_Stamp | None, ssl.SSLContext]] = {}
_making = threading.Lock()


async def tls_context(ca_file: str) -> ssl.SSLContext:
    """The context, made in a thread at the first call, and again after its file has changed.

    Args:
        ca_file: the CA certificates to trust; empty for the system's.

    Raises:
        OSError: the file cannot be read, or holds no certificate.
    """
    return await asyncio.to_thread(_context, ca_file)


def _context(ca_file: str) -> ssl.SSLContext:
    with _making:
        stamp = _stamp(ca_file or ssl.get_default_verify_paths().cafile)
        if ca_file not in _made or _made[ca_file][0] != stamp:
            _made[ca_file] = stamp, ssl.create_default_context(cafile=ca_file or None)
        return _made[ca_file][1]


def _stamp(file: str | None) -> _Stamp | None:
    """What changes with the file's content."""
    if file is None:
        return None
    found = os.stat(file)
    return found.st_mtime_ns, found.st_ino, found.st_size
