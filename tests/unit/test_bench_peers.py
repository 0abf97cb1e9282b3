"""The comparison with peers: turns, limits, checks and tables, without any peer."""

import itertools
import json
import os
import time

import numpy as np
import pytest

from tools.peers.embedders import EMBEDDERS, Text, batches_of_like_length, padded, pooled
from tools.peers.environments import ENVIRONMENTS, Home, last_line
from tools.peers.generators import QUANTIZED
from tools.peers.main import chosen, stored
from tools.peers.measuring import ENGINES, PEERS, Outcome, compare
from tools.peers.page import ROSE, ROSE_FROM_TEXT, Ratio, is_rose, make_report, ratios
from tools.peers.plots import draw
from tools.peers.processes import OthersWatch, PeerError, Worker
from tools.peers.turns import (
    FEWEST_TURNS,
    Measured,
    least_disturbed,
    orders_of_turns,
    take_turns,
)
from tools.peers.workloads import (
    PROMPT,
    WORKLOADS,
    Inputs,
    Limits,
    head_shape,
    least_seconds,
    linear_shapes,
)

BERT = {"model_type": "bert", "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_every_engine_begins_and_ends_turns():
    orders = list(orders_of_turns(["a", "b", "c"], 6))
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {"a", "b", "c"}
    assert list(orders_of_turns([], 2)) == [[], []]


def test_an_engine_that_fails_is_left_out_with_its_reason():
    calls = itertools.count()

    def fails_late():
        if next(calls):
            raise PeerError("out of memory")
        return {"seconds": [1.0]}

    engines = {"good": lambda: {"seconds": [2.0]}, "bad": fails_late}
    measured = Measured()
    take_turns("row", engines, measured, 5, 100, lambda: {"flops": 1.0})
    assert measured.rows == {"row": {"good": [{"seconds": [2.0]}] * 5}}
    assert measured.failed == {"bad": "row: out of memory"}
    assert len(measured.limits) == 5
    assert list(engines) == ["good"]


def test_a_run_that_is_interrupted_leaves_whole_samples():
    def interrupted():
        raise SystemExit

    measured = Measured()
    with pytest.raises(SystemExit):
        take_turns("row", {"a": lambda: {"seconds": [1.0]}, "b": interrupted}, measured, 3, 100)
    assert measured.rows == {"row": {"a": [{"seconds": [1.0]}]}}


def test_time_cuts_turns_but_not_below_the_fewest():
    measured = Measured()
    take_turns("row", {"a": lambda: {"seconds": [time.perf_counter()]}}, measured, 50, 0.0)
    assert len(measured.rows["row"]["a"]) == FEWEST_TURNS


def test_batches_hold_each_text_once_and_texts_of_like_length():
    lengths = [3, 9, 1, 7, 8]
    batches = batches_of_like_length(lengths, 2)
    assert batches == [[1, 4], [3, 0], [2]]


def test_padding_does_not_count_in_the_mean():
    ids, mask = padded([Text("", [5, 6, 7]), Text("", [8])])
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    hidden = np.ones((2, 3, 2), np.float32)
    hidden[1] = [[3, 4], [99, -99], [99, 99]]
    np.testing.assert_allclose(pooled(hidden, mask)[1], [0.6, 0.8], rtol=1e-6)


def test_linear_shapes_count_what_a_token_goes_through():
    assert sum(a * b for a, b in linear_shapes(BERT)) == 2 * (4 * 8 * 8 + 2 * 8 * 32)
    attention = 2 * 8 * 8 + 2 * 8 * 4  # queries and output, keys and values
    assert sum(a * b for a, b in linear_shapes(LLAMA)) == 3 * (attention + 3 * 8 * 24)
    assert head_shape(LLAMA) == (8, 100)
    with pytest.raises(ValueError, match="'gpt2'"):
        linear_shapes(BERT | {"model_type": "gpt2"})


def test_the_limit_is_the_slower_of_computing_and_reading():
    limits = Limits([50.0, 100.0], [10.0])
    assert limits.seconds([(10, 10)], 10, 4) == 40  # 400 bytes at 10 a second
    assert limits.seconds([(10, 10)], 100, 4) == 200  # 20,000 operations at 100 a second


def test_the_limit_of_decoding_counts_prompts_and_steps():
    one, many = WORKLOADS["decode"].rows[0], WORKLOADS["decode"].rows[-1]
    limits = Limits([1e30], [1.0])  # reading alone
    layers = 2.0 * sum(a * b for a, b in linear_shapes(LLAMA))
    step = layers + 2 * 8 * 100
    steps = one.units - 1
    for row in (one, many):  # all streams share the reading
        assert least_seconds(row, "generate", limits, LLAMA) == pytest.approx(layers + steps * step)
    computing = Limits([1.0], [1e30])
    tokens = many.tokens * PROMPT * layers + steps * many.tokens * step
    assert least_seconds(many, "generate", computing, LLAMA) == pytest.approx(tokens)
    assert least_seconds(one, "generate", Limits(), LLAMA) is None


def test_the_least_time_of_a_batch_is_that_of_its_tokens():
    row = WORKLOADS["batches"].rows[0]
    weights = sum(a * b for a, b in linear_shapes(BERT))
    limits = Limits([1.0], [1e30])
    assert least_seconds(row, "embed", limits, BERT) == pytest.approx(2 * weights * 5 * 512)


@pytest.mark.parametrize(
    ("answer", "reference", "good", "note"),
    [
        ({"vectors": [[3, 4]]}, {"vectors": [[0.6, 0.8]]}, True, "cosine 1 - "),
        ({"vectors": [[4, 3]]}, {"vectors": [[0.6, 0.8]]}, False, "cosine 0.96"),
        ({"vectors": [[np.nan, 1]]}, {"vectors": [[0.6, 0.8]]}, False, "nan"),
        ({"tokens": [[1, 2], [3]]}, {"tokens": [[1, 2], [3]]}, True, "2 of 2"),
        ({"tokens": [[1, 2], [4]]}, {"tokens": [[1, 2], [3]]}, False, "1 of 2"),
    ],
)
def test_other_answers_are_seen(answer, reference, good, note):
    outcome = Outcome("w", "today", 2)
    assert compare("x", answer, reference, outcome) is good
    assert note in outcome.checks["x"]
    assert ("x" in outcome.measured.failed) is not good


def samples(*times):
    return [{"seconds": [t]} for t in times]


def test_a_peer_is_compared_with_rose_that_reads_the_same():
    found = ratios(
        WORKLOADS["latency"],
        {
            ROSE: samples(1, 1, 1),
            ROSE_FROM_TEXT: samples(2, 2, 2),
            "ONNX Runtime": samples(1, 2, 4),
            "sentence-transformers": samples(4, 4, 4),
        },
    )
    assert found == {
        "ONNX Runtime": Ratio(2, 1, 4),
        "sentence-transformers": Ratio(2, 2, 2),
    }


def test_rounded_weights_are_compared_with_as_wide_ones():
    found = ratios(
        WORKLOADS["decode-quantized"],
        {
            "ROSE, int8": samples(2, 2, 2),
            "ROSE, int4": samples(1, 1, 1),
            "llama.cpp, Q8_0": samples(4, 4, 4),
            "llama.cpp, Q4_1": samples(4, 4, 4),
        },
    )
    assert found == {"llama.cpp, Q8_0": Ratio(2, 2, 2), "llama.cpp, Q4_1": Ratio(4, 4, 4)}
    assert {engine.width for engine in QUANTIZED.values()} == {"int8", "int4"}
    assert {f"ROSE, {engine.width}" for engine in QUANTIZED.values()} <= set(QUANTIZED)


@pytest.mark.parametrize(
    ("tokens", "good"), [([[1, 9], [3, 4], [9, 9]], True), ([[9, 2], [3, 4], [9, 9]], False)]
)
def test_rounded_weights_have_to_begin_alike_mostly(tokens, good):
    outcome = Outcome("decode-quantized", "today", 2)
    reference = {"tokens": [[1, 2], [3, 4], [5, 6]]}
    assert compare("x", {"tokens": tokens}, reference, outcome, exact=False) is good
    assert f"{1 + good} of 3 outputs, {1.0 if good else 0.7} of 2 tokens" in outcome.checks["x"]
    assert ("x" in outcome.measured.failed) is not good


def test_the_page_holds_every_rose_to_its_answers(checkpoints):
    settings = {"settings": "", "versions": {}}
    engines = dict.fromkeys(("ROSE, int8", "ROSE, int4", "llama.cpp, Q8_0"), settings)
    outcome = Outcome("decode-quantized", "today", 2, engines)
    outcome.measured.rows = {
        "1 stream": {"ROSE, int8": samples(1.0), "llama.cpp, Q8_0": samples(2.0)}
    }
    outcome.measured.limits = [{"flops": 1e9, "bytes": 1e9}]
    report = make_report({"decode-quantized": outcome}, INPUTS, checkpoints, 2)
    assert report.kept
    assert "| llama.cpp, Q8_0 | 16.0" in report.markdown()
    outcome.measured.failed["ROSE, int4"] = "does not start"
    assert not make_report({"decode-quantized": outcome}, INPUTS, checkpoints, 2).kept


@pytest.fixture
def checkpoints(tmp_path):
    folders = {"embedder": tmp_path / "embedder", "llm": tmp_path / "llm"}
    for folder, config in zip(folders.values(), (BERT, LLAMA), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    return folders


@pytest.fixture
def outcomes():
    latency = Outcome("latency", "today", 2, {name: {"settings": ""} for name in EMBEDDERS})
    latency.checks = {ROSE: "cosine 1 - 1e-07"}
    latency.measured.rows = {
        "16 tokens": {
            ROSE: samples(0.01, 0.01, 0.01),
            "ONNX Runtime": samples(0.008, 0.008, 0.012),
            "vLLM": samples(0.02, 0.02, 0.02),
        }
    }
    latency.measured.failed = {"fastembed": "does not install: no such thing"}
    latency.measured.limits = [{"flops": 1e9, "bytes": 1e9}]
    http = Outcome("http-128", "today", 2, {ROSE: {"settings": ""}})
    http.measured.rows = {
        "1 client": {
            ROSE: [{"seconds": [0.02, 0.04], "rate": 30.0}],
            "infinity": [{"seconds": [0.05], "rate": 20.0}],
        }
    }
    start = Outcome("start", "today", 2, {ROSE: {"settings": ""}})
    start.measured.rows = {"start": {ROSE: [{"seconds": [3.0], "mib": 500.0}]}}
    decode = Outcome("decode", "today", 2, {ROSE: {"settings": ""}})
    decode.measured.rows = {"1 stream": {ROSE: samples(2.0), "llama.cpp": samples(4.0)}}
    return {"latency": latency, "decode": decode, "http-128": http, "start": start}


INPUTS = Inputs({}, [Text("a", [1, 2, 3])], {})


def test_the_page_hides_nothing(outcomes, checkpoints):
    page = make_report(outcomes, INPUTS, checkpoints, 2).markdown()
    tables = {part.split("**")[0]: part for part in page.split("\n\n**")[1:]}
    behind = tables["Where a peer is ahead of ROSE"]
    assert "| ONNX Runtime | 0.80" in behind
    assert "0.80 to 1.20" in behind
    assert "**ahead**" in behind
    assert "vLLM" not in behind
    assert "no such thing" in tables["Left out"]
    assert "20 / 40" not in page
    assert "30 / 40, 30.0" in page
    assert "3.0 s, 500 MiB" in page
    assert "| 16.0 " in page  # 32 tokens in 2 s
    assert "the machine's limit" in tables["Embedding one text (turns of 16 tokens: 3)"]


def test_a_run_without_rose_or_with_a_wrong_rose_fails(outcomes, checkpoints):
    assert make_report(outcomes, INPUTS, checkpoints, 2).kept
    outcomes["latency"].measured.failed[ROSE] = "other answers than transformers"
    assert not make_report(outcomes, INPUTS, checkpoints, 2).kept


def test_pictures_are_drawn_of_what_there_is(outcomes, tmp_path):
    lines = draw(outcomes, tmp_path)
    assert len(lines) == 3
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "cpu-embedding.svg",
        "cpu-decode.svg",
        "cpu-http.svg",
    }
    assert draw({}, tmp_path) == []


def test_outcomes_are_kept_and_read_again(outcomes, tmp_path):
    for name, outcome in outcomes.items():
        outcome.write(tmp_path / "results" / f"{name}.json")
    found = stored(Home(tmp_path))
    assert found == outcomes
    assert list(found) == [name for name in WORKLOADS if name in outcomes]


def test_inputs_are_kept_and_read_again(tmp_path):
    inputs = Inputs({"16": [Text("a b", [1, 2])]}, [Text("c", [3])], {"32": [[4, 5]]})
    inputs.write(tmp_path / "inputs.json")
    assert Inputs.read(tmp_path / "inputs.json") == inputs


def test_the_reason_of_a_failure_is_the_line_that_names_it():
    assert last_line("ERROR: no matching distribution\nWARNING: old pip\n\n") == (
        "ERROR: no matching distribution"
    )
    assert last_line("ImportError: no x\nERROR: start-up failed") == "ImportError: no x"
    assert last_line("one\ntwo\n") == "two"
    assert last_line("") == "it wrote nothing"


def test_engines_have_their_environment_and_are_peers_or_rose():
    for engines in ENGINES.values():
        assert is_rose(next(iter(engines)))
        for engine in engines.values():
            assert engine.environment in (None, *ENVIRONMENTS)
            assert engine.packages
    assert ROSE not in PEERS
    assert chosen(["vLLM"]) == [ROSE, "vLLM"]
    assert chosen(["vLLM", "infinity"])[:2] == [ROSE, ROSE_FROM_TEXT]
    assert chosen(["llama.cpp, Q4_1"]) == [ROSE, "ROSE, int4", "llama.cpp, Q4_1"]
    assert {"ONNX Runtime", "vLLM", "llama.cpp"} <= set(PEERS)


def test_a_worker_that_cannot_start_says_why(tmp_path):
    INPUTS.write(tmp_path / "inputs.json")
    worker = Worker(Home(tmp_path), "embed", "nobody", None, 1)
    try:
        with pytest.raises(PeerError, match="KeyError: 'nobody'"):
            worker.wait_ready()
        with pytest.raises(PeerError, match="the process ended"):
            worker.ask(op="vectors")
    finally:
        worker.close()


def test_what_was_disturbed_is_measured_again_and_the_quietest_is_kept():
    def measuring(*shares):
        samples = iter([{"seconds": [share], "others": share} for share in shares])
        return lambda: next(samples)

    assert least_disturbed(measuring(0.05))["others"] == 0.05
    assert least_disturbed(measuring(0.5, 0.01))["others"] == 0.01
    assert least_disturbed(measuring(0.5, 0.2, 0.3))["others"] == 0.2


def test_others_are_all_but_a_process_and_its_children():
    with OthersWatch(os.getpid()) as watch:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
    alone = watch.share
    with OthersWatch(1 << 30) as watch:  # nobody has this number, so this process is an other
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
    assert 0 <= alone < 1.5
    assert watch.share > 0.3 / 30 / (os.cpu_count() or 1)  # even if this took 30 s
