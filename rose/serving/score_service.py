"""Scoring inside the engine process: batches as in embedding, and raw scores as rows."""

from collections.abc import Callable

import numpy as np

from rose.runtime.build import ServedModel
from rose.runtime.embedding import EmbeddingRuntime
from rose.runtime.errors import RequestError
from rose.runtime.options import EmbedOptions
from rose.runtime.queue import EmbedJob
from rose.serving.embed_service import EmbedService, FinishedEmbed, FloatRows

_NO_OPTIONS = EmbedOptions()  # raw scores are what they are: activations are the gateway's


class ScoreService(EmbedService):
    """Queues texts and pairs to score, and delivers their raw scores, float32 [B, labels]."""

    def submit_texts(
        self, job: EmbedJob, deliver: Callable[[FinishedEmbed | Exception], None]
    ) -> None:
        """Admit a request; see `EmbedService.submit`."""
        self.submit(job, _NO_OPTIONS, deliver)

    def _choose_runtime(self, served: ServedModel) -> EmbeddingRuntime | None:
        return served.scoring

    def _choose_budget(self, served: ServedModel) -> int:
        return served.max_score_tokens

    def _check(self, job: EmbedJob, options: EmbedOptions) -> None:  # noqa: ARG002 - none
        if self._runtime is None:
            raise RequestError(f"model {self._card.name!r} cannot score", "model")
        self._check_texts(job)
        assert self._card.scoring is not None
        _check_segments(job, wanted=self._card.scoring.segment_ids)

    def _finish_rows(self, rows: FloatRows, options: EmbedOptions) -> FloatRows:  # noqa: ARG002
        return rows


def _check_segments(job: EmbedJob, *, wanted: bool) -> None:
    """Refuse segments that would read beyond the model's table, or that it has no use for."""
    if (job.segments is not None) != wanted:
        raise RequestError("segments are needed" if wanted else "this model takes no segments")
    if job.segments is None:
        return
    if len(job.segments) != len(job.ids) or not np.isin(job.segments, (0, 1)).all():
        raise RequestError("segments have to be 0 or 1, one for each token")
