"""LiteLLM: python with_litellm.py chat|responses <base URL> <model>"""

import json
import sys
from collections.abc import Callable
from typing import Any

import litellm

BY, URL, MODEL = sys.argv[1], sys.argv[2], f"openai/{sys.argv[3]}"
SERVICE: dict[str, Any] = {"model": MODEL, "api_base": URL, "api_key": "none", "max_retries": 0}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
RESULT = json.dumps({"degrees": 21, "dry": True})
SCHEMA = {"type": "object", "properties": {"degrees": {"type": "number", "multipleOf": 7}}}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOO_LONG = "Hello. " * 1000


def code_of(ask: Callable[..., Any], **asked: Any) -> str:
    """OpenAI's code of the error that asking raises; LiteLLM has a class for one of them, and of a
    response the rest of its message is the service's body.
    """
    try:
        list(ask(**SERVICE, **asked))
    except litellm.ContextWindowExceededError:
        return "context_length_exceeded"
    except litellm.BadRequestError as error:
        _, _, body = str(error).partition(" - ")
        return str(error.code if BY == "chat" else json.loads(body)["error"]["code"])
    return "none"


def chat() -> dict[str, Any]:
    """One conversation by chat completions."""
    ask: Any = litellm.completion
    greedy: dict[str, Any] = {**SERVICE, "temperature": 0, "max_tokens": 150}
    greedy["tools"] = [{"type": "function", "function": WEATHER}]
    first = {**greedy, "messages": QUESTION, "tool_choice": "required"}
    message = ask(**first).choices[0].message
    again = litellm.stream_chunk_builder(list(ask(**first, stream=True)))
    (call,) = message.tool_calls
    returned = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    second = {**greedy, "messages": [*QUESTION, message, returned], "tool_choice": "none"}
    streamed = litellm.stream_chunk_builder(list(ask(**second, stream=True)))

    telling = ask(**SERVICE, messages=QUESTION, extra_body={"ignore_eos": True}, stream=True)
    cancelled = next(telling).id
    telling.completion_stream.close()
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    long = [{"role": "user", "content": TOO_LONG}]
    return {
        "called": json.loads(call.function.arguments),
        "called_streamed": json.loads(again.choices[0].message.tool_calls[0].function.arguments),
        "answer": ask(**second).choices[0].message.content,
        "streamed": streamed.choices[0].message.content,
        "refused": code_of(ask, messages=QUESTION, response_format=form),
        "too_long": code_of(ask, messages=long),
        "too_long_streamed": code_of(ask, messages=long, stream=True),
        "cancelled": cancelled,
    }


def responses() -> dict[str, Any]:
    """One conversation by responses."""
    # LiteLLM streams the responses of a model that it does not know only when they are complete.
    known = {"litellm_provider": "openai", "supports_native_streaming": True}
    litellm.register_model({MODEL: known})
    ask: Any = litellm.responses
    greedy: dict[str, Any] = {**SERVICE, "temperature": 0, "max_output_tokens": 150}
    greedy["tools"] = [{"type": "function", **WEATHER}]
    first = {**greedy, "input": QUESTION, "tool_choice": "required"}
    output = ask(**first).output
    *_, again = ask(**first, stream=True)
    call = output[-1]
    returned = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    second = {**greedy, "input": [*QUESTION, *output, returned], "tool_choice": "none"}
    *_, streamed = ask(**second, stream=True)

    telling = ask(**SERVICE, input=QUESTION, extra_body={"ignore_eos": True}, stream=True)
    next(telling)
    telling.response.close()
    form = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA}}
    return {
        "called": json.loads(call.arguments),
        "called_streamed": json.loads(again.response.output[-1].arguments),
        "answer": ask(**second).output_text,
        "streamed": streamed.response.output_text,
        "refused": code_of(ask, input=QUESTION, text=form),
        "too_long": code_of(ask, input=TOO_LONG),
        "too_long_streamed": code_of(ask, input=TOO_LONG, stream=True),
        "cancelled": telling.response.headers["x-request-id"],
    }


print(json.dumps({BY: chat() if BY == "chat" else responses()}))
