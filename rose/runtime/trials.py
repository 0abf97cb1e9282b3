"""What follows a step that failed: whose pages nobody trusts any more, and who runs alone.

When a step fails as a whole, nobody knows yet whose fault it is. Its sequences are computed again
from their tokens, each in a step of its own until it has brought its next token: the one that
fails there too ends by the error, the others have lost nothing but time.

What a failed step has written may be NaN. No sequence finds it again, and a page of it is zeroed
before it is handed out, since kernels may load what lies beyond a sequence's end.
"""

from rose.runtime.kv_cache import PagePool
from rose.runtime.sequence import Sequence, StepPlan


class Trials:
    """Keeps what failed steps have touched away from everyone else."""

    def __init__(self, pool: PagePool) -> None:
        """Watch over the pages of `pool`."""
        self._pool = pool
        self._suspect: set[int] = set()  # pages of sequences that failed, and their sharers'
        self._scrub: list[int] = []

    def begin(self, sequence: Sequence) -> None:
        """Let a sequence start again, on trial.

        What the steps behind the failed one bring for it rests on what was not computed.
        """
        self.distrust(sequence)
        sequence.attempt += 1
        sequence.on_trial = True
        sequence.pending = 0

    def distrust(self, sequence: Sequence) -> None:
        """Let nobody find what a sequence has computed; zero its pages once nobody holds them."""
        self._pool.forget(sequence.pages)
        self._suspect.update(sequence.pages)
        if self._pool.snapshots is not None:
            for serial in sequence.kept:
                self._pool.snapshots.drop(serial)

    def release(self, sequence: Sequence) -> None:
        """Release the pages of a sequence, and note which of them to zero."""
        freed = self._suspect.intersection(self._pool.release(sequence.pages))
        self._suspect -= freed
        self._scrub.extend(sorted(freed))

    def take_scrub(self) -> list[int]:
        """Return the pages that the next step has to zero."""
        taken, self._scrub = self._scrub, []
        return taken

    def scrub_again(self, plan: StepPlan) -> set[int]:
        """Note that a step failed, perhaps before it zeroed what it had to.

        Returns:
            Those of these pages that somebody was given meanwhile. To zero them now would take away
            what a step in flight writes, so their holders have to begin again.
        """
        held = {page for page in plan.scrub if not self._pool.is_free(page)}
        self._suspect |= held
        self._scrub.extend(page for page in plan.scrub if page not in held)
        return held
