"""The answer forwards every byte of the journal, whatever arrives while it is sending; its first
message keeps its headers.
"""

from __future__ import annotations

import pickle

from serve_app.ingress.answer import ResponseStart


def a_start() -> ResponseStart:
    return ResponseStart(
        type="http.response.start", status=200, headers=[(b"x-request-id", b"req_1")]
    )


def test_a_middleware_cannot_replace_the_headers() -> None:
    message = a_start()
    message["headers"] = [*message["headers"], (b"X-Request-ID", b"another")]
    message["status"] = 201
    assert message["headers"] == [(b"x-request-id", b"req_1")]
    assert message["status"] == 201


def test_it_survives_the_way_through_ray_with_its_headers() -> None:
    received = pickle.loads(pickle.dumps(a_start()))
    assert type(received) is dict
    assert received == dict(a_start())
