"""What is loaded when a process begins to serve is out of the garbage collector's way."""

import gc
import weakref

import pytest

from rose.serving.process import freeze_heap


@pytest.fixture(autouse=True)
def _thaw():
    yield
    gc.unfreeze()


def test_a_full_collection_does_not_look_at_what_was_there():
    there = [[i] for i in range(1000)]
    freeze_heap()
    assert gc.get_freeze_count() >= len(there)
    assert not any(item is there for item in gc.get_objects())


def test_garbage_goes_before():
    class Node:
        pass

    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    del node
    freeze_heap()
    assert gone() is None
