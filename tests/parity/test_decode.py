"""Decoding: equal to transformers, whatever the cache, chunks, page pressure and company."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose.kernels.attention import BACKENDS
from rose.models.loader import load
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.kv_cache import PageKey
from rose.runtime.options import SamplingParams
from rose.runtime.worker import DeviceWorker
from tests.generation_rig import Rig
from tests.tiny import DECODERS, save_decoder

VOCAB, EOS, NEW = 70, 0, 24
SMOLLM = Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct"
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, VOCAB, RNG.integers(1, 30)).tolist() for _ in range(8)]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def pair(request, tmp_path_factory):
    """The oracle and ROSE's model of one family, with the same weights."""
    folder = save_decoder(tmp_path_factory.mktemp(request.param), request.param)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return oracle.eval(), load(folder, dtype="float32").lm


@pytest.fixture(scope="module")
def greedy(pair):
    """What transformers makes of `PROMPTS`."""
    return [oracle_greedy(pair[0], prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load(save_decoder(tmp_path_factory.mktemp("lm"), "llama"), dtype="float32").lm


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Work this small only loses by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def worker(one_thread):
    worker = DeviceWorker()
    yield worker
    worker.close()


@torch.inference_mode()
def oracle_greedy(oracle, prompt, new=NEW, **options):
    ids = torch.tensor([prompt])
    out = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options
    )
    return out[0, len(prompt) :].tolist()


GREEDY = SamplingParams(temperature=0, max_tokens=NEW)


@pytest.mark.parametrize(
    "squeeze",
    [{}, {"step_tokens": 16}, {"caching": False}, {"depth": 1}],
    ids=["plain", "chunks of 16", "no prefix cache", "one in flight"],
)
def test_greedy_tokens_equal_transformers(pair, greedy, worker, squeeze):
    rig = Rig(pair[1], worker, eos_ids=[EOS], **squeeze)
    outputs = rig.run([(prompt, GREEDY) for prompt in PROMPTS])
    assert [output.tokens for output in outputs] == greedy


def test_greedy_tokens_equal_transformers_under_page_pressure(pair, greedy, worker):
    rig = Rig(pair[1], worker, num_pages=15, eos_ids=[EOS])
    outputs = rig.run([(prompt, GREEDY) for prompt in PROMPTS])
    assert [output.tokens for output in outputs] == greedy
    assert rig.loop.stats().preemptions > 0


@pytest.mark.parametrize("kind", list(DECODERS))
def test_greedy_tokens_of_every_decoder_equal_transformers(tmp_path, worker, kind):
    folder = save_decoder(tmp_path, kind)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rig = Rig(load(folder, dtype="float32").lm, worker, step_tokens=16, eos_ids=[EOS])
    outputs = rig.run([(prompt, GREEDY) for prompt in PROMPTS])
    assert [output.tokens for output in outputs] == [oracle_greedy(oracle, p) for p in PROMPTS]


def test_repetition_penalty_equals_transformers(pair, worker):
    oracle, model = pair
    params = SamplingParams(temperature=0, max_tokens=NEW, repetition_penalty=1.3)
    outputs = Rig(model, worker, eos_ids=[EOS]).run([(p, params) for p in PROMPTS[:3]])
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert output.tokens == oracle_greedy(oracle, prompt, repetition_penalty=1.3)


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM.exists(), reason="needs .models/SmolLM2-135M-Instruct")
def test_smollm2_equals_transformers(worker):
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM)
    oracle = AutoModelForCausalLM.from_pretrained(SMOLLM, dtype=torch.float32).eval()
    loaded = load(SMOLLM, dtype="float32")
    texts = [
        "The capital of France is",
        "def fibonacci(n):",
        "Once upon a time, in a land far away,",
    ]
    chat = [{"role": "user", "content": "Name three colours of the rainbow."}]
    ids = [tokenizer(text).input_ids for text in texts]
    ids.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
    rig = Rig(loaded.lm, worker, eos_ids=loaded.card.generation.eos_token_ids, page_size=16)
    outputs = rig.run([(prompt, SamplingParams(temperature=0, max_tokens=32)) for prompt in ids])
    for prompt, output in zip(ids, outputs, strict=True):
        assert output.tokens == oracle_greedy(oracle, prompt, new=32)
    assert "Paris" in tokenizer.decode(outputs[0].tokens)


def half_greedy_half_seeded(count=8):
    """Prompts of 5 to 20 tokens with penalties and log-probabilities."""
    rng = np.random.default_rng(3)
    return [
        (
            rng.integers(3, VOCAB, rng.integers(5, 21)).tolist(),
            SamplingParams(
                temperature=0 if i % 2 else 1,
                seed=100 + i,
                repetition_penalty=1.3,
                frequency_penalty=0.2,
                logprobs=2,
                max_tokens=30,
                ignore_eos=True,
            ),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def solo(llama, worker):
    """What each request gives alone, in a pool of its own."""
    return [Rig(llama, worker, caching=False).run([r])[0] for r in half_greedy_half_seeded(16)]


@pytest.mark.parametrize("count", [8, 16])
@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize(
    ("squeeze", "preempts"),
    [({}, False), ({"step_tokens": 16}, False), ({"num_pages": 15}, True)],
    ids=["plain", "chunks of 16", "tiny pool"],
)
def test_company_changes_no_token_and_no_log_probability(
    llama, worker, solo, count, caching, squeeze, preempts
):
    rig = Rig(llama, worker, caching=caching, **squeeze)
    outputs = rig.run(half_greedy_half_seeded(count))
    assert (rig.loop.stats().preemptions > 0) is preempts
    for output, alone in zip(outputs, solo, strict=False):
        assert output.tokens == alone.tokens
        assert output.finish == alone.finish == "length"
        assert [e.token_id for e in output.logprobs] == output.tokens
        for entry, other in zip(output.logprobs, alone.logprobs, strict=True):
            assert entry.top_ids == other.top_ids
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.parametrize("length", range(1, 18))
def test_prompts_at_every_offset_of_a_page_sent_again(llama, worker, length):
    """P, P again, P and a token, P without its last, twice in one step, and with a page evicted."""
    rng = np.random.default_rng(length)
    prompt = rng.integers(3, VOCAB, length).tolist()
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    variants = [prompt, prompt, [*prompt, 5], prompt[:-1] or [3]]
    rig = Rig(llama, worker)
    for turn, variant in enumerate(variants):
        rig.add(turn, variant, params)
        rig.drain()
    assert rig.outputs[1].cached_tokens == (length - 1) // 4 * 4
    rig.add("left", prompt, params)
    rig.add("right", prompt, params)
    rig.drain()
    evict_first_page(rig, prompt)
    rig.add("evicted", prompt, params)
    rig.drain()
    assert rig.outputs["evicted"].cached_tokens == 0
    everything = [*enumerate(variants), *((k, prompt) for k in ("left", "right", "evicted"))]
    for name, variant in everything:
        (alone,) = Rig(llama, worker, caching=False).run([(variant, params)])
        assert rig.outputs[name].tokens == alone.tokens
        ours = [entry.logprob for entry in rig.outputs[name].logprobs]
        assert ours == pytest.approx([entry.logprob for entry in alone.logprobs], abs=1e-4)


def evict_first_page(rig, prompt):
    pages = rig.pool.find(prompt, "", 4).pages
    rig.pool.share(pages)
    rig.pool.forget(pages)
    rig.pool.release(pages)


def test_pages_are_told_apart_where_every_hash_collides(llama, worker, monkeypatch):
    monkeypatch.setattr(PageKey, "__hash__", lambda _: 7)
    a, b, x = [3] * 16, [4] * 16, [5] * 16
    requests = [a + x, b + x, x, x + a, a + b, x + x]
    params = SamplingParams(temperature=0, max_tokens=5)
    rig = Rig(llama, worker)
    for _ in range(2):
        for index, prompt in enumerate(requests):
            rig.outputs.pop(index, None)
            rig.add(index, [*prompt, 6], params)
            rig.drain()
    assert rig.loop.stats().prefix_hit_tokens > 0
    for index, prompt in enumerate(requests):
        (alone,) = Rig(llama, worker, caching=False).run([([*prompt, 6], params)])
        assert rig.outputs[index].tokens == alone.tokens


def test_random_prompts_over_three_tokens_with_and_without_prefix_cache(llama, worker):
    rng = np.random.default_rng(5)
    requests = [
        (
            rng.integers(3, 6, rng.integers(1, 20)).tolist(),
            SamplingParams(temperature=0, max_tokens=4, cache_salt="xy"[i % 2] * (i % 3 == 0)),
        )
        for i in range(60)
    ]
    squeeze = {"num_pages": 80, "page_size": 2, "seqs": 4}
    cached, plain = (Rig(llama, worker, caching=c, **squeeze) for c in (True, False))
    ours = [output.tokens for output in cached.run(requests)]
    assert ours == [output.tokens for output in plain.run(requests)]
    assert cached.loop.stats().prefix_hit_tokens > 20


def test_generation_from_cached_pages_changes_no_vector(tmp_path, worker):
    """One copy of the weights embeds and generates; vectors know nothing of pages or chunks."""
    loaded = load(save_decoder(tmp_path, "qwen3"), dtype="float32", tasks=("embed", "generate"))
    embedder = EmbeddingRuntime(loaded.embedding, BACKENDS.load("torch_sdpa")(), worker)
    head = [9] * 40
    texts = [[*head, 3], [*head, 4], [*head, 3]]
    lengths = np.full(3, 41, np.int32)
    batch = EmbedBatch(np.array(texts, np.int32).ravel(), lengths, np.zeros(3, np.int32))
    before = embedder.step(batch).result(60)
    rig = Rig(loaded.lm, worker, step_tokens=16)
    for turn, text in enumerate(texts):
        rig.add(turn, text, max_tokens=3)
        rig.advance()
        during = embedder.step(batch)
        rig.drain()
        assert torch.equal(during.result(60), before)
    assert rig.outputs[2].cached_tokens == 40
    assert torch.equal(before[0], before[2])
    assert not torch.equal(before[0], before[1])
