"""Who owns which block: sharing by equal tokens alone, nothing lost, nothing stale."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tritonllm import BlockManager, Sequence

SIZE = 4


def allocated(manager: BlockManager, tokens: list[int], registered: bool = True) -> Sequence:
    seq = Sequence(tokens, block_size=manager.block_size)
    assert manager.can_allocate(seq)
    manager.allocate(seq)
    if registered:
        manager.register(seq, len(seq))
    return seq


def grow(manager: BlockManager, seq: Sequence, token: int) -> list[int]:
    seq.append_token(token)
    return manager.append(seq)


def test_a_block_is_added_when_the_last_one_is_full_and_not_before() -> None:
    manager = BlockManager(2, SIZE)
    seq = allocated(manager, [1, 2, 3])
    assert grow(manager, seq, 4) == []
    assert manager.num_free_blocks == 1
    assert len(grow(manager, seq, 5)) == 1
    for token in (6, 7, 8):
        assert grow(manager, seq, token) == []
    seq.append_token(9)
    assert not manager.can_append(seq)


def test_equal_prefixes_share_full_blocks_and_one_token_is_left_to_compute() -> None:
    manager = BlockManager(16, SIZE)
    for length, cached in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8)):
        first = allocated(manager, list(range(length)))
        second = allocated(manager, list(range(length)))
        assert second.num_cached_tokens == second.num_computed_tokens == cached
        shared = cached // SIZE
        assert second.block_table[:shared] == first.block_table[:shared]
        assert not set(second.block_table[shared:]) & set(first.block_table)
        for seq in (first, second):
            manager.deallocate(seq)
    assert manager.num_free_blocks == 16


def test_the_same_tokens_behind_another_prefix_are_another_block() -> None:
    manager = BlockManager(16, SIZE)
    allocated(manager, [1] * 4 + [9] * 4 + [0])
    assert allocated(manager, [2] * 4 + [9] * 4 + [0]).num_cached_tokens == 0
    assert allocated(manager, [1] * 4 + [8] * 4 + [0]).num_cached_tokens == 4
    assert allocated(manager, [9] * 4 + [0]).num_cached_tokens == 0


def test_equal_hashes_are_not_equal_tokens() -> None:
    class Same(int):
        def __hash__(self) -> int:
            return 1

    manager = BlockManager(16, SIZE)
    allocated(manager, [Same(token) for token in (1, 2, 3, 4, 5)])
    assert allocated(manager, [Same(token) for token in (1, 2, 3, 5, 5)]).num_cached_tokens == 0
    assert allocated(manager, [Same(token) for token in (1, 2, 3, 4, 6)]).num_cached_tokens == 4


def test_a_block_is_not_found_before_its_step_was_read() -> None:
    manager = BlockManager(8, SIZE)
    seq = allocated(manager, [1] * 9, registered=False)
    assert allocated(manager, [1] * 9, registered=False).num_cached_tokens == 0
    manager.register(seq, 7)
    assert allocated(manager, [1] * 9, registered=False).num_cached_tokens == 4


def test_a_block_handed_out_again_is_no_longer_found_under_its_old_tokens() -> None:
    manager = BlockManager(2, SIZE)
    for token in (1, 2, 3):
        seq = allocated(manager, [token] * 8)
        assert seq.num_cached_tokens == 0
        manager.deallocate(seq)
    assert allocated(manager, [1] * 8).num_cached_tokens == 0
    assert len(manager._prefixes) <= 2


def test_freed_blocks_are_found_until_they_are_needed_and_the_oldest_goes_first() -> None:
    manager = BlockManager(4, SIZE)
    for token in (1, 2):
        manager.deallocate(allocated(manager, [token] * 8))
    manager.deallocate(allocated(manager, [3] * 3))
    assert allocated(manager, [2] * 9).num_cached_tokens == 8
    assert allocated(manager, [1] * 4).num_cached_tokens == 0


def test_cached_blocks_that_are_free_count_as_needed() -> None:
    manager = BlockManager(3, SIZE)
    manager.deallocate(allocated(manager, [1] * 8))
    assert manager.can_allocate(Sequence([1] * 12, block_size=SIZE))
    assert not manager.can_allocate(Sequence([1] * 13, block_size=SIZE))
    assert not manager.can_allocate(Sequence([1] * 12, block_size=SIZE), reserve=1)


def test_poisoned_blocks_are_forgotten_at_once_and_zeroed_when_nobody_holds_them() -> None:
    manager = BlockManager(8, SIZE)
    bad = allocated(manager, [1] * 9)
    sharer = allocated(manager, [1] * 9)
    manager.poison(bad)
    assert allocated(manager, [1] * 9).num_cached_tokens == 0
    shared, last = bad.block_table[:2], bad.block_table[2]
    manager.deallocate(bad)
    assert manager.take_blocks_to_zero() == [last]
    manager.deallocate(sharer)
    assert sorted(manager.take_blocks_to_zero()) == sorted(shared)
    assert manager.take_blocks_to_zero() == []


@pytest.mark.parametrize("size", [1, 2, 16, 256])
def test_a_table_of_every_length_has_exactly_the_blocks_it_needs(size: int) -> None:
    manager = BlockManager(4, size)
    for length in sorted({1, 2, size - 1, size, size + 1, 2 * size, 3 * size + 1} - {0}):
        if length > 4 * size:
            continue
        seq = allocated(manager, list(range(length)), registered=False)
        assert len(seq.block_table) == -(-length // size)
        while len(seq) < 4 * size:
            before = len(seq.block_table)
            added = grow(manager, seq, 0)
            assert len(added) == (len(seq) % size == 1 or size == 1)
            assert len(seq.block_table) == before + len(added)
        seq.append_token(0)
        assert not manager.can_append(seq)
        manager.deallocate(seq)
        assert manager.num_free_blocks == 4


class Blocks(RuleBasedStateMachine):
    """Random lives of sequences made of two kinds of blocks, so that prefixes are often equal."""

    sequences = Bundle("sequences")

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 2, 4, 16, 256]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.live: list[Sequence] = []

    @rule(target=sequences, kinds=st.lists(st.integers(0, 1), max_size=4), tail=st.integers(0, 1), part=st.floats(0, 1))
    def allocate(self, kinds: list[int], tail: int, part: float):
        size = self.manager.block_size
        tokens = [kind for kind in kinds for _ in range(size)] + [tail] * max(int(part * size), not kinds)
        seq = Sequence(tokens, block_size=size)
        if not self.manager.can_allocate(seq):
            return multiple()
        self.manager.allocate(seq)
        assert seq.num_cached_tokens < len(seq)
        assert seq.num_cached_tokens % size == 0
        self.live.append(seq)
        return seq

    @rule(seq=sequences, token=st.integers(0, 1), count=st.integers(1, 3))
    def append(self, seq: Sequence, token: int, count: int) -> None:
        for _ in range(count):
            seq.append_token(token)
            free = self.manager.num_free_blocks
            if not self.manager.can_append(seq):
                assert free == 0
                seq.token_ids.pop()
                return
            assert len(self.manager.append(seq)) == free - self.manager.num_free_blocks

    @rule(seq=sequences, part=st.floats(0, 1))
    def register(self, seq: Sequence, part: float) -> None:
        self.manager.register(seq, int(part * len(seq)))

    @rule(seq=sequences)
    def register_all(self, seq: Sequence) -> None:
        self.manager.register(seq, len(seq))

    @rule(seq=sequences)
    def find_again(self, seq: Sequence) -> None:
        """What is registered and whole is found by an equal sequence, unless one met NaN."""
        twin = Sequence(seq.token_ids, block_size=self.manager.block_size)
        if self.manager.can_allocate(twin):
            self.manager.allocate(twin)
            self.manager.deallocate(twin)

    @rule(seq=consumes(sequences))
    def poison(self, seq: Sequence) -> None:
        held = set(seq.block_table)
        self.manager.poison(seq)
        self.free(seq)
        others = {block_id for other in self.live for block_id in other.block_table}
        assert held - others <= set(self.manager.take_blocks_to_zero())

    @rule(seq=consumes(sequences))
    def deallocate(self, seq: Sequence) -> None:
        self.free(seq)

    def free(self, seq: Sequence) -> None:
        self.manager.deallocate(seq)
        self.live.remove(seq)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_invariants(self.live)
            assert len(self.manager._prefixes) <= self.manager.num_blocks
            used = {block_id for seq in self.live for block_id in seq.block_table}
            assert len(used) + self.manager.num_free_blocks == self.manager.num_blocks
            for seq in self.live:
                assert len(seq.block_table) == self.manager.blocks_for(len(seq))


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=30)
