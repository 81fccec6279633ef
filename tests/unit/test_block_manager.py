"""Who owns which block: sharing by equal tokens alone, nothing lost, nothing stale."""

from __future__ import annotations

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


class Blocks(RuleBasedStateMachine):
    """Random lives of sequences over two ids, so that prefixes are often equal."""

    sequences = Bundle("sequences")

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, SIZE)
        self.live: list[Sequence] = []

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def allocate(self, tokens: list[int]):
        seq = Sequence(tokens, block_size=SIZE)
        if not self.manager.can_allocate(seq):
            return multiple()
        self.manager.allocate(seq)
        for other in self.live:
            shared = set(other.block_table) & set(seq.block_table)
            for block_id in shared:
                index = seq.block_table.index(block_id)
                assert other.block_table[: index + 1] == seq.block_table[: index + 1]
                assert other.token_ids[: (index + 1) * SIZE] == seq.token_ids[: (index + 1) * SIZE]
        self.live.append(seq)
        return seq

    @rule(seq=sequences, token=st.integers(0, 1))
    def append(self, seq: Sequence, token: int) -> None:
        seq.append_token(token)
        if self.manager.can_append(seq):
            self.manager.append(seq)
        else:
            seq.token_ids.pop()

    @rule(seq=sequences)
    def register(self, seq: Sequence) -> None:
        self.manager.register(seq, len(seq))

    @rule(seq=consumes(sequences))
    def poison(self, seq: Sequence) -> None:
        self.manager.poison(seq)
        self.free(seq)

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
            for seq in self.live:
                assert len(seq.block_table) == self.manager.blocks_for(len(seq))


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=30)
