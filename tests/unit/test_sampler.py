"""The sampler against plain references: semantics of each step, distribution, independence."""

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from rose.kernels.sampling import Cut, Knobs, _hashes, _noise, _weights, cutoff, draw
from rose.runtime.options import SamplingParams
from rose.runtime.sampler import Sampler, token_logprobs, unpack_bits
from rose.runtime.sampling_plan import RowStatus, SamplingState, row_keys, seed_key, unpack

V = 64
EOS = 2
ODD_FLOATS = [0.0, -1.0, 5e-324, 1e-300, 1e-9, 1e-5, 1e6, 1e300, float("inf"), float("nan")]


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine threads wait for each other longer than they work on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def state(params: SamplingParams, vocab_size: int = V, **facts) -> SamplingState:
    return SamplingState(params, vocab_size=vocab_size, eos_ids=(EOS,), **facts)


def sample(logits, params, *, index=0, masks=None, sampler=None, states=None):
    """Sample one step; `params` and `index` hold for all rows or come one per row."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    rows, width = logits.shape
    params = params if isinstance(params, list) else [params] * rows
    states = states or [state(p, width) for p in params]
    indices = index if isinstance(index, list) else [index] * rows
    sampler = sampler or Sampler(width)
    tokens = sampler.sample(logits, sampler.plan(states, indices, masks))
    return unpack(tokens.packed.numpy(), states)


def ids(rows) -> list[int]:
    assert all(row.status == RowStatus.OK for row in rows)
    return [row.token_id for row in rows]


def random_logits(rows: int, width: int = V, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def draws(logits_V: torch.Tensor, params: SamplingParams, count: int) -> np.ndarray:
    """How often each token comes in `count` draws with different seeds."""
    width = len(logits_V)
    kept = [state(params, width) for _ in range(count)]
    for seed, one in enumerate(kept):
        one.key = seed_key(seed)
    rows = sample(logits_V.expand(count, width), [params] * count, states=kept)
    return np.bincount(ids(rows), minlength=width)


def expected(logits_V, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """A reference in float64 by full sort."""
    x = np.asarray(logits_V, np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(len(p), bool)
    keep[order[: top_k or None]] = True
    p = np.where(keep, p, 0) / p[keep].sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


# Greedy


def test_temperature_zero_takes_the_most_likely_and_the_first_of_equals():
    logits = random_logits(5)
    logits[3] = 0.0
    assert ids(sample(logits, SamplingParams(temperature=0))) == logits.argmax(-1).tolist()
    assert ids(sample(logits[3:4], SamplingParams(temperature=0))) == [0]


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-300, 1e-9, 1e-5, -1.0, float("nan")])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = random_logits(40, scale=100)
    params = SamplingParams(temperature=temperature, seed=3)
    assert ids(sample(logits, params)) == logits.argmax(-1).tolist()


def test_top_k_one_is_greedy():
    logits = random_logits(40, scale=0.1)
    params = SamplingParams(temperature=5.0, top_k=1, seed=1)
    assert ids(sample(logits, params)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e6, 1e300, float("inf")])
def test_a_huge_temperature_is_uniform(temperature):
    counts = draws(random_logits(1, 20)[0], SamplingParams(temperature=temperature), 4000)
    assert stats.chisquare(counts).pvalue > 1e-4


# The distribution


@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
    ],
)
def test_tokens_come_as_often_as_they_should(cuts):
    logits = random_logits(1, 40, seed=7, scale=1.5)[0]
    counts = draws(logits, SamplingParams(**cuts), 10000)
    wanted = expected(logits, **cuts)
    assert not counts[wanted == 0].any()
    often = wanted * counts.sum() >= 5
    observed = np.append(counts[often], counts[~often].sum())
    target = np.append(wanted[often], wanted[~often].sum()) * counts.sum()
    nonempty = target > 0
    assert stats.chisquare(observed[nonempty], target[nonempty]).pvalue > 1e-4


def noise_of(steps: int, seeds: int, width: int) -> np.ndarray:
    """The uniform numbers behind the noise: [seeds, steps, width]."""
    keys = np.array([seed_key(seed) for seed in range(seeds)], np.uint64)
    rows = [row_keys(keys, np.full(seeds, step)) for step in range(steps)]
    halves = torch.from_numpy(np.stack(rows, 2).reshape(2, -1, 1)).double()
    knobs = knobs_of(1, [1.0] * seeds * steps)._replace(key_low=halves[0], key_high=halves[1])
    logarithms = _noise(_hashes(width, torch.device("cpu")), knobs)
    return -np.expm1(logarithms.double().numpy()).reshape(seeds, steps, width)


def test_noise_is_uniform_and_independent():
    table = noise_of(steps=30, seeds=30, width=300)
    assert table.min() > 0
    assert table.max() < 1
    assert stats.kstest(table.ravel(), "uniform").pvalue > 1e-4
    low = np.sort(table.ravel())[:1000]  # it decides which of the unlikely tokens win
    assert stats.kstest(low / low[-1], "uniform").pvalue > 1e-4
    for axis in range(3):
        for gap in (1, 2, 7):
            first, second = np.split(table, [gap], axis)[1], np.split(table, [-gap], axis)[0]
            assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.01


def test_tokens_stay_the_same_where_logits_differ_by_rounding():
    """As the same sequence's logits do in batches of different shapes."""
    count, width = 400, 20000
    logits = random_logits(count, width, scale=2.0)
    wobble = torch.randn(count, width, generator=torch.Generator().manual_seed(1)) * 2e-5
    for params in [SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.95, top_k=400)]:
        index = list(range(count))
        one, other = (ids(sample(x, params, index=index)) for x in (logits, logits + wobble))
        assert np.sum(np.array(one) != np.array(other)) <= 1


def test_every_probability_can_win_the_race():
    """Also the least and the only one, whatever the noise."""
    logits = torch.full((3000, 5), -torch.inf)
    logits[:, 3] = 0.0
    assert ids(sample(logits, SamplingParams(seed=1), index=list(range(3000)))) == [3] * 3000


def cutoff_by_sorting(weights_V: np.ndarray, top_k: int, top_p: float) -> float:
    largest = np.sort(weights_V)[::-1]
    kth = largest[top_k - 1]
    goal = top_p * weights_V[weights_V >= kth].sum()
    return max(kth, largest[max(1, (np.cumsum(largest) - largest < goal).sum()) - 1])


def knobs_of(top_k: int, tops: list[float], temperature: float = 1.0) -> Knobs:
    rows = [(row * 7919, 0.0, temperature, top_k, top_p, 0.0) for row, top_p in enumerate(tops)]
    return Knobs(*torch.tensor(rows, dtype=torch.float64).T[:, :, None])


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("top_k", [3, 512, 600, 9000, 12000])
def test_every_way_to_the_cutoff_finds_the_one_by_sorting(scale, top_k):
    """Few candidates, or all of them; alone and beside rows that take another way."""
    tops = [1e-300, 1e-9, 0.3, 0.9, 0.999, 1.0]
    logits = random_logits(1, 12000, scale=scale).bfloat16().float().expand(len(tops), -1)
    weights, knobs = _weights(logits.softmax(-1)), knobs_of(top_k, tops)
    together = cutoff(weights, knobs, Cut.ANY)
    for row, top_p in enumerate(tops):
        wanted = cutoff_by_sorting(weights[row].numpy(), top_k, top_p)
        alone = cutoff(weights[row : row + 1], knobs.at(torch.tensor([row])), Cut.ANY)
        assert float(alone) == float(together[row]) == wanted
        if top_k <= 512:
            assert float(cutoff(weights[:1], knobs.at(torch.tensor([row])), Cut.FEW)) == wanted


@pytest.mark.parametrize("top_p", [0.5, 1.0])
@pytest.mark.parametrize("levels", [3, 2000])
def test_a_small_top_k_draws_the_same_among_few_and_among_all(levels, top_p):
    """Also where more tokens are equally likely than the few that are looked at."""
    count, width = 500, 6000
    logits = (random_logits(1, width) * levels).round() / levels
    knobs = knobs_of(20, [top_p] * count)
    few = draw(logits.expand(count, -1), knobs, Cut.FEW)
    every = draw(logits.expand(count, -1), knobs, Cut.ANY)
    assert (few == every).float().mean() > 0.99  # the sums of their softmax differ by rounding
    kth = logits[0].topk(20).values[-1]
    assert (logits[0][few] >= kth).all()


def test_tokens_as_likely_as_the_last_one_kept_stay_too():
    logits = torch.zeros(10)
    logits[5:] = 1.0
    counts = draws(logits, SamplingParams(top_k=2), 500)
    assert (counts[5:] > 50).all()
    assert not counts[:5].any()


def test_min_p_one_keeps_the_most_likely():
    logits = random_logits(30, scale=0.5)
    assert ids(sample(logits, SamplingParams(min_p=1.0, seed=1))) == logits.argmax(-1).tolist()


# Seeds


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_a_seed_repeats_its_tokens(seed):
    logits = random_logits(50)
    params = SamplingParams(seed=seed)
    tokens = [ids(sample(logits, params, index=list(range(50)))) for _ in range(2)]
    assert tokens[0] == tokens[1]


def test_seeds_differ_and_none_is_fresh():
    logits = torch.zeros(1, 10000)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**62, None, None, None]
    tokens = [sample(logits, SamplingParams(seed=seed))[0].token_id for seed in seeds]
    assert len(set(tokens)) == len(seeds)


def test_each_output_token_has_a_random_number_of_its_own():
    logits = torch.zeros(20, 10000)
    tokens = ids(sample(logits, SamplingParams(seed=5), index=list(range(20))))
    assert len(set(tokens)) == 20


# Independence of neighbours

MIXED = [
    {"temperature": 0},
    {},
    {"top_k": 5},
    {"top_k": 700},
    {"top_p": 0.9},
    {"top_p": 0.5, "top_k": 40},
    {"min_p": 0.2},
    {"temperature": 2.0, "top_p": 0.999},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {3: 4.0, 7: -100.0}, "min_tokens": 5},
    {"temperature": 1e300},
]


@pytest.mark.parametrize(("width", "dtype"), [(50, torch.float32), (9999, torch.bfloat16)])
def test_a_row_does_not_depend_on_its_neighbours(width, dtype):
    """Alone, in a batch, in a shuffled batch and between failing rows: the same tokens."""
    torch.set_num_threads(2)  # threads share out a batch by its size
    rng = np.random.default_rng(0)
    params = [SamplingParams(seed=s, **p) for s, p in enumerate(MIXED)]
    steps = 3
    logits = random_logits(len(params) * steps, width).to(dtype).view(steps, len(params), width)

    def run(rows: list[int], broken: bool = False) -> dict[int, list[int]]:
        sampler = Sampler(width)
        kept = {row: state(params[row], width, prompt_ids=[1, 2, 3]) for row in rows}
        out = {row: [] for row in rows}
        for step in range(steps):
            batch = logits[step, rows].float()
            states = [kept[row] for row in rows]
            if broken:
                bad = torch.full((1, width), torch.nan)
                batch, states = torch.cat([bad, batch]), [state(params[1], width), *states]
            got = sample(
                batch.to(dtype),
                [s.params for s in states],
                index=step,
                sampler=sampler,
                states=states,
            )
            for row, token in zip(rows, got[broken:], strict=True):
                out[row].append(token.token_id)
        return out

    everyone = run(list(range(len(params))))
    assert run(rng.permutation(len(params)).tolist()) == everyone
    assert run(list(range(len(params))), broken=True) == everyone
    for row in range(len(params)):
        assert run([row])[row] == everyone[row]


# Penalties, biases, bans


def penalised(logits_V, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    x = np.asarray(logits_V, np.float32).copy()
    for token in set(prompt) | set(output):
        x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        x[token] += bias
    return x


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(temperature=0, presence_penalty=1.5),
        SamplingParams(temperature=0, frequency_penalty=1.5),
        SamplingParams(temperature=0, presence_penalty=-2.0, frequency_penalty=-0.1),
        SamplingParams(
            temperature=0,
            repetition_penalty=0.8,
            presence_penalty=1.5,
            frequency_penalty=0.7,
            logit_bias={1: 2.0, 5: -3.0},
        ),
    ],
)
def test_penalties_match_a_reference(params):
    sampler, prompt, output = Sampler(12), [1, 1, 4], []
    one = state(params, 12, prompt_ids=prompt, output_ids=output)
    other = state(SamplingParams(temperature=0), 12)
    for index in range(30):
        logits = random_logits(2, 12, seed=index % 3, scale=2)
        got = sample(
            logits, [params, other.params], index=index, sampler=sampler, states=[one, other]
        )
        assert got[0].token_id == penalised(logits[0], params, prompt, output).argmax()
        assert got[1].token_id == logits[1].argmax()
        output.append(got[0].token_id)


def test_counts_do_not_need_the_tokens_on_the_host():
    """Steps are planned ahead; the token that penalises the next step is on the device only."""
    params = SamplingParams(temperature=0, frequency_penalty=100.0)
    sampler, one = Sampler(V), state(params, prompt_ids=[1])
    logits = random_logits(1)
    plans = [sampler.plan([one], [index]) for index in range(4)]
    tokens = [int(sampler.sample(logits, plan).token_ids) for plan in plans]
    assert tokens == logits[0].topk(4).indices.tolist()


def test_counts_are_rebuilt_after_a_token_was_dropped():
    params = SamplingParams(temperature=0, frequency_penalty=100.0)
    sampler, output = Sampler(V), []
    one, logits = state(params, output_ids=output), random_logits(1)
    best = logits[0].topk(3).indices.tolist()

    def step(index: int) -> int:
        return int(sampler.sample(logits, sampler.plan([one], [index])).token_ids)

    assert step(0) == best[0]
    output.append(best[0])
    assert step(1) == best[1]  # dropped: the sequence was preempted while it was on its way
    assert step(1) == best[1]
    output.append(best[1])
    assert step(2) == best[2]


def test_a_released_row_of_counts_starts_anew():
    params = SamplingParams(temperature=0, frequency_penalty=100.0)
    sampler, logits = Sampler(V), random_logits(1)
    for _ in range(3):
        one = state(params)
        assert sample(logits, params, sampler=sampler, states=[one])[0].token_id == logits.argmax()
        assert one.slot == 0
        sampler.release(one)
        sampler.release(one)


def test_repetition_penalty_equals_transformers():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = [5, 9, 9, 9, 7]
    oracle = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        repetition_penalty=1.3,
        do_sample=False,
        max_new_tokens=30,
        min_new_tokens=30,
        pad_token_id=0,
        eos_token_id=None,
    )[0].tolist()[len(prompt) :]
    params = SamplingParams(temperature=0, repetition_penalty=1.3)
    sampler, output = Sampler(V), []
    one = state(params, prompt_ids=prompt, output_ids=output)
    for index in range(30):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[:, -1]
        got = sample(logits, params, index=index, sampler=sampler, states=[one])
        output.append(got[0].token_id)
    assert output == oracle


def test_min_tokens_bans_every_end_token_until_then():
    logits = random_logits(1)
    logits[0, EOS], logits[0, 9] = 100.0, 99.0
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(9, V + 5, -1))
    tokens = [sample(logits, params, index=index)[0].token_id for index in range(4)]
    assert not {EOS, 9} & set(tokens[:3])
    assert tokens[3] == EOS


def test_end_tokens_of_a_sequence():
    assert state(SamplingParams(stop_token_ids=(9,))).end_ids == {EOS, 9}
    assert state(SamplingParams(stop_token_ids=(9,), ignore_eos=True)).end_ids == {9}
    assert state(SamplingParams(grammar="{}", ignore_eos=True)).end_ids == {EOS}
    assert state(SamplingParams(grammar="{}")).needs_last_token


@pytest.mark.parametrize("bias", [-100.0, -1e30, float("-inf")])
def test_a_bias_of_minus_100_or_less_bans(bias):
    logits = random_logits(1, scale=1000)
    best, second = logits[0].topk(2).indices.tolist()
    params = SamplingParams(temperature=0, logit_bias={best: bias, V + 3: 5.0, -1: 5.0})
    assert sample(logits, params)[0].token_id == second


def test_a_bias_of_100_forces():
    assert sample(random_logits(1), SamplingParams(seed=1, logit_bias={7: 100.0}))[0].token_id == 7


def test_a_mask_leaves_only_what_it_allows():
    mask = np.zeros(2, np.int32)
    mask[1] = (1 << 3) | -(1 << 31)
    rows = sample(random_logits(3), SamplingParams(seed=1), masks={1: mask}, index=[0, 0, 0])
    assert rows[1].token_id in (35, 63)
    free = sample(random_logits(3), SamplingParams(seed=1))
    assert [rows[0], rows[2]] == [free[0], free[2]]
    assert unpack_bits(torch.from_numpy(mask[None]), 40).sum() == 1


# Rows that fail


def test_a_failing_row_harms_no_other():
    logits = random_logits(6)
    logits[1, 5] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    logits[4] = torch.nan
    params = [SamplingParams(temperature=0), *[SamplingParams(seed=1, top_p=0.5, logprobs=2)] * 5]
    rows = sample(logits, params)
    assert [row.status.name for row in rows] == [
        "OK",
        "NON_FINITE",
        "ALL_BANNED",
        "NON_FINITE",
        "NON_FINITE",
        "OK",
    ]
    assert all(0 <= row.token_id < V for row in rows)
    assert rows[5] == sample(logits[5:], params[5])[0]


def test_a_mask_does_not_hide_what_the_model_computed():
    logits = random_logits(1)
    logits[0, 5] = torch.nan
    mask = np.array([1 << 7, 0], np.int32)
    row = sample(logits, SamplingParams(temperature=0), masks={0: mask})[0]
    assert row.status == RowStatus.NON_FINITE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_everything_fails_the_row(temperature):
    params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(V), -100.0))
    rows = sample(random_logits(2), [params, SamplingParams(temperature=0)])
    assert [row.status for row in rows] == [RowStatus.ALL_BANNED, RowStatus.OK]


@pytest.mark.parametrize("value", ODD_FLOATS)
def test_no_value_of_a_parameter_raises(value):
    names = [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ]
    params = [SamplingParams(seed=1, **{name: value}) for name in names]
    params += [SamplingParams(seed=2**200, logit_bias={1: value}, top_k=10**30, top_p=0.9)]
    params += [SamplingParams(temperature=value, top_p=value, min_p=value, top_k=-5)]
    sampler, kept = Sampler(V), [state(p, prompt_ids=[1, 2], output_ids=[]) for p in params]
    control = state(SamplingParams(temperature=0))
    logits = random_logits(len(params) + 1)
    for index in range(3):
        rows = sample(logits, [], index=index, sampler=sampler, states=[*kept, control])
        assert all(0 <= row.token_id < V for row in rows)
        assert rows[-1].token_id == logits[-1].argmax()


# Log-probabilities


def test_logprobs_are_the_models_own():
    """Neither temperature nor penalties nor bans change them."""
    logits = random_logits(3)
    reference = logits.log_softmax(-1)
    bans = {int(logits[1].argmax()): -100.0}
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.3, seed=1, logprobs=5, logit_bias=bans),
        SamplingParams(temperature=0, logprobs=0, repetition_penalty=1.5),
    ]
    rows = sample(logits, params)
    assert rows[0].logprob is None
    assert rows[1].logprob == pytest.approx(float(reference[1, rows[1].token_id]), abs=1e-5)
    assert rows[1].top_ids == logits[1].topk(5).indices.tolist()
    assert rows[1].top_logprobs == pytest.approx(reference[1].topk(5).values.tolist(), abs=1e-5)
    assert rows[2].logprob == pytest.approx(float(reference[2].max()), abs=1e-5)
    assert rows[2].top_ids == []


def test_more_logprobs_than_tokens():
    row = sample(random_logits(1, 8), SamplingParams(temperature=0, logprobs=20))[0]
    assert sorted(row.top_ids) == list(range(8))
    assert len(row.top_logprobs) == 8


@pytest.mark.parametrize("top_n", [0, 3])
def test_logprobs_of_given_tokens(top_n):
    logits, next_ids = random_logits(7), torch.arange(7)
    reference = logits.log_softmax(-1)
    chosen, top_ids, top = token_logprobs(logits, next_ids, top_n)
    torch.testing.assert_close(chosen[:, 0], reference.diagonal())
    torch.testing.assert_close(top, reference.topk(top_n).values)
    torch.testing.assert_close(top_ids, reference.topk(top_n).indices)


def test_the_logits_are_left_as_they_are():
    logits = random_logits(4)
    before = logits.clone()
    sample(logits, SamplingParams(seed=1, top_p=0.9, logit_bias={1: 5.0}, frequency_penalty=1.0))
    assert torch.equal(logits, before)
