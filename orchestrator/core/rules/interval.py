"""The governor: the checkpoint interval follows what saving and failing really cost."""

from statistics import median

from checkpointing.interval.tuner import TunerInputs, choose
from orchestrator.core.actions import Decision, SetInterval
from orchestrator.core.policy import Policy
from orchestrator.core.rules.operator import steps_ahead
from orchestrator.core.rules.verdicts import is_pending, make
from orchestrator.core.state import AttemptPhase, Incident, State

DEFAULT_RESTART_S = 60.0
MEASURED_COMMITS = 2
COUNTED_CLASSES = ("process", "node", "storage")


def interval(state: State, now: float, policy: Policy) -> Decision | None:
    """Move the interval when a new commit has been measured and the gain is worth it."""
    attempt = state.attempt
    if not policy.tune_interval or attempt is None or state.run is None:
        return None
    if attempt.phase is not AttemptPhase.RUNNING or attempt.first_step_at is None:
        return None
    if is_pending(state, SetInterval):
        return None
    new = state.commits[:MEASURED_COMMITS]
    if len(new) < MEASURED_COMMITS or new[-1][0] <= state.interval_changed_step:
        return None  # too little has been measured since the last move
    inputs = measured_inputs(state, policy)
    if inputs is None:
        return None
    choice = choose(inputs)
    if not choice.move:
        return None
    action = SetInterval(
        attempt=attempt.number,
        interval_steps=choice.interval_steps,
        effective_step=attempt.max_step + steps_ahead(state),
        previous_steps=state.interval_steps,
        goodput=choice.goodput,
        binding=choice.binding.value,
        inputs=as_numbers(inputs),
    )
    return make(state, "interval", action, choice.reason, (), state.seq)


def measured_inputs(state: State, policy: Policy) -> TunerInputs | None:
    """Return the tuner's inputs, or None while a needed cost has not been measured."""
    measured = state.measured
    if not measured.step_s or not measured.stall_s or not measured.upload_s:
        return None
    assert state.run is not None
    return TunerInputs(
        step_s=measured.step_s,
        stall_s=median(measured.stall_s),
        upload_s=_p90(measured.upload_s),
        slowdown=0.0,
        restart_s=_restart_s(state.incidents),
        faults=sum(i.fault_class in COUNTED_CLASSES for i in state.incidents),
        exposure_node_s=measured.node_s,
        nodes=state.run.nodes,
        prior_per_1000_node_days=policy.prior_per_1000_node_days,
        max_overhead=policy.max_overhead,
        max_lost_work_s=policy.max_lost_work_s,
        interval_steps=state.interval_steps,
        memory_steps=policy.memory_interval_steps,
    )


def as_numbers(inputs: TunerInputs) -> dict[str, float]:
    """List the inputs by name, for the journal."""
    values = {name: float(getattr(inputs, name)) for name in inputs.__dataclass_fields__}
    if not inputs.memory_steps:  # as in journals from before there were such saves
        del values["memory_steps"]
    return values


def _p90(values: tuple[float, ...]) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(0.9 * len(ranked)))]


def _restart_s(incidents: tuple[Incident, ...]) -> float:
    """Return the median time from fault to first new step, or a guess before the first."""
    done = [i.first_step_at - i.fault_at for i in incidents if i.first_step_at is not None]
    return median(done) if done else DEFAULT_RESTART_S
