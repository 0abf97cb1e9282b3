"""The generation loop over a toy model: overlap, failures, cancels, log-probabilities, sizes."""

import asyncio
from contextlib import suppress

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from rose.kernels.attention import BACKENDS
from rose.kernels.attention.base import AttentionSpec, RaggedLayout
from rose.models.batch import TokenBatch
from rose.runtime.decode import DecodeRuntime, TokenLogprob
from rose.runtime.errors import NonFiniteError, RequestError
from rose.runtime.kv_pool import _available_in_cgroup, choose_num_pages, page_bytes
from rose.runtime.options import SamplingParams
from rose.runtime.sampler import Sampler
from rose.runtime.sampling_plan import SamplingState, unpack
from rose.runtime.worker import DeviceWorker
from tests.generation_rig import Output, Rig

VOCAB, WIDTH, HEADS, KV_HEADS, POSITIONS = 61, 32, 4, 2, 160


class ToyBackbone(nn.Module):
    """Two layers of attention with learned positions."""

    def __init__(self):
        super().__init__()
        self.hidden_size, self.vocab_size, self.max_positions = WIDTH, VOCAB, POSITIONS
        dim = WIDTH // HEADS
        self.attention_specs = [
            AttentionSpec(layer, HEADS, KV_HEADS, dim, dim**-0.5, causal=True) for layer in (0, 1)
        ]
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(POSITIONS, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH + 2 * KV_HEADS * dim) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, batch):
        x_TC = self.tokens(batch.input_ids) + self.places(batch.positions)
        for spec, qkv, out in zip(self.attention_specs, self.qkv, self.out, strict=True):
            sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
            packed = qkv(x_TC).unflatten(-1, (-1, spec.head_dim))
            attended = batch.attention.attend(*packed.split(sizes, 1), spec)
            x_TC = torch.tanh(x_TC + out(attended.flatten(1)))
        return x_TC


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = ToyBackbone()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def logits(self, hidden_SC):
        return self.head(hidden_SC)


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


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return ToyModel().eval()


@torch.inference_mode()
def reference(model, prompt, params, eos_ids=(), limit=128):
    """One sequence alone, without a KV cache: the whole of it through the model for every token."""
    backend, sampler = BACKENDS.load("torch_sdpa")(), Sampler(VOCAB)
    output = Output()
    state = SamplingState(
        params,
        vocab_size=VOCAB,
        eos_ids=eos_ids,
        prompt_ids=prompt,
        output_ids=output.tokens,
    )
    while len(prompt) + len(output.tokens) < limit:
        logits_TV = model.logits(ragged(model, backend, [*prompt, *output.tokens]))
        batch = sampler.plan([state], [len(output.tokens)])
        (row,) = unpack(sampler.sample(logits_TV[-1:], batch).packed.numpy(), [state])
        output.tokens.append(row.token_id)
        if row.logprob is not None:
            output.logprobs.append(
                TokenLogprob(row.token_id, row.logprob, row.top_ids, row.top_logprobs)
            )
        if row.token_id in state.end_ids and len(output.tokens) > params.min_tokens:
            output.finish = "stop"
            return output
        if len(output.tokens) == params.max_tokens:
            break
    output.finish = "length"
    return output


def ragged(model, backend, ids):
    layout = RaggedLayout(torch.tensor([0, len(ids)], dtype=torch.int32), (len(ids),))
    batch = TokenBatch(torch.tensor(ids), torch.arange(len(ids)), backend.plan_ragged(layout))
    return model.backbone(batch)


def assert_same(output, expected):
    assert output.error is None
    assert output.tokens == expected.tokens
    assert output.finish == expected.finish
    assert_close(output.logprobs, expected.logprobs)


def assert_close(entries, expected):
    assert [e.token_id for e in entries] == [e.token_id for e in expected]
    assert [e.top_ids for e in entries] == [e.top_ids for e in expected]
    for entry, other in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert entry.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def mixed_requests(count, max_tokens=20):
    """Prompts of 1 to 40 tokens: greedy, seeded, penalised, biased, with log-probabilities."""
    rng = np.random.default_rng(0)
    kinds = [
        {"temperature": 0},
        {"seed": 5},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
        {"seed": 6, "top_k": 9, "top_p": 0.9, "frequency_penalty": 0.7, "logprobs": 0},
        {"seed": 7, "presence_penalty": 1.5, "logit_bias": {3: 4.0, 9: -100.0}, "min_tokens": 8},
    ]
    return [
        (
            rng.integers(0, VOCAB, rng.integers(1, 41)).tolist(),
            SamplingParams(max_tokens=max_tokens, **kinds[i % len(kinds)]),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def expected(model):
    return [reference(model, *request, eos_ids=[46]) for request in mixed_requests(15)]


@pytest.mark.parametrize("squeeze", [{}, {"depth": 1}, {"step_tokens": 16}, {"caching": False}])
def test_any_company_gives_what_a_sequence_gives_alone(model, worker, expected, squeeze):
    rig = Rig(model, worker, eos_ids=[46], **squeeze)
    outputs = rig.run(mixed_requests(15))
    assert {"stop", "length"} == {output.finish for output in outputs}
    for output, alone in zip(outputs, expected, strict=True):
        assert_same(output, alone)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_nothing(model, worker, expected, caching, depth):
    rig = Rig(model, worker, num_pages=17, eos_ids=[46], caching=caching, depth=depth)
    for output, alone in zip(rig.run(mixed_requests(15)), expected, strict=True):
        assert_same(output, alone)
    assert rig.loop.stats().preemptions > 0


def test_a_prompt_with_nan_fails_alone_and_leaves_clean_pages(worker):
    torch.manual_seed(2)
    model = ToyModel().eval()
    model.backbone.tokens.weight.data[13] = torch.nan
    rig = Rig(model, worker, num_pages=14)
    sound = [([1, 2, 3, 4, 5], SamplingParams(max_tokens=12, temperature=0)) for _ in range(3)]
    outputs = rig.run([sound[0], ([1, 13, 3, 4, 5], sound[0][1]), *sound[1:]])
    assert isinstance(outputs[1].error, NonFiniteError)
    assert outputs[1].tokens == []
    alone = reference(model, *sound[0])
    for index in (0, 2, 3):
        assert_same(outputs[index], alone)
    rig.add("last", [13, 1], max_tokens=2)
    rig.drain()
    assert not pool_is_finite(rig)
    rig.run(sound[:1])  # zeroes what the failure left
    assert pool_is_finite(rig)


def pool_is_finite(rig):
    pages = rig.runtime._pages
    return all(tensor.isfinite().all() for tensor in (*pages.keys, *pages.values))


def test_nan_in_the_middle_of_an_output_fails_that_sequence_alone(worker):
    torch.manual_seed(3)
    model = ToyModel().eval()
    request = ([1, 2, 3], SamplingParams(max_tokens=12, temperature=0))
    alone = reference(model, *request)
    poisoned = alone.tokens[4]
    assert poisoned not in [1, 2, 3, *alone.tokens[:4]]
    model.backbone.tokens.weight.data[poisoned] = torch.nan
    other = (
        [poisoned - 1, 2],
        SamplingParams(max_tokens=12, temperature=0, logit_bias={poisoned: -100}),
    )
    outputs = Rig(model, worker).run([request, other])
    assert outputs[0].tokens == alone.tokens[:5]
    assert isinstance(outputs[0].error, NonFiniteError)
    assert (len(outputs[1].tokens), outputs[1].finish) == (12, "length")


def test_when_every_token_is_banned_that_request_fails_alone(model, worker):
    banned = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -100.0), max_tokens=3)
    outputs = Rig(model, worker).run([([1], banned), ([1], SamplingParams(max_tokens=3))])
    assert isinstance(outputs[0].error, RequestError)
    assert outputs[0].error.field == "logit_bias"
    assert outputs[1].finish == "length"


def test_a_step_that_raises_once_costs_nobody_anything(worker):
    torch.manual_seed(4)
    model = ToyModel().eval()
    rig = Rig(model, worker, seqs=3)
    params = SamplingParams(
        max_tokens=6, seed=5, frequency_penalty=1.0, logprobs=1, prompt_logprobs=1
    )
    for index in range(4):
        rig.add(index, [index, 5, 7], params)
    logits, model.logits = model.logits, None  # not callable: the step raises
    rig.loop.advance()
    with suppress(Exception):
        rig.loop._flights[0].lazy.result()
    model.logits = logits
    rig.drain()
    for index in range(4):
        assert_same(rig.outputs[index], reference(model, [index, 5, 7], params))


def test_only_the_sequence_that_breaks_a_step_fails(worker):
    torch.manual_seed(4)
    model = ToyModel().eval()
    rig = Rig(model, worker)
    params = SamplingParams(max_tokens=6, temperature=0, logit_bias={13: -100})

    class Backbone(ToyBackbone):
        def forward(self, batch):
            if (batch.input_ids == 13).any():
                raise RuntimeError("no thirteen")
            return super().forward(batch)

    model.backbone.__class__ = Backbone
    prompts = [[1, 5], [2, 13], [3, 5], [4, 5]]
    outputs = rig.run([(prompt, params) for prompt in prompts])
    assert str(outputs[1].error) == "no thirteen"
    for index in (0, 2, 3):
        assert_same(outputs[index], reference(model, prompts[index], params))
    rig.scheduler.check()


def test_a_step_that_cannot_be_launched_fails_its_sequences(model):
    closed = DeviceWorker()
    closed.close()
    arrivals = []
    rig = Rig(model, closed, on_arrival=lambda: arrivals.append(1))
    rig.add("a", [1, 2])
    assert rig.loop.advance()
    assert arrivals == [1]
    rig.collect()
    assert "closed" in str(rig.outputs["a"].error)
    assert not rig.loop.has_work
    rig.scheduler.check()


def test_a_soak_with_cancels_at_any_moment_leaves_nothing_behind(model, worker):
    rng = np.random.default_rng(1)
    rig = Rig(model, worker, num_pages=17, seqs=4)
    process = psutil.Process()
    memory = []
    for n in range(1200):
        kind = {} if n % 3 else {"frequency_penalty": 1.0, "logprobs": 1, "prompt_logprobs": 1}
        rig.add(n, rng.integers(0, VOCAB, rng.integers(1, 20)).tolist(), max_tokens=6, **kind)
        if rng.random() < 0.8:
            rig.advance()
        if rng.random() < 0.3:
            rig.loop.cancel(int(rng.integers(max(0, n - 5), n + 5)))  # some unknown, some ended
        if rng.random() < 0.9:
            rig.collect()
        rig.scheduler.check()
        if n % 600 == 599:
            rig.drain()
            rig.outputs.clear()
            memory.append(process.memory_info().rss)
    stats = rig.loop.stats()
    assert stats.preemptions > 0
    assert (stats.sequences_running, stats.sequences_waiting, stats.kv_pages_used) == (0, 0, 0)
    slots = rig.runtime._sampler._slots
    assert len(slots._free) == slots._given <= 8
    assert memory[1] - memory[0] < 20 << 20


def test_the_same_prompt_again_is_found_and_reported(model, worker):
    rig = Rig(model, worker)
    prompt = list(range(10, 27))
    rig.add("first", prompt, max_tokens=4, temperature=0)
    rig.drain()
    rig.add("again", prompt, max_tokens=4, temperature=0)
    rig.add("salted", prompt, max_tokens=4, temperature=0, cache_salt="other")
    rig.drain()
    found = {name: output.cached_tokens for name, output in rig.outputs.items()}
    assert found == {"first": 0, "again": 16, "salted": 0}
    assert len({tuple(output.tokens) for output in rig.outputs.values()}) == 1
    assert rig.loop.stats().prefix_hit_tokens == 16


@pytest.mark.parametrize("step_tokens", [16, 512])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_log_probabilities_of_a_prompt(model, worker, step_tokens, length, monkeypatch):
    monkeypatch.setattr("rose.runtime.decode.LOGITS_BYTES", 7 * 4 * VOCAB)  # chunks of 7 rows
    prompt = [(5 * i + 3) % VOCAB for i in range(length)]
    rig = Rig(model, worker, step_tokens=step_tokens)
    rig.add("warm", prompt, max_tokens=1)
    rig.drain()
    rig.add("echo", prompt, max_tokens=3, temperature=0, prompt_logprobs=2)
    rig.add("echo only", prompt, max_tokens=0, prompt_logprobs=2)
    rig.drain()
    with torch.inference_mode():
        logits_TV = model.logits(ragged(model, BACKENDS.load("torch_sdpa")(), prompt))
    logprobs_TV = logits_TV.log_softmax(-1)
    top = logprobs_TV.topk(2)
    wanted = [
        TokenLogprob(
            token, logprobs_TV[i, token].item(), top.indices[i].tolist(), top.values[i].tolist()
        )
        for i, token in enumerate(prompt[1:])
    ]
    for name in ("echo", "echo only"):
        assert_close(rig.outputs[name].prompt_logprobs, wanted)
    assert rig.outputs["warm"].prompt_logprobs is None
    assert (rig.outputs["echo only"].tokens, rig.outputs["echo only"].finish) == ([], "length")
    assert (
        rig.outputs["echo"].tokens
        == reference(model, prompt, SamplingParams(max_tokens=3, temperature=0)).tokens
    )


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_tokens_outside_the_vocabulary_are_refused(model, worker, bad):
    rig = Rig(model, worker)
    with pytest.raises(RequestError, match=f"token {bad}; ids from 0 to {VOCAB - 1}") as caught:
        rig.loop.add("a", np.array([1, bad], np.int32), SamplingParams())
    assert caught.value.field == "prompt"
    assert not rig.loop.has_work


def test_any_row_of_the_embedding_can_be_sampled_and_fed(model, worker):
    last = VOCAB - 1  # beyond the tokenizer, perhaps: the model does not care
    params = SamplingParams(max_tokens=5, temperature=0, logit_bias={last: 99.0})
    (output,) = Rig(model, worker).run([([1], params)])
    assert output.tokens == [last] * 5


def test_a_grammar_needs_a_compiler(model, worker):
    with pytest.raises(RequestError, match="structured output"):
        Rig(model, worker).add("a", [1], grammar="{}")


class AlternatingGrammar:
    """Even tokens at even places, odd ones at odd places, refusing to go on after `last`."""

    def __init__(self, last=99):
        self.last, self.place = last, 0

    def mask(self):
        allowed = np.zeros(64, bool)
        allowed[self.place % 2 : VOCAB : 2] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def advance(self, token):
        assert token % 2 == self.place % 2
        self.place += 1
        if self.place > self.last:
            raise RequestError("too complex", "response_format")


def test_a_grammar_masks_every_token_and_neighbours_do_not_wait(model, worker):
    class Compiler:
        def matcher(self, schema):
            return AlternatingGrammar(last=4 if schema == "short" else 99)

    rig = Rig(model, worker, grammars=Compiler())
    rig.add("long", [1, 2], max_tokens=12, grammar="long", seed=3)
    rig.add("short", [1, 2], max_tokens=12, grammar="short", seed=3)
    rig.add("free", [1, 2], max_tokens=12, temperature=0)
    rig.drain()
    assert [token % 2 for token in rig.outputs["long"].tokens] == [0, 1] * 6
    assert rig.outputs["short"].tokens == rig.outputs["long"].tokens[:4]
    assert rig.outputs["short"].error.field == "response_format"
    assert_same(
        rig.outputs["free"], reference(model, [1, 2], SamplingParams(max_tokens=12, temperature=0))
    )


def test_the_loop_can_be_awaited(model, worker):
    rig = Rig(model, worker)

    async def serve():
        await rig.loop.arrival()  # nothing in flight
        rig.add("a", [1, 2], max_tokens=5, temperature=0)
        while rig.loop.has_work:
            rig.loop.advance()
            await rig.loop.arrival()
            rig.collect()

    asyncio.run(serve())
    assert_same(
        rig.outputs["a"], reference(model, [1, 2], SamplingParams(max_tokens=5, temperature=0))
    )


def test_a_bidirectional_model_cannot_generate(worker):
    model = ToyModel()
    spec = model.backbone.attention_specs[0]
    model.backbone.attention_specs[0] = AttentionSpec(
        0, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, causal=False
    )
    with pytest.raises(ValueError, match="bidirectional"):
        DecodeRuntime(model, BACKENDS.load("torch_sdpa")(), worker, num_pages=4, num_slots=2)


def test_the_size_of_the_pool():
    specs = [AttentionSpec(layer, 8, 2, 64, 1.0, causal=True) for layer in range(3)]
    size = page_bytes(specs, 16, torch.float32)
    assert size == 3 * 2 * 16 * 2 * 64 * 4
    cpu = torch.device("cpu")

    def pages(**options):
        given = {"page_size": 16, "max_num_seqs": 4, "max_model_len": 100} | options
        return choose_num_pages(specs, torch.float32, cpu, **given)

    assert pages() == 1 + 4 * 7  # what all sequences can fill
    assert pages(cache_bytes=10 * size + 5) == 10
    assert 2 <= pages(max_num_seqs=1 << 20, max_model_len=1 << 20) < 1 << 36
    with pytest.raises(ValueError, match=r"kv_cache_memory.*hold 1 pages"):
        pages(cache_bytes=size)


def test_a_containers_limit_counts(tmp_path):
    assert _available_in_cgroup(tmp_path) == float("inf")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _available_in_cgroup(tmp_path) == float("inf")
    (tmp_path / "memory.max").write_text("1000\n")
    assert _available_in_cgroup(tmp_path) == 700
