"""Chooses the checkpoint interval. Pure: the same inputs give the same choice, anywhere."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from checkpointing.interval.rates import GammaRate
from checkpointing.interval.waste import Costs, unbounded_optimum_s, waste

HYSTERESIS: Final = 0.20
MAX_FACTOR: Final = 2.0
_MOST_STEPS: Final = 1e15  # "never", as a number that a slot can hold


class Binding(StrEnum):
    """What set the interval."""

    OPTIMUM = "optimum"
    UPLOAD = "upload"
    OVERHEAD = "overhead"
    LOST_WORK = "lost_work"
    NOT_MEASURED = "not_measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerInputs:
    """What was measured, what is assumed, and the limits.

    Attributes:
        step_s: Seconds of one step.
        stall_s: Blocking seconds of one save.
        upload_s: Seconds from the step boundary until durable.
        slowdown: Fraction by which steps get longer during an upload.
        restart_s: Seconds from a fault to the first step after it.
        faults: Incidents counted (coalesced; no preemptions, no planned stops).
        exposure_node_s: Node seconds over which they were counted.
        nodes: Nodes in the job.
        prior_per_1000_node_days: Published rate to start from.
        prior_weight: Incidents that the prior counts for.
        max_overhead: Largest share of time for saving; inf for no cap.
        max_lost_work_s: Largest work that one fault may lose; inf for no cap.
        interval_steps: The interval in force; 0 when none is.
        memory_steps: Saves that stay in memory are made at least every so many steps; 0: none are.
    """

    step_s: float
    stall_s: float
    upload_s: float
    slowdown: float
    restart_s: float
    faults: float
    exposure_node_s: float
    nodes: int
    prior_per_1000_node_days: float
    prior_weight: float = 2.0
    max_overhead: float = math.inf
    max_lost_work_s: float = math.inf
    interval_steps: int = 0
    memory_steps: int = 0

    @property
    def memory_share(self) -> float:
        """Share of time that the saves in memory take, those that go on to the store included."""
        every_s = self.memory_steps * self.step_s
        return self.stall_s / every_s if every_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The interval to use.

    Attributes:
        interval_steps: Steps between saves, at least 1.
        move: Whether this differs from the interval in force.
        goodput: Predicted share of time spent training with it.
        binding: What set the wanted interval.
        rate_per_s: Faults per second of the whole job, posterior mean.
        reason: One sentence for a person.
    """

    interval_steps: int
    move: bool
    goodput: float
    binding: Binding
    rate_per_s: float
    reason: str


def choose(inputs: TunerInputs) -> Choice:
    """Return the interval, moved at most by `MAX_FACTOR` and not at all inside `HYSTERESIS`."""
    prior = GammaRate.prior(inputs.prior_per_1000_node_days, inputs.prior_weight)
    posterior = prior.observe(inputs.faults, inputs.exposure_node_s)
    rate = posterior.mean_per_node_s * inputs.nodes
    measured = (inputs.step_s, inputs.stall_s, inputs.upload_s, inputs.slowdown, inputs.restart_s)
    if not all(math.isfinite(value) and value >= 0 for value in measured) or inputs.step_s == 0:
        return Choice(
            interval_steps=max(inputs.interval_steps, 1),
            move=False,
            goodput=math.nan,
            binding=Binding.NOT_MEASURED,
            rate_per_s=rate,
            reason="kept: step, stall, upload or restart time is not measured yet",
        )
    costs = Costs(
        stall_s=inputs.stall_s,
        upload_s=inputs.upload_s,
        slowdown=inputs.slowdown,
        restart_s=inputs.restart_s,
    )
    wanted_s, binding = _wanted(inputs, costs, rate)
    wanted = _whole_steps(wanted_s / inputs.step_s, binding)
    steps, held = _damped(wanted, inputs, costs)
    return Choice(
        interval_steps=steps,
        move=steps != inputs.interval_steps,
        goodput=max(
            0.0, 1.0 - waste(steps * inputs.step_s, costs, rate) - _kept_in_memory(inputs, steps)
        ),
        binding=binding,
        rate_per_s=rate,
        reason=_reason(inputs, costs, rate, wanted, steps, binding, held),
    )


def _wanted(inputs: TunerInputs, costs: Costs, rate: float) -> tuple[float, Binding]:
    """Return the interval in seconds before damping. The floor by upload outranks every cap."""
    seconds, binding = unbounded_optimum_s(costs, rate), Binding.OPTIMUM
    overhead_floor = _overhead_floor_s(inputs, costs)
    if seconds < overhead_floor:
        seconds, binding = overhead_floor, Binding.OVERHEAD
    lost_work_cap = inputs.max_lost_work_s - inputs.upload_s
    if seconds > lost_work_cap:
        seconds, binding = max(lost_work_cap, 0.0), Binding.LOST_WORK
    if seconds < costs.floor_s:
        seconds, binding = costs.floor_s, Binding.UPLOAD
    return seconds, binding


def _overhead_floor_s(inputs: TunerInputs, costs: Costs) -> float:
    """Return the shortest interval whose saves take no more than the largest share of time.

    A save for the store that falls on one in memory stalls nobody once more, so an interval longer
    than memory's saves at most what uploading costs.
    """
    alone = costs.per_save_s / inputs.max_overhead if inputs.max_overhead > 0 else math.inf
    if not inputs.memory_steps:
        return alone
    left = inputs.max_overhead - inputs.memory_share
    uploading = (costs.per_save_s - costs.stall_s) / left if left > 0 else 0.0
    return min(alone, max(inputs.memory_steps * inputs.step_s, uploading))


def _kept_in_memory(inputs: TunerInputs, steps: int) -> float:
    """Return the share of time for saves that do not go on to the store."""
    if not 0 < inputs.memory_steps < steps:
        return 0.0
    return inputs.memory_share - inputs.stall_s / (steps * inputs.step_s)


def _memory_words(inputs: TunerInputs, steps: int) -> str:
    """Say what saves in memory take, and whether that is more than wanted."""
    if not 0 < inputs.memory_steps < steps:
        return ""
    words = f"; saves in memory every {inputs.memory_steps} steps take {inputs.memory_share:.1%}"
    if inputs.memory_share <= inputs.max_overhead:
        return words
    return f"{words}, more than the {inputs.max_overhead:.1%} wanted: only fewer of them help"


def _whole_steps(steps: float, binding: Binding) -> int:
    """Round away from what limits: down under a cap, up above a floor."""
    steps = min(steps, _MOST_STEPS)
    if binding is Binding.LOST_WORK:
        return max(1, math.floor(steps + 1e-9))
    if binding in (Binding.UPLOAD, Binding.OVERHEAD):
        return max(1, math.ceil(steps - 1e-9))
    return max(1, round(steps))


def _damped(wanted: int, inputs: TunerInputs, costs: Costs) -> tuple[int, str]:
    """Return the interval after hysteresis and the factor, and which of them held it."""
    current = inputs.interval_steps
    if current < 1 or wanted == current:
        return wanted, ""
    seconds = current * inputs.step_s
    too_long = seconds + inputs.upload_s > inputs.max_lost_work_s and wanted < current
    too_short = seconds < costs.floor_s
    if abs(wanted / current - 1.0) <= HYSTERESIS and not too_long and not too_short:
        return current, "hysteresis"
    low, high = math.ceil(current / MAX_FACTOR), math.floor(current * MAX_FACTOR)
    bounded = min(max(wanted, low), high)
    return bounded, "" if bounded == wanted else "factor"


def _reason(
    inputs: TunerInputs,
    costs: Costs,
    rate: float,
    wanted: int,
    steps: int,
    binding: Binding,
    held: str,
) -> str:
    mtbf = f"a fault every {_span(1 / rate)}" if rate > 0 else "no faults expected"
    why = {
        Binding.OPTIMUM: "loses least",
        Binding.UPLOAD: _upload_bound(inputs, costs, rate),
        Binding.OVERHEAD: f"keeps saving under {inputs.max_overhead:.1%} of the time",
        Binding.LOST_WORK: f"keeps lost work under {_span(inputs.max_lost_work_s)}",
        Binding.NOT_MEASURED: "",
    }[binding]
    if held == "hysteresis":
        action = f"kept {steps} steps, since {wanted} is within {HYSTERESIS:.0%}"
    elif held == "factor":
        action = f"{inputs.interval_steps} -> {steps} steps on the way to {wanted}"
    elif steps == inputs.interval_steps:
        action = f"kept {steps} steps"
    else:
        action = f"{inputs.interval_steps or 'no interval'} -> {steps} steps"
    return (
        f"{action}: with {mtbf}, a stall of {_span(costs.stall_s)} and an upload of "
        f"{_span(costs.upload_s)}, every {_span(wanted * inputs.step_s)} {why}"
        f"{_memory_words(inputs, steps)}"
    )


def _upload_bound(inputs: TunerInputs, costs: Costs, rate: float) -> str:
    """Say what twice the bandwidth would save, when the upload is the limit."""
    faster = replace(costs, upload_s=costs.upload_s / 2)
    better_s, _ = _wanted(replace(inputs, upload_s=faster.upload_s), faster, rate)
    saved = waste(costs.floor_s, costs, rate) - waste(better_s, faster, rate)
    return f"is the shortest that the store keeps up with (twice the bandwidth saves {saved:.2%})"


def _span(seconds: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"
