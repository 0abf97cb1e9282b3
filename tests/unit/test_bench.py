"""`rose bench` on tiny models: in process, on a server, and on another server beside it."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from rose import Engine
from rose.serving import cli
from rose.serving.bench.http_client import BenchError, HttpClient, embed_body, vectors_of
from rose.serving.bench.loads import Load, Sequences, loads_of
from rose.serving.bench.measure import Effort, check_tokens, check_vectors, measure_embedding
from rose.serving.bench.results import Results, Row, as_json
from rose.serving.bench.run import make_sequences
from rose.serving.bench.targets import InProcess, Server
from tests.tiny import save_bert, save_decoder

BENCHES = ("latency", "scoring", "throughput", "concurrency", "decode")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_decoder(tmp_path_factory.mktemp("models") / "llama", "llama")


def rose(*arguments):
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    return caught.value.code


class Peer(BaseHTTPRequestHandler):
    """An OpenAI-compatible server around an engine, with vectors as digits."""

    protocol_version = "HTTP/1.1"
    engine: Engine
    lock = threading.Lock()
    spoil = False

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._answer({"data": [{"id": "peer"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "peer"
        with self.lock:
            rows = self.engine.embed(body["input"])
        if self.spoil:
            rows = rows[:, ::-1]
        data = [{"index": i, "embedding": row.tolist()} for i, row in enumerate(rows)]
        self._answer({"data": data[::-1]})

    def _answer(self, content):
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def peer(bert):
    with Engine(bert, device="cpu", max_batch_tokens=256) as engine:
        handler = type("Handler", (Peer,), {"engine": engine})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, handler
        server.shutdown()
        thread.join()
        server.server_close()


def url_of(peer):
    return f"http://127.0.0.1:{peer[0].server_address[1]}"


# --- loads ---


@pytest.mark.parametrize("bench", BENCHES)
def test_loads_have_names_of_their_own(bench):
    for quick in (True, False):
        names = [load.name for load in loads_of(bench, quick=quick)]
        assert len(set(names)) == len(names) > 0


def test_loads_say_what_they_are():
    assert Load(512).name == "512 tokens"
    assert Load(512, batch=25).name == "25 x 512 tokens"
    assert Load(512, batch=100, clients=4).name == "4 clients, 100 x 512 tokens"
    assert Load(64, clients=8, new_tokens=32).name == "8 x 64 tokens + 32"


def test_sequences_are_as_long_as_they_should_be():
    sequences = Sequences([7, 8, 9], ([1], [2]))
    for tokens in (1, 2, 3, 50):
        assert len(sequences.ids(tokens)) == tokens
    ids = sequences.ids(9)
    assert (ids[0], ids[-1]) == (1, 2)
    assert set(ids[1:-1]) <= {7, 8, 9}
    again = Sequences([7, 8, 9], ([1], [2]))
    assert [again.ids(n) for n in (1, 2, 3, 50, 9)][-1] == ids


def test_sequences_of_a_tokenizer_have_its_special_tokens(bert):
    with Engine(bert, device="cpu", max_batch_tokens=64) as engine:
        sequences = make_sequences(engine.tokenizer)
        ids = sequences.ids(6)
        text = engine.tokenizer.backend.decode(ids)
        assert engine.encode(text).ids[0].tolist() == ids


# --- measuring ---


class Clock:
    """A target whose requests take a known time."""

    def __init__(self, name, seconds, vector=(1.0, 0.0)):
        self.name, self.seconds, self.vector, self.asked = name, seconds, vector, []

    def vectors(self, inputs):
        return np.array([self.vector] * len(inputs), np.float32)

    def embed(self, requests, clients):
        self.asked.append((len(requests), clients))
        return [self.seconds] * len(requests)


def test_targets_get_the_same_requests_in_turns():
    fast, slow = Clock("fast", 0.001), Clock("slow", 0.003)
    results = Results("concurrency", "m")
    drawn = []

    def draw(load):
        drawn.append(load)
        return ["text"]

    shown = []
    measure_embedding(results, [fast, slow], Load(16, clients=2), draw, Effort(0, 3), shown.append)
    assert fast.asked == slow.asked == [(2, 2), *[(8, 2)] * 3]
    assert [len(row.seconds) for row in results.rows] == [24, 24]
    assert [round(results.ratio(row), 6) for row in results.rows] == [1.0, 3.0]
    assert shown[-1] == "2 clients, 16 tokens, turn 3"
    assert all(row.per_turn == 8 for row in results.rows)


def test_an_effort_ends_after_both_its_turns_and_its_time():
    assert list(Effort(0.0, 3).turns()) == [0, 1, 2]
    assert len(list(Effort(0.05, 1).turns())) > 3


def test_vectors_that_do_not_agree_break_the_check():
    for vector, kept in (((0.0, 1.0), False), ((2.0, 0.0), True), ((1.0, 0.0, 0.0), False)):
        results = Results("latency", "m")
        check_vectors(results, [Clock("a", 0), Clock("b", 0, vector)], [[1], [2]])
        assert [check.kept for check in results.checks] == [kept]


def test_texts_that_do_not_agree_break_the_check():
    class Writer:
        def __init__(self, name, text):
            self.name, self.text = name, text

        def decode(self, prompts, load):
            from rose.serving.bench.http_client import Stream

            return [Stream(self.text, 0.0, [1.0], 1) for _ in prompts]

    results = Results("decode", "m")
    sequences = Sequences([1, 2], ([], []))
    writers = [Writer("a", "abcd"), Writer("b", "abcd"), Writer("c", "abxx")]
    check_tokens(results, writers, sequences)
    assert [check.kept for check in results.checks] == [True, False, False]
    assert "the same for 50% of their length" in results.checks[1].value


def test_percentiles_and_rates():
    row = Row("x", Load(100), 10, [i / 1000 for i in range(1, 101)], [0.5, 0.25, 1.0])
    assert row.rate == 20
    assert row.milliseconds(50) == pytest.approx(50.5)
    assert row.milliseconds(100) == pytest.approx(100)
    results = Results("throughput", "m", rows=[row, Row("y", Load(100), 10, [0.1], [1.0])])
    assert results.ratio(results.rows[1]) == 2.0
    written = json.loads(json.dumps(as_json(results)))
    assert written["rows"][0]["milliseconds"]["max"] == pytest.approx(100)
    assert written["machine"]


# --- servers ---


def test_a_server_is_asked_as_openai_says(peer, bert):
    server = Server.find(url_of(peer), None, "key")
    assert (server.model, server.name) == ("peer", url_of(peer))
    texts = [[1, 5, 6, 2], [1, 7, 2]]
    expected = peer[1].engine.embed(texts)
    np.testing.assert_allclose(server.vectors(texts), expected, rtol=1e-6)
    times = server.embed([texts] * 5, clients=2)
    assert len(times) == 5
    assert all(seconds > 0 for seconds in times)
    server.close()


def test_vectors_come_as_bytes_or_as_digits():
    digits = b'{"data": [{"index": 1, "embedding": [3, 4]}, {"index": 0, "embedding": [1, 2]}]}'
    assert vectors_of(digits).tolist() == [[1, 2], [3, 4]]
    coded = b'{"data": [{"index": 0, "embedding": "AACAPwAAAEA="}]}'
    assert vectors_of(coded).tolist() == [[1, 2]]
    assert json.loads(embed_body("m", [[1]]))["encoding_format"] == "base64"


def test_what_is_no_server_says_so(peer):
    with pytest.raises(BenchError, match="no address"):
        HttpClient("localhost:80", None)
    with pytest.raises(BenchError, match=r"127.0.0.1:9/v1/models: .*refused"):
        Server.find("http://127.0.0.1:9", None, None)
    with pytest.raises(BenchError, match="serves peer, and not 'other'"):
        Server.find(url_of(peer), "other", None)


# --- the commands ---


@pytest.mark.parametrize("bench", ["latency", "scoring", "throughput"])
def test_embedding_benches_in_process(bench, bert, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "result"
    assert rose("bench", bench, bert, "--quick", "-o", out, "--max-batch-tokens", 256) == 0
    shown = capsys.readouterr().out
    assert re.search(r"least cosine, in process to each text alone: (1\.0|0\.99999)", shown)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["bench"] == bench
    assert [row["target"] for row in written["rows"]] == ["in process"]
    assert written["checks"][0]["kept"]
    assert (tmp_path / "result.png").read_bytes()[:4] == b"\x89PNG"


def test_a_peer_gets_the_same_load(bert, peer, tmp_path, capsys):
    out = tmp_path / "result"
    words = ("bench", "latency", bert, "--quick", "--compare", url_of(peer), "-o", out)
    assert rose(*words, "--max-batch-tokens", 256) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["target"] for row in rows] == ["in process", url_of(peer)]
    assert rows[0]["ratio"] == 1.0
    assert rows[1]["ratio"] > 0
    assert "time, ratio" in capsys.readouterr().out


def test_other_vectors_of_a_peer_end_with_code_1(bert, peer, capsys):
    peer[1].spoil = True
    words = ("bench", "latency", bert, "--quick", "--compare", url_of(peer))
    assert rose(*words, "--max-batch-tokens", 256) == 1
    assert "the answers do not agree" in capsys.readouterr().err


def test_decode_in_process(llama, capsys):
    assert rose("bench", "decode", llama, "--quick") == 0
    shown = capsys.readouterr().out
    assert "3 of 3 equal" in shown
    assert "new tokens/s" in shown


def test_a_model_that_cannot_do_it_says_so(bert, capsys):
    assert rose("bench", "decode", bert, "--quick") == 1
    assert "generate" in capsys.readouterr().err


def test_loads_beyond_the_model_are_left_out(bert, tmp_path, capsys):
    assert rose("bench", "latency", bert, "--max-batch-tokens", 256) == 1
    assert "fewer than any load of this benchmark" in capsys.readouterr().err
    long = save_bert(tmp_path / "long", max_position_embeddings=200)
    assert rose("bench", "latency", long, "--max-batch-tokens", 256, "--seconds", 0) == 0
    shown = capsys.readouterr().out
    assert "Left out, for the model takes 200 tokens: 512 tokens; 4,096 tokens." in shown


def test_streams_side_by_side_are_those_alone(llama):
    load = Load(8, clients=3, new_tokens=5)
    prompts = [[1, 2, 3], [4, 5], [6]]
    with Engine(llama, device="cpu", tasks=("generate",)) as engine:
        target = InProcess(engine)
        together = [stream.text for stream in target.decode(prompts, load)]
        assert together == [target.decode([prompt], load)[0].text for prompt in prompts]
