"""LangChain with `langchain-openai`: python with_langchain.py <base URL> <model>"""

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import BadRequestError
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]
QUESTION = "What is the weather in Paris?"
TOO_LONG = "Hello. " * 1000


@tool  # type: ignore[untyped-decorator]
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city"""
    return json.dumps({"degrees": 21, "dry": True})


class Weather(BaseModel):
    """A schema that the service cannot have answers obey."""

    degrees: float = Field(multiple_of=7)


def code_of(ask: Callable[[], Any]) -> str:
    """OpenAI's code of the error that asking raises; LangChain has a class for one of them."""
    try:
        ask()
    except ContextOverflowError:
        return "context_length_exceeded"
    except BadRequestError as error:
        return str(error.code)
    return "none"


def run(responses: bool) -> dict[str, Any]:
    """One conversation, by chat completions or by responses."""

    def model(**more: Any) -> ChatOpenAI:
        own = {"base_url": URL, "api_key": "none", "model": MODEL, "max_retries": 0}
        return ChatOpenAI(use_responses_api=responses, **own, **more)

    greedy = model(temperature=0, max_tokens=150)
    calling = greedy.bind_tools([get_weather], tool_choice="required", strict=True)
    messages: list[Any] = [HumanMessage(QUESTION)]
    first = calling.invoke(messages)
    again = sum_of(calling.stream(messages))
    messages += [first, *(get_weather.invoke(call) for call in first.tool_calls)]
    telling = greedy.bind_tools([get_weather], tool_choice="none", strict=True)
    endless = model(extra_body={"ignore_eos": True}, include_response_headers=True).stream(QUESTION)
    told = next(chunk.response_metadata for chunk in endless if chunk.response_metadata)
    endless.close()
    return {
        "called": first.tool_calls[0]["args"],
        "called_streamed": again.tool_calls[0]["args"],
        "answer": telling.invoke(messages).text,
        "streamed": sum_of(telling.stream(messages)).text,
        "refused": code_of(lambda: greedy.with_structured_output(Weather).invoke(QUESTION)),
        "too_long": code_of(lambda: greedy.invoke(TOO_LONG)),
        "too_long_streamed": code_of(lambda: list(greedy.stream(TOO_LONG))),
        "cancelled": told["headers"]["x-request-id"],
    }


def sum_of(chunks: Any) -> Any:
    """The whole message of a stream."""
    whole = next(chunks)
    for chunk in chunks:
        whole += chunk
    return whole


print(json.dumps({"chat": run(responses=False), "responses": run(responses=True)}))
