"""The HTTP responses of the simulated engine, in OpenAI's format. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from workers.recorder import Recorder


class ResponseFormat:
    """OpenAI's response objects, in the only form that this engine needs."""

    def __init__(self, request_id: str, model: str, chat: bool, created_s: int) -> None:
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        self._model = model
        self._created = created_s
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._prefix = (
            "data: "
            f'{{"id":"{self._id}","object":"{kind}","created":{self._created},"model":"{model}",'
            '"choices":[{"index":0,' + ('"delta":{"content":"' if chat else '"text":"')
        ).encode()

    def chunk(self, word: str, last: bool) -> bytes:
        """One streamed token; the words need no escaping."""
        finish = b'"length"' if last else b"null"
        return b'%b%b"%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (
            self._prefix,
            word.encode(),
            b"}" if self._chat else b"",
            finish,
        )

    def usage(self, usage: dict[str, int]) -> bytes:
        """The chunk that `stream_options.include_usage` asks for."""
        chunk = {
            **self._object("chat.completion.chunk" if self._chat else "text_completion", []),
            "usage": usage,
        }
        return b"data: %b\n\n" % msgspec.json.encode(chunk)

    def complete(self, text: str, usage: dict[str, int]) -> bytes:
        """The complete response, if it is not streamed."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        return msgspec.json.encode({**self._object(kind, [choice]), "usage": usage})

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def start(status: int, content_type: str) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", content_type.encode())],
    }


def body_part(body: bytes) -> dict[str, Any]:
    """An ASGI message with a part of the body, not the last one."""
    return {"type": "http.response.body", "body": body, "more_body": True}


async def respond(recorder: Recorder, status: int, content_type: str, body: bytes) -> None:
    """Send a complete response."""
    await recorder.send(start(status, content_type))
    await recorder.send({"type": "http.response.body", "body": body, "more_body": False})
