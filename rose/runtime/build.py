"""From a checkpoint and options to loaded weights and the runtimes that serve them."""

import logging
from dataclasses import dataclass, field

import torch

from rose.kernels.attention import BACKENDS
from rose.kernels.attention.base import AttentionBackend, AttentionSpec
from rose.models.loader import LoadedModel, load
from rose.runtime.embedding import EmbeddingRuntime
from rose.runtime.worker import DeviceWorker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What a user can choose about a model. None and "auto" leave it to the checkpoint."""

    path: str
    name: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    attention: str = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    deterministic: bool = False
    tasks: tuple[str, ...] = ()


@dataclass(slots=True)
class ServedModel:
    """A loaded model and its runtimes, which share one worker and one copy of the weights."""

    loaded: LoadedModel
    worker: DeviceWorker
    embedding: EmbeddingRuntime | None
    max_batch_tokens: int = field(default=0)

    def close(self) -> None:
        """Stop the worker; steps that wait fail."""
        self.worker.close()


def build(options: ModelOptions) -> ServedModel:
    """Load a checkpoint and make its runtimes.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ValueError: an option does not fit, for instance an attention back end that cannot serve it.
    """
    _check_device(options.device)
    loaded = load(
        options.path,
        dtype=options.dtype,
        device=options.device,
        max_model_len=options.max_model_len,
        tasks=options.tasks or None,
        name=options.name,
    )
    backend = choose_backend(
        options.attention,
        loaded.backbone.attention_specs,
        loaded.dtype,
        torch.device(options.device),
    )
    worker = DeviceWorker(options.device)
    served = ServedModel(loaded, worker, _embedding_runtime(loaded, backend, worker, options))
    if served.embedding:
        served.max_batch_tokens = options.max_batch_tokens or served.embedding.measure_saturation(
            loaded.card.max_model_len, loaded.card.vocab_size
        )
    return served


def choose_backend(
    name: str, specs: list[AttentionSpec], dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """Return the back end `name`, or with "auto" the first that can serve all layers.

    Raises:
        ValueError: it cannot serve a layer; the message gives the reasons.
    """
    names = list(BACKENDS) if name == "auto" else [name]
    refusals = []
    for candidate in names:
        backend = BACKENDS.load(candidate)()
        reasons = {r for spec in specs for r in backend.unsupported(spec, dtype, device)}
        if not reasons:
            log.info("attention back end: %s", candidate)
            return backend
        refusals.append(f"{candidate}: {'; '.join(sorted(reasons))}")
    raise ValueError(f"no attention back end can serve this model. {' | '.join(refusals)}")


def _embedding_runtime(
    loaded: LoadedModel, backend: AttentionBackend, worker: DeviceWorker, options: ModelOptions
) -> EmbeddingRuntime | None:
    if loaded.embedding is None:
        return None
    return EmbeddingRuntime(
        loaded.embedding,
        backend,
        worker,
        device=options.device,
        deterministic=options.deterministic,
    )


def _check_device(device: str) -> None:
    """Raise ValueError for a device that torch does not know or that is not there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {device!r} cannot be used: {str(error).splitlines()[0]}"
        ) from None
