"""Decoding with states beside pages: equal to transformers in any steps, pressure and company."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rose.kernels.attention import BACKENDS
from rose.models.loader import load
from rose.runtime.build import ModelOptions, build
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.graphs import WarmupShape
from rose.runtime.options import SamplingParams
from rose.runtime.worker import DeviceWorker
from tests import tiny
from tests.generation_rig import Rig
from tests.parity.served import post
from tests.parity.test_decode import (
    EOS,
    GREEDY,
    PROMPTS,
    half_greedy_half_seeded,
    oracle_greedy,
)

KINDS = [*tiny.HYBRIDS, "qwen3_5"]


@pytest.fixture(scope="module")
def worker():
    worker = DeviceWorker()
    yield worker
    worker.close()


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return tiny.save_decoder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, dtype="float32").lm


@pytest.fixture(scope="module")
def greedy(folder, model):
    """What transformers makes of `PROMPTS`."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [oracle_greedy(oracle, prompt) for prompt in PROMPTS]


def rig(model, worker, **squeeze):
    squeeze = {"caching": squeeze.get("snapshots", 0) > 0} | squeeze
    return Rig(model, worker, eos_ids=[EOS], **squeeze)


@pytest.mark.parametrize(
    "squeeze",
    [{}, {"step_tokens": 16}, {"depth": 1}, {"seqs": 2}, {"snapshots": 9, "step_tokens": 16}],
    ids=["plain", "chunks of 16", "one in flight", "two at once", "prefix cache"],
)
def test_greedy_tokens_equal_transformers(model, greedy, worker, squeeze):
    outputs = rig(model, worker, **squeeze).run([(prompt, GREEDY) for prompt in PROMPTS])
    assert [output.tokens for output in outputs] == greedy


def test_greedy_tokens_equal_transformers_one_by_one(model, greedy, worker):
    served = rig(model, worker)
    for prompt, tokens in zip(PROMPTS, greedy, strict=True):
        served.add("one", prompt, GREEDY)
        assert served.drain()["one"].tokens == tokens


def test_greedy_tokens_equal_transformers_under_page_pressure(model, greedy, worker):
    served = rig(model, worker, num_pages=15)
    outputs = served.run([(prompt, GREEDY) for prompt in PROMPTS])
    assert [output.tokens for output in outputs] == greedy
    assert served.loop.stats().preemptions > 0


@pytest.mark.parametrize(
    "squeeze",
    [{}, {"step_tokens": 16}, {"num_pages": 30}, {"snapshots": 2}],
    ids=["plain", "chunks of 16", "tiny pool", "few rows"],
)
def test_what_is_found_in_the_cache_changes_no_token(model, greedy, worker, squeeze):
    """What was sent is sent again."""
    served = rig(model, worker, **({"snapshots": 40} | squeeze))
    for turn in range(3):
        outputs = served.run([(prompt, GREEDY) for prompt in PROMPTS])
        assert [output.tokens for output in outputs] == greedy
        if turn and not squeeze:
            hits = [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
            assert [output.cached_tokens for output in outputs] == hits
    stats = served.loop.stats()
    assert stats.preemptions if "num_pages" in squeeze else stats.prefix_hit_tokens


@pytest.fixture(scope="module")
def branches(folder):
    """Texts with a common head, and what transformers makes of them."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(3)
    head = rng.integers(3, 70, 75).tolist()
    prompts = [head + rng.integers(3, 70, 4 + 3 * n).tolist() for n in range(5)]
    return prompts, [oracle_greedy(oracle, prompt, new=10) for prompt in prompts]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("step_tokens", [24, 512])
def test_texts_that_begin_alike(model, branches, worker, together, step_tokens):
    prompts, wanted = branches
    served = rig(model, worker, snapshots=20, step_tokens=step_tokens)
    params = SamplingParams(temperature=0, max_tokens=10)
    for turn, prompt in enumerate(prompts):
        served.add(turn, prompt, params)
        if not together:
            served.drain()
    outputs = served.drain()
    assert [outputs[turn].tokens for turn in range(5)] == wanted
    cached = [outputs[turn].cached_tokens for turn in range(5)]
    assert cached == ([0, *[72] * 4] if together else [0, 64, *[72] * 3])


def test_salts_keep_states_apart(model, greedy, worker):
    served = rig(model, worker, snapshots=20)
    prompt = max(PROMPTS, key=len)
    cached = []
    for turn, salt in enumerate(["a", "b", "a"]):
        served.add(turn, prompt, SamplingParams(temperature=0, max_tokens=24, cache_salt=salt))
        output = served.drain()[turn]
        assert output.tokens == greedy[PROMPTS.index(prompt)]
        cached.append(output.cached_tokens)
    assert cached == [0, 0, (len(prompt) - 1) // 4 * 4]


def test_preempted_sequences_start_from_kept_states(model, greedy, worker):
    served = rig(model, worker, num_pages=20, snapshots=40)
    restored = []
    step = served.runtime.step
    served.runtime.step = lambda plan: (
        restored.extend(row.snapshot for row in plan.rows if row.snapshot is not None),
        step(plan),
    )[1]
    outputs = served.run([(prompt, GREEDY) for prompt in PROMPTS])
    assert [output.tokens for output in outputs] == greedy
    assert served.loop.stats().preemptions > 0
    assert restored


def test_a_step_that_fails_leaves_no_state_behind(model, greedy, worker):
    served = rig(model, worker, snapshots=20)
    backbone, lengths = served.runtime._model.backbone.forward, []

    def sometimes(batch):
        hidden = backbone(batch)
        lengths.append(len(batch.recurrence._lengths))
        if lengths.count(8) in (2, 4) and lengths[-1] == 8:
            raise RuntimeError("a step that failed")
        return hidden

    served.runtime._model.backbone.forward = sometimes
    try:
        for _ in range(3):
            outputs = served.run([(prompt, GREEDY) for prompt in PROMPTS])
            assert [output.tokens for output in outputs] == greedy
    finally:
        del served.runtime._model.backbone.forward
    assert lengths.count(8) >= 4
    assert lengths.count(1) > 8, "one by one"


def test_a_long_prompt_in_pieces_beside_decodes(folder, model, worker):
    """Longer than the chunks of the delta rule, which the pieces cut anywhere."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    long = np.random.default_rng(7).integers(3, 70, 200).tolist()
    prompts = [PROMPTS[0], long, PROMPTS[1]]
    wanted = [oracle_greedy(oracle, prompt) for prompt in prompts]
    served = rig(model, worker, step_tokens=37, model_len=256)
    outputs = served.run([(prompt, GREEDY) for prompt in prompts])
    assert [output.tokens for output in outputs] == wanted


@pytest.fixture(scope="module")
def solo(model, worker):
    return [rig(model, worker).run([request])[0] for request in half_greedy_half_seeded(16)]


@pytest.mark.parametrize("count", [8, 16])
@pytest.mark.parametrize(
    ("squeeze", "preempts"),
    [
        ({}, False),
        ({"step_tokens": 16}, False),
        ({"num_pages": 15}, True),
        ({"num_pages": 15, "snapshots": 20}, True),
    ],
    ids=["plain", "chunks of 16", "tiny pool", "tiny pool with kept states"],
)
def test_company_changes_no_token_and_no_log_probability(
    model, worker, solo, count, squeeze, preempts
):
    served = rig(model, worker, **squeeze)
    outputs = served.run(half_greedy_half_seeded(count))
    assert (served.loop.stats().preemptions > 0) is preempts
    for output, alone in zip(outputs, solo, strict=False):
        assert output.tokens == alone.tokens
        for entry, other in zip(output.logprobs, alone.logprobs, strict=True):
            assert entry.top_ids == other.top_ids
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_cancelled_neighbours_leave_nothing_behind(model, greedy, worker):
    """A row is free again once nobody uses it, and whoever gets it starts from nothing."""
    served = rig(model, worker, seqs=2)
    served.add("gone", PROMPTS[1], max_tokens=50, ignore_eos=True)
    for turn, prompt in enumerate(PROMPTS):
        served.add(turn, prompt, GREEDY)
    for _ in range(3):
        served.advance()
        served.collect()
    served.loop.cancel("gone")
    served.drain()
    assert [served.outputs[turn].tokens for turn in range(len(PROMPTS))] == greedy
    assert len(served.scheduler._slots) == served.scheduler.num_slots


def test_prompt_log_probabilities_in_pieces(model, worker):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    prompt = PROMPTS[0] * 3
    (whole,) = rig(model, worker).run([(prompt, params)])
    (pieces,) = rig(model, worker, step_tokens=16).run([(prompt, params)])
    assert len(whole.prompt_logprobs) == len(prompt) - 1
    for entry, other in zip(whole.prompt_logprobs, pieces.prompt_logprobs, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_generation_changes_no_vector(folder, worker):
    """One copy of the weights embeds and generates; vectors know nothing of states."""
    loaded = load(folder, dtype="float32", tasks=("embed", "generate"))
    backend = BACKENDS.load("torch_sdpa")()
    embedder = EmbeddingRuntime(loaded.embedding, backend, worker, recurrent=True)
    texts = [[9] * 40 + [3], [9] * 40 + [4]]
    batch = EmbedBatch(
        np.array(texts, np.int32).ravel(), np.full(2, 41, np.int32), np.zeros(2, np.int32)
    )
    before = embedder.step(batch).result(60)
    served = rig(loaded.lm, worker, step_tokens=16)
    for turn, text in enumerate(texts):
        served.add(turn, text, max_tokens=3)
        served.advance()
        during = embedder.step(batch)
        served.drain()
        assert torch.equal(during.result(60), before)
    assert not torch.equal(before[0], before[1])


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_served_as_a_whole(tmp_path, kind):
    """From a folder to tokens and vectors with every default, on the back end of the machine."""
    path = tiny.save_decoder(tmp_path, kind)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    served = build(
        ModelOptions(
            path=str(path),
            device="cpu",
            tasks=("embed", "generate"),
            kv_cache_memory=4 << 20,
            max_batch_tokens=64,
            warmup=(WarmupShape(3, None), WarmupShape(2, 20)),
        )
    )
    try:
        assert served.generation.scheduler.pool.caching
        assert not served.graphs
        loop = served.generation.make_loop()
        tokens = {}
        for turn, prompt in enumerate(PROMPTS):
            loop.add(turn, prompt, GREEDY)
            tokens[turn] = []
        while loop.has_work:
            loop.advance()
            for event in loop.collect(timeout=60):
                tokens[event.request_id] += event.token_ids
        assert [tokens[turn] for turn in tokens] == [oracle_greedy(oracle, p) for p in PROMPTS]
        texts = EmbedBatch.of_equal(3, 20, 70)
        assert torch.isfinite(served.embedding.step(texts).result(60)).all()
    finally:
        served.close()


def test_states_that_leave_no_room_are_said(tmp_path):
    path = tiny.save_decoder(tmp_path, "qwen3_5_text")
    with pytest.raises(ValueError, match=r"kv_cache_memory.*states"):
        build(ModelOptions(path=str(path), device="cpu", kv_cache_memory=1000))
    served = build(ModelOptions(path=str(path), device="cpu", kv_cache_memory=100_000))
    assert 1 <= served.generation.scheduler.num_slots // 2 < 32
    served.close()


def test_a_prefix_cache_without_states_is_refused(model, worker):
    with pytest.raises(AssertionError, match="no prefix has its state"):
        Rig(model, worker)


def test_clients_see_what_was_found_in_the_cache(tmp_path):
    """One of two equal prompts waits for the state that the other leaves."""
    path = tiny.save_decoder(tmp_path / "model", "qwen3_5_text")
    prompt = np.random.default_rng(5).integers(3, 70, 100).tolist()
    request = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    paths = [("/v1/completions", request)] * 2
    salted = ("/v1/completions", request | {"cache_salt": "other"})
    answers = [answer.json() for answer in post(path, *paths, salted, max_batch_tokens=256)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    *equal, other = [detail["cached_tokens"] for detail in details]
    assert (sorted(equal), other) == ([0, 64], 0)
