"""LangChain with `langchain-anthropic`: python with_langchains_anthropic.py <base URL> <model>"""

import json
import sys
from collections.abc import Callable
from typing import Any, Literal
from urllib.request import urlopen

from anthropic import BadRequestError
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

URL, MODEL = sys.argv[1].removesuffix("/v1"), sys.argv[2]
QUESTION = "What is the weather in Paris?"
TOO_LONG = "Hello. " * 1000


@tool  # type: ignore[untyped-decorator]
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city"""
    return json.dumps({"degrees": 21, "dry": True})


def model(**more: Any) -> ChatAnthropic:
    own = {"base_url": URL, "api_key": "none", "model": MODEL, "max_retries": 0, "max_tokens": 150}
    return ChatAnthropic(**{**own, **more})


def code_of(ask: Callable[[], Any]) -> str:
    """The error that asking raises in OpenAI's words: LangChain has a class for one of them."""
    try:
        ask()
    except ContextOverflowError:
        return "context_length_exceeded"
    except BadRequestError as error:
        return str(error.body["error"]["type"]).removesuffix("_error")  # type: ignore[index]
    return "none"


def newest() -> str:
    """The id of the last request: of a stream LangChain gives only an id of its own."""
    with urlopen(f"{URL}/v1/requests?limit=1") as answer:
        return str(json.load(answer)["data"][0]["id"])


def run() -> dict[str, Any]:
    """One conversation by messages."""
    greedy = model(temperature=0)
    calling = greedy.bind_tools([get_weather], tool_choice="any", strict=True)
    messages: list[Any] = [HumanMessage(QUESTION)]
    first = calling.invoke(messages)
    again = sum_of(calling.stream(messages))
    messages += [first, *(get_weather.invoke(call) for call in first.tool_calls)]
    telling = greedy.bind_tools([get_weather], tool_choice={"type": "none"}, strict=True)
    chunks = model(max_tokens=3_000).stream("Tell me a story about a lighthouse.")
    next(chunks)
    left = newest()
    chunks.close()
    return {
        "called": first.tool_calls[0]["args"],
        "called_streamed": again.tool_calls[0]["args"],
        "answer": telling.invoke(messages).text,
        "streamed": sum_of(telling.stream(messages)).text,
        "refused": code_of(lambda: model(temperature=7).invoke(QUESTION)),
        "too_long": code_of(lambda: greedy.invoke(TOO_LONG)),
        "too_long_streamed": code_of(lambda: list(greedy.stream(TOO_LONG))),
        "cancelled": left,
    }


def sum_of(chunks: Any) -> Any:
    """The whole message of a stream."""
    whole = next(chunks)
    for chunk in chunks:
        whole += chunk
    return whole


print(json.dumps({"messages": run()}))
