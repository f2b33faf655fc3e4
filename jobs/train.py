"""The training loop: one step of one rank, and the loop around it."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from jobs.data.order import Batches
from jobs.digest import tensor_sha256
from jobs.errors import NonFiniteLoss, UsageError
from jobs.moe.model import MoETransformer
from jobs.moe.parallel import Bucket
from jobs.moe.router import max_violation
from jobs.optim.adamw import AdamW
from jobs.optim.schedule import Schedule
from jobs.outputs import Outputs, StepRecord
from jobs.rng import RandomState

State = Mapping[str, Any]


class Keeper(Protocol):
    """The part of :class:`checkpointing.Checkpointer` that the loop calls."""

    @property
    def should_stop(self) -> bool:
        """Whether a planned stop has been saved."""
        ...

    def restore(self, state: State, local: State | None = None) -> int:
        """Fill the state in place; return the number of finished steps."""
        ...

    def step(
        self,
        step: int,
        state: State | Callable[[], State] | None = None,
        local: State | None = None,
        *,
        loss: float = math.nan,
        tokens: int = 0,
    ) -> None:
        """Report a finished step and save when it is time."""
        ...

    def finish(
        self, step: int, state: State | Callable[[], State], local: State | None = None
    ) -> None:
        """Save the last state."""
        ...


class NoKeeper:
    """Keeps nothing: the bare loop, for tests and for measuring what a keeper costs."""

    should_stop = False

    def restore(self, state: State, local: State | None = None) -> int:
        """Start from nothing."""
        del state, local
        return 0

    def step(
        self,
        step: int,
        state: State | Callable[[], State] | None = None,
        local: State | None = None,
        *,
        loss: float = math.nan,
        tokens: int = 0,
    ) -> None:
        """Do nothing."""

    def finish(
        self, step: int, state: State | Callable[[], State], local: State | None = None
    ) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What decides the numbers of a run beside model and data."""

    seed: int
    schedule: Schedule
    clip: float
    world: int


class Trainer:
    """One replica: model, optimiser and data of one rank.

    Args:
        model: already on its device.
        batches: of this rank.
        recipe: seed, schedule, clipping, number of ranks.
    """

    def __init__(self, model: MoETransformer, batches: Batches, recipe: Recipe) -> None:
        parameters = dict(model.named_parameters())
        self._model = model
        self._batches = batches
        self._recipe = recipe
        self._device = next(model.parameters()).device
        self._load_shape = (model.config.layers, model.config.experts)
        # The tail carries loss and expert load in fp32: counts are exact below 2^24 tokens a step.
        self._bucket = Bucket(parameters, tail=1 + math.prod(self._load_shape), world=recipe.world)
        self._optimizer = AdamW(parameters)
        order = batches.order
        self._step_tokens = order.batch * order.world * batches.seq
        self._run: dict[str, Any] = {
            "seed": recipe.seed,
            "corpus": batches.corpus.fingerprint,
            "samples_per_step": order.batch * order.world,
            "seq": batches.seq,
            "tokens": 0,
        }
        self._identity = {key: self._run[key] for key in self._run if key != "tokens"}
        self._random = RandomState(self._device)

    @property
    def tokens(self) -> int:
        """Tokens trained by the whole run so far."""
        return int(self._run["tokens"])

    def state(self) -> dict[str, Any]:
        """What is equal on all ranks: weights with router biases, moments, data identity."""
        return {"model": self._model, "optimizer": self._optimizer, "run": self._run}

    def local(self) -> dict[str, Any]:
        """What is this rank's own: its random number generators."""
        return {"random": self._random}

    def check_resumed(self) -> None:
        """Refuse a checkpoint of a run that read other data or in another order.

        Raises:
            UsageError: naming the first value that differs.
        """
        for key, own in self._identity.items():
            if self._run[key] != own:
                raise UsageError(
                    f"the checkpoint was trained with {key} {self._run[key]}, this run has {own}; "
                    "resume with the same data, seed, batch and sequence length"
                )

    def run_step(self, step: int) -> StepRecord:
        """Train on the batch of ``step`` (from 0).

        Raises:
            NonFiniteLoss: on every rank alike, before any weight is changed.
        """
        started = time.perf_counter()
        bucket = self._bucket
        bucket.zero()
        inputs, targets = (torch.from_numpy(a).to(self._device) for a in self._batches.read(step))
        loss = self._model.loss(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        bucket.tail[0] = loss.detach()
        bucket.tail[1:] = self._model.expert_load().flatten()
        bucket.reduce()
        norm = bucket.clip(self._recipe.clip)
        mean_loss, grad_norm = torch.stack((bucket.tail[0] / self._recipe.world, norm)).tolist()
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            raise NonFiniteLoss(
                f"step {step + 1}: loss {mean_loss}, gradient norm {grad_norm}: not finite; "
                "stopped before the weights were changed"
            )
        lr = self._recipe.schedule.lr(step)
        self._optimizer.step(lr)
        load_le = bucket.tail[1:].view(self._load_shape)
        self._model.balance(load_le)
        self._run["tokens"] += self._step_tokens
        return StepRecord(
            step=step + 1,
            loss=mean_loss,
            grad_norm=grad_norm,
            lr=lr,
            max_violation=max_violation(load_le),
            step_s=time.perf_counter() - started,
            tokens=self.tokens,
        )

    def digests(self) -> dict[str, str]:
        """Hash weights (with router biases) and optimiser moments."""
        return {
            "weights": tensor_sha256({"model": self._model.state_dict()}),
            "optimizer": tensor_sha256({"optimizer": self._optimizer.state_dict()}),
        }


def train(trainer: Trainer, keeper: Keeper, outputs: Outputs, steps: int) -> None:
    """Run from the restored step to the end, or to a planned stop.

    Raises:
        NonFiniteLoss: see :meth:`Trainer.run_step`.
        UsageError: the restored state belongs to another run.
    """
    start = keeper.restore(trainer.state(), local=trainer.local())
    trainer.check_resumed()
    loss: float | None = None
    for step in range(start, steps):
        record = trainer.run_step(step)
        loss = record.loss
        # First the metrics, then the boundary: a step that was saved is never missing in them.
        outputs.record(record)
        keeper.step(
            record.step, trainer.state, trainer.local(), loss=record.loss, tokens=record.tokens
        )
        if keeper.should_stop:
            return
    keeper.finish(max(start, steps), trainer.state, trainer.local())
    outputs.finish(
        steps=max(start, steps), loss=loss, tokens=trainer.tokens, sha256=trainer.digests()
    )
