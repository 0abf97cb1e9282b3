"""Splitting and balancing over replicas, with engines that the test controls."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.models.card import ModelCard, TokenizerCard
from rose.runtime.options import EmbedOptions, SamplingParams
from rose.serving.client_api import EmbedAnswer, EngineError
from rose.serving.protocol import Stats, TokensDelta
from rose.serving.replicas import CHUNK_TOKENS, ReplicaSet, cut


def card(fingerprint="f"):
    return ModelCard(
        name="toy",
        path="toy",
        architecture="bert",
        dtype="float32",
        tasks=("embed",),
        vocab_size=1 << 30,
        max_model_len=64,
        fingerprint=fingerprint,
        created=0,
        tokenizer=TokenizerCard(),
    )


class FakeClient:
    """An engine: a text's vector is its first id. `fail` gives an error for a call, or None."""

    def __init__(self, delay=0.0, fail=lambda _: None, fingerprint="f"):
        self.delay = delay
        self.fail = fail
        self.card = card(fingerprint)
        self.tokenizer_json = b"{}"
        self.ready = True
        self.unready_reason = None
        self.stats = Stats(tokens=7)
        self.chunks = []
        self.running = self.most_running = self.cancelled = 0

    async def embed(self, ids, options, **_):
        self.chunks.append([int(text[0]) for text in ids])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if error := self.fail(ids):
            raise error
        return EmbedAnswer(np.array([[text[0]] for text in ids], np.float32), 0.5, 0.25)

    async def generate(self, ids, sampling, *, priority="online", trace=""):
        for index in range(4):
            if error := self.fail(index):
                raise error
            yield TokensDelta(1, [index], finish="length" if index == 3 else None)

    def lose(self, reason="gone"):
        self.ready, self.unready_reason = False, reason


def texts(count, tokens):
    return [np.full(tokens, i, np.int32) for i in range(count)]


def gone(_):
    return EngineError("unavailable", "gone")


@given(st.lists(st.integers(1, 300), min_size=1), st.integers(1, 500))
def test_chunks_cover_the_batch_in_order_and_fit(lengths, size):
    chunks = cut(lengths, size)
    assert [i for chunk in chunks for i in chunk] == list(range(len(lengths)))
    for chunk in chunks:
        assert len(chunk) == 1 or sum(lengths[i] for i in chunk) <= size


def test_a_large_batch_is_shared_and_comes_back_in_order():
    async def scenario():
        clients = [FakeClient(0.01), FakeClient(0.01), FakeClient(0.01)]
        answer = await ReplicaSet(clients).embed(texts(600, 100), EmbedOptions())
        assert answer.vectors[:, 0].tolist() == list(range(600))
        assert answer.queued_s == 0.5
        assert all(len(client.chunks) >= 3 for client in clients)
        assert all(client.most_running <= 3 for client in clients)

    asyncio.run(scenario())


def test_a_slow_replica_gets_less():
    async def scenario():
        slow, fast = FakeClient(0.2), FakeClient(0.005)
        await ReplicaSet([slow, fast]).embed(texts(2000, 100), EmbedOptions())
        assert len(slow.chunks) * 3 < len(fast.chunks)

    asyncio.run(scenario())


def test_a_small_request_goes_to_the_idle_replica_and_passes_a_large_one():
    async def scenario():
        clients = [FakeClient(0.02), FakeClient(0.02)]
        replicas = ReplicaSet(clients)
        large = asyncio.create_task(replicas.embed(texts(4000, 100), EmbedOptions()))
        await asyncio.sleep(0.03)
        small = asyncio.create_task(replicas.embed(texts(1, 3), EmbedOptions()))
        done, _ = await asyncio.wait([large, small], return_when=asyncio.FIRST_COMPLETED)
        assert done == {small}
        await large

    asyncio.run(scenario())


def test_a_lost_replica_is_replaced_by_another():
    async def scenario():
        dead, alive = FakeClient(fail=gone), FakeClient()
        answer = await ReplicaSet([dead, alive]).embed(texts(300, 100), EmbedOptions())
        assert answer.vectors[:, 0].tolist() == list(range(300))
        assert dead.chunks

    asyncio.run(scenario())


def test_when_all_are_lost_the_request_ends_with_an_error():
    async def scenario():
        replicas = ReplicaSet([FakeClient(fail=gone), FakeClient(fail=gone)])
        with pytest.raises(EngineError) as caught:
            await replicas.embed(texts(2, 3), EmbedOptions())
        assert caught.value.kind == "unavailable"

    asyncio.run(scenario())


def test_an_error_names_the_text_of_the_request_and_cancels_the_siblings():
    def fail(ids):
        if any(text[0] == 90 for text in ids):
            return EngineError("non_finite", "NaN", f"input[{[t[0] for t in ids].index(90)}]")
        return None

    async def scenario():
        client = FakeClient(fail=fail)
        slow = FakeClient(5)
        with pytest.raises(EngineError) as caught:
            await ReplicaSet([client, slow]).embed(texts(400, CHUNK_TOKENS // 8), EmbedOptions())
        assert caught.value.field == "input[90]"
        assert slow.cancelled == len(slow.chunks) > 0
        assert slow.running == 0

    asyncio.run(scenario())


def test_giving_up_leaves_nothing_outstanding():
    async def scenario():
        client = FakeClient(5)
        replicas = ReplicaSet([client])
        asked = asyncio.create_task(replicas.embed(texts(400, 100), EmbedOptions()))
        await asyncio.sleep(0.02)
        assert replicas._replicas[0].outstanding > 0
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        stream = replicas.generate(np.array([1], np.int32), SamplingParams(max_tokens=4))
        assert (await anext(stream)).token_ids == [0]
        assert replicas._replicas[0].outstanding == 5
        await stream.aclose()
        assert replicas._replicas[0].outstanding == 0

    asyncio.run(scenario())


def test_a_deadline_holds_for_the_whole_request_and_nothing_stays_outstanding():
    async def scenario():
        client = FakeClient(5)
        replicas = ReplicaSet([client])
        with pytest.raises(EngineError) as caught:
            await replicas.embed(texts(400, 100), EmbedOptions(), timeout_s=0.05)
        assert caught.value.kind == "deadline"
        assert client.running == 0
        assert replicas._replicas[0].outstanding == 0

    asyncio.run(scenario())


def test_a_replica_with_another_checkpoint_is_not_used(caplog):
    async def scenario():
        first, other = FakeClient(), FakeClient(fingerprint="g")
        replicas = ReplicaSet([first, other])
        for _ in range(3):
            await replicas.embed(texts(1, 3), EmbedOptions())
        assert not other.chunks
        assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
            "a replica of toy serves another checkpoint: it is not used"
        ]

    asyncio.run(scenario())


def test_a_new_checkpoint_is_served_once_its_first_replica_is_the_first_that_is_ready():
    async def scenario():
        first, second = FakeClient(fingerprint="old"), FakeClient(fingerprint="new")
        replicas = ReplicaSet([first, second])
        first.lose()
        assert replicas.ready
        assert replicas.card.fingerprint == "new"
        await replicas.embed(texts(1, 3), EmbedOptions())
        assert second.chunks

    asyncio.run(scenario())


def test_the_chunks_of_a_request_are_all_of_one_checkpoint():
    async def scenario():
        old, new = FakeClient(0.02, fingerprint="old"), FakeClient(fingerprint="new")
        replicas = ReplicaSet([old, new])
        asked = asyncio.create_task(replicas.embed(texts(600, 100), EmbedOptions()))
        await asyncio.sleep(0.03)
        old.lose()
        old.fail = gone
        with pytest.raises(EngineError) as caught:
            await asked
        assert caught.value.kind == "unavailable"
        assert not new.chunks

    asyncio.run(scenario())


def test_a_full_replica_passes_a_request_on():
    def full(_):
        return EngineError("overloaded", "full")

    async def scenario():
        answer = await ReplicaSet([FakeClient(fail=full), FakeClient()]).embed(
            texts(3, 3), EmbedOptions()
        )
        assert answer.vectors[:, 0].tolist() == [0, 1, 2]
        with pytest.raises(EngineError) as caught:
            await ReplicaSet([FakeClient(fail=full)] * 2).embed(texts(3, 3), EmbedOptions())
        assert caught.value.kind == "overloaded"

    asyncio.run(scenario())


def test_a_replica_that_always_fails_does_not_draw_all_requests(monkeypatch):
    def broken(_):
        return EngineError("internal", "broken")

    async def scenario():
        bad, good = FakeClient(0.001, fail=broken), FakeClient(0.02)
        replicas = ReplicaSet([bad, good])
        asked = [replicas.embed(texts(1, 3), EmbedOptions()) for _ in range(2)]

        async def client():
            for _ in range(20):
                await asyncio.gather(
                    replicas.embed(texts(1, 3), EmbedOptions()), return_exceptions=True
                )

        await asyncio.gather(*asked, *[client() for _ in range(4)], return_exceptions=True)
        assert len(bad.chunks) < 15
        tried = len(bad.chunks)
        monkeypatch.setattr("rose.serving.replicas.AVOIDED_S", 0)
        bad.fail = lambda _: None
        await replicas.embed(texts(1, 3), EmbedOptions())
        assert len(bad.chunks) == tried + 1, "it is tried again after a while"

    asyncio.run(scenario())


def test_state_is_that_of_all():
    first, second = FakeClient(), FakeClient()
    replicas = ReplicaSet([first, second])
    assert replicas.stats.tokens == 14
    assert replicas.ready
    first.lose()
    assert replicas.ready
    assert replicas.unready_reason is None
    second.lose("frozen")
    assert not replicas.ready
    assert replicas.unready_reason == "gone; frozen"


def collect(replicas):
    async def run():
        stream = replicas.generate(np.array([1, 2], np.int32), SamplingParams(max_tokens=4))
        async with aclosing(stream):
            return [delta.token_ids[0] async for delta in stream]

    return asyncio.run(run())


def test_a_stream_starts_again_elsewhere_only_before_its_first_token():
    assert collect(ReplicaSet([FakeClient(fail=gone), FakeClient()])) == [0, 1, 2, 3]

    def later(index):
        return EngineError("unavailable", "gone") if index == 2 else None

    with pytest.raises(EngineError, match="gone"):
        collect(ReplicaSet([FakeClient(fail=later), FakeClient()]))
    with pytest.raises(EngineError, match="bad"):
        collect(ReplicaSet([FakeClient(fail=lambda _: EngineError("bad_request", "bad"))]))
