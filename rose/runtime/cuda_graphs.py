"""Captures CUDA graphs while a server serves.

`torch.cuda.graph` waits for the whole device and empties its caches, so capturing is done here by
hand: on a stream of its own, in thread-local mode, so that other threads may go on using CUDA.
"""

import threading
from collections.abc import Callable

import torch

_CAPTURING = threading.Lock()  # one capture at a time in a process


class CudaCapturer:
    """Captures on one device. All graphs share a memory pool: they never run at the same time.

    Inputs and outputs of a graph lie outside the pool, made by whoever calls.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the capture stream and the pool."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._broken: list[torch.cuda.CUDAGraph] = []

    def warm(self, function: Callable[[], None]) -> None:
        """Run `function` on the capture stream, between the work before and after it.

        cuBLAS has a workspace per stream, and kernels may be compiled at their first launch.
        """
        self._on_stream(function)

    def capture(self, function: Callable[[], None]) -> "CudaGraph":
        """Record what `function` launches; nothing of it runs.

        Raises:
            RuntimeError: an operation cannot be captured.
        """
        with _CAPTURING:
            free = torch.cuda.mem_get_info(self._device)[0]
            graph = torch.cuda.CUDAGraph()
            self._on_stream(lambda: self._record(graph, function))
            used = free - torch.cuda.mem_get_info(self._device)[0]
            return CudaGraph(graph, max(0, used))

    def _on_stream(self, function: Callable[[], None]) -> None:
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        try:
            with torch.cuda.stream(self._stream):
                function()
        finally:  # what a failed call has launched must not be overtaken either
            compute.wait_stream(self._stream)

    def _record(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            function()
        except BaseException:
            self._abandon(graph)
            raise
        try:
            graph.capture_end()
        except BaseException:
            self._keep_broken(graph)
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Take the stream out of a capture that has failed; the first error is the one to raise."""
        try:
            graph.capture_end()
            graph.reset()
        except RuntimeError:
            self._keep_broken(graph)

    def _keep_broken(self, graph: torch.cuda.CUDAGraph) -> None:
        """Turn to a fresh pool: torch's allocator still refers to the old one and to the graph."""
        self._broken.append(graph)
        self._pool = torch.cuda.graph_pool_handle()


class CudaGraph:
    """A captured graph.

    `num_bytes` is how much less memory was free after the capture: what the shared pool and the
    driver took for it.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int) -> None:
        """Keep a graph that was captured and instantiated."""
        self.num_bytes = num_bytes
        self._graph = graph

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Free it; its memory goes back to the shared pool, for the next capture."""
        self._graph.reset()
