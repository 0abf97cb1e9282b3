"""Tool calls in text: found whole, however the text is cut, and never shown half."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.serving.gateway.tool_calls import CLOSE, OPEN, ForcedCall, MarkedCalls, Parsed, Parser

WEATHER = '{"name": "weather", "arguments": {"city": "Oslö", "days": [1, 2]}}'
CLOCK = '{"name": "clock", "arguments": {}}'


def marked(call: str) -> str:
    return f"{OPEN}\n{call}\n{CLOSE}"


def read(parser: Parser, pieces: list[str]) -> Parsed:
    found = Parsed()
    for part in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        found.content += part.content
        found.calls += part.calls
    return found


def names(parsed: Parsed) -> list[str]:
    return [call.name for call in parsed.calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (marked(WEATHER), "", ["weather"]),
        (f"Let me see.\n{marked(WEATHER)}", "Let me see.", ["weather"]),
        (f"{marked(WEATHER)}\n{marked(CLOCK)}\n", "", ["weather", "clock"]),
        (f"a {marked(CLOCK)} b", "ab", ["clock"]),
        (f"{OPEN}{CLOCK}{CLOSE}", "", ["clock"]),
        (f"{OPEN}\n{CLOCK}", "", ["clock"]),  # cut off right before the end mark
        (f"{OPEN}\n" + CLOCK[:-1], f"{OPEN}\n" + CLOCK[:-1], []),
        ("a < b and <tool", "a < b and <tool", []),
        (marked("{oops}"), marked("{oops}"), []),
        (marked('{"arguments": {}}'), marked('{"arguments": {}}'), []),
        (marked('{"name": "f", "arguments": 7}'), marked('{"name": "f", "arguments": 7}'), []),
        (f"{OPEN}{OPEN}", f"{OPEN}{OPEN}", []),
        (CLOSE, CLOSE, []),
        ("tail  \n", "tail  \n", []),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_in_a_text(text, content, calls, size):
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    found = read(MarkedCalls(), pieces)
    assert (found.content, names(found)) == (content, calls)


def test_arguments_keep_their_letters_and_ids_differ():
    found = read(MarkedCalls(), [marked(WEATHER) + marked(WEATHER)])
    assert json.loads(found.calls[0].arguments) == json.loads(WEATHER)["arguments"]
    assert "Oslö" in found.calls[0].arguments
    assert found.calls[0].id != found.calls[1].id


PIECES = ["a", " ", "\n", "<", "<tool", OPEN, CLOSE, marked(CLOCK), CLOCK, "{", "tool_call>"]


@given(text=st.lists(st.sampled_from(PIECES), max_size=12), cuts=st.lists(st.integers(0, 200)))
@settings(max_examples=500, deadline=None)
def test_how_the_text_is_cut_makes_no_difference(text, cuts):
    whole = "".join(text)
    bounds = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    expected = read(MarkedCalls(), [whole])
    found = read(MarkedCalls(), [whole[a:b] for a, b in pairwise(bounds)])
    assert found.content == expected.content
    assert names(found) == names(expected)


@pytest.mark.parametrize("before", ["", "text ", "a < b\n"])
def test_no_part_of_a_mark_is_shown(before):
    """Nor the call itself; only what turns out to be text."""
    text, parser, shown = f"{before}{marked(WEATHER)}", MarkedCalls(), ""
    for char in text:
        shown += parser.push(char).content
        assert before.startswith(shown)
    assert shown == before.rstrip()


def test_a_call_comes_as_soon_as_it_is_complete():
    parser = MarkedCalls()
    text = marked(CLOCK)
    assert parser.push(text[:-1]) == Parsed()
    assert names(parser.push(text[-1])) == ["clock"]


def test_text_is_not_held_back():
    parser = MarkedCalls()
    assert parser.push("hello").content == "hello"
    assert parser.push(" wor").content == " wor"
    assert parser.push("<b").content == "<b"


@pytest.mark.parametrize("text", [WEATHER, CLOCK[:-3]])
def test_a_forced_call(text):
    found = read(ForcedCall(), [text[:5], text[5:]])
    assert names(found) == (["weather"] if text == WEATHER else [])
    assert found.content == ("" if text == WEATHER else text)
