"""The process tree with stand-ins for engines and gateway: signals, order, restarts, the example."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rose.serving.supervisor import ModelSpec, _curl, parse_models
from tests.ports import free_port

# Both roles: it beats, notes what happens to it in a file, and ends when asked to, after a while.
STAND_IN = """
import json, os, signal, socket, sys, threading, time

role = sys.argv[1]
name = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else role
say = lambda what: print(f"{name} {what}", file=open(os.environ["NOTES"], "a"), flush=True)
heartbeat = int(os.environ["ROSE_HEARTBEAT_FD"])
listener = None

def stop(*_):
    say("asked to stop")
    if listener:
        listener.close()
    time.sleep(float(os.environ.get(f"STOP_S_{role}", "0")))
    say("ends")
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
if os.environ.get("FAIL") == role:
    sys.exit(3)
if "--bind" in sys.argv:
    open(sys.argv[sys.argv.index("--bind") + 1].removeprefix("ipc://"), "w").close()
if role == "gateway":
    listener = socket.socket(fileno=int(sys.argv[sys.argv.index("--listen-fd") + 1]))
    say(f"key {os.environ.get('ROSE_API_KEY')}")

def serve():
    listener.settimeout(0.05)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        request = connection.recv(4096).decode()
        models = {"data": [{"id": "m", "tasks": json.loads(os.environ.get("TASKS", '["embed"]'))}]}
        ready = os.environ.get("READY", "1") == "1"
        body = json.dumps(models) if "/v1/models" in request else "{}"
        status = "200 OK" if ready else "503 Not ready"
        head = f"HTTP/1.1 {status}\\r\\nContent-Length: {len(body)}\\r\\nConnection: close\\r\\n\\r\\n"
        connection.sendall((head + body).encode())
        connection.close()

if listener:
    threading.Thread(target=serve, daemon=True).start()
say(f"started {os.getpid()}")
while True:
    os.write(heartbeat, b".")
    time.sleep(0.1)
"""

SUPERVISE = """
import sys
from rose.serving import children, supervisor
from rose.serving.process import set_up_logging

class StandIn(children.Child):
    def __init__(self, name, arguments, **options):
        super().__init__(name, arguments, **options)
        self._command = [sys.executable, {stand_in!r}, *arguments]

set_up_logging("info", "serve")
supervisor.Child = StandIn
children.FIRST_DELAY_S = 0.01
models = [supervisor.ModelSpec(name, "path") for name in {names!r}]
tree = supervisor.Supervisor(models, host="127.0.0.1", port={port}, secrets={{"ROSE_API_KEY": {key!r}}})
try:
    sys.exit(tree.run())
except children.ChildFailedError as error:
    sys.exit(f"error: {{error}}")
"""


class Tree:
    """A supervisor in a process of its own."""

    def __init__(self, folder, *, names=("m",), key="", before="", **environment):
        self.port = free_port()
        self.notes = folder / "notes"
        self.notes.touch()
        stand_in = folder / "stand_in.py"
        stand_in.write_text(STAND_IN)
        code = SUPERVISE.format(stand_in=str(stand_in), names=names, port=self.port, key=key)
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", before + code],
                stdout=output,
                stderr=output,
                env={**os.environ, "NOTES": str(self.notes), **environment},
            )

    def wait_for(self, pattern, times=1):
        """Wait until notes or output hold a pattern; returns its first group, if it has one."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            text = self.notes.read_text() + self.output.read_text()
            found = re.findall(pattern, text)
            if len(found) >= times:
                return found[-1]
            time.sleep(0.02)
        raise TimeoutError(f"no {pattern!r} in: {text}")

    def serving(self):
        self.wait_for("ROSE serves")
        return self

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(30)

    def close(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def tree(tmp_path):
    trees = []

    def start(**options):
        trees.append(Tree(tmp_path, **options))
        return trees[-1]

    yield start
    for started in trees:
        started.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_gateway_and_then_all_engines_at_once(tree, number):
    running = tree(names=("m", "n"), STOP_S_engine="2", STOP_S_gateway="0.1").serving()
    assert running.stop(number) == 0
    asked = [
        line for line in running.notes.read_text().splitlines() if line[-1] == "s" or "stop" in line
    ]
    assert asked[:2] == ["gateway asked to stop", "gateway ends"]
    assert sorted(asked[2:4]) == ["m asked to stop", "n asked to stop"], "before either ends"
    assert sorted(asked[4:]) == ["m ends", "n ends"]


def test_nohup_is_heeded(tree):
    before = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    running = tree(before=before).serving()
    running.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert running.process.poll() is None
    assert running.stop() == 0


def test_a_second_signal_ends_everything_at_once(tree):
    running = tree(STOP_S_gateway="60", STOP_S_engine="60").serving()
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("gateway asked to stop")
    began = time.monotonic()
    assert running.stop() == 1
    assert time.monotonic() - began < 10
    last = running.output.read_text().splitlines()[-1]
    assert "not stopped cleanly: gateway did not end in time and was killed; engine m did" in last


def test_a_child_that_outlasts_the_drain_is_killed_and_told_of(tree):
    limits = "import rose.serving.supervisor as s; s.GATEWAY_STOP_S = s.ENGINE_STOP_S = 0.3\n"
    running = tree(before=limits, STOP_S_engine="60").serving()
    assert running.stop() == 1
    last = running.output.read_text().splitlines()[-1]
    assert last.endswith("not stopped cleanly: engine m did not end in time and was killed")


def test_a_child_that_dies_while_it_drains_is_told_of(tree):
    running = tree(STOP_S_gateway="60").serving()
    pid = int(running.wait_for(r"gateway started (\d+)"))
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("gateway asked to stop")
    os.kill(pid, signal.SIGKILL)
    assert running.process.wait(30) == 1
    assert "not stopped cleanly: gateway was ended by SIGKILL" in running.output.read_text()


def test_a_signal_while_models_load_stops_too(tree):
    running = tree(READY="0")
    running.wait_for("gateway started")
    assert running.stop() == 0
    assert "ROSE serves" not in running.output.read_text()


def test_no_connection_is_taken_while_the_gateway_drains(tree):
    running = tree(STOP_S_gateway="2").serving()
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("gateway asked to stop")
    time.sleep(0.2)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", running.port), timeout=1).close()
    assert running.process.wait(30) == 0


def test_a_gateway_that_is_started_again_keeps_the_port(tree):
    running = tree().serving()
    os.kill(int(running.wait_for(r"gateway started (\d+)")), signal.SIGKILL)
    running.wait_for("gateway started", times=2)
    url = f"http://127.0.0.1:{running.port}/ready"
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.status == 200
    assert "perhaps for lack of memory" in running.output.read_text()
    assert running.stop() == 0


def test_a_child_that_cannot_start_ends_the_tree_with_its_name(tree):
    running = tree(FAIL="engine", READY="0")
    assert running.process.wait(30) == 1
    assert (
        "error: engine m ended with exit code 3; its message is above" in running.output.read_text()
    )


def test_there_is_an_example_for_each_task(tree):
    running = tree(TASKS='["embed", "generate"]', key="secret other").serving()
    command = shlex.split(running.wait_for(r"Try:\n  (curl .*)\n"))
    assert command[1] == f"http://127.0.0.1:{running.port}/v1/chat/completions"
    assert json.loads(command[-1])["model"] == "m"
    assert "Authorization: Bearer $ROSE_API_KEY" in command
    other = shlex.split(running.wait_for(r"Try:\n.*\n  (curl .*)\n"))
    assert other[1].endswith("/v1/embeddings")
    assert running.output.read_text().count("curl") == 2
    assert "secret" not in running.output.read_text()
    assert running.wait_for("gateway key (.*)") == "secret other"
    assert running.stop() == 0


def test_a_ranker_has_an_example_too(tree):
    running = tree(TASKS='["score"]').serving()
    command = shlex.split(running.wait_for(r"\n  (curl .*)\n"))
    assert command[1].endswith("/v1/rerank")
    assert running.stop() == 0


def test_without_a_known_task_there_is_no_example(tree):
    running = tree(TASKS='["dream"]').serving()
    running.stop()
    assert "curl" not in running.output.read_text()


def test_the_folder_of_the_sockets_is_private_and_goes_away(tree, tmp_path):
    running = tree(TMPDIR=str(tmp_path)).serving()
    (folder,) = tmp_path.glob("rose-*")
    assert folder.stat().st_mode & 0o077 == 0
    running.stop()
    assert list(tmp_path.glob("rose-*")) == []


def test_engines_whose_sockets_were_removed_are_started_again_one_by_one(tree, tmp_path):
    running = tree(names=("m", "n"), TMPDIR=str(tmp_path), STOP_S_engine="0.3").serving()
    (folder,) = tmp_path.glob("rose-*")
    pids = [running.wait_for(rf"{name} started (\d+)") for name in "mn"]
    shutil.rmtree(folder)
    running.wait_for("m started", times=2)
    running.wait_for("n started", times=2)
    assert "was removed by somebody and is made again" in running.output.read_text()
    lines = running.notes.read_text().splitlines()
    assert lines.index("m ends") < lines.index("n asked to stop") or lines.index(
        "n ends"
    ) < lines.index("m asked to stop")
    assert pids != [running.wait_for(rf"{name} started (\d+)") for name in "mn"]
    assert sorted(path.name for path in folder.iterdir()) == ["0.sock", "1.sock", "owner"]
    assert running.stop() == 0
    assert list(tmp_path.glob("rose-*")) == []


def test_a_folder_that_cannot_be_made_again_ends_the_tree_with_a_reason(tree, tmp_path):
    (tmp_path / "tmp").mkdir()
    running = tree(TMPDIR=str(tmp_path / "tmp")).serving()
    shutil.rmtree(tmp_path / "tmp")
    (tmp_path / "tmp").touch()
    assert running.process.wait(30) == 1
    last = running.output.read_text().splitlines()[-1]
    assert "error: the folder of the sockets was removed and cannot be made again" in last


def test_a_command_survives_the_shell():
    command = _curl("http://h/p", {"model": 'it\'s "mine"', "input": "$HOME `x`"}, keyed=False)
    done = subprocess.run(
        ["sh", "-c", command.replace("curl", "printf '%s\\n'", 1)], capture_output=True, text=True
    )
    assert json.loads(done.stdout.splitlines()[-1])["model"] == 'it\'s "mine"'


def test_models_and_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a=b").mkdir()
    assert parse_models(["x/y/model/", "alias=x/z", "a=b"]) == [
        ModelSpec("model", "x/y/model/"),
        ModelSpec("alias", "x/z"),
        ModelSpec("a=b", "a=b"),
    ]
    with pytest.raises(ValueError, match="two models are called 'model'"):
        parse_models(["x/model", "model=y"])
