"""How a checkpoint scores texts or pairs: its kind, labels, activation and template.

Free of torch. A ranker is a sequence classifier, or a causal language model that answers yes or no
(Qwen3-Reranker, and sentence-transformers' LogitScore module).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import Tokenizer

from rose.models.card import PairTemplate, ScoringCard
from rose.models.classifier_config import ClassifierHead, read_labels
from rose.models.config import CheckpointFolder, ConfigReader, Setting
from rose.models.errors import CheckpointError
from rose.models.recipe import SENTENCE_CONFIG, read_modules, read_prompts
from rose.models.recipe_modules import torch_activation
from rose.models.tokenizer import gives_segment_ids, read_tokenizer_json
from rose.models.transformer_module import CLASSIFY, YES_NO, Use, read_transformer_module

if TYPE_CHECKING:
    from rose.models.architecture import Architecture, ModelConfig
    from rose.models.card import ChatTexts

# The template of Qwen3-Reranker (Zhang et al., 2025), for chat models in the ChatML format.
QWEN3_RERANKER = PairTemplate(
    prefix=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    ),
    body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
_CHAT_ML = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Scoring:
    """What scoring needs: the card, and the head's facts or the ids of "yes" and "no".

    `token_ids` has one id where there is no "no".
    """

    card: ScoringCard
    head: ClassifierHead | None
    token_ids: tuple[int, ...]
    settings: tuple[Setting, ...]
    warnings: tuple[str, ...]


def read_classifier(
    folder: CheckpointFolder,
    reader: ConfigReader,
    architecture: "Architecture",
    config: "ModelConfig",
) -> Scoring:
    """Read what there is to know of a sequence classifier.

    Raises:
        CheckpointError: a setting is malformed or not supported.
    """
    assert architecture.classifier is not None
    module = read_transformer_module(folder, CLASSIFY)
    _check_modules(folder, CLASSIFY)
    labels = read_labels(reader)
    activation, source = _activation(folder, reader, len(labels))
    prompts, default = read_prompts(folder)
    card = ScoringCard(
        kind="cross_encoder",
        labels=labels,
        activation=activation,
        probabilities=_probabilities(reader, len(labels)),
        segment_ids=config.segments > 1 and gives_segment_ids(folder),
        chat=module.chat,
        prompts=prompts,
        default_prompt_name=default,
    )
    settings = (
        Setting("labels", labels, reader.source("id2label")),
        Setting("activation", activation, source),
        Setting("segment ids", card.segment_ids, "tokenizer and type_vocab_size"),
    )
    head = architecture.classifier(reader)
    return Scoring(card, head, (), settings, tuple(module.warnings))


def _probabilities(reader: ConfigReader, count: int) -> Literal["sigmoid", "softmax"]:
    problem = reader.optional("problem_type", str, record=False)
    return "sigmoid" if count == 1 or problem == "multi_label_classification" else "softmax"


def read_yes_no(folder: CheckpointFolder, reader: ConfigReader, vocab_size: int) -> Scoring:
    """Read what there is to know of a causal language model that answers yes or no.

    Raises:
        CheckpointError: a setting is malformed or not supported, or there is no template.
    """
    module = read_transformer_module(folder, YES_NO)
    _check_modules(folder, YES_NO)
    tokenizer = Tokenizer.from_str(read_tokenizer_json(folder).decode())
    ids, ids_source = _answer_ids(folder, tokenizer, vocab_size)
    template, chat, pair_source = _pairs(folder, module.chat, tokenizer)
    activation, source = _activation(folder, reader, 1)
    prompts, default = read_prompts(folder)
    card = ScoringCard(
        kind="yes_no",
        labels=("yes",),
        activation=activation,
        probabilities="sigmoid",
        template=template,
        chat=chat,
        prompts=prompts,
        default_prompt_name=default,
    )
    settings = (
        Setting("ids of yes and no", ids, ids_source),
        Setting("pairs", "template" if template else "chat" if chat else "tokenizer", pair_source),
        Setting("activation", activation, source),
    )
    return Scoring(card, None, ids, settings, tuple(module.warnings))


def _check_modules(folder: CheckpointFolder, use: Use) -> None:
    """Refuse modules that would change the score."""
    entries = read_modules(folder) or []
    expected = ["Transformer", "LogitScore"] if use is YES_NO else ["Transformer"]
    kinds = [entry.kind for entry in entries]
    if entries and kinds != expected:
        raise CheckpointError(
            f"{folder.path / 'modules.json'}: of a model that scores, {', '.join(expected)} is "
            f"expected, found {', '.join(kinds)}"
        )


def _answer_ids(
    folder: CheckpointFolder, tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], str]:
    """Return the ids of "yes" and "no", and where they are from."""
    entries = [entry for entry in read_modules(folder) or [] if entry.kind == "LogitScore"]
    if entries:
        name = f"{entries[0].path}/config.json"
        reader = ConfigReader(folder.json(name) or {}, str(folder.path / name), "LogitScore")
        if reader.get("module_input_name", "causal_logits", str) != "causal_logits":
            raise CheckpointError(f"{reader.where('module_input_name')} is not supported")
        keys = ("true_token_id", "false_token_id")
        stated = (reader.optional(key, int) for key in keys)
        ids = tuple(token for token in stated if token is not None)
        if not reader.has(keys[0]) or not all(0 <= token < vocab_size for token in ids):
            raise CheckpointError(f"{reader.file}: {keys[0]}: a token id is expected, found {ids}")
        return ids, name
    found = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    ids = tuple(token for token in found if token is not None)
    if len(ids) < 2:
        raise CheckpointError(
            f"{folder.path}: the tokenizer has no tokens 'yes' and 'no', so this model cannot score"
        )
    return ids, "tokens 'yes' and 'no'"


def _pairs(
    folder: CheckpointFolder, chat: "ChatTexts | None", tokenizer: Tokenizer
) -> "tuple[PairTemplate | None, ChatTexts | None, str]":
    """Choose how a pair becomes a text: by the checkpoint's files, else as Qwen3-Reranker's do."""
    if read_modules(folder) is not None:
        return None, chat, "sentence-transformers' files"
    if all(tokenizer.token_to_id(token) is not None for token in _CHAT_ML):
        return QWEN3_RERANKER, None, "default of ChatML models: Qwen3-Reranker's template"
    raise CheckpointError(
        f"{folder.path}: nothing says how a query and a document become a prompt: there is no "
        f"modules.json, and the tokenizer has no tokens {' and '.join(_CHAT_ML)}"
    )


def _activation(folder: CheckpointFolder, reader: ConfigReader, count: int) -> tuple[str, str]:
    """Return the activation of the scores and where it is from, as CrossEncoder chooses it."""
    for where, value, source in _stated_activations(folder, reader):
        if value is not None:
            return torch_activation(value, where), source
    return ("sigmoid" if count == 1 else "identity"), f"default for {count} label(s)"


def _stated_activations(
    folder: CheckpointFolder, reader: ConfigReader
) -> list[tuple[str, Any, str]]:
    key, old = "activation_fn", "sbert_ce_default_activation_function"
    own = (folder.json(SENTENCE_CONFIG) or {}).get(key)
    nested = reader.optional("sentence_transformers", dict, record=False) or {}
    inner = f"sentence_transformers.{key}"
    found = [
        (f"{folder.path / SENTENCE_CONFIG}: {key}", own, SENTENCE_CONFIG),
        (reader.where(inner), nested.get(key), f"{reader.label}: {inner}"),
    ]
    if key not in nested:
        found.append((reader.where(old), reader.values.get(old), f"{reader.label}: {old}"))
    return found
