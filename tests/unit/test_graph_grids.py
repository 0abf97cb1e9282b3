"""The device graphs of a running engine: over the wire, as numbers, as text and as a picture."""

import asyncio
import io
import json
import threading

import pytest
from rich.console import Console

from rose.runtime.graphs import GraphCache, GraphPolicy
from rose.serving import protocol
from rose.serving.cli import main
from rose.serving.graph_grids import fetch_grids, graph_counts, graph_grids
from rose.serving.graph_picture import Place, draw_grids, places, print_grids, summary
from rose.serving.protocol import GraphCell, GraphGrid
from tests.graph_rig import CallCapturer
from tests.unit.engine_rig import RunningEngine, ToyRuntime, drive, raw, served_by
from tests.unit.test_graphs import Values, batch


def cache_of(*runs, max_graphs=8):
    """A cache after batches, each in the bucket of a number."""
    policy = GraphPolicy(max_tokens=1000, max_graphs=max_graphs)
    cache = GraphCache(Values(), CallCapturer(), policy, clock=lambda: 0.0)
    for bucket in runs:
        cache.run(batch(bucket, "x"))
    return cache


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/e.sock"


def with_engine(address, graphs, scenario):
    """Run a scenario beside an engine with these caches."""
    runtime = ToyRuntime()
    served = served_by(runtime)
    served.graphs = graphs

    async def run():
        running = RunningEngine(served, address)
        try:
            return await scenario(running.server)
        finally:
            await running.close()

    result = []
    try:
        drive(lambda: _keep(run(), result))
    finally:
        runtime.close()
    return result[0]


async def _keep(awaited, result):
    result.append(await awaited)


def test_an_engine_tells_its_grids(address):
    graphs = {"embed": cache_of(1, 1, 1, 3, 2, 2, max_graphs=1), "decode": cache_of(4)}
    embed, decode = with_engine(address, graphs, lambda _: fetch_grids(address))
    assert embed == GraphGrid(
        runtime="embed",
        max_tokens=1000,
        num_bytes=1,
        hits=1,
        captures=2,
        evictions=1,
        failures=0,
        eager=3,
        tokens=60 + 60 + 124,
        padding_tokens=12,
        cells=[
            GraphCell(1, 64, 64, "cold", 3),
            GraphCell(2, 128, 64, "captured", 2),
            GraphCell(3, 192, 64, "warm", 1),
        ],
    )
    assert (decode.runtime, decode.eager) == ("decode", 1)
    assert [cell.state for cell in decode.cells] == ["warm"]


def test_an_engine_without_graphs_has_no_grid(address):
    assert with_engine(address, {}, lambda _: fetch_grids(address)) == []


def test_the_counters_are_part_of_the_statistics(address):
    caches = {"embed": cache_of(1, 1, 1), "decode": cache_of(2, 2)}

    async def scenario(_):
        async with raw(address) as client:
            await client.hello()
            await client.send(protocol.Ping(1))
            return (await client.receive(protocol.Pong)).stats

    stats = with_engine(address, caches, scenario)
    assert (stats.graph_hits, stats.graph_captures, stats.graph_evictions) == (1, 2, 0)
    assert stats.padding_tokens == 4 + 4 + 4
    assert set(graph_counts([])) <= set(protocol.COUNTERS)


def test_nobody_there_is_said_in_time(address):
    with pytest.raises(ValueError, match="no engine answers"):
        asyncio.run(fetch_grids(address, timeout_s=0.1))
    with pytest.raises(ValueError, match="address"):
        asyncio.run(fetch_grids("nonsense"))


def test_buckets_of_other_longest_sequences_share_a_place():
    cells = [
        GraphCell(4, 128, 64, "cold", 3),
        GraphCell(4, 128, 128, "captured", 5),
        GraphCell(8, 128, 64, "failed", 2),
    ]
    assert places(cells) == {(4, 128): Place("captured", 8), (8, 128): Place("failed", 2)}


def test_grids_as_text():
    grids = graph_grids({"embed": cache_of(1, 1, 1, 3, 2, 2), "decode": cache_of(4)})
    out = io.StringIO()
    print_grids(grids, Console(width=120, file=out))
    text = out.getvalue()
    assert "Batches of texts" in text
    assert "Decode steps" in text
    assert "■ 3" in text
    assert "○ 1" in text
    assert "6 batches: 16.7% replayed, 2 captured, 3 eager" in text
    assert "captured: replayed from now on" in text


def test_the_summary_of_an_idle_cache_divides_by_nothing():
    (grid,) = graph_grids({"embed": cache_of()})
    assert summary(grid).startswith("0 batches: 0.0% replayed")


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_grids_as_a_picture(tmp_path, kind):
    pytest.importorskip("matplotlib")
    grids = graph_grids({"embed": cache_of(1, 1, 1, 3, 2, 2), "decode": cache_of()})
    path = tmp_path / f"grid.{kind}"
    draw_grids(grids, path)
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[kind]
    assert path.read_bytes().startswith(start)
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_grids([], path)


class EngineThread:
    """An engine in a thread of its own, for the command line, which has a loop of its own."""

    def __init__(self, address, graphs):
        self.ready, self.done = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(address, graphs))

    def _run(self, address, graphs):
        async def wait(_):
            self.ready.set()
            await asyncio.to_thread(self.done.wait, 20)

        with_engine(address, graphs, wait)

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(10)

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()


def test_rose_inspect_graphs(address, capsys, tmp_path):
    def rose(*arguments):
        try:
            main(["inspect", "--graphs", *map(str, arguments)])
        except SystemExit as stop:
            return stop.code
        return 0

    with EngineThread(address, {"embed": cache_of(1, 1, 1)}):
        assert rose(address) == 0
        assert "■ 3" in capsys.readouterr().out
        assert rose(address, "--json") == 0
        (grid,) = json.loads(capsys.readouterr().out)
        assert grid["cells"] == [[1, 64, 64, "captured", 3]]
        pytest.importorskip("matplotlib")
        assert rose(address, "--picture", tmp_path / "grid.png") == 0
        assert (tmp_path / "grid.png").stat().st_size > 1000


@pytest.mark.parametrize("arguments", [[], ["folder", "--graphs", "ipc://x"]])
def test_rose_inspect_wants_one_thing_to_look_at(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["inspect", *arguments])
    assert stop.value.code == 1
    assert "either a model folder, or --graphs" in capsys.readouterr().err
