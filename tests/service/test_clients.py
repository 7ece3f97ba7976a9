"""Clients as their users install them, unmodified, each by a script of `tests/clients`: two turns
with a tool call between them, streams, errors, and a stream that is left.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.installed_clients import ENVIRONMENT, INSTALLED, SCRIPTS, need, of_node, python
from tests.service.support import CHAT, Running
from tests.waiting import until

# It concerns the clients; in the gate: test_openai_sdk.py, and journal/test_disconnects.py.
pytestmark = pytest.mark.nightly
TRIES = 3


def of_python(script: str, *words: str) -> list[str]:
    return [str(python()), str(INSTALLED / "python" / script), *words]


def of_java() -> list[str]:
    """The command of the client that is a part of the JDK."""
    return [need("java", "openjdk-17-jdk-headless"), str(SCRIPTS / "java" / "Main.java")]


def of_curl() -> list[str]:
    """The command of curl's script."""
    need("curl", "curl")
    return ["bash", str(SCRIPTS / "curl" / "main.sh")]


CLIENTS: dict[str, Callable[[], list[str]]] = {
    "curl": of_curl,
    "java": of_java,
    "openai-node": lambda: of_node("openai-node"),
    "vercel-ai": lambda: of_node("vercel-ai"),
    "langchain": lambda: of_python("with_langchain.py"),
    "langchain-anthropic": lambda: of_python("with_langchains_anthropic.py"),
    "litellm": lambda: of_python("with_litellm.py", "chat"),
    "litellm-responses": lambda: of_python("with_litellm.py", "responses"),
}


def conversations(command: list[str]) -> dict[str, dict[str, Any]]:
    """What a client tells of its conversations. What else it prints stands before."""
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    told: dict[str, dict[str, Any]] = json.loads(ran.stdout.strip().splitlines()[-1])
    assert told
    return told


def _left_by(service: Running, found: dict[str, Any]) -> dict[str, Any]:
    """The state of the request that a client has left."""
    (request_id,) = re.findall(r"req_[0-9a-f]{32}", found["cancelled"])
    return service.ended(request_id)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_talks_calls_streams_fails_and_leaves(service: Running, name: str) -> None:
    command = [*CLIENTS[name](), f"{service.url}/v1", service.model]
    for _ in range(TRIES):
        told = conversations(command)
        left = [_left_by(service, found) for found in told.values()]
        if not any(one["state"] == "completed" for one in left):
            break  # otherwise the engine had written all before the client left
    for ended in left:
        assert (ended["state"], ended["reason"]) == ("cancelled", "client_disconnected")
        listed = service.http.get("/v1/requests?state=cancelled&limit=100").json()["data"]
        assert ended["id"] in [one["id"] for one in listed]
    for found in told.values():
        for called in (found["called"], found["called_streamed"]):
            arguments = json.loads(called) if isinstance(called, str) else called
            assert arguments in ({"city": "Paris"}, {"city": "Rome"})
        assert len(found["answer"]) > 10
        assert found["streamed"] == found["answer"]
        assert found["refused"] == "invalid_request"
        assert found["too_long"] == found["too_long_streamed"] == "context_length_exceeded"
    if len(told) == 2:  # one conversation by both: the model has read the same
        assert told["chat"]["answer"] == told["responses"]["answer"]
        assert told["chat"].get("further") == told["responses"].get("further")


def test_a_client_that_leaves_before_its_whole_answer_frees_the_engine(service: Running) -> None:
    user = secrets.token_hex(8)
    body = json.dumps(service.long_body("I will not wait.", user=user)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    port = urlsplit(service.url).port or 0
    with service.freed():
        with socket.create_connection(("127.0.0.1", port)) as hasty:
            hasty.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            request_id = until("it runs", lambda: service.begun(user))
        ended = service.ended(request_id)
    assert (ended["state"], ended["reason"]) == ("cancelled", "client_disconnected")
