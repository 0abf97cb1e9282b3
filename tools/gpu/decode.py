"""Decoding of 1, 8 and 32 streams beside transformers, with graphs and without."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rose.runtime.build import ModelOptions, build
from rose.runtime.generation import Failed, GenerationLoop
from rose.runtime.options import SamplingParams
from tools.gpu import roofs
from tools.gpu.stage import Context

STREAMS, PROMPT, NEW = (1, 8, 32), 128, 64
NEAR_TIE = 1e-3  # two logits in float32 that are no further apart may change places by rounding
Ids = list[int]


@dataclass
class Times:
    """Seconds to the first token of the slowest stream, and to the last token of all."""

    first: float
    total: float


def run(context: Context) -> None:
    """Compare greedy tokens in float32, then time in the models' dtype."""
    streams, prompt, new = ((1, 2), 12, 4) if context.dry else (STREAMS, PROMPT, NEW)
    _compare(context, prompt, new)
    rows = []
    for graphs in (True, False):
        name = f"ROSE, graphs {'on' if graphs else 'off'}"
        with _Loop(context, context.dtype, graphs=graphs) as loop:
            for count in streams:
                prompts = _prompts(count, prompt)
                _generate(loop, prompts, new)  # warms up, captures
                rows.append(_row(context, name, count, new, _timed(loop, prompts, new)))
    model = _reference(context, context.dtype)
    for count in streams:
        times = _timed_reference(context, model, _prompts(count, prompt), new)
        rows.append(_row(context, "transformers", count, new, times))
    columns = ["by", "streams", "first token ms", "ms a token", "tokens/s", "weights at bandwidth"]
    context.report.table("Decoding, qwen3", columns, rows)


class _Loop:
    """A generation loop over the checkpoint."""

    def __init__(self, context: Context, dtype: str, *, graphs: bool) -> None:
        self._served = build(
            ModelOptions(
                path=str(context.folder / "qwen3"),
                device=str(context.device),
                dtype=dtype,
                tasks=("generate",),
                max_model_len=1024,
                max_graph_tokens=None if graphs else 0,
            )
        )
        self._count = 0

    def __enter__(self) -> "_Loop":
        assert self._served.generation is not None
        self.loop: GenerationLoop = self._served.generation.make_loop()
        return self

    def __exit__(self, *_: object) -> None:
        self._served.close()

    def next_id(self) -> int:
        self._count += 1
        return self._count


def _prompts(count: int, tokens: int) -> list[Ids]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(2, 290, (count, tokens), generator=generator).tolist()


def _generate(
    loop: _Loop, prompts: Sequence[Ids], new: int, began: float = 0.0
) -> tuple[list[Ids], float]:
    """Continue prompts greedily; returns their tokens, and when each had its first one."""
    requests = {loop.next_id(): index for index, _ in enumerate(prompts)}
    salt = str(min(requests))  # no prompt is found in the cache of an earlier run
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, cache_salt=salt)
    for request, index in requests.items():
        loop.loop.add(request, prompts[index], params)
    outputs: list[Ids] = [[] for _ in prompts]
    last_first = 0.0
    while loop.loop.has_work:
        while loop.loop.advance():
            pass
        for item in loop.loop.collect(None):
            if isinstance(item, Failed):
                raise item.error
            mine = outputs[requests[item.request_id]]
            if not mine and item.token_ids:
                last_first = time.perf_counter() - began
            mine += item.token_ids
    return outputs, last_first


def _timed(loop: _Loop, prompts: Sequence[Ids], new: int) -> Times:
    began = time.perf_counter()
    _, first = _generate(loop, prompts, new, began)
    return Times(first, time.perf_counter() - began)


def _reference(context: Context, dtype: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        context.folder / "qwen3", dtype=getattr(torch, dtype)
    )
    model.generation_config = GenerationConfig(pad_token_id=1)
    return model.eval().to(context.device)


def _continue(model: PreTrainedModel, prompts: Sequence[Ids], new: int, **more: object) -> object:
    ids = torch.tensor(prompts, device=model.device)
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **more)


def _timed_reference(
    context: Context, model: PreTrainedModel, prompts: Sequence[Ids], new: int
) -> Times:
    _continue(model, prompts, 2)
    spans = []
    for tokens in (1, new):
        context.synchronize()
        began = time.perf_counter()
        _continue(model, prompts, tokens)
        context.synchronize()
        spans.append(time.perf_counter() - began)
    return Times(*spans)


def _row(context: Context, name: str, streams: int, new: int, times: Times) -> list[str]:
    step = (times.total - times.first) / max(1, new - 1)
    file = next((context.folder / "qwen3").glob("*.safetensors"))
    share = file.stat().st_size / roofs.read(context.folder).bytes / step if step > 0 else 0.0
    cells = [name, str(streams), f"{1e3 * times.first:.1f}", f"{1e3 * step:.2f}"]
    return [*cells, f"{streams * new / times.total:.0f}", f"{100 * share:.0f} %"]


def _compare(context: Context, prompt: int, new: int) -> None:
    """Hold greedy tokens in float32 to transformers'; a near tie may go either way."""
    prompts = _prompts(4, prompt)
    model = _reference(context, "float32")
    answer = _continue(model, prompts, new, return_dict_in_generate=True, output_logits=True)
    expected = answer.sequences[:, prompt:].tolist()
    best_two = torch.stack([step.float().topk(2).values for step in answer.logits]).cpu()
    margins = (best_two[..., 0] - best_two[..., 1]).T
    with _Loop(context, "float32", graphs=True) as loop:
        outputs, _ = _generate(loop, prompts, new)
    wrong = 0
    for row, (ours, wanted) in enumerate(zip(outputs, expected, strict=True)):
        parted = next(
            (i for i, pair in enumerate(zip(ours, wanted, strict=True)) if pair[0] != pair[1]), None
        )
        wrong += parted is not None and float(margins[row, parted]) > NEAR_TIE
    context.report.check(
        "greedy outputs in float32 that differ from transformers'", wrong, "0", wrong == 0
    )
