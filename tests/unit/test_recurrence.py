"""Layers with a state: the gated delta rule and the convolution before it, in any company."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from rose.kernels.recurrence import Mark, RecurrentBatch, States, StateSpec, StoredRows
from rose.runtime.state_pool import allocate_states

CPU = torch.device("cpu")
SPEC = StateSpec(layer=0, conv_channels=10, conv_width=4, num_heads=4, key_dim=6, value_dim=5)
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def tokens(count, seed=0, decay=-0.5):
    """Queries, keys, values, decays and betas of packed tokens; two key heads for four states."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(count, *shape, generator=generator)

    return noise(2, 6), noise(2, 6), noise(4, 5), decay * noise(4).abs(), noise(4).sigmoid()


def alone(inputs, state=None):
    """The rule token by token for one sequence, as transformers computes it: outputs and state."""
    q, k, v, decay, beta = (x.unsqueeze(0) for x in inputs)
    out, state = torch_recurrent_gated_delta_rule(
        q, k, v, decay, beta, state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out[0], state[0]


def split(inputs, lengths):
    return zip(*(x.split(lengths) for x in inputs), strict=True)


def pool(rows):
    """States that are all NaN, so that one that is read by mistake shows."""
    states = allocate_states([SPEC], rows, torch.float32, CPU)
    for tensor in (*states.conv, *states.matrices):
        tensor.fill_(torch.nan)
    return states


@pytest.mark.parametrize("lengths", [[1], [2], [64], [65], [200], [1, 1, 1], [3, 1, 130, 64, 1, 9]])
@pytest.mark.parametrize("decay", [-0.01, -0.5, -30.0])
def test_chunks_and_steps_equal_token_by_token(lengths, decay):
    inputs = tokens(sum(lengths), decay=decay)
    out = RecurrentBatch(tuple(lengths), CPU).apply_delta_rule(*inputs, SPEC)
    for found, own in zip(out.split(lengths), split(inputs, lengths), strict=True):
        torch.testing.assert_close(found, alone(own)[0], **CLOSE)


def test_half_precision_is_computed_exactly_and_rounded_once():
    inputs = [x.bfloat16() for x in tokens(70)]
    batch = RecurrentBatch((70,), CPU)
    exact = batch.apply_delta_rule(*(x.float() for x in inputs), SPEC)
    assert torch.equal(batch.apply_delta_rule(*inputs, SPEC), exact.bfloat16())


@pytest.mark.parametrize("lengths", [[1], [5, 1, 3], [2, 2], [20, 1, 1]])
def test_the_convolution_sees_the_tokens_before_in_its_own_sequence(lengths):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), 10, generator=generator)
    weight = torch.randn(10, 4, generator=generator)
    out = RecurrentBatch(tuple(lengths), CPU).convolve(x, weight, SPEC)
    for found, own in zip(out.split(lengths), x.split(lengths), strict=True):
        padded = F.pad(own.t().unsqueeze(0), (3, 0))
        wanted = F.conv1d(padded, weight.unsqueeze(1), groups=10)[0].t()
        torch.testing.assert_close(found, wanted)


def run_in_parts(inputs, x, weight, lengths, parts):
    """Feed sequences part by part, whoever has tokens left; returns what came for each."""
    states, found = pool(len(lengths)), [([], []) for _ in lengths]
    own = list(zip(split(inputs, lengths), x.split(lengths), strict=True))
    done = [0] * len(lengths)
    for sizes in parts:
        members = [i for i, n in enumerate(lengths) if done[i] < n and sizes[i]]
        if not members:
            continue
        takes = [slice(done[i], min(done[i] + sizes[i], lengths[i])) for i in members]
        counts = tuple(take.stop - take.start for take in takes)
        rows = tuple(i + 1 for i in members)
        stored = StoredRows(states, rows, tuple(take.start == 0 for take in takes))
        batch = RecurrentBatch(counts, CPU, stored)
        pieces = [
            [part[take] for part in (*own[i][0], own[i][1])]
            for i, take in zip(members, takes, strict=True)
        ]
        *packed, packed_x = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        conv = batch.convolve(packed_x, weight, SPEC).split(counts)
        out = batch.apply_delta_rule(*packed, SPEC).split(counts)
        for i, a, b, count in zip(members, conv, out, counts, strict=True):
            found[i][0].append(a)
            found[i][1].append(b)
            done[i] += count
    return states, found, done


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_and_company_change_nothing(data):
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    sizes = st.lists(
        st.sampled_from([0, 1, 1, 2, 3, 7, 64, 70]),
        min_size=len(lengths),
        max_size=len(lengths),
    )
    parts = data.draw(st.lists(sizes, max_size=8))
    parts.append([max(lengths)] * len(lengths))
    generator = torch.Generator().manual_seed(sum(lengths))
    inputs = tokens(sum(lengths), seed=3)
    x = torch.randn(sum(lengths), 10, generator=generator)
    weight = torch.randn(10, 4, generator=generator)
    states, found, done = run_in_parts(inputs, x, weight, lengths, parts)
    assert done == lengths
    whole = RecurrentBatch(tuple(lengths), CPU).convolve(x, weight, SPEC).split(lengths)
    for i, own in enumerate(split(inputs, lengths)):
        out, state = alone(own)
        torch.testing.assert_close(torch.cat(found[i][0]), whole[i])
        torch.testing.assert_close(torch.cat(found[i][1]), out, **CLOSE)
        torch.testing.assert_close(states.matrices[0][i + 1], state, **CLOSE)
        last = F.pad(x.split(lengths)[i], (0, 0, 3, 0))[-3:]
        assert torch.equal(states.conv[0][i + 1], last)
    assert states.matrices[0][0].isnan().all(), "row 0 is for padding"


def test_a_row_is_used_again_whatever_it_held():
    states: States = pool(2)
    inputs, x, weight = tokens(3), torch.ones(3, 10), torch.ones(10, 4)
    batch = RecurrentBatch((2, 1), CPU, StoredRows(states, (2, 1), (True, True)))
    assert batch.convolve(x, weight, SPEC).isfinite().all()
    assert batch.apply_delta_rule(*inputs, SPEC).isfinite().all()
    states.matrices[0][2] = torch.nan  # a sequence that failed
    stored = StoredRows(states, (1, 2), (False, True))
    out = RecurrentBatch((1, 2), CPU, stored).apply_delta_rule(*inputs, SPEC)
    assert out.isfinite().all()


@pytest.mark.parametrize("count", [1, 70])
def test_a_failed_neighbour_is_not_felt(count):
    states, inputs = pool(2), tokens(2 * count)
    batch = RecurrentBatch((count, count), CPU, StoredRows(states, (1, 2), (True, True)))
    batch.apply_delta_rule(*inputs, SPEC)
    kept = states.matrices[0][1].clone()
    states.matrices[0][2] = torch.nan
    stored = StoredRows(states, (1, 2), (False, False))
    out = RecurrentBatch((count, count), CPU, stored).apply_delta_rule(*inputs, SPEC)
    wanted, state = alone([x[:count] for x in inputs], kept.unsqueeze(0))
    torch.testing.assert_close(out[:count], wanted, **CLOSE)
    torch.testing.assert_close(states.matrices[0][1], state, **CLOSE)
    assert out[count:].isnan().all()


def test_cuts_between_chunks_change_no_bit():
    lengths, inputs = (200,), tokens(200)
    whole, cut = pool(1), pool(3)
    marks = ((Mark(64, 2), Mark(128, 3)),)
    outputs = [
        RecurrentBatch(lengths, CPU, stored).apply_delta_rule(*inputs, SPEC)
        for stored in (
            StoredRows(whole, (1,), (True,)),
            StoredRows(cut, (1,), (True,), marks),
        )
    ]
    assert torch.equal(*outputs)
    assert torch.equal(whole.matrices[0][1], cut.matrices[0][1])


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_kept_state_is_that_after_so_many_tokens(data):
    """And whoever goes on from it computes what the sequence itself does."""
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=2))
    cuts = [
        sorted(
            data.draw(st.sets(st.sampled_from([1, 2, 3, n // 2 + 1, n]), max_size=2))
            & {*range(1, n + 1)}
        )
        for n in lengths
    ]
    inputs = tokens(sum(lengths), seed=5)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(sum(lengths), 10, generator=generator)
    weight = torch.randn(10, 4, generator=generator)
    rows = iter(range(len(lengths) + 1, 99))
    marks = tuple(tuple(Mark(cut, next(rows)) for cut in own) for own in cuts)
    states = pool(len(lengths) + sum(map(len, cuts)))
    slots = tuple(range(1, len(lengths) + 1))
    stored = StoredRows(states, slots, (True,) * len(lengths), marks)
    batch = RecurrentBatch(tuple(lengths), CPU, stored)
    conv = batch.convolve(x, weight, SPEC).split(lengths)
    out = batch.apply_delta_rule(*inputs, SPEC).split(lengths)
    for i, own in enumerate(split(inputs, lengths)):
        torch.testing.assert_close(out[i], alone(own)[0], **CLOSE)
        own_x = x.split(lengths)[i]
        for mark in marks[i]:
            head = [part[: mark.offset] for part in own]
            torch.testing.assert_close(states.matrices[0][mark.row], alone(head)[1], **CLOSE)
            last = F.pad(own_x[: mark.offset], (0, 0, 3, 0))[-3:]
            assert torch.equal(states.conv[0][mark.row], last)
        if marks[i] and marks[i][-1].offset < lengths[i]:
            cut, row = marks[i][-1]
            rest = RecurrentBatch((lengths[i] - cut,), CPU, StoredRows(states, (row,), (False,)))
            assert torch.equal(rest.convolve(own_x[cut:], weight, SPEC), conv[i][cut:])
            found = rest.apply_delta_rule(*(part[cut:] for part in own), SPEC)
            torch.testing.assert_close(found, out[i][cut:], atol=1e-6, rtol=1e-5)
    assert states.matrices[0][0].isnan().all(), "row 0 is for padding"
