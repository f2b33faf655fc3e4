"""What each subcommand does with its arguments: one call, one line for the person who asked."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

from deploy.devcluster import faults, features, lifecycle, packages, shell, state, status
from deploy.devcluster.plan import Node, Plan, Spec
from deploy.devcluster.units import Units

Options = argparse.Namespace
Action = Callable[[Options], None]


def say(text: str) -> None:
    """Write one line to stdout."""
    sys.stdout.write(text + "\n")


def on_cluster(fault: Callable[[Plan, Units, Options], object]) -> Action:
    """Return an action that holds the cluster's lock, so that two faults never mix."""

    def act(options: Options) -> None:
        packages.require_root(options.subcommand)
        plan = state.existing(options.name)
        with state.locked(plan.state):
            fault(plan, Units(plan.state), options)

    return act


def on_node(fault: Callable[[Plan, Units, Node, Options], object]) -> Action:
    """Return an action as `on_cluster` does, for a fault of one node."""
    return on_cluster(
        lambda plan, units, options: fault(plan, units, plan.node(options.node), options)
    )


def up(options: Options) -> None:
    """Bring a cluster up and say where it is."""
    began = time.monotonic()
    spec = Spec(
        name=options.name,
        nodes=options.nodes,
        gpus=options.gpus,
        cpus=options.cpus if options.cpus is not None else max(8, options.gpus),
        memory_mb=options.memory_mb,
        prefix=options.prefix,
        shm_size=options.shm_size,
        tmp_size=options.tmp_size,
        grace_s=options.grace,
        accounting=options.accounting,
        share=tuple(os.path.realpath(path) for path in options.share),
        settings=tuple(options.settings),
    )
    plan, new, lacks = lifecycle.up(spec)
    if lacks is not None:
        sys.stderr.write(f"devcluster: {lacks}\n")
    word = f"up in {time.monotonic() - began:.1f} s" if new else "was up already"
    nodes = f"{plan.nodes[0].name} to {plan.nodes[-1].name} on {plan.subnet}"
    say(f"cluster {spec.name} {word}: {nodes}; export SLURM_CONF={plan.slurm_conf}")


def down(options: Options) -> None:
    """Take a cluster down."""
    there = lifecycle.down(options.name)
    say(f"cluster {options.name} {'is down, nothing left' if there else 'was not there'}")


def ls(_: Options) -> None:
    """Say which clusters there are."""
    for name in state.names():
        say(name)


def show_status(options: Options) -> None:
    """Say how a cluster is."""
    packages.require_root(options.subcommand)
    now = status.look(state.existing(options.name))
    say(json.dumps(now.to_json(), indent=2) if options.json else status.table(now).rstrip())


def env(options: Options) -> None:
    """Say what a client's environment needs."""
    variables = shell.variables(state.existing(options.name))
    if options.json:
        say(json.dumps(variables))
        return
    for key, value in variables.items():
        say(f"export {key}={value}")


def check(_: Options) -> None:
    """Say what the machine has and lacks."""
    packages.require_root("check")
    missing = packages.missing(accounting=True)
    say(f"packages missing: {' '.join(missing) or 'none'}")
    for feature in features.probe():
        purpose = f" (for: {feature.needed_by})" if feature.needed_by else ""
        say(f"{'yes' if feature.works else 'NO':4}{feature.name}{purpose}")


def enter(options: Options) -> None:
    """Become a shell or command on a node."""
    packages.require_root(options.subcommand)
    shell.enter(state.existing(options.name), options.node, options.command)


def preempt(options: Options) -> None:
    """Have a job preempted and say by which."""
    plan = state.existing(options.name)
    urgent = faults.preempt(plan, options.job, options.hold)
    say(f"job {urgent} takes the nodes of job {options.job}; it gets {plan.spec.grace_s} s")


def power_off(plan: Plan, units: Units, node: Node, _: Options) -> None:
    """Cut a node's power."""
    faults.power_off(plan, units, node)


def power_on(plan: Plan, units: Units, node: Node, _: Options) -> None:
    """Switch a node on."""
    faults.power_on(plan, units, node)


def partition(_: Plan, units: Units, node: Node, __: Options) -> None:
    """Cut a node's cable."""
    faults.partition(units, node)


def heal(plan: Plan, units: Units, node: Node, _: Options) -> None:
    """Undo what was done to a node's network and CPUs."""
    faults.heal(plan, units, node)


def slow(_: Plan, units: Units, node: Node, options: Options) -> None:
    """Limit a node's cable."""
    faults.slow(units, node, options.rate, options.delay)


def drop(_: Plan, units: Units, node: Node, options: Options) -> None:
    """Lose packets of a node."""
    faults.drop(units, node, options.port, options.percent)


def throttle(plan: Plan, units: Units, node: Node, options: Options) -> None:
    """Slow a node's CPUs."""
    faults.throttle(plan, units, node, options.cpu)


def drain(plan: Plan, _: Units, node: Node, options: Options) -> None:
    """Drain a node."""
    faults.drain(plan, node, options.reason)


def undrain(plan: Plan, _: Units, node: Node, __: Options) -> None:
    """Take a node back."""
    faults.undrain(plan, node)


def stop_slurmctld(_: Plan, units: Units, options: Options) -> None:
    """Stop the controller."""
    faults.stop_slurmctld(units, hard=options.hard)


def start_slurmctld(plan: Plan, units: Units, _: Options) -> None:
    """Start the controller."""
    faults.start_slurmctld(plan, units)
