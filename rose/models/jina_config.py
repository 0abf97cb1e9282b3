"""config.json of JinaBERT, whose `model_type` is BERT's. Free of torch.

The encoders of jina-embeddings-v2, and with norms of queries and keys those of its model for code,
say in `architectures`, `auto_map` and their tensors that they are no BERT.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from rose.models.architecture import Architecture
from rose.models.classifier_config import pooler_head
from rose.models.config import CheckpointFolder, ConfigReader
from rose.models.encoder_config import IGNORED, EncoderConfig, read_encoder_config
from rose.models.errors import CheckpointError
from rose.models.weight_files import WeightFiles, find_weight_files, read_headers, tensor_names

PLAIN, CODE = "jina_bert", "jina_bert_code"
ALIBI = "alibi"
_CLASS = "JinaBert"  # how its classes begin
_CODE_REPOSITORY = (
    "qk-post-norm"  # part of the name of the one with the classes of the model for code
)
# Tensors that BERT does not have, by what they tell.
_GATED = (".mlp.gated_layers.", ".mlp.up_gated_layer.")
_NORMED = ".attention.self.layer_norm_q."
_CLASSIFIER, _POOLER = "classifier.weight", "pooler.dense.weight"
_WITHOUT_HEAD = (f"{_CLASS}Model", f"{_CLASS}ForMaskedLM")
# Kinds of MLP with a gate -> its activation. "original" has none.
_GATES = {"geglu": "gelu", "reglu": "relu"}
_ORIGINAL = "original"


@dataclass(frozen=True, slots=True)
class JinaConfig(EncoderConfig):
    """Facts of JinaBERT: an encoder with slopes; `gated` is whether its MLP has a gate."""

    gated: bool = True


def tell_variant(reader: ConfigReader, folder: CheckpointFolder) -> str:
    """Return the name of the architecture of a checkpoint whose `model_type` is "bert".

    Raises:
        CheckpointError: it has BERT's tensors and JinaBERT's positions, or the other way round.
    """
    positions = reader.optional("position_embedding_type", str, record=False)
    named = _names_jina(reader)
    if positions != ALIBI and not named:
        return "bert"
    if positions != ALIBI:
        raise CheckpointError(
            f"{reader.where('position_embedding_type')}: {positions or 'absolute'!r} is not "
            f"supported for {_CLASS} (as architectures or auto_map say), only {ALIBI!r}"
        )
    files = find_weight_files(folder)
    names = tensor_names(files)
    if not named and not _holds(names, *_GATED):
        raise CheckpointError(
            f"{reader.where('position_embedding_type')}: {ALIBI!r} is supported for {_CLASS} "
            f"alone, and this is none: neither architectures nor auto_map name it, and the "
            f"weights have no tensor such as encoder.layer.0{_GATED[0]}weight"
        )
    _read_head(reader, files)
    is_code = _holds(names, _NORMED) if names is not None else _CODE_REPOSITORY in _origin(reader)
    return CODE if is_code else PLAIN


def _holds(names: list[str] | None, *parts: str) -> bool:
    return any(part in name for name in names or () for part in parts)


def _names_jina(reader: ConfigReader) -> bool:
    return any(name.startswith(_CLASS) for name in _architectures(reader)) or any(
        path.rpartition(".")[2].startswith(_CLASS) for path in _auto_map(reader)
    )


def _architectures(reader: ConfigReader) -> list[str]:
    names = reader.values.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def _auto_map(reader: ConfigReader) -> Iterator[str]:
    """Yield the paths of classes, such as "owner/name--module.class"; without "--" its own."""
    values = reader.values.get("auto_map")
    for value in values.values() if isinstance(values, dict) else ():
        yield from (str(path) for path in (value if isinstance(value, list) else [value]))


def _origin(reader: ConfigReader) -> str:
    return " ".join([str(reader.values.get("_name_or_path")), *_auto_map(reader)])


def _read_head(reader: ConfigReader, files: WeightFiles) -> None:
    """Let the tensors say that there is a classifier, and of how many labels.

    The rerankers' config.json leaves the labels to those who load it.
    """
    shapes = {header.name: header.shape for header in read_headers(files)}
    shape = shapes.get(_CLASSIFIER)
    if shape is None or not any(f".{name}".endswith(f".{_POOLER}") for name in shapes):
        return
    source = f"the weights: {_CLASSIFIER}"
    if all(name in _WITHOUT_HEAD for name in _architectures(reader)):
        reader.override({"architectures": [f"{_CLASS}ForSequenceClassification"]}, source)
    if not reader.has("id2label") and not reader.has("num_labels"):
        reader.override({"num_labels": shape[0]}, source)


def read_jina_config(reader: ConfigReader) -> JinaConfig:
    """Read config.json with the defaults of the model's published configuration class.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    config = read_encoder_config(reader, vocab_size=30522, positions=ALIBI)
    kind = reader.get("feed_forward_type", _ORIGINAL, str)
    if kind not in (*_GATES, _ORIGINAL):
        raise CheckpointError(
            f"{reader.where('feed_forward_type')}: {kind!r} is not supported, only "
            f"{', '.join((*_GATES, _ORIGINAL))}"
        )
    config = replace(
        config,
        activation=_GATES.get(kind, config.activation),
        up_bias=kind == _ORIGINAL,
        slopes=alibi_slopes(config.num_heads),
    )
    facts = {field.name: getattr(config, field.name) for field in fields(config)}
    return JinaConfig(**facts, gated=kind in _GATES)


def read_jina_code_config(reader: ConfigReader) -> JinaConfig:
    """Read config.json of the model for code, whose MLPs have no first bias.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    return replace(read_jina_config(reader), up_bias=False)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi (Press et al., 2022) for this many heads.

    Of a power of two: a geometric series that ends with 2^-8. Of others: those of the next lower
    one, then every other slope of the next higher one.
    """
    regular = 1 << (heads.bit_length() - 1)
    series = [2.0 ** (-8 * (index + 1) / regular) for index in range(regular)]
    between = [2.0 ** (-4 * (index + 1) / regular) for index in range(0, 2 * regular, 2)]
    assert math.isclose(series[-1], 2**-8)
    return (*series, *between[: heads - regular])


JINA_BERT = Architecture(
    name=PLAIN,
    read_config=read_jina_config,
    backbone="rose.models.jina:JinaBertModel",
    ignored=IGNORED,
    fused=(("mlp.gated_layers", ("mlp.gate", "mlp.up")),),
    classifier=pooler_head,
)
JINA_BERT_CODE = Architecture(
    name=CODE,
    read_config=read_jina_code_config,
    backbone="rose.models.jina:JinaCodeModel",
    ignored=IGNORED,
    fused=(("mlp.up_gated_layer", ("mlp.up", "mlp.gate")),),
    classifier=pooler_head,
)
