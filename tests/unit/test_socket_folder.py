"""The folder of the sockets: who owns it, who may sweep it away."""

import os
import subprocess
import sys

import pytest

from rose.serving import socket_folder
from rose.serving.socket_folder import OWNER, SocketFolder, sweep

HOLD = """
import sys, time
from rose.serving.socket_folder import SocketFolder
with SocketFolder() as folder:
    (folder.path / "0.sock").touch()
    print(folder.path, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(socket_folder.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(tmp):
    """Another process that has a folder."""
    environment = {**os.environ, "TMPDIR": str(tmp)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=environment
    )
    process.path = socket_folder.Path(process.stdout.readline().strip())
    yield process
    process.kill()
    process.communicate()


def test_the_folder_of_a_killed_owner_is_swept_by_the_next_start(tmp, other):
    assert sweep() == []
    with SocketFolder() as folder:
        assert (other.path / "0.sock").exists(), "its owner lives"
        assert folder.path != other.path
    other.kill()
    other.wait()
    with SocketFolder() as folder:
        assert list(tmp.iterdir()) == [folder.path]
    assert list(tmp.iterdir()) == []


def test_only_folders_of_the_kind_are_swept(tmp):
    for name in ("rose-tool-x", "rose-", "other"):
        (tmp / name).mkdir()
    (tmp / "other" / OWNER).touch()
    (tmp / "elsewhere").mkdir()
    (tmp / "elsewhere" / OWNER).touch()
    (tmp / "rose-link").symlink_to(tmp / "elsewhere")
    assert sweep() == []
    assert len(list(tmp.iterdir())) == 5


def test_a_folder_that_was_removed_is_made_again_and_still_owned(tmp):
    with SocketFolder() as folder:
        assert not folder.restore()
        socket_folder.shutil.rmtree(folder.path)
        assert folder.restore()
        assert not folder.restore()
        assert folder.path.stat().st_mode & 0o077 == 0
        assert sweep() == []


def test_no_file_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    with SocketFolder() as folder:
        socket_folder.shutil.rmtree(folder.path)
        folder.restore()
    assert len(os.listdir("/proc/self/fd")) == before
