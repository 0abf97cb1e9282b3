"""Models that score, in the form that the runtime of packed texts runs."""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rose.models.batch import TokenBatch
    from rose.models.classifier import Classifier


class ScoringModel:
    """A classifier whose raw scores, one per label, take the place of a vector."""

    def __init__(self, classifier: "Classifier") -> None:
        """Run `classifier`."""
        self._classifier = classifier
        self.dimensions = classifier.num_labels

    def __call__(
        self,
        batch: "TokenBatch",
        cu_seqlens: Tensor,
        pool_from: Tensor | None = None,  # noqa: ARG002 - a head reads the whole sequence
    ) -> Tensor:
        """Compute raw scores, float32 [sequences, labels]."""
        return self._classifier(batch, cu_seqlens)
