"""What pydantic finds is told in one sentence, by the field of the request and not by Python."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tests.tables import each
from workers.vllm_failures import _of_fields, refusal_of


class Text(BaseModel):
    type: Literal["text"]
    text: str


class Image(BaseModel):
    type: Literal["image"]
    url: str | dict[str, str]


class Message(BaseModel):
    role: Literal["user", "system"]
    content: str | list[Text | Image]


class Asked(BaseModel):
    model_config = ConfigDict(strict=True)
    messages: list[Message] = Field(min_length=1)
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=2)] | None = None


def asked(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


@each(
    "body, param, message",
    [
        (
            {"messages": [{"role": "wat", "content": "x"}]},
            "messages[0].role",
            "Invalid value for {}: it must be 'user' or 'system'.",
        ),
        (asked("x", n=0), "n", "Invalid value for {}: it should be greater than or equal to 1."),
        (asked("x", n="1"), "n", "Invalid value for {}: it must be an integer."),
        (asked("x", stop=3), "stop", "Invalid value for {}: it must be a string or an array."),
        (
            asked("x", stop=["a", "b", "c"]),
            "stop",
            "Invalid value for {}: it should have at most 2 items after validation, not 3.",
        ),
        (asked("x", stop=["a", 3]), "stop[1]", "Invalid value for {}: it must be a string."),
        (
            asked([{"type": "text"}]),
            "messages[0].content[0].text",
            "Missing required parameter: {}.",
        ),
        (
            asked([{"type": "image", "url": 3}]),
            "messages[0].content[0].url",
            "Invalid value for {}: it must be a string or an object.",
        ),
        (
            asked([{"type": "wat"}]),
            "messages[0].content[0].type",
            "Invalid value for {}: it must be 'text' or 'image'.",
        ),
        (asked(["x"]), "messages[0].content[0]", "Invalid value for {}: it must be an object."),
    ],
)
def test_the_field_is_named_and_what_it_must_be(
    body: dict[str, Any], param: str, message: str
) -> None:
    try:
        Asked.model_validate(body)
    except ValidationError as error:
        refusal = refusal_of(error.errors(), body)
    assert (refusal.param, refusal.message) == (param, message.format(f"'{param}'"))
    assert refusal.status == 400


def test_what_cannot_be_placed_is_told_of_the_root() -> None:
    errors = [{"loc": ("wat",), "type": "string_type", "msg": "Input should be a valid string"}]
    refusal = refusal_of(errors, {"messages": []}, "messages")
    assert refusal.param == "messages"
    assert refusal.message == "Invalid value for 'messages': it must be a string."


def test_what_the_model_reads_is_the_field_that_the_request_has() -> None:
    part = {"type": "text"}
    errors = [{"loc": ("text",), "type": "missing", "msg": "Field required", "input": part}]
    for name in ("messages", "prompt"):
        body = b'{"' + name.encode() + b'": [{"content": [{"type": "text"}]}]}'
        assert _of_fields(errors, "/tokenize", body).param == f"{name}[0].content[0].text"
