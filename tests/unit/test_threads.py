"""One thread at a time: whoever comes second is refused at once, and whoever is inside loses nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tritonllm import SamplingParams
from tritonllm.errors import EngineError

PROMPTS = [[2, 3, 4], [9] * 20, [7], [11, 12]]
REFUSED = "another thread is using this engine"


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class Gate:
    """Holds the engine's next step in `collect`, the middle of a step, until it is opened."""

    def __init__(self, engine) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        collect = engine.runner.collect

        def wait() -> list[int]:
            self.reached.set()
            assert self.opened.wait(60)
            return collect()

        engine.runner.collect = wait


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


CALLS: dict[str, Callable] = {
    "generate": lambda engine: engine.generate([[5, 6]], greedy(2)),
    "stream": lambda engine: engine.stream([[5, 6]], greedy(2)),
    "chat": lambda engine: engine.chat([{"role": "user", "content": "hi"}], greedy(2)),
    "add_prompt": lambda engine: engine.add_prompt([5, 6], greedy(2)),
    "step": lambda engine: engine.step(),
    "abort": lambda engine: engine.abort(0),
    "exit": lambda engine: engine.exit(),
}


def test_every_call_is_refused_while_another_thread_generates(engine, pool) -> None:
    alone = engine.generate(PROMPTS, greedy(12))
    stream = engine.stream([[5, 6]], greedy(2))
    gate = Gate(engine)
    running = pool.submit(engine.generate, PROMPTS, greedy(12))
    assert gate.reached.wait(60)
    before = engine.stats()
    for call in [*CALLS.values(), lambda engine: next(stream)]:
        with pytest.raises(EngineError, match=REFUSED):
            call(engine)
    assert engine.stats() == before
    gate.opened.set()
    assert running.result(60)["token_ids"] == alone["token_ids"]
    assert engine.scheduler.is_finished()
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]


def test_every_call_is_refused_while_another_thread_steps(engine, pool) -> None:
    (alone,) = engine.generate([[5, 6]], greedy(6))["token_ids"]
    engine.add_prompt([5, 6], greedy(6))
    engine.step()
    gate = Gate(engine)
    running = pool.submit(engine.step)
    assert gate.reached.wait(60)
    for call in CALLS.values():
        with pytest.raises(EngineError, match=REFUSED):
            call(engine)
    gate.opened.set()
    outputs, _, _ = running.result(60)
    while not engine.scheduler.is_finished():
        outputs += engine.step()[0]
    assert [output.token_ids for output in outputs] == [alone]


def test_threads_that_try_until_they_may_all_get_their_tokens(engine, pool) -> None:
    alone = [engine.generate([prompt], greedy(16))["token_ids"][0] for prompt in PROMPTS]
    refusals = []

    def persist(prompt: list[int]) -> list[int]:
        while True:
            try:
                return engine.generate([prompt], greedy(16))["token_ids"][0]
            except EngineError as error:
                refusals.append(str(error))
                time.sleep(0.001)

    for _ in range(2):
        assert list(pool.map(persist, PROMPTS)) == alone
    assert all(REFUSED in refusal for refusal in refusals)


def test_threads_may_take_turns_with_one_engine(engine, pool) -> None:
    seq_id = pool.submit(engine.add_prompt, PROMPTS[1], greedy(5)).result()
    stream = engine.stream([PROMPTS[0]], greedy(5))
    pieces = []
    while (piece := pool.submit(next, stream, None).result()) is not None:
        pieces.append(piece)
    outputs = []
    while not engine.scheduler.is_finished():
        outputs += pool.submit(engine.step).result()[0]
    assert [output.seq_id for output in outputs] == [seq_id]
    tokens = [[token for piece in pieces for token in piece.token_ids], outputs[0].token_ids]
    assert tokens == engine.generate(PROMPTS[:2], greedy(5))["token_ids"]


def test_two_engines_in_two_threads(make_engine, pool) -> None:
    engines = [make_engine(), make_engine(block_size=8)]
    alone = engines[0].generate(PROMPTS, greedy(16))["token_ids"]
    running = [pool.submit(engine.generate, PROMPTS, greedy(16)) for engine in engines]
    assert [future.result(60)["token_ids"] for future in running] == [alone, alone]


def test_asyncio_one_after_another_and_never_two_at_once(engine) -> None:
    alone = engine.generate(PROMPTS, greedy(8))["token_ids"]

    async def run() -> None:
        lock = asyncio.Lock()

        async def ask(prompt: list[int]) -> list[int]:
            async with lock:
                result = await asyncio.to_thread(engine.generate, [prompt], greedy(8))
            return result["token_ids"][0]

        assert await asyncio.gather(*map(ask, PROMPTS)) == alone
        gate = Gate(engine)
        first = asyncio.create_task(asyncio.to_thread(engine.generate, PROMPTS, greedy(8)))
        await asyncio.to_thread(gate.reached.wait, 60)
        with pytest.raises(EngineError, match=REFUSED):
            await asyncio.to_thread(engine.generate, PROMPTS, greedy(8))
        gate.opened.set()
        assert (await first)["token_ids"] == alone

    asyncio.run(run())


def test_a_stream_dropped_while_another_thread_steps_is_aborted_by_that_thread(engine, pool) -> None:
    alone = engine.generate(PROMPTS[:1], greedy(12))["token_ids"]
    stream = engine.stream([[3] * 20], greedy(60))
    next(stream)
    gate = Gate(engine)
    running = pool.submit(engine.generate, PROMPTS[:1], greedy(12))
    assert gate.reached.wait(60)
    del stream
    gc.collect()
    gate.opened.set()
    assert running.result(60)["token_ids"] == alone
    while not engine.scheduler.is_finished():
        assert engine.step()[0] == []
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]


def test_a_stream_collected_in_the_middle_of_a_step_is_aborted_by_the_next(engine) -> None:
    stream = engine.stream([[3] * 20], greedy(60))
    next(stream)
    launch = engine.runner.launch

    def collecting(plan) -> None:
        nonlocal stream
        stream = None
        gc.collect()
        launch(plan)

    engine.runner.launch = collecting
    (seq,) = engine.scheduler.running
    engine.step()
    assert not seq.is_finished
    engine.step()
    assert seq.finish_reason == "abort"
    while not engine.scheduler.is_finished():
        assert engine.step()[0] == []
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]
