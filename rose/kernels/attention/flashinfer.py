"""Attention by FlashInfer: the back ends flashinfer-fa2 and flashinfer-fa3.

A layer's kind (heads, window, causal or not, ...) is planned once per batch, on the host, from
index tensors on the host; its layers then only launch. A plan goes to the device by a copy that may
still be waiting when the next plan is made, and both would use the wrapper's one staging buffer. So
each kind has two wrappers in turn, and an event behind each plan that the next one waits for.

A back end serves one device, from one thread. Shape letters: T tokens, H query heads, K key/value
heads, D head size, P pages, S slots of a page.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from rose.kernels.attention import flashinfer_memory as memory
from rose.kernels.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    FixedBatch,
    GraphSupport,
    KVPages,
    PagedLayout,
    RaggedLayout,
)
from rose.kernels.attention.flashinfer_plans import (
    CORE_GROUPS,
    Facts,
    LayerKind,
    PagedFacts,
    RaggedFacts,
    Wrapper,
    kind_of,
)
from rose.kernels.attention.gpu import device_reasons, layer_reasons, load_library
from rose.kernels.attention.stored import StoredAttention

HEAD_DIMS = (64, 128, 256)
TURNS = 2  # wrappers of a kind that take turns


class Event(Protocol):
    """A mark in the device's stream of work."""

    def record(self) -> None:
        """Put the mark behind all work so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has come past the mark."""
        ...


class FlashInferBackend(AttentionBackend):
    """What both kernels share."""

    kernel: ClassVar[str]
    graph_support = GraphSupport.ALL

    def __init__(self) -> None:
        """Start without any wrapper."""
        self._planners: dict[torch.device, _Planner] = {}

    def unsupported(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device
    ) -> list[str]:
        """Say why a layer cannot be served; an empty list means that it can."""
        reasons = [*self.device_reasons(device), *layer_reasons(spec, dtype)]
        if spec.head_dim not in HEAD_DIMS:
            known = ", ".join(map(str, HEAD_DIMS))
            reasons.append(f"head size {spec.head_dim} is none of {known}")
        if not spec.causal and spec.window[1] is not None:
            reasons.append(
                f"window {spec.window} looks right: FlashInfer bounds the left side only"
            )
        if not reasons and isinstance(library := self.library(), str):
            reasons.append(library)
        return reasons

    def library(self) -> ModuleType | str:
        """Return FlashInfer, or why it cannot be used."""
        return load_library("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper")

    def device_reasons(self, device: torch.device) -> list[str]:
        """Say why the kernel does not run on a device."""
        raise NotImplementedError

    def new_event(self) -> Event:
        """Make an event."""
        return torch.cuda.Event()

    def num_sms(self, device: torch.device) -> int:
        """Return the number of multiprocessors."""
        return int(torch.cuda.get_device_properties(device).multi_processor_count)

    def prepare(self, specs: Sequence[AttentionSpec], dtype: torch.dtype, *, paged: bool) -> None:
        """Compile FlashInfer's modules for these layers, all at once; they stay in its cache."""
        kinds = {kind_of(spec, dtype) for spec in specs}
        with suppress(ImportError):  # other versions compile each at its first plan
            from flashinfer.jit.attention.modules import (
                gen_batch_decode_module,
                gen_batch_prefill_module,
            )
            from flashinfer.jit.core import build_jit_specs

            modules = [gen_batch_prefill_module(self.kernel, *_module(k), False) for k in kinds]
            for kind in kinds if paged else ():
                if _uses_tensor_cores(kind):
                    modules.append(gen_batch_prefill_module("fa2", *_module(kind), False))
                else:
                    modules.append(gen_batch_decode_module(*_module(kind)))
            build_jit_specs(list({module.name: module for module in modules}.values()))

    def plan_ragged(self, layout: RaggedLayout) -> AttentionBatch:
        """Plan a batch without a KV cache."""
        device = layout.cu_seqlens.device
        facts = RaggedFacts.of([n for n in layout.lengths if n], device)
        return _RaggedBatch(self._planner(device), facts)

    def plan_paged(self, layout: PagedLayout, pages: KVPages) -> AttentionBatch:
        """Plan a batch whose keys and values are read from and written to `pages`."""
        facts = PagedFacts.of(layout, pages.page_size, keep_empty=False)
        planner = self._planner(layout.block_table.device)
        return _PagedBatch(planner, facts, pages, layout.slot_mapping)

    def fix_ragged(self, layout: RaggedLayout, max_seqlen: int) -> FixedBatch:
        """Plan batches of one size for a graph."""
        assert layout.max_seqlen <= max_seqlen
        device = layout.cu_seqlens.device
        return _FixedRagged(self._planner(device), RaggedFacts.of(layout.lengths, device))

    def fix_paged(self, layout: PagedLayout, pages: KVPages, max_kv_len: int) -> FixedBatch:
        """Plan steps of one size for a graph."""
        assert layout.max_kv_len <= max_kv_len <= layout.block_table.shape[1] * pages.page_size
        facts = PagedFacts.of(layout, pages.page_size, keep_empty=True)
        planner = self._planner(layout.block_table.device)
        return _FixedPaged(planner, facts, pages, layout.slot_mapping)

    def _planner(self, device: torch.device) -> "_Planner":
        if device not in self._planners:
            self._planners[device] = _Planner(self, device)
        return self._planners[device]


class FlashInferFa2Backend(FlashInferBackend):
    """FlashInfer's kernels for compute capability 8.0 and above."""

    name = "flashinfer-fa2"
    kernel = "fa2"

    def device_reasons(self, device: torch.device) -> list[str]:
        """Say why the kernel does not run on a device."""
        return device_reasons(device, (8, 0))


class FlashInferFa3Backend(FlashInferBackend):
    """FlashInfer's kernels for Hopper, which need CUDA 12.3.

    They load values past a sequence's end and weigh them with 0, so a NaN there spreads.
    """

    name = "flashinfer-fa3"
    kernel = "fa3"

    def device_reasons(self, device: torch.device) -> list[str]:
        """Say why the kernel does not run on a device."""
        reasons = device_reasons(device, (9, 0), (9, 0))
        version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
        if not reasons and version < (12, 3):
            reasons.append(f"CUDA {torch.version.cuda}: at least 12.3 is needed")
        return reasons


def _module(kind: LayerKind) -> tuple[Any, ...]:
    """What FlashInfer compiles a module by: dtypes, head sizes, no positions, window, soft cap."""
    dtypes = (kind.dtype, kind.dtype, kind.dtype, torch.int32)
    sizes = (kind.head_dim, kind.head_dim)
    return (*dtypes, *sizes, 0, kind.window_left >= 0, kind.soft_cap > 0)


def _uses_tensor_cores(kind: LayerKind) -> bool:
    return kind.heads // kind.kv_heads not in CORE_GROUPS


class _Slot:
    """A wrapper with the event behind its last plan, and the batch that the plan is for."""

    def __init__(self, wrapper: Wrapper, workspace: Tensor, event: Event) -> None:
        self.wrapper = wrapper
        self.workspace = workspace
        self.owner: object = None
        self._event = event
        self._planned = False

    def plan(self, facts: Facts, kind: LayerKind, owner: object) -> None:
        self.wait()
        facts.plan(self.wrapper, kind)
        self._event.record()
        self._planned, self.owner = True, owner

    def wait(self) -> None:
        """Wait until the last plan has been copied from the wrapper's staging buffer."""
        if self._planned:
            self._event.synchronize()

    def __del__(self) -> None:
        """The staging buffer must not be used for anything else before that."""
        if not sys.is_finalizing():
            self.wait()


class _Planner:
    """The wrappers of one device, and the workspace that they share since they run in turn."""

    def __init__(self, backend: FlashInferBackend, device: torch.device) -> None:
        library = backend.library()
        assert not isinstance(library, str), library
        self._library = library
        self._backend = backend
        self._device = device
        self._sms = backend.num_sms(device)
        self._workspace: Tensor | None = None
        self._slots: dict[tuple[str, LayerKind], list[_Slot]] = {}

    def take(self, facts: Facts, kind: LayerKind, owner: object) -> _Slot:
        """Plan a batch in the next of its kind's wrappers."""
        slots = self._slots.setdefault((facts.mode, kind), [])
        num_bytes = facts.float_bytes(kind, self._sms, fixed=False)
        if len(slots) < TURNS:
            slot = self._make(facts, kind, num_bytes, fixed=False)
        else:
            slot = slots.pop(0)
            if slot.workspace.numel() < num_bytes:
                slot = self._make(facts, kind, num_bytes, fixed=False)
        slots.append(slot)
        slot.plan(facts, kind, owner)
        return slot

    def fix(self, facts: Facts, kind: LayerKind, owner: object) -> _Slot:
        """Plan in a new wrapper with buffers of its own."""
        num_bytes = facts.float_bytes(kind, self._sms, fixed=True)
        slot = self._make(facts, kind, num_bytes, fixed=True)
        slot.plan(facts, kind, owner)
        return slot

    def _make(self, facts: Facts, kind: LayerKind, num_bytes: int, *, fixed: bool) -> _Slot:
        if self._workspace is None or self._workspace.numel() < num_bytes:
            # Zeros, as the decode kernels ask for. Wrappers keep the one they were made with.
            self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        kernel = self._backend.kernel
        if facts.mode == "decode":
            kernel = "tensor" if _uses_tensor_cores(kind) else "core"
        wrapper = facts.make(self._library, kernel, self._workspace, fixed=fixed)
        if fixed:  # of which there are many: the 8 MB that a wrapper starts with would add up
            ints = memory.int_workspace_bytes(*facts.size, kind.heads, kind.kv_heads, self._sms)
            buffer = torch.empty(ints, dtype=torch.uint8, device=self._device)
            wrapper.reset_workspace_buffer(self._workspace, buffer)
        return _Slot(wrapper, self._workspace, self._backend.new_event())


class _Plans:
    """The plans of one batch, one per kind of layer, made when the first such layer comes."""

    def __init__(self, planner: _Planner, facts: Facts) -> None:
        self._planner = planner
        self._facts = facts
        self._slots: dict[LayerKind, _Slot] = {}

    def wrapper(self, spec: AttentionSpec, dtype: torch.dtype) -> Wrapper:
        kind = kind_of(spec, dtype)
        slot = self._slots.get(kind)
        if slot is None or slot.owner is not self:  # a later batch may have taken it
            slot = self._slots[kind] = self._planner.take(self._facts, kind, self)
        return slot.wrapper


class _FixedPlans:
    """The same in wrappers that belong to one graph."""

    def __init__(self, planner: _Planner, facts: Facts) -> None:
        self._planner = planner
        self._facts = facts
        self._slots: dict[LayerKind, _Slot] = {}

    def wrapper(self, spec: AttentionSpec, dtype: torch.dtype) -> Wrapper:
        kind = kind_of(spec, dtype)
        if kind not in self._slots:
            self._slots[kind] = self._planner.fix(self._facts, kind, self)
        return self._slots[kind].wrapper

    def update(self, facts: Facts) -> None:
        assert (facts.mode, facts.size) == (self._facts.mode, self._facts.size), "another size"
        self._facts = facts
        for kind, slot in self._slots.items():
            slot.plan(facts, kind, self)


class _RaggedBatch:
    """Keys and values are those of this forward pass."""

    def __init__(self, planner: _Planner, facts: RaggedFacts) -> None:
        self._plans = _Plans(planner, facts)

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        if not q_THD.shape[0]:
            return q_THD.new_empty(q_THD.shape)
        out_THD: Tensor = self._plans.wrapper(spec, q_THD.dtype).run(q_THD, k_TKD, v_TKD)
        return out_THD


class _FixedRagged:
    """Ragged batches of one size."""

    def __init__(self, planner: _Planner, facts: RaggedFacts) -> None:
        self._plans = _FixedPlans(planner, facts)
        self._device = facts.device

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, spec: AttentionSpec) -> Tensor:
        out_THD: Tensor = self._plans.wrapper(spec, q_THD.dtype).run(q_THD, k_TKD, v_TKD)
        return out_THD

    def update(self, layout: RaggedLayout | PagedLayout) -> None:
        assert isinstance(layout, RaggedLayout)
        self._plans.update(RaggedFacts.of(layout.lengths, self._device))


class _PagedBatch(StoredAttention):
    """Keys and values are read from the pages."""

    def __init__(
        self, planner: _Planner, facts: PagedFacts, pages: KVPages, slots_T: Tensor
    ) -> None:
        super().__init__(pages, slots_T)
        self._plans: _Plans | _FixedPlans = _Plans(planner, facts)

    def attend_stored(self, q_THD: Tensor, spec: AttentionSpec) -> Tensor:
        if not q_THD.shape[0]:
            return q_THD.new_empty(q_THD.shape)
        wrapper = self._plans.wrapper(spec, q_THD.dtype)
        out_THD: Tensor = wrapper.run(q_THD, self.keys_and_values(spec.layer))
        return out_THD


class _FixedPaged(_PagedBatch):
    """Steps of one size."""

    def __init__(
        self, planner: _Planner, facts: PagedFacts, pages: KVPages, slots_T: Tensor
    ) -> None:
        super().__init__(planner, facts, pages, slots_T)
        self._fixed = self._plans = _FixedPlans(planner, facts)

    def update(self, layout: RaggedLayout | PagedLayout) -> None:
        assert isinstance(layout, PagedLayout)
        facts = PagedFacts.of(layout, self.pages.page_size, keep_empty=True)
        self._fixed.update(facts)
