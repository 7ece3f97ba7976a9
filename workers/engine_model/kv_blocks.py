"""The KV cache of an engine: blocks, and which of them hold a beginning that others share. Pure.

As in vLLM, a block whose owner has ended keeps its content until the block is needed again; the
least recently used goes first, and of one sequence its end before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict

from workers.engine_model.sequence import Sequence


class KvBlocks:
    """A number of blocks.

    Args:
        total: how many there are.
        block_tokens: tokens in each.
        caching: whether content is found again.
    """

    def __init__(self, total: int, block_tokens: int, caching: bool) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self._caching = caching
        self._empty = total
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Content of blocks that nobody uses, the least recently used first."""
        self._users: dict[int, int] = {}
        """How many sequences use a block of this content."""

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return self._empty + len(self._unused)

    @property
    def used(self) -> int:
        """Blocks that sequences occupy."""
        return self.total - self.free

    def find(self, sequence: Sequence) -> tuple[int, int]:
        """How many blocks at the beginning are there, and how many of those nobody uses now.

        At least one token is left to compute, because its result is the next token.
        """
        if not self._caching:
            return 0, 0
        users, unused, content = self._users, self._unused, sequence.content
        idle = 0
        most = (sequence.tokens - 1) // self.block_tokens
        for block in range(most):
            name = content(block)
            if name in users:
                continue
            if name not in unused:
                return block, idle
            idle += 1
        return most, idle

    def use(self, sequence: Sequence, found: int) -> None:
        """A sequence begins with the blocks that `find` found."""
        for block in range(found):
            name = sequence.content(block)
            self._unused.pop(name, None)
            self._users[name] = self._users.get(name, 0) + 1
            sequence.held.append(name)
        sequence.blocks = sequence.registered = found

    def lacks(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that a sequence needs beyond its own to hold `tokens` tokens."""
        return -(-tokens // self.block_tokens) - sequence.blocks

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence the blocks for `tokens` tokens. Returns whether there were enough."""
        more = self.lacks(sequence, tokens)
        if more > 0:
            if more > self.free:
                return False
            fresh = min(more, self._empty)
            self._empty -= fresh
            for _ in range(more - fresh):
                self._unused.popitem(last=False)
            sequence.blocks += more
            sequence.private += more
        if self._caching:
            self._register(sequence, tokens // self.block_tokens)
        return True

    def _register(self, sequence: Sequence, full: int) -> None:
        """From now on others find the blocks that are full."""
        while sequence.registered < full:
            name = sequence.content(sequence.registered)
            sequence.registered += 1
            if name in self._users:
                continue  # a duplicate: somebody computed the same at the same time
            if name in self._unused:
                del self._unused[name]
                self._empty += 1
            self._users[name] = 1
            sequence.held.append(name)
            sequence.private -= 1

    def release(self, sequence: Sequence) -> None:
        """A sequence no longer needs its blocks."""
        self._empty += sequence.private
        for name in reversed(sequence.held):
            if self._users[name] == 1:
                del self._users[name]
                self._unused[name] = None
            else:
                self._users[name] -= 1
        sequence.held.clear()
        sequence.blocks = sequence.private = sequence.registered = 0
