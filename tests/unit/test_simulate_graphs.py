"""The simulated load: everything is answered, and the counters tell of every batch."""

import numpy as np
import pytest

from rose.runtime.graphs import GraphPolicy
from tools import simulate_graphs
from tools.simulate_graphs import Gpu, Load, Replay


def replay(arrivals, lengths, **limits):
    load = Load(np.array(arrivals, float), np.array(lengths, np.int32))
    return Replay(load, Gpu(), GraphPolicy(**({"max_tokens": 1024} | limits)), 512).run()


def test_alone_each_request_takes_what_its_pass_takes():
    gpu = Gpu()
    run = replay(range(5), [63] * 5)
    eager, capture, *hits = run.latencies
    assert eager == pytest.approx(gpu.launches_s)
    assert capture == pytest.approx(gpu.launches_s + gpu.capture_s + gpu.weights_s, rel=0.02)
    assert hits == pytest.approx([gpu.replay_s + gpu.weights_s] * 3, rel=0.5)
    assert run.history[-1] == (5, 3, 1, 5)


def test_without_graphs_all_is_eager_and_a_burst_shares_batches():
    run = replay([0.0] * 40, [64] * 40, max_tokens=0)
    assert len(run.latencies) == 40
    assert run.cache.counters.eager == run.history[-1][3] == 6  # the first text alone, then 8 each
    assert sorted(run.latencies) == run.latencies


def test_the_page_and_its_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(simulate_graphs, "PAGES", tmp_path)
    monkeypatch.setattr("tools.report.PAGES", tmp_path)
    small = ["--requests", "400", "--rates", "200", "--shown", "200", "--write-page"]
    simulate_graphs.main(small)
    page = (tmp_path / "graphs.md").read_text()
    assert "None of this has run on hardware" in page
    assert "![Hits and captures over time, and the buckets](graphs.svg)" in page
    assert "Batches per bucket" in (tmp_path / "graphs.svg").read_text()
    assert page in capsys.readouterr().out
