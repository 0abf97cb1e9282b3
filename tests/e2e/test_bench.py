"""`rose bench` with a real server: one of its own, and one that runs."""

import json
import subprocess
import sys

from rose.serving.bench.run import own_server
from rose.serving.commands.flags import EngineFlags
from tests.tiny import save_bert, save_decoder


def bench(*words):
    command = [sys.executable, "-m", "rose", "bench", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_concurrency_starts_a_server_of_its_own(tmp_path):
    model, out = save_bert(tmp_path / "tiny"), tmp_path / "out"
    done = bench("concurrency", model, "--quick", "-o", out, "--max-batch-tokens", 256)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["16 tokens", "2 clients, 16 tokens"]
    assert all(row["rate"] > 0 for row in rows)


def test_decode_over_http_beside_the_process(tmp_path):
    model, out = save_decoder(tmp_path / "llama", "llama"), tmp_path / "out"
    with own_server(str(model), EngineFlags()) as url:
        done = bench("decode", model, "--quick", "--url", url, "-o", out)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert {row["target"] for row in written["rows"]} == {"in process", url}
    assert [check["kept"] for check in written["checks"]] == [True]
