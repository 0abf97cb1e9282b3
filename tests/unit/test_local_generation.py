"""`Engine.generate`, `generate_each` and `stream`: a language model in this process."""

import os
import signal
import threading
from contextlib import closing
from itertools import islice, repeat

import pytest
import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rose import Completion, Engine, SamplingParams
from rose.runtime.errors import NonFiniteError, RequestError, RuntimeClosedError
from rose.runtime.generation import GenerationLoop
from rose.runtime.sampler import Sampler
from rose.serving.gateway.templates import TemplateError
from rose.serving.interrupts import interrupts_held
from tests.tiny import copy, edit_json, edit_tensors, save_bert, save_decoder
from tests.unit.gguf_files import bpe

PROMPTS = ["Hello", "the sea", "a", "7 kites over the red hill, 8 over the sea."]
ENDS_BY_ITSELF = "x"
GREEDY = SamplingParams(temperature=0, max_tokens=24)
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}.{% endfor %}{% if add_generation_prompt %}A {% endif %}"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = save_decoder(tmp_path_factory.mktemp("models") / "llama", "llama", seed=7)
    edit_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return path


@pytest.fixture(scope="module")
def engine(path):
    with Engine(path, max_num_seqs=4, max_model_len=128) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    """Every page is free again after each test, and every sequence is forgotten."""
    yield
    if "engine" in request.fixturenames:
        scheduler = request.getfixturevalue("engine")._served.generation.scheduler
        scheduler.check()
        assert not scheduler.has_work
        assert scheduler.pool.used == 0


@pytest.fixture(scope="module")
def tokenizer(path):
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def references(path, tokenizer):
    """What transformers continues prompts with: token ids, greedily."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt in [*PROMPTS, ENDS_BY_ITSELF]:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24)
        found.append(out[0, ids.shape[1] :].tolist())
    return found


# What comes out


def test_greedy_text_is_that_of_transformers(engine, tokenizer, references):
    found = engine.generate([*PROMPTS, ENDS_BY_ITSELF], GREEDY)
    for done, expected in zip(found, references, strict=True):
        assert done.token_ids == expected
        assert done.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert [done.finish_reason for done in found] == [*(["length"] * 4), "stop"]


def test_prompts_may_be_texts_or_token_ids_or_one_alone(engine, tokenizer):
    (alone,) = engine.generate(PROMPTS[0], GREEDY)
    ids = tokenizer(PROMPTS[0]).input_ids
    (same,) = engine.generate(ids, GREEDY)
    mixed = engine.generate([PROMPTS[1], ids], GREEDY)
    assert alone.text == same.text == mixed[1].text
    assert alone.prompt_tokens == len(ids)
    assert engine.generate([], GREEDY) == []


def test_a_stream_is_the_same_text_in_pieces(engine):
    for prompt in PROMPTS:
        (whole,) = engine.generate(prompt, GREEDY)
        pieces = list(engine.stream(prompt, GREEDY))
        assert "".join(pieces) == whole.text
        assert "" not in pieces
        assert len(pieces) > 10


def end_of(tokenizer, token_ids, stop):
    """Number of tokens, and the text, up to the first place where `stop` is complete."""
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count], skip_special_tokens=True)
        if stop in text:
            return count, text[: text.index(stop)]
    raise AssertionError(f"{stop!r} is not in the text")


def test_a_stop_string_at_every_offset_ends_the_text_before_it(engine, tokenizer):
    (whole,) = engine.generate(PROMPTS[3], GREEDY)
    for length, step in ((1, 1), (4, 3)):
        for start in range(0, len(whole.text) - length + 1, step):
            stop = whole.text[start : start + length]
            count, text = end_of(tokenizer, whole.token_ids, stop)
            (done,) = engine.generate(PROMPTS[3], GREEDY, stop=[stop])
            assert (done.text, done.finish_reason) == (text, "stop")
            assert done.token_ids == whole.token_ids[:count]
            assert "".join(engine.stream(PROMPTS[3], GREEDY, stop=[stop])) == text


def test_a_stop_string_that_is_not_completed_is_text(engine):
    (whole,) = engine.generate(PROMPTS[0], GREEDY)
    for stop in (whole.text[-3:] + "~", whole.text + "~", "~"):
        (done,) = engine.generate(PROMPTS[0], GREEDY, stop=[stop])
        assert (done.text, done.finish_reason) == (whole.text, "length")
        assert "".join(engine.stream(PROMPTS[0], GREEDY, stop=[stop])) == whole.text


def test_one_stop_string_need_not_be_in_a_list(engine):
    (whole,) = engine.generate(PROMPTS[0], GREEDY)
    stop = whole.text[5:8]
    assert engine.generate(PROMPTS[0], GREEDY, stop=stop) == engine.generate(
        PROMPTS[0], GREEDY, stop=[stop]
    )


def test_min_tokens_keep_stop_strings_and_end_tokens_waiting(engine):
    (whole,) = engine.generate(PROMPTS[0], GREEDY)
    late = SamplingParams(temperature=0, max_tokens=24, min_tokens=10)
    (done,) = engine.generate(PROMPTS[0], late, stop=sorted(set(whole.text)))
    assert len(done.token_ids) == 10
    assert done.text == whole.text[: len(done.text)]
    assert len(done.text) >= 7


def test_the_token_that_ends_an_output_is_counted_and_has_no_text(engine, tokenizer):
    (whole,) = engine.generate(PROMPTS[0], GREEDY)
    end = whole.token_ids[6]
    first = whole.token_ids.index(end)
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(end,))
    (done,) = engine.generate(PROMPTS[0], params)
    assert done.token_ids == whole.token_ids[: first + 1]
    assert done.text == tokenizer.decode(whole.token_ids[:first], skip_special_tokens=True)
    assert done.finish_reason == "stop"


def test_log_probabilities_and_cached_tokens_come_along(engine):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    (done,) = engine.generate(PROMPTS[3], params)
    assert [entry.token_id for entry in done.logprobs] == done.token_ids
    assert len(done.prompt_logprobs) == done.prompt_tokens - 1
    assert engine.generate(PROMPTS[3], GREEDY)[0].logprobs is None
    assert engine.generate(PROMPTS[3], GREEDY)[0].cached_tokens == 32


def test_nothing_is_generated_when_asked_for_nothing(engine):
    (done,) = engine.generate(PROMPTS[0], SamplingParams(max_tokens=0))
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], "length")


def test_progress_counts_prompts(engine):
    seen = []
    params = SamplingParams(temperature=0, max_tokens=2)
    engine.generate(PROMPTS, params, progress=lambda *counts: seen.append(counts))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_a_seed_gives_the_same_text_in_any_company(engine, temperature):
    params = [SamplingParams(temperature=temperature, max_tokens=12, seed=s) for s in range(9)]
    pairs = list(zip(islice(cycle_of(PROMPTS), 9), params, strict=True))
    together = dict(engine.generate_each(pairs))
    backwards = dict(engine.generate_each(pairs[::-1]))
    for index, (prompt, own) in enumerate(pairs):
        (alone,) = engine.generate(prompt, own)
        assert alone.text == together[index].text == backwards[8 - index].text
    texts = {together[i].text for i in (0, 4, 8)}  # one prompt, three seeds
    assert len(texts) == 3


def cycle_of(items):
    while True:
        yield from items


def test_output_can_be_held_to_a_schema(tmp_path):
    pytest.importorskip("llguidance")
    path = save_decoder(tmp_path / "llm", "llama", vocab_size=320, eos_token_id=2)
    backend = bpe(pre_tokenizers.ByteLevel(False))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    schema = '{"type": "integer", "minimum": 10, "maximum": 999}'
    with Engine(path, max_num_seqs=4, max_model_len=64) as engine:
        params = engine.sampling_params(temperature=2.0, max_tokens=20, grammar=schema)
        prompts = ["a", "over", "the sea"] * 3
        for done in engine.generate(prompts, params):
            assert 10 <= int(done.text) <= 999
            assert done.finish_reason == "stop"


# Many prompts


def test_thousands_of_prompts_are_taken_as_there_is_room(path):
    taken, most, found = [], 0, {}

    def prompts():
        for number in range(2000):
            taken.append(number)
            yield [3 + number % 60, 5], SamplingParams(temperature=0, max_tokens=1 + number % 3)

    with Engine(path, max_num_seqs=64, max_model_len=32) as engine:
        for index, outcome in engine.generate_each(prompts()):
            found[index] = outcome
            most = max(most, len(taken) - len(found))
        for index in (0, 1234, 1999):
            params = SamplingParams(temperature=0, max_tokens=1 + index % 3)
            assert engine.generate([3 + index % 60, 5], params)[0].text == found[index].text
    assert sorted(found) == list(range(2000))
    assert 64 < most <= 128


def test_prompts_that_end_sooner_come_sooner(engine):
    lengths = [30, 3, 1, 2]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    order = [index for index, _ in engine.generate_each(zip(PROMPTS, params, strict=True))]
    assert order == [2, 3, 1, 0]


def test_new_tokens_are_counted_step_by_step(engine):
    counts = []
    done = list(engine.generate_each(zip(PROMPTS, repeat(GREEDY)), on_tokens=counts.append))
    assert sum(counts) == sum(len(outcome.token_ids) for _, outcome in done)
    assert max(counts) <= 8  # two steps of four sequences may arrive at a time


# What is wrong


BAD = {
    "empty": ([], "the prompt has no tokens"),
    "no text": ("", "the prompt has no tokens"),
    "too long": ([5] * 128, "more than the model's 128"),
    "unknown id": ([5, 70], "token ids go from 0 to 69"),
    "no ids": ([0.5], "neither text nor token ids"),
}


def test_a_bad_prompt_among_good_ones_is_its_own_outcome(engine):
    prompts = [p for bad, _ in BAD.values() for p in (PROMPTS[0], bad)]
    found = dict(engine.generate_each(zip(prompts, repeat(GREEDY))))
    expected = engine.generate(PROMPTS[0], GREEDY)[0].text
    for index, (_, message) in enumerate(BAD.values()):
        assert found[2 * index].text == expected
        assert isinstance(found[2 * index + 1], RequestError)
        assert message in str(found[2 * index + 1])


@pytest.mark.parametrize("kind", BAD)
def test_generate_names_the_bad_prompt(engine, kind):
    bad, message = BAD[kind]
    with pytest.raises(RequestError, match=message) as caught:
        engine.generate([PROMPTS[0], PROMPTS[1], bad, PROMPTS[2]], GREEDY)
    assert str(caught.value).startswith("prompts[2]: ")
    assert caught.value.field == "prompts[2]"


def test_good_prompts_after_many_bad_ones_are_not_forgotten(engine):
    prompts = [*([[]] * 200), PROMPTS[0]]
    found = dict(engine.generate_each(zip(prompts, repeat(GREEDY))))
    assert len(found) == 201
    assert isinstance(found[200], Completion)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; above 0"),
        ({"top_p": 1.5}, "top_p is 1.5; at most 1"),
        ({"min_p": 2.0}, "min_p is 2.0; at most 1"),
        ({"top_k": -2}, "top_k is -2; at least -1"),
        ({"max_tokens": -1}, "max_tokens is -1; at least 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; above 0"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3.0; at most 2"),
    ],
)
def test_parameters_out_of_range_are_named(engine, values, message):
    (name,) = values
    for attempt in (
        lambda: engine.generate("a", SamplingParams(**values)),
        lambda: list(engine.stream("a", SamplingParams(**values))),
        lambda: engine.sampling_params(**values),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            attempt()
        assert caught.value.field == name


def test_a_schema_that_cannot_be_used_is_said_before_the_first_prompt(engine):
    pytest.importorskip("llguidance")
    with pytest.raises(RequestError, match="schema") as caught:
        engine.sampling_params(grammar="{")
    assert caught.value.field == "response_format"


def test_the_checkpoint_s_defaults_hold_where_nothing_is_said(tmp_path):
    path = save_decoder(tmp_path / "llm", "llama")
    edit_json(path / "generation_config.json", temperature=0.3, top_k=7)
    with Engine(path, max_num_seqs=2) as engine:
        params = engine.sampling_params(top_k=None, max_tokens=9)
        assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 7, 9)
        assert engine.sampling_params(temperature=0.0).temperature == 0


def test_the_checkpoint_s_bans_equal_those_of_transformers(path, tokenizer, references, tmp_path):
    banned = references[0][:2]
    path = copy(path, tmp_path / "llm")
    values = {"suppress_tokens": banned, "bad_words_ids": [[references[0][3]]]}
    edit_json(path / "generation_config.json", **values)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer(PROMPTS[0]).input_ids])
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
    with Engine(path, max_num_seqs=2, max_model_len=128) as engine:
        params = engine.sampling_params(temperature=0.0, max_tokens=12)
        (found,) = engine.generate([PROMPTS[0]], params)
        assert engine.sampling_params(logit_bias={5: 1.0}).logit_bias.keys() > {5, *banned}
    assert found.token_ids == expected[0, ids.shape[1] :].tolist()
    assert not {*banned} & {*found.token_ids}


def test_an_embedder_cannot_generate(tmp_path):
    with Engine(save_bert(tmp_path / "bert"), max_batch_tokens=64) as engine:
        with pytest.raises(RequestError, match="cannot generate"):
            engine.generate("a")
        with pytest.raises(RequestError, match="cannot generate"):
            engine.generate_each([])


def test_a_prompt_whose_logits_are_no_numbers_fails_alone(tmp_path):
    path = save_decoder(tmp_path / "llm", "llama")

    def spoil(tensors):
        tensors["model.embed_tokens.weight"][9] = torch.nan
        return tensors

    edit_tensors(path, spoil)
    good = SamplingParams(temperature=0, max_tokens=8, logit_bias={9: -100})
    prompts = [[5, 6], [7, 9], [8, 8]]
    with Engine(path, max_num_seqs=4) as engine:
        found = dict(engine.generate_each(zip(prompts, repeat(good))))
        assert isinstance(found[1], NonFiniteError)
        for index in (0, 2):
            (alone,) = engine.generate(prompts[index], good)
            assert found[index].token_ids == alone.token_ids
        with pytest.raises(NonFiniteError, match=r"prompts\[1\]"):
            engine.generate(prompts, good)


def test_a_step_that_fails_ends_what_took_part_and_no_more(engine, monkeypatch):
    expected = engine.generate(PROMPTS[:2], GREEDY)

    def fail(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate(PROMPTS[:2], GREEDY)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(engine.stream(PROMPTS[0], GREEDY))
    again = engine.generate(PROMPTS[:2], GREEDY)
    assert [done.text for done in again] == [done.text for done in expected]


def test_a_closed_engine_says_so(path):
    engine = Engine(path, max_num_seqs=2)
    stream = engine.stream("a", GREEDY)
    next(stream)
    engine.close()
    with pytest.raises(RuntimeClosedError):
        list(stream)
    with pytest.raises(RuntimeClosedError):
        engine.generate("a", GREEDY)


# Leaving off


def test_streams_and_runs_side_by_side_do_not_mix(engine):
    expected = [engine.generate(prompt, GREEDY)[0].text for prompt in PROMPTS]
    one, two = engine.stream(PROMPTS[0], GREEDY), engine.stream(PROMPTS[1], GREEDY)
    texts = [next(one), next(two)]
    runs = engine.generate_each(zip(PROMPTS[2:], repeat(GREEDY)))
    found = dict([next(runs)])
    texts[1] += "".join(two)
    found |= dict(runs)
    texts[0] += "".join(one)
    assert [*texts, found[0].text, found[1].text] == expected


def test_what_nobody_waits_for_is_cancelled(engine):
    pool = engine._served.generation.scheduler.pool
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert pool.used > 0
    stream.close()
    assert pool.used == 0
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 100, 100, 100)]
    with closing(engine.generate_each(zip(PROMPTS, params, strict=True))) as runs:
        next(runs)
        assert pool.used > 0
    assert pool.used == 0


def test_a_stream_given_up_does_not_end_another(engine):
    expected = engine.generate(PROMPTS[1], GREEDY)[0].text
    one, two = engine.stream(PROMPTS[0], GREEDY), engine.stream(PROMPTS[1], GREEDY)
    text = next(two)
    next(one)
    one.close()
    assert text + "".join(two) == expected


def test_a_mistake_of_the_caller_on_the_way_cancels_the_rest(engine):
    def prompts():
        yield PROMPTS[0], GREEDY
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        list(engine.generate_each(prompts()))


def test_ctrl_c_waits_until_a_step_is_taken_in(engine, monkeypatch):
    scheduler = engine._served.generation.scheduler
    original, steps = GenerationLoop._land, []

    def land(self, flight):
        steps.append(1)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, flight)

    expected = engine.generate(PROMPTS, GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(GenerationLoop, "_land", land)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, GREEDY)
    assert len(steps) >= 5
    assert scheduler.pool.used == 0
    again = engine.generate(PROMPTS, GREEDY)
    assert [done.text for done in again] == [done.text for done in expected]


def test_a_held_interrupt_comes_at_the_end_and_a_second_one_at_once():
    reached = []

    def interrupt(times):
        with interrupts_held():
            for number in range(times):
                signal.raise_signal(signal.SIGINT)
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        interrupt(1)
    with pytest.raises(KeyboardInterrupt):
        interrupt(2)
    assert reached == [0, 0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_are_left_to_a_program_with_a_handler_of_its_own():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("mine"))
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["mine"]


def test_another_thread_can_generate(engine):
    found = []
    thread = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS, GREEDY)))
    thread.start()
    thread.join(60)
    assert len(found) == len(PROMPTS)


# Chat


def test_a_continuation_keeps_its_first_blank_and_an_answer_begins_without(path, tmp_path):
    path = copy(path, tmp_path / "llm")
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.decoder = decoders.Metaspace("h")  # a letter that stands for a blank
    tokenizer.save(str(path / "tokenizer.json"))
    blank = tokenizer.token_to_id("h")
    params = SamplingParams(temperature=0, max_tokens=2, logit_bias={blank: 1e6})
    with Engine(path, max_num_seqs=2, max_model_len=128) as engine:
        ids = tokenizer.encode("a").ids
        found = engine.generate(["a", ids], params)
        assert [done.text for done in found] == ["  ", "  "]
        assert "".join(engine.stream("a", params)) == "  "
        prompt = engine.chat_prompt([{"role": "user", "content": "a"}])
        assert engine.generate([prompt], params)[0].text == " "


def test_a_chat_prompt_is_what_transformers_makes(engine, tokenizer):
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "you"}]
    ids = engine.chat_prompt(messages)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ids == tokenizer(text, add_special_tokens=False).input_ids
    assert engine.generate(ids, GREEDY)[0].prompt_tokens == len(ids)


def test_without_a_template_there_is_no_chat(tmp_path):
    path = save_decoder(tmp_path / "llm", "llama")
    with Engine(path, max_num_seqs=2) as engine, pytest.raises(TemplateError, match="no chat"):
        engine.chat_prompt([{"role": "user", "content": "a"}])
