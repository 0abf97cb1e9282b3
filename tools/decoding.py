"""Running ROSE's decode runtime and transformers on the same token ids, for tools that compare."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from rose.runtime.build import PAGE_SIZE, ModelOptions, build
from rose.runtime.generation import Failed, GenerationLoop
from rose.runtime.kv_pool import page_bytes
from rose.runtime.options import SamplingParams
from tools.texts import mixed_texts

NEAR_TIE = 1e-4  # two logits that are no further apart may change places by rounding
Ids = list[int]


@dataclass(frozen=True)
class Continuation:
    """What transformers makes of a prompt: its tokens, and how sure it was of each.

    `margins` are the distances of the two largest logits.
    """

    tokens: Ids
    margins: list[float]

    def fault_at(self, tokens: Ids) -> int | None:
        """Where other tokens part from these first; None if they never do."""
        pairs = zip(self.tokens, tokens, strict=True)
        return next((i for i, (one, other) in enumerate(pairs) if one != other), None)

    def is_tie(self, position: int) -> bool:
        """Whether rounding may decide at a position."""
        return self.margins[position] < NEAR_TIE


@dataclass(frozen=True)
class Verdict:
    """How many outputs equal the expected ones, part at a near tie, or are wrong."""

    equal: int
    excused: int
    wrong: int

    @classmethod
    def of(cls, outputs: Sequence[Ids], expected: Sequence[Continuation]) -> "Verdict":
        """Compare outputs with what transformers makes."""
        parted = [(one, one.fault_at(out)) for one, out in zip(expected, outputs, strict=True)]
        excused = sum(at is not None and one.is_tie(at) for one, at in parted)
        equal = sum(at is None for _, at in parted)
        return cls(equal, excused, len(parted) - equal - excused)


def draw_prompts(
    path: Path, lengths: Sequence[int], count: int, seed: int, extra: Sequence[str]
) -> list[Ids]:
    """Draw `count` prompts of texts, cut to `lengths` tokens in turn."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    texts = iter(mixed_texts(50 * count, seed, extra))
    prompts: list[Ids] = []
    while len(prompts) < count:
        length = lengths[len(prompts) % len(lengths)]
        ids = tokenizer.encode(next(texts)).ids
        if len(ids) >= length and ids[:length] not in prompts:
            prompts.append(ids[:length])
    return prompts


@torch.inference_mode()
def reference_greedy(
    model: PreTrainedModel, prompts: Sequence[Ids], new: int
) -> list[Continuation]:
    """Continue prompts by transformers; those of one length together, so that nothing is padded."""
    found: dict[int, Continuation] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        group = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        answer = generate(model, [prompts[i] for i in group], new, output_logits=True)
        tokens = answer.sequences[:, length:].tolist()
        best_two_NB2 = torch.stack([step.topk(2).values for step in answer.logits])
        margins_BN = (best_two_NB2[..., 0] - best_two_NB2[..., 1]).T.tolist()
        for row, index in enumerate(group):
            found[index] = Continuation(tokens[row], margins_BN[row])
    return [found[index] for index in range(len(prompts))]


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Ids],
    new: int,
    **options: Any,  # noqa: ANN401
) -> GenerateDecoderOnlyOutput:
    """Continue prompts of one length greedily by transformers, past any end token."""
    ids = torch.tensor(prompts)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )


def bytes_of_pages(path: Path, pages: int) -> int:
    """Memory of so many pages in float32, the reserved one included."""
    served = build(ModelOptions(path=str(path), device="cpu", dtype="float32", max_num_seqs=1))
    served.close()
    specs = served.loaded.backbone.attention_specs
    return pages * page_bytes(specs, PAGE_SIZE, torch.float32)


@contextmanager
def decode_loop(path: Path, **options: Any) -> Iterator[GenerationLoop]:  # noqa: ANN401
    """A loop over a model in float32 with these `ModelOptions`."""
    served = build(
        ModelOptions(path=str(path), device="cpu", dtype="float32", tasks=("generate",), **options)
    )
    try:
        assert served.generation is not None
        yield served.generation.make_loop()
    finally:
        served.close()


def run(
    loop: GenerationLoop, prompts: Sequence[Ids], params: Sequence[SamplingParams]
) -> list[Ids]:
    """Continue prompts together; returns their tokens.

    Raises:
        Exception: what the loop reports for a sequence that failed.
    """
    tokens: list[Ids] = [[] for _ in prompts]
    for index, pair in enumerate(zip(prompts, params, strict=True)):
        loop.add(index, *pair)
    while loop.has_work:
        while loop.advance():
            pass
        for event in loop.collect(None):
            if isinstance(event, Failed):
                raise event.error
            assert isinstance(event.request_id, int)
            tokens[event.request_id] += event.token_ids
    return tokens


def greedy(new: int, salt: str = "") -> SamplingParams:
    """The most likely token each time, past any end token."""
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, cache_salt=salt)


def seeded(new: int, seed: int) -> SamplingParams:
    """Tokens drawn by a seed. They share no cached prefix with greedy sequences."""
    return SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        seed=seed,
        max_tokens=new,
        ignore_eos=True,
        cache_salt="seeded",
    )
