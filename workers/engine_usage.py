"""What vLLM's engine says of its memory and its batch, as its statistics of each step tell."""

from __future__ import annotations

from typing import Any

from serve_app.contract import EngineReport


class EngineUsage:
    """The latest statistics of one engine; of each of its ranks, if it is data-parallel."""

    def __init__(self) -> None:
        self._latest: dict[int, Any] = {}
        self._preemptions = 0

    def stepped(self, rank: int, scheduler: Any, iteration: Any) -> None:
        """A step has ended (hot path: called for every step).

        Args:
            scheduler: vLLM's `SchedulerStats`; None if the step has none.
            iteration: vLLM's `IterationStats`; None if the step has none.
        """
        if scheduler is not None:
            self._latest[rank] = scheduler
        if iteration is not None:
            self._preemptions += iteration.num_preempted_reqs

    def report(self, name: str, config: Any, idle: bool) -> EngineReport:
        """What others may know.

        Args:
            config: vLLM's `VllmConfig`, after the engine has started.
            idle: whether no request uses the engine. The latest statistics are then those of the
                last step, in which some did.
        """
        cache = config.cache_config
        blocks = cache.num_gpu_blocks or 0
        # One is vLLM's null block: the engine keeps no KV, as those of encoders do.
        kv_tokens = blocks * cache.block_size if blocks > 1 else 0
        longest = config.model_config.max_model_len
        if idle or not self._latest:
            return EngineReport(name, kv_tokens, longest, preemptions=self._preemptions)
        ranks = self._latest.values()
        used_share = sum(one.kv_cache_usage for one in ranks) / len(ranks)
        return EngineReport(
            name,
            kv_tokens,
            longest,
            round(used_share * kv_tokens),
            sum(one.num_running_reqs for one in ranks),
            # Not those that wait for a grammar: no window would let them begin.
            sum(one.num_waiting_reqs for one in ranks),
            self._preemptions,
        )
