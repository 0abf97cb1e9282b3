"""Grammars: what they allow, what they refuse, and outputs sampled under them."""

import json
import sys
import threading
import time

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rose.runtime import structured
from rose.runtime.errors import RequestError
from rose.runtime.options import SamplingParams
from rose.runtime.sampler import Sampler
from rose.runtime.sampling_plan import RowStatus, SamplingState, unpack
from rose.runtime.structured import GrammarCompiler, GrammarMatcher
from rose.serving.gateway.sampling_fields import ANY_OBJECT

ENDS = ("<|end|>", "<|eot|>")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(ENDS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(['{"name": "Ann", "age": 7, "tags": ["a", "b"]}'] * 9, trainer)
    return tokenizer


TOKENIZER = byte_level()
VOCAB = TOKENIZER.get_vocab_size() + 21  # a model whose vocabulary was padded
COMPILER = GrammarCompiler(TOKENIZER.to_str().encode(), VOCAB, [0, 1])


def allowed(matcher: GrammarMatcher) -> set[int]:
    mask = matcher.mask()
    assert mask.dtype == np.int32
    assert mask.shape == ((VOCAB + 31) // 32,)
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def accepts(schema: object, text: str) -> bool:
    """Whether a grammar takes a text as a whole."""
    matcher = COMPILER.matcher(json.dumps(schema))
    for token in TOKENIZER.encode(text).ids:
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    return 0 in allowed(matcher)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name": "Ann", "age": 7, "tags": []}', True),
        ('{"name":"Ann","age":7,"tags":["a","b"]}', True),
        ('{\n  "name": "Ann",\n  "age": 7,\n  "tags": [\n    "a"\n  ]\n}', True),
        ('{"name": "Ann", "age": 777, "tags": []}', False),
        ('{"name": "Ann", "age": 7, "tags": ["c"]}', False),
        ('{"name": "Ann", "age": 7}', False),
        ('{"name": "Ann", "age": 7, "tags": []', False),
        ('  {"name": "Ann", "age": 7, "tags": []}', False),
        ('{"name":  "Ann", "age": 7, "tags": []}', False),
        ("[]", False),
    ],
)
def test_what_a_schema_allows(text, fits):
    assert accepts(PERSON, text) is fits


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("{}", True),
        ('{"a": [1, null, {"b": "c"}], "d": true}', True),
        ("[]", True),
        ("1", True),
        ('"a"', True),
        ("null", True),
        ('{"a"}', False),
    ],
)
@pytest.mark.parametrize("schema", [{}, True])
def test_a_schema_that_says_nothing_allows_any_value(schema, text, fits):
    assert accepts(schema, text) is fits


@pytest.mark.parametrize(("text", "fits"), [('{"a": [1]}', True), ("[]", False), ("1", False)])
def test_any_object(text, fits):
    assert accepts(json.loads(ANY_OBJECT), text) is fits


def test_end_tokens_come_where_the_output_is_complete_and_only_there():
    matcher = COMPILER.matcher("{}")
    for token in TOKENIZER.encode('{"a": 1}').ids:
        assert not allowed(matcher) & {0, 1}
        matcher.advance(token)
    assert allowed(matcher) == {0, 1}
    assert not matcher.is_finished
    matcher.advance(1)
    assert matcher.is_finished


def test_ids_that_the_tokenizer_does_not_know_are_never_allowed():
    matcher = COMPILER.matcher('{"type": "string"}')
    matcher.accept(TOKENIZER.token_to_id('"'))
    inside = allowed(matcher)
    assert len(inside) > 100
    assert max(inside) < TOKENIZER.get_vocab_size()


def test_a_model_smaller_than_its_tokenizer_sees_its_own_ids_only():
    compiler = GrammarCompiler(TOKENIZER.to_str().encode(), 100, [0])
    assert compiler.matcher("{}").mask().shape == (4,)


@pytest.mark.parametrize(
    "schema",
    [
        "not json",
        "",
        "null",
        "[]",
        "7",
        '{"type": "nope"}',
        '{"$ref": "#/nowhere"}',
        '{"$ref": "#"}',
        '{"$ref": "http://example.org/x"}',
        '{"type": "string", "pattern": "("}',
        '{"type": "string", "pattern": "(?=a)b"}',
        '{"not": {"type": "string"}}',
        '{"allOf": [{"type": "string"}, {"type": "integer"}]}',
        '{"type": "integer", "minimum": 5, "maximum": 1}',
        "[" * 90_000,
        '{"a":' * 9000 + "1" + "}" * 9000,
        json.dumps({"enum": ["x" * structured.MAX_SCHEMA_CHARS]}),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_at_once(schema):
    start = time.monotonic()
    with pytest.raises(RequestError) as error:
        COMPILER.matcher(schema)
    assert error.value.field == "response_format"
    assert len(str(error.value)) < 1000
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("3", "a JSON schema is an object, found 3"),
        ("false", "false allows no value"),
        ('{"$ref": "#"}', "refers to itself without end"),
        (
            '{"oneOf": [{"type": "integer"}, {"type": "number"}]}',
            "oneOf is not supported, anyOf is",
        ),
    ],
)
def test_the_reason_is_told_in_words_of_the_schema(schema, reason):
    with pytest.raises(RequestError, match=reason):
        COMPILER.matcher(schema)


def test_the_schema_cannot_lift_the_rules_of_the_server():
    schema = {"x-guidance": {"whitespace_pattern": "[ ]*", "lenient": True}, "not": {}}
    with pytest.raises(RequestError, match="not"):
        COMPILER.matcher(json.dumps(schema))


def test_a_token_that_is_not_allowed_is_an_error_of_that_output_alone():
    one, other = (COMPILER.matcher(ANY_OBJECT) for _ in range(2))
    with pytest.raises(RequestError):
        one.accept(TOKENIZER.token_to_id("]"))
    other.accept(TOKENIZER.token_to_id("{"))
    assert allowed(other)


def test_compiled_grammars_are_kept_the_latest_first(monkeypatch):
    compiler = GrammarCompiler(TOKENIZER.to_str().encode(), VOCAB, [0], capacity=2)
    compiled: list[str] = []
    compile_one = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda s: compiled.append(s) or compile_one(s))
    one, two, three = ('{"const": 1}', '{"const": 2}', '{"const": 3}')
    for schema in [one, two, one, three, one, two]:
        compiler.matcher(schema)
    assert compiled == [one, two, three, two]


def test_threads_share_a_compiler():
    results: list[bool] = []

    def work(number: int) -> None:
        for value in range(5):
            text = json.dumps({"v": value})
            schema = {"type": "object", "properties": {"v": {"const": value}}, "required": ["v"]}
            results.append(accepts(schema, text))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(TOKENIZER.to_str().encode(), VOCAB, [0])
    with pytest.raises(RequestError, match=r"rose-engine\[structured\]") as error:
        compiler.matcher("{}")
    assert error.value.field == "response_format"


def words_only(decoder: decoders.Decoder) -> str:
    tokenizer = Tokenizer(models.WordLevel({"<0xZZ>": 0, "</s>": 1}, unk_token="</s>"))
    tokenizer.decoder = decoder
    return tokenizer.to_str()


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]),  # it panics
    ],
)
def test_a_tokenizer_that_the_library_cannot_use_is_refused(decoder):
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(words_only(decoder).encode(), VOCAB, [1]).matcher("{}")


def test_a_model_without_end_tokens_cannot_end_a_grammar():
    with pytest.raises(RequestError):
        GrammarCompiler(TOKENIZER.to_str().encode(), VOCAB, []).matcher("{}")


def test_sampled_outputs_follow_their_schema():
    """Rows with and without grammars in one batch, at a temperature where all tokens are alike."""
    params = SamplingParams(
        temperature=1e6, grammar=json.dumps(PERSON), ignore_eos=True, min_tokens=500
    )
    sampler = Sampler(VOCAB)
    count, states = 8, []
    matchers = {row: COMPILER.matcher(json.dumps(PERSON)) for row in range(count)}
    for row in range(count + 1):
        one = SamplingParams(temperature=0) if row == count else params
        states.append(SamplingState(one, vocab_size=VOCAB, eos_ids=(0, 1)))
    outputs: dict[int, list[int]] = {row: [] for row in range(count)}
    generator = torch.Generator().manual_seed(0)
    for index in range(400):
        logits = torch.randn(count + 1, VOCAB, generator=generator)
        running = {row: m for row, m in matchers.items() if not m.is_finished}
        if not running:
            break
        plan = sampler.plan(
            states, [index] * len(states), {r: m.mask() for r, m in running.items()}
        )
        rows = unpack(sampler.sample(logits, plan).packed.numpy(), states)
        assert rows[count].token_id == logits[count].argmax()
        for row, matcher in running.items():
            assert rows[row].status == RowStatus.OK
            outputs[row].append(rows[row].token_id)
            matcher.advance(rows[row].token_id)
    for row, ids in outputs.items():
        assert matchers[row].is_finished
        assert ids[-1] in states[row].end_ids
        found = json.loads(TOKENIZER.decode(ids))
        assert set(found) == {"name", "age", "tags"}
        assert 0 <= found["age"] <= 120
        assert set(found["tags"]) <= {"a", "b"}
