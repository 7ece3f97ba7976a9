"""A grammar whose masks take too long ends its own requests, and no others. The clock is turned,
but for the last test.
"""

from __future__ import annotations

import json
import string
import time
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import xgrammar
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from serve_app import timings
from tests.engine.grammars import compiler
from workers import engine_plugin
from workers.engine_plugin import install

_WORDS = 9
"""Of 32 bits, for the bytes and the token that ends an answer."""


class Clock:
    """CPU time, which every mask of a slow grammar turns on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def thread_time(self) -> float:
        return self.now_s


class Backend:
    """The real grammars of xgrammar for a vocabulary of single bytes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def compile_grammar(self, kind: Any, regex: str, **_: Any) -> XgrammarGrammar:
        compiled = compiler().compile_regex(regex)
        grammar = XgrammarGrammar(
            matcher=xgrammar.GrammarMatcher(compiled), vocab_size=257, ctx=compiled
        )
        fill, cpu_s = grammar.fill_bitmask, 0.42 if "slow" in regex else 0.01

        def filled(*args: Any) -> None:
            fill(*args)
            self._clock.now_s += (
                0.1 if "first" in regex and not grammar.num_processed_tokens else cpu_s
            )

        grammar.fill_bitmask = filled
        return grammar


class Manager(StructuredOutputManager):  # type: ignore[misc]
    """vLLM's own, without an engine's configuration."""

    def __init__(self, clock: Clock) -> None:
        self.backend: Any = Backend(clock)
        self._grammar_bitmask: Any = torch.zeros((1, _WORDS), dtype=torch.int32)
        self._full_mask = torch.tensor(-1, dtype=torch.int32)

    def _get_constraint_bounds(self, *_: Any, **__: Any) -> Any:
        return 0, 0

    def request(self, regex: str, salt: str | None = None) -> Any:
        request: Any = SimpleNamespace(
            request_id=regex,
            sampling_params=None,
            cache_salt=salt,
            use_structured_output=True,
            structured_output_request=SimpleNamespace(structured_output_key=("regex", regex)),
        )
        request.structured_output_request.grammar = self._create_grammar(request)
        return request

    def step(self, request: Any, byte: str) -> bool:
        """A step of an engine: a mask, and a token. Whether the request goes on."""
        grammar = request.structured_output_request.grammar
        self._fill_bitmasks(((grammar, 0, True),))
        return bool(self.accept_tokens(request, [ord(byte)]))

    def is_free(self) -> bool:
        return bool((self._grammar_bitmask == -1).all())


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    install()
    clock = Clock()
    monkeypatch.setattr(engine_plugin, "time", clock)
    engine_plugin._spent.cache_clear()
    return Manager(clock)


def test_a_grammar_past_its_budget_ends_its_requests_and_no_others(manager: Manager) -> None:
    first, second = manager.request("(slow)+"), manager.request("(slow)+")
    assert manager.step(first, "s")
    assert manager.step(second, "s")  # 0.8 s
    assert not manager.is_free()
    assert not manager.step(first, "l")  # 1.2 s
    assert not manager.step(second, "l")
    assert manager.is_free(), "the mask is no longer computed"
    later = manager.request("(slow)+")
    assert not manager.step(later, "s")
    assert manager.is_free(), "its repetition takes no time, either"
    other = manager.request("(slow)*")
    assert manager.step(other, "s")
    assert not manager.is_free()
    assert manager.step(manager.request("(slow)+", "another tenant's"), "s")
    assert not manager.is_free()


def test_masks_as_usual_count_against_no_budget(manager: Manager) -> None:
    request = manager.request("a+")
    assert all(manager.step(request, "a") for _ in range(1000))


def test_a_slow_first_mask_is_paid_back(manager: Manager) -> None:
    for _ in range(100):
        request = manager.request("first|f{0,40}")
        assert all(manager.step(request, "f") for _ in range(20))


def test_a_request_without_a_grammar_is_left_alone(manager: Manager) -> None:
    request: Any = SimpleNamespace(use_structured_output=False, structured_output_request=None)
    assert manager.accept_tokens(request, [1])


VOCABULARY = 128_000
USUAL: list[tuple[str, Any]] = [
    ("regex", r"[\w.+-]+@[\w-]+\.[\w.-]+"),
    ("regex", ".{0,200}"),
    ("json_schema", {"type": "object"}),
    ("json_schema", {"type": "array", "items": {"type": "string", "maxLength": 4000}}),
    (
        "json_schema",
        {
            "type": "object",
            "properties": {f"k{n}": {"type": ["string", "null"]} for n in range(60)},
            "required": [f"k{n}" for n in range(40)],
        },
    ),
]
SLOW = [r"([a-z]+ ?){1,20}", r"(\w+\s?)*", r"(\w+\s?){0,100}"]


@cache
def large() -> xgrammar.GrammarCompiler:
    """For a vocabulary of a usual size: bytes and made-up words."""
    random, words = Random(1), {bytes([byte]): None for byte in range(256)}
    letters = string.ascii_letters + string.digits + ' .,:{}[]"_-' + chr(10)
    while len(words) < VOCABULARY:
        words["".join(random.choices(letters, k=random.randint(2, 9))).encode()] = None
    info = xgrammar.TokenizerInfo([*words, b"</s>"], stop_token_ids=[VOCABULARY])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def spent_by(kind: str, text: Any, requests: int, tokens: int) -> engine_plugin._Spent:
    """What random answers leave of a grammar's budget, or how far they exceed it."""
    compile_ = getattr(large(), f"compile_{kind}")
    compiled = compile_(text if isinstance(text, str) else json.dumps(text))
    mask, random, spent = (
        xgrammar.allocate_token_bitmask(1, VOCABULARY + 1),
        Random(2),
        engine_plugin._Spent(),
    )
    for _ in range(requests):
        matcher = xgrammar.GrammarMatcher(compiled)
        for _ in range(tokens):
            start_s = time.thread_time()
            matcher.fill_next_token_bitmask(mask)
            spent.add(time.thread_time() - start_s)
            bits = mask[0].tolist()
            allowed = [n for n in range(VOCABULARY) if bits[n >> 5] >> (n & 31) & 1]
            if spent.exceeded() or not allowed:
                return spent
            matcher.accept_token(random.choice(allowed))
    return spent


@pytest.mark.clock
def test_usual_grammars_keep_their_budget_and_slow_ones_do_not() -> None:
    usual = {str(text)[:40]: spent_by(kind, text, 20, 20).s for kind, text in USUAL}
    slow = {text: spent_by("regex", text, 20, 20).s for text in SLOW}
    print(usual, slow)
    assert max(usual.values()) < timings.MASKS_S / 2, usual
    assert min(slow.values()) > timings.MASKS_S, slow
