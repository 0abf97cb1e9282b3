"""Rounds the weights of a loaded model, and refuses where that changes its vectors.

Shape letters: B texts, C channels, D channels of a vector.
"""

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose.kernels.pooling import mean
from rose.models.classifier import SequenceClassifier
from rose.models.layers import prepare
from rose.models.loader import LoadedModel
from rose.models.sample_texts import encode_samples, input_power, pack

log = logging.getLogger(__name__)

LEAST_COSINE = 0.999
MAX_LEN = 512  # tokens of a built-in text


def prepare_loaded(loaded: LoadedModel) -> None:
    """Bring a model's weights into the form that it is served with, rounded where its card says so.

    Weights of 4 bits are chosen by what the projections are given for a few built-in texts. Vectors
    of these texts are computed before and after. Weights that were stored rounded were chosen then,
    and the vectors of the original are gone.

    Raises:
        ValueError: the quantization cannot be computed here, or changes vectors too much.
    """
    kind = loaded.card.quantization
    if kind is None or loaded.stored_quantization is not None:
        _prepare(loaded, kind, [])
        return
    limit = min(MAX_LEN, loaded.card.max_model_len)
    texts = encode_samples(loaded.tokenizer_json, loaded.card.vocab_size, limit)
    before_BD = _vectors(loaded, texts)
    _prepare(loaded, kind, texts)
    after_BD = _vectors(loaded, texts)
    if before_BD is not None and after_BD is not None:
        way_out = "without quantization"
        if loaded.lm is not None:
            way_out += ", or with --task generate"
        _compare(kind, before_BD, after_BD, way_out)


def _prepare(loaded: LoadedModel, kind: str | None, texts: Sequence[list[int]]) -> None:
    """Prepare every part; `texts` are to choose weights of 4 bits by, where there are any."""
    power = input_power(loaded.backbone, texts) if kind == "int4" and texts else None
    if isinstance(loaded.classifier, SequenceClassifier):
        # In float32, whatever the backbone's weights are rounded to.
        prepare(loaded.classifier.head)
    for model in (loaded.lm, loaded.embedding, loaded.classifier):
        if isinstance(model, nn.Module):
            prepare(model, kind, power)


@torch.inference_mode()
def _vectors(loaded: LoadedModel, texts: Sequence[list[int]]) -> Tensor | None:
    """Return vectors of texts, float32 [B, D]; None of a model that only generates.

    A model that scores has none, so that the means of its hidden states stand for them.
    """
    if not texts or (loaded.embedding is None and loaded.classifier is None):
        return None
    batch, cu_seqlens = pack(loaded.backbone, texts)
    if loaded.embedding is not None:
        vectors_BD: Tensor = loaded.embedding(batch, cu_seqlens)
        return vectors_BD.float().clone()
    return mean(loaded.backbone(batch).float(), cu_seqlens).clone()


def _compare(kind: str, before_BD: Tensor, after_BD: Tensor, way_out: str) -> None:
    cosines_B = F.cosine_similarity(before_BD, after_BD)
    least = float(cosines_B.min())
    log.info(
        "quantization %s: least cosine to float32 of %d texts: %.5f", kind, len(cosines_B), least
    )
    if not least >= LEAST_COSINE:
        raise ValueError(
            f"--quantization: {kind} changes the vectors of this model too much: of "
            f"{len(cosines_B)} built-in texts the least cosine to float32 is {least:.4f}, and "
            f"{LEAST_COSINE} is wanted. Serve it {way_out}."
        )
