"""LiteLLM by chat completions: python with_litellm.py <base URL> <model>"""

import json
import sys
from collections.abc import Callable
from typing import Any

import litellm

URL, MODEL = sys.argv[1], f"openai/{sys.argv[2]}"
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
    """OpenAI's code of the error that asking raises; LiteLLM has a class for one of them."""
    try:
        list(ask(**SERVICE, **asked))
    except litellm.ContextWindowExceededError:
        return "context_length_exceeded"
    except litellm.BadRequestError as error:
        return str(error.code)
    return "none"


def run() -> dict[str, Any]:
    """One conversation."""
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


print(json.dumps({"chat": run()}))
