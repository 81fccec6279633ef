"""`AsyncLLMEngine`: many coroutines in one batch, and what is left when one of them goes away."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator

import pytest

from tritonllm import AsyncLLMEngine, SamplingParams, StreamOutput
from tritonllm.engine.logprobs import TokenLogprobs
from tritonllm.engine.mailbox import Mailbox
from tritonllm.errors import ConfigError, EngineError, RequestError

PROMPTS = [[2, 3, 4], [9] * 20, [7], [11, 12], [5, 6, 7, 8], [13] * 17, [21, 4], [30] * 40]
LONG = 70


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


@pytest.fixture
def make_async(llama: str, _one_thread) -> Iterator[Callable[..., AsyncLLMEngine]]:
    """`make_async(**keys)`: an engine on the tiny Llama with four rows; closed after the test."""
    made = []

    def make(**keys) -> AsyncLLMEngine:
        sized = {"block_size": 16, "max_model_length": 96, "max_num_sequences": 4, "max_num_batched_tokens": 64}
        made.append(AsyncLLMEngine({"model_name_or_path": llama, "device": "cpu", **sized}, **keys))
        return made[-1]

    yield make
    for engine in made:
        engine.exit()


@pytest.fixture
def engine(make_async) -> AsyncLLMEngine:
    return make_async()


def run(coroutine: Coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


async def gather(engine: AsyncLLMEngine, prompt, params: SamplingParams) -> list[StreamOutput]:
    return [piece async for piece in engine.generate(prompt, params)]


def tokens_of(pieces: list[StreamOutput]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def text_of(pieces: list[StreamOutput]) -> str:
    return "".join(piece.text for piece in pieces)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def is_idle(engine: AsyncLLMEngine) -> bool:
    stats = engine.stats()
    return stats["waiting"] == stats["running"] == 0 and stats["free_blocks"] == stats["total_blocks"]


class TestPieces:
    @pytest.mark.parametrize("stop", [(), ("a", " th")])
    def test_joined_they_are_what_generate_gives(self, engine, make_engine, stop: tuple[str, ...]) -> None:
        params = [
            SamplingParams(temperature=1, seed=seed, max_tokens=20, ignore_eos=True, stop=stop)
            for seed in range(len(PROMPTS))
        ]
        whole = make_engine().generate(PROMPTS, params)

        async def main() -> None:
            found = await asyncio.gather(*(gather(engine, *pair) for pair in zip(PROMPTS, params, strict=True)))
            assert [text_of(pieces) for pieces in found] == whole["text"]
            assert [tokens_of(pieces) for pieces in found] == whole["token_ids"]
            assert [pieces[-1].finish_reason for pieces in found] == whole["finish_reason"]
            assert [pieces[-1].stop_reason for pieces in found] == whole["stop_reason"]
            assert all(piece.finish_reason is None for pieces in found for piece in pieces[:-1])
            await until(lambda: is_idle(engine))

        run(main())

    def test_log_probabilities_are_what_generate_gives(self, engine, make_engine) -> None:
        params = [
            SamplingParams(temperature=1, seed=4, max_tokens=20, ignore_eos=True, n=2, logprobs=2, prompt_logprobs=1),
            greedy(20, logprobs=0),
            greedy(20),
        ]
        whole = make_engine().generate(PROMPTS[:3], params)

        async def main() -> None:
            first, second, third = await asyncio.gather(*map(gather, [engine] * 3, PROMPTS, params))
            for sample in (0, 1):
                own = [piece for piece in first if piece.sample == sample]
                assert [entry for piece in own for entry in piece.logprobs] == whole["logprobs"][0][sample]
                about_prompt = [piece.prompt_logprobs for piece in own]
                assert about_prompt == [None if sample else whole["prompt_logprobs"][0], *[None] * (len(own) - 1)]
            assert [entry for piece in second for entry in piece.logprobs] == whole["logprobs"][1]
            assert {(piece.logprobs, piece.prompt_logprobs) for piece in third} == {(None, None)}

        run(main())

    def test_a_conversation_and_a_text(self, engine, make_engine) -> None:
        sync = make_engine()
        messages = [{"role": "user", "content": "What is it?"}]

        async def main() -> None:
            answer = [piece async for piece in engine.chat(messages, greedy(8))]
            assert tokens_of(answer) == sync.chat(messages, greedy(8))["token_ids"][0]
            assert (
                tokens_of(await gather(engine, "The capital", greedy(8)))
                == (sync.generate("The capital", greedy(8))["token_ids"][0])
            )

        run(main())

    def test_event_loops_one_after_another_and_side_by_side(self, engine, make_engine) -> None:
        alone = make_engine().generate(PROMPTS[:4], greedy(12))["token_ids"]
        found: dict[int, list[int]] = {}

        def ask(index: int) -> None:
            async def main() -> None:
                found[index] = tokens_of(await gather(engine, PROMPTS[index], greedy(12)))

            run(main())

        ask(0)
        threads = [threading.Thread(target=ask, args=(index,)) for index in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[index] for index in range(4)] == alone


class TestLeaving:
    """Whoever goes away takes the request along; the neighbours do not notice."""

    async def check(self, engine: AsyncLLMEngine, neighbour: asyncio.Task, alone: list[int]) -> None:
        assert tokens_of(await neighbour) == alone
        await until(lambda: is_idle(engine))

    @pytest.mark.parametrize("num_pieces", [0, 1, 5])
    def test_cancelled(self, engine, make_engine, num_pieces: int) -> None:
        (alone,) = make_engine().generate([[5, 6]], greedy(60))["token_ids"]

        async def main() -> None:
            neighbour = asyncio.create_task(gather(engine, [5, 6], greedy(60)))
            seen: list[StreamOutput] = []

            async def follow() -> None:
                async for piece in engine.generate([3] * 20, greedy(LONG)):
                    seen.append(piece)

            task = asyncio.create_task(follow())
            await until(lambda: len(seen) >= num_pieces)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(tokens_of(seen)) < LONG
            await self.check(engine, neighbour, alone)

        run(main())

    def test_closed_and_forgotten(self, engine, make_engine) -> None:
        (alone,) = make_engine().generate([[5, 6]], greedy(60))["token_ids"]

        async def main() -> None:
            neighbour = asyncio.create_task(gather(engine, [5, 6], greedy(60)))
            closed, forgotten = (engine.generate([token] * 20, greedy(LONG)) for token in (3, 4))
            await anext(closed)
            await closed.aclose()
            await anext(forgotten)
            del forgotten
            gc.collect()
            await self.check(engine, neighbour, alone)

        run(main())

    def test_what_nobody_waits_for_is_computed_no_further(self, engine) -> None:
        steps, collect = threading.Semaphore(0), engine.engine.runner.collect

        def collect_when_allowed() -> list[int]:
            assert steps.acquire(timeout=60)
            return collect()

        engine.engine.runner.collect = collect_when_allowed

        async def main() -> None:
            left = engine.generate([3] * 20, greedy(LONG))
            steps.release(3)
            await anext(left)
            await left.aclose()
            steps.release(1000)
            await until(lambda: is_idle(engine))
            assert engine.stats()["processed_tokens"] <= 20 + 6

        run(main())

    def test_cancelled_while_it_waits_for_a_place(self, make_async) -> None:
        engine = make_async(max_requests=1)

        async def main() -> None:
            first = asyncio.create_task(gather(engine, [5, 6], greedy(LONG)))
            await until(lambda: engine.stats()["requests"] == 1)
            second, third = (asyncio.create_task(gather(engine, [token], greedy(4))) for token in (7, 8))
            await asyncio.sleep(0)
            second.cancel()
            assert len(tokens_of(await first)) == LONG
            assert len(tokens_of(await third)) == 4
            assert engine.stats()["requests"] == 2
            await until(lambda: is_idle(engine))

        run(main())

    def test_a_closed_event_loop(self, engine) -> None:
        loop = asyncio.new_event_loop()
        generator = engine.generate([3] * 20, greedy(LONG))
        loop.run_until_complete(anext(generator))
        loop.close()

        async def main() -> None:
            assert len(tokens_of(await gather(engine, [5, 6], greedy(8)))) == 8
            await until(lambda: is_idle(engine))

        run(main())

    def test_nobody_asks_nothing_is_queued(self, engine) -> None:
        engine.generate([3] * 20, greedy(LONG))
        time.sleep(0.05)
        assert engine.stats()["requests"] == 0


class TestLimits:
    def test_requests_beyond_the_limit_wait_in_the_order_of_their_arrival(self, make_async) -> None:
        engine = make_async(max_requests=2)
        ended: list[int] = []
        inside: list[int] = []

        async def ask(index: int) -> None:
            async for _ in engine.generate([index + 2], greedy(6)):
                inside.append(engine.stats()["waiting"] + engine.stats()["running"])
            ended.append(index)

        async def main() -> None:
            await asyncio.gather(*(ask(index) for index in range(8)))

        run(main())
        assert max(inside) <= 2
        assert [index // 2 for index in ended] == [0, 0, 1, 1, 2, 2, 3, 3]

    def test_a_slow_consumer_holds_up_nobody_and_loses_nothing(self, engine, make_engine) -> None:
        alone = make_engine().generate([[5, 6], [7]], greedy(60))

        async def main() -> None:
            slow = engine.generate([5, 6], greedy(60))
            pieces = [await anext(slow)]
            assert tokens_of(await gather(engine, [7], greedy(60))) == alone["token_ids"][1]
            await until(lambda: is_idle(engine))
            pieces += [piece async for piece in slow]
            assert tokens_of(pieces) == alone["token_ids"][0]
            assert text_of(pieces) == alone["text"][0]
            assert len(pieces) <= 3
            assert pieces[-1].finish_reason == "length"

        run(main())

    @pytest.mark.parametrize("value", [0, -1, True, 1.5, None, "8"])
    def test_a_limit_that_is_none(self, value: object) -> None:
        with pytest.raises(ConfigError, match="max_requests="):
            AsyncLLMEngine("no/such/model", max_requests=value)  # type: ignore[arg-type]


class TestFailures:
    def test_a_bad_prompt_is_its_own_consumer_s(self, engine, make_engine) -> None:
        (alone,) = make_engine().generate([[5, 6]], greedy(30))["token_ids"]

        async def main() -> None:
            neighbour = asyncio.create_task(gather(engine, [5, 6], greedy(30)))
            for prompt in ([], [10**6], [3] * 96, 5):
                with pytest.raises(RequestError):
                    await gather(engine, prompt, greedy(4))
            assert tokens_of(await neighbour) == alone

        run(main())

    def test_params_that_are_none_are_refused_at_the_call(self, engine) -> None:
        with pytest.raises(RequestError, match="sampling params are a SamplingParams"):
            engine.generate([5], {"max_tokens": 3})

    def test_an_engine_that_fails_tells_everybody(self, engine) -> None:
        async def main() -> None:
            tasks = [asyncio.create_task(gather(engine, [token] * 3, greedy(LONG))) for token in range(2, 8)]
            await until(lambda: engine.stats()["steps"] >= 3)

            def fail() -> list[int]:
                raise RuntimeError("the device is gone")

            engine.engine.runner.collect = fail
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, EngineError) for result in results)
            assert all("the device is gone" in str(result) for result in results)
            assert len({id(result) for result in results}) == len(results)
            with pytest.raises(EngineError, match="the device is gone"):
                await gather(engine, [5], greedy(4))

        run(main())
        engine.exit()

    def test_other_threads_are_refused(self, engine) -> None:
        for call in (engine.engine.step, lambda: engine.engine.generate([[5]], greedy(2)), engine.engine.exit):
            with pytest.raises(EngineError, match="another thread is using this engine"):
                call()

        async def main() -> None:
            assert len(tokens_of(await gather(engine, [5], greedy(4)))) == 4

        run(main())


class TestEnd:
    def test_consumers_that_wait_are_told(self, make_async) -> None:
        engine = make_async(max_requests=2)

        async def main() -> None:
            tasks = [asyncio.create_task(gather(engine, [token] * 3, greedy(LONG))) for token in range(2, 8)]
            await until(lambda: engine.stats()["steps"] >= 3)
            await asyncio.to_thread(engine.exit)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, EngineError) for result in results)
            assert all("closed by exit()" in str(result) for result in results)
            with pytest.raises(EngineError, match=r"closed by exit\(\)"):
                await gather(engine, [5], greedy(4))

        run(main())
        engine.exit()

    def test_a_context_manager_ends_the_thread_and_gives_the_memory_back(self, make_async) -> None:
        engine = make_async()
        runner = engine.engine.runner

        async def main() -> None:
            async with engine:
                assert len(tokens_of(await gather(engine, [5], greedy(4)))) == 4
            assert not engine._thread._thread.is_alive()
            assert not hasattr(runner, "model")

        run(main())

    def test_an_engine_that_nobody_holds_ends_its_thread(self, llama) -> None:
        engine = AsyncLLMEngine(llama, device="cpu", max_model_length=32)
        thread, gone = engine._thread._thread, weakref.ref(engine)
        del engine
        gc.collect()
        assert gone() is None
        thread.join(60)
        assert not thread.is_alive()

    def test_it_ends_with_the_interpreter(self, llama) -> None:
        code = (
            "import asyncio\n"
            "from tritonllm import AsyncLLMEngine, SamplingParams\n"
            f"engine = AsyncLLMEngine({llama!r}, device='cpu', max_model_length=32)\n"
            "async def main():\n"
            "    async for piece in engine.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True)):\n"
            "        print(len(piece.token_ids))\n"
            "        break\n"
            "asyncio.run(main())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        assert int(done.stdout) >= 1
        assert "Traceback" not in done.stderr


def test_a_mailbox_gives_what_came_before_the_error() -> None:
    async def main() -> None:
        box = Mailbox()
        one, two, three = (TokenLogprobs(token, -1.0, 1, []) for token in (1, 2, 3))
        about = {"prompt_logprobs": [None, three]}
        assert box.put([StreamOutput(0, "a", [1], None, logprobs=[one], **about)])
        assert not box.put([StreamOutput(0, "x", [7], "length", sample=1)])
        assert not box.put([StreamOutput(0, "b", [2, 3], None, logprobs=[two, three])])
        box.fail(EngineError("over"))
        box.wake()
        joined = StreamOutput(0, "ab", [1, 2, 3], None, logprobs=[one, two, three], **about)
        assert await box.take() == [joined, StreamOutput(0, "x", [7], "length", sample=1)]
        with pytest.raises(EngineError, match="over"):
            await box.take()

    run(main())
