"""Drives a generation loop in tests: requests in, all that came of each out."""

from dataclasses import dataclass, field

import torch

from rose.kernels.attention import BACKENDS
from rose.runtime.decode import DecodeRuntime
from rose.runtime.generation import Failed, GenerationLoop
from rose.runtime.kv_cache import PagePool
from rose.runtime.options import SamplingParams
from rose.runtime.scheduler import SLOTS_PER_SEQUENCE, Scheduler
from rose.runtime.snapshots import Snapshots


@dataclass
class Output:
    """What came for one request."""

    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    error: Exception | None = None


class Rig:
    """A loop over a model, with everything that a test may want to squeeze."""

    def __init__(
        self,
        model,
        worker,
        *,
        num_pages=400,
        page_size=4,
        seqs=16,
        step_tokens=512,
        model_len=128,
        caching=True,
        snapshots=0,
        gap=4,
        grid=1,
        depth=2,
        eos_ids=(),
        grammars=None,
        on_arrival=None,
        backend=None,
        dtype=torch.float32,
    ):
        kept = None
        if snapshots:
            first = SLOTS_PER_SEQUENCE * seqs
            kept = Snapshots(snapshots, first, grid=grid, gap=gap, interval=16 * page_size)
        self.pool = PagePool(num_pages, page_size, prefix_caching=caching, snapshots=kept)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=seqs,
            max_step_tokens=step_tokens,
            max_model_len=model_len,
            eos_ids=eos_ids,
        )
        self.runtime = DecodeRuntime(
            model,
            backend or BACKENDS.load("torch_sdpa")(),
            worker,
            num_pages=num_pages,
            page_size=page_size,
            num_slots=self.scheduler.num_slots,
            num_snapshots=snapshots,
            eos_ids=eos_ids,
            dtype=dtype,
        )
        self.loop = GenerationLoop(
            self.runtime,
            self.scheduler,
            max_in_flight=depth,
            grammars=grammars,
            on_arrival=on_arrival,
        )
        self.outputs = {}

    def add(self, request_id, prompt, params=None, **options):
        self.loop.add(request_id, prompt, params or SamplingParams(**options))
        self.outputs[request_id] = Output()

    def advance(self):
        while self.loop.advance():
            pass

    def collect(self):
        for event in self.loop.collect(timeout=60):
            output = self.outputs[event.request_id]
            assert output.finish is None
            assert output.error is None
            if isinstance(event, Failed):
                output.error = event.error
                continue
            assert (event.prompt_logprobs is None) or not output.tokens
            if event.prompt_logprobs is not None:
                output.prompt_logprobs = event.prompt_logprobs
            output.tokens += event.token_ids
            output.logprobs += event.logprobs or []
            output.cached_tokens = event.cached_tokens
            output.finish = event.finish

    def drain(self):
        while self.loop.has_work:
            self.advance()
            self.collect()
        self.scheduler.check()
        assert self.pool.used == 0
        assert not self.loop._alive
        assert not self.loop._prompt_logprobs
        return self.outputs

    def run(self, requests):
        """Serve (prompt, params) pairs together; returns their outputs in order."""
        for index, (prompt, params) in enumerate(requests):
            self.add(index, prompt, params)
        self.drain()
        return [self.outputs[index] for index in range(len(requests))]
