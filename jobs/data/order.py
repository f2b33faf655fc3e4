"""The order of samples: a pure function of (seed, step, rank), with nothing that grows.

The corpus is cut into N windows of ``seq`` tokens. Sample number i of the run, counted over all
ranks, reads window ``permutation(i mod N)`` of epoch ``i div N``; the permutation is a small keyed
Feistel network, so neither a shuffled list nor a position has to be kept, and one epoch reads every
window once whatever the number of ranks.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from jobs.data.corpus import Corpus, check_vocabulary
from jobs.errors import DataError

_MASK64: Final = 2**64 - 1
_ROUNDS: Final = 6


def mix(*numbers: int) -> int:
    """Hash integers to 64 bits with the finaliser of splitmix64; equal on every machine.

    Source: https://prng.di.unimi.it/splitmix64.c
    """
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) & _MASK64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
        value ^= value >> 31
    return value


def permute(index: int, size: int, key: int) -> int:
    """Return the image of ``index`` under a keyed permutation of range(size)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:  # cycle walking: the network permutes 2^(2 half) >= size; leave when inside
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mix(key, turn, right) & mask)
        index = (left << half) | right
        if index < size:
            return index


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Which window each sample of a step reads.

    Attributes:
        seed: of the run.
        num_windows: windows of the corpus.
        batch: samples of one rank in one step.
        world: number of ranks.
    """

    seed: int
    num_windows: int
    batch: int
    world: int

    def windows(self, step: int, rank: int) -> tuple[int, ...]:
        """Return the windows that ``rank`` reads in ``step`` (from 0)."""
        first = (step * self.world + rank) * self.batch
        return tuple(self._window(first + i) for i in range(self.batch))

    def _window(self, sample: int) -> int:
        epoch, position = divmod(sample, self.num_windows)
        return permute(position, self.num_windows, mix(self.seed, epoch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The batches of one rank; build it with :func:`plan_batches`."""

    corpus: Corpus
    order: SampleOrder
    seq: int
    rank: int
    vocabulary: int

    def read(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets of a step (from 0), each int64 [batch, seq].

        Raises:
            DataError: a token lies outside the vocabulary.
        """
        windows = self.order.windows(step, self.rank)
        rows: list[NDArray[np.unsignedinteger[Any]]] = [
            self.corpus.tokens[w * self.seq : w * self.seq + self.seq + 1] for w in windows
        ]
        stacked = np.stack(rows)
        check_vocabulary(stacked, self.vocabulary, self.corpus.name)
        wide = stacked.astype(np.int64)
        return wide[:, :-1].copy(), wide[:, 1:].copy()


def plan_batches(
    corpus: Corpus, *, seed: int, batch: int, seq: int, rank: int, world: int, vocabulary: int
) -> Batches:
    """Lay the order of samples over a corpus.

    Raises:
        DataError: one step of all ranks needs more windows than the corpus has.
    """
    num_windows = (int(corpus.tokens.size) - 1) // seq
    if num_windows < batch * world:
        raise DataError(
            f"--data {corpus.name}: has {corpus.tokens.size} tokens, but one step reads "
            f"{batch * world * seq + 1} (batch {batch} x seq {seq} x {world} ranks); "
            "give more data or a smaller --batch or --seq"
        )
    order = SampleOrder(seed=seed, num_windows=num_windows, batch=batch, world=world)
    return Batches(corpus=corpus, order=order, seq=seq, rank=rank, vocabulary=vocabulary)
