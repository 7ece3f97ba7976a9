"""The simulated engine under vLLM's own server: chats, Responses, Messages, tools and parsers are
vLLM's, and only what computes tokens is not there. It needs the model's config and tokenizer, no
weights. It writes what the engine without vLLM does, and obeys no grammar.
"""

from __future__ import annotations

import asyncio
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

from serve_app.settings import Settings
from workers.simulated_engine import Batch, Fault, SimulatedArguments, arguments_of, text_of
from workers.vllm_engine import VllmEngine

_NEEDED = {"load_format": "dummy", "max_logprobs": 0}
"""There are no probabilities, so vLLM refuses requests for them."""


class SimulatedVllm(VllmEngine):
    """vLLM without its core."""

    name = "simulated"

    def __init__(self, settings: Settings) -> None:
        self._simulated = arguments_of(settings)
        args = {**(self._simulated.vllm or {}), **_NEEDED}
        engine = settings.engine.model_copy(update={"kind": "vllm", "args": args})
        super().__init__(settings.model_copy(update={"engine": engine}))

    def _made(self, engine_args: Any, **options: Any) -> Any:
        from vllm.v1.engine import async_llm

        def made(renderer: Any, **_: Any) -> _Core:
            return _Core(self._simulated, renderer.tokenizer)

        real = async_llm.EngineCoreClient
        async_llm.EngineCoreClient = SimpleNamespace(make_async_mp_client=made)
        try:
            return super()._made(engine_args, **options)
        finally:
            async_llm.EngineCoreClient = real

    async def _warm_up(self) -> None:
        """Nothing is compiled."""


class _Core:
    """In place of vLLM's client of an engine core (`AsyncMPClient`)."""

    def __init__(self, arguments: SimulatedArguments, tokenizer: Any) -> None:
        from vllm.v1 import engine

        self._vllm = engine
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self.arguments, self.tokenizer = arguments, tokenizer
        self.batch = Batch(arguments, self._stepped)
        self._sequences: dict[str, _Sequence] = {}
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._made: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """It has no caches and no weights that it could be told something about."""

        async def ignored(*_: Any, **__: Any) -> None:
            return None

        if not name.endswith("_async"):
            raise AttributeError(name)
        return ignored

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        sequence = self._sequences[request.request_id] = _Sequence(self, request)
        await self.batch.join(sequence)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._ended(request_id)

    async def get_output_async(self) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        outputs = await self._queue.get()
        if outputs is None:
            self.resources.engine_dead = True
            raise EngineDeadError
        return outputs

    def shutdown(self, timeout: float | None = None) -> None:
        self.batch.stop()

    def write(self, request_id: str, token_id: int, last: bool) -> None:
        reason = self._vllm.FinishReason.LENGTH if last else None
        output = self._vllm.EngineCoreOutput(request_id, [token_id], finish_reason=reason)
        self._made.append(output)
        if last:
            self._ended(request_id)

    def _ended(self, request_id: str) -> None:
        if sequence := self._sequences.pop(request_id, None):
            self.batch.leave(sequence)

    def _stepped(self) -> None:
        made, self._made = self._made, []
        outputs = self._vllm.EngineCoreOutputs(outputs=made)
        self._queue.put_nowait(None if self.batch.failed else outputs)


class _Sequence:
    """A member of the batch: its tokens are those of the words that follow its prompt."""

    def __init__(self, core: _Core, request: Any) -> None:
        from workers.engine_plugin import prior_of
        from workers.vllm_failures import asked

        self._core, self._id = core, request.request_id
        prompt = request.prompt_token_ids or []
        prior = len(prior_of(request.sampling_params))
        most = core.arguments.max_output_tokens
        limit = request.sampling_params.max_tokens
        self._left = min(limit, most or limit) - prior
        words = text_of(repr(prompt).encode())
        token_ids = (core.tokenizer.encode(one, add_special_tokens=False) for one in words)
        self._tokens = islice(chain.from_iterable(token_ids), prior, None)
        self._fault = core.arguments.fault_of(asked.get()[1])
        self.prompt_tokens, self.produced = len(prompt) + prior, 0

    def step(self) -> None:
        if self._fault and self.produced >= self._core.arguments.fault_after_tokens:
            self._core.batch.suffer(self._fault)
            if self._fault is not Fault.HOLD:
                return
        self.produced += 1
        self._core.write(self._id, next(self._tokens), self.produced >= self._left)
