"""A DNS server that knows no name, for a command in a network namespace of its own:
`python -m tests.journal.resolver <command>`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

ADDRESS = ("127.0.0.1", 53)
NAME_ERROR = b"\x81\x83"


def answer(server: socket.socket) -> None:
    """Answer every question with NXDOMAIN."""
    while True:
        asked, client = server.recvfrom(512)
        counts = asked[4:6] + bytes(6)  # the question again, and no answers
        question = asked[12 : asked.index(b"\0", 12) + 5]
        server.sendto(asked[:2] + NAME_ERROR + counts + question, client)


def main() -> int:
    """Serve until the command ends."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(ADDRESS)
    threading.Thread(target=answer, args=(server,), daemon=True).start()
    return subprocess.run(sys.argv[1:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
