"""Which cache block belongs to whom, and which blocks hold a known prefix. Plain Python, no tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from tritonllm.engine.sequence import Sequence

PrefixKey = tuple[int, tuple[int, ...]]
"""The parent prefix's number and the tokens of this block. Compared whole, so unequal prefixes never share."""

ROOT_PREFIX = 0


@dataclass(slots=True)
class Block:
    """One block of the pool.

    Attributes:
        ref_count: block tables that hold it.
        key: the prefix that it holds, None while it is not shared.
        uid: number of that prefix; the key of the next block names it as parent.
        poisoned: it may hold NaN and must be zeroed before it is handed out again.
    """

    ref_count: int = 0
    key: PrefixKey | None = None
    uid: int = ROOT_PREFIX
    poisoned: bool = False


class BlockManager:
    """Owns every block of the pool, with reference counts and a prefix cache.

    A block is free or in use. A free block may still hold a known prefix and is then found again until it is handed
    out; the block freed longest ago goes first, and of one sequence the last block before the first.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens a block holds.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._prefixes: dict[PrefixKey, int] = {}
        self._next_uid = ROOT_PREFIX + 1
        self._to_zero: list[int] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, seq: Sequence, reserve: int = 0) -> bool:
        """Whether blocks for every token of a waiting sequence are there, with `reserve` more left over."""
        if self.num_free_blocks <= reserve:  # no prefix holds the last token: do not look one up at every step
            return False
        hits = self._cached_prefix(seq)
        free_hits = sum(1 for block_id in hits if self._blocks[block_id].ref_count == 0)
        return self.blocks_for(len(seq)) - len(hits) + free_hits + reserve <= self.num_free_blocks

    def allocate(self, seq: Sequence) -> None:
        """Give a waiting sequence its block table; a cached prefix is shared and counts as computed.

        At least one token is left to compute, since the logits of the last token are wanted; so no sequence ever
        writes to a block that another one holds.
        """
        hits = self._cached_prefix(seq)
        for block_id in hits:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1
        seq.block_table = hits
        seq.num_registered_blocks = len(hits)
        seq.prefix_uid = self._blocks[hits[-1]].uid if hits else ROOT_PREFIX
        seq.num_computed_tokens = len(hits) * self.block_size
        if seq.admission < 0:  # after a preemption it would find itself
            seq.num_cached_tokens = seq.num_computed_tokens
        self._grow(seq, len(seq))

    def can_append(self, seq: Sequence) -> bool:
        """Whether the newest token of a running sequence has a slot, or a block for it is free."""
        return self.blocks_for(seq.length) - len(seq.block_table) <= self.num_free_blocks

    def append(self, seq: Sequence) -> list[int]:
        """Make room for the newest token's key and value; returns the blocks that were added to the table."""
        return self._grow(seq, seq.length)

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens findable; their steps have been read."""
        for index in range(seq.num_registered_blocks, num_tokens // self.block_size):
            key = _prefix_key(seq.prefix_uid, seq.block(index))
            known = self._prefixes.get(key)
            if known is None:
                known = seq.block_table[index]
                self._prefixes[key] = known
                block = self._blocks[known]
                block.key, block.uid = key, self._next_uid
                self._next_uid += 1
            seq.prefix_uid = self._blocks[known].uid
            seq.num_registered_blocks = index + 1

    def deallocate(self, seq: Sequence) -> None:
        """Give back every block of a sequence that no step in flight writes to."""
        for block_id in reversed(seq.block_table):
            block = self._blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if block.poisoned:
                    block.poisoned = False
                    self._to_zero.append(block_id)
        seq.block_table = []
        seq.num_registered_blocks = 0
        seq.prefix_uid = ROOT_PREFIX
        seq.num_computed_tokens = 0

    def poison(self, seq: Sequence) -> None:
        """The sequence met NaN: nobody may find its blocks any more, and each is zeroed once nobody holds it."""
        for block_id in seq.block_table:
            self._forget(block_id)
            self._blocks[block_id].poisoned = True

    def take_blocks_to_zero(self) -> list[int]:
        """Freed blocks that must be zeroed before the next step, handed over once."""
        taken, self._to_zero = self._to_zero, []
        return taken

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless ref counts, free list, prefixes and the tables of all sequences agree."""
        held: Counter[int] = Counter()
        first: dict[int, tuple[Sequence, int]] = {}
        for seq in sequences:
            held.update(seq.block_table)
            for index, block_id in enumerate(seq.block_table):
                other, place = first.setdefault(block_id, (seq, index))
                stop = (index + 1) * self.block_size
                if place != index or (other is not seq and other.token_ids[:stop] != seq.token_ids[:stop]):
                    raise AssertionError(f"block {block_id} is shared by two sequences whose prefixes differ")
                key = self._blocks[block_id].key
                if key is not None and key[1] != tuple(seq.block(index)):
                    raise AssertionError(f"block {block_id} is found under tokens that its owner does not have there")
        for block_id, block in enumerate(self._blocks):
            if block.ref_count != held[block_id]:
                raise AssertionError(f"block {block_id}: ref count {block.ref_count}, held {held[block_id]} times")
            if (block_id in self._free) != (block.ref_count == 0):
                raise AssertionError(f"block {block_id}: ref count {block.ref_count}, free: {block_id in self._free}")
            if block.key is not None and self._prefixes.get(block.key) != block_id:
                raise AssertionError(f"block {block_id} holds a prefix that the map does not find there")
        for key, block_id in self._prefixes.items():
            if self._blocks[block_id].key != key:
                raise AssertionError(f"the map finds a prefix in block {block_id} that is not there")

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that already hold the sequence's first tokens, never all of them."""
        hits: list[int] = []
        uid = ROOT_PREFIX
        if seq.wants_prompt_logprobs:  # of every token, so each has to be computed
            return hits
        for index in range((len(seq) - 1) // self.block_size):
            block_id = self._prefixes.get(_prefix_key(uid, seq.block(index)))
            if block_id is None:
                break
            hits.append(block_id)
            uid = self._blocks[block_id].uid
        return hits

    def _grow(self, seq: Sequence, num_tokens: int) -> list[int]:
        added = []
        for _ in range(self.blocks_for(num_tokens) - len(seq.block_table)):
            block_id, _ = self._free.popitem(last=False)
            self._forget(block_id)
            self._blocks[block_id].ref_count = 1
            added.append(block_id)
        seq.block_table.extend(added)
        return added

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.key is not None:
            del self._prefixes[block.key]
            block.key = None


def _prefix_key(parent: int, token_ids: list[int]) -> PrefixKey:
    return parent, tuple(token_ids)
