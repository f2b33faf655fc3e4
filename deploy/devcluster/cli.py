"""The command line: subcommands, their arguments, exit codes.

Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 the machine lacks something, 5 no such cluster
or node, 130 interrupted. `shell` gives the code of its command.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from deploy.devcluster import commands
from deploy.devcluster.commands import Action, on_cluster, on_node
from deploy.devcluster.errors import DevclusterError
from deploy.devcluster.plan import Spec

INTERRUPTED = 130


class Commands:
    """The subcommands; each has --name, and carries what it does as `action`."""

    def __init__(self, top: argparse.ArgumentParser) -> None:
        self._sub = top.add_subparsers(required=True, metavar="COMMAND")

    def add(self, name: str, action: Action, words: str, *given: str) -> argparse.ArgumentParser:
        """Add a subcommand whose positional arguments are `given`."""
        sub = self._sub.add_parser(name, help=words, description=words)
        default = os.environ.get("DEVCLUSTER_NAME", "dev")
        sub.add_argument("--name", default=default, help="which cluster (default: %(default)s)")
        for each in given:
            sub.add_argument(each.lower(), metavar=each)
        sub.set_defaults(action=action, subcommand=name)
        return sub


def parser() -> argparse.ArgumentParser:
    """Return the parser of everything before a `--`."""
    top = argparse.ArgumentParser(
        prog="devcluster", description="A real multi-node Slurm on this machine, faults included."
    )
    subcommands = Commands(top)
    _up(subcommands)
    _others(subcommands)
    _node_faults(subcommands)
    _slurm_faults(subcommands)
    return top


def _up(to: Commands) -> None:
    up = to.add("up", commands.up, "bring a cluster up; the same again changes nothing")
    option = up.add_argument
    option("--nodes", type=int, default=4, help="how many (default: 4)")
    option("--gpus", type=int, default=8, help="per node, for the scheduler (default: 8)")
    option("--cpus", type=int, help="that a node claims (default: 8, at least --gpus)")
    option("--memory-mb", type=int, default=16384, help="that a node claims (default: 16384)")
    option("--prefix", default="node", help="of the nodes' names (default: node)")
    option("--shm-size", default="1g", help="of each node's own /dev/shm (default: 1g)")
    option("--tmp-size", default="1g", help="of each node's own /tmp (default: 1g)")
    option("--grace", type=int, default=10, help="seconds a preempted job gets (default: 10)")
    option("--accounting", action="store_true", help="slurmdbd and MariaDB, so that sacct works")
    share = "folder below /tmp or /dev/shm that all nodes see; may be repeated"
    option("--share", action="append", default=[], metavar="DIR", help=share)
    settings = "line of slurm.conf to replace or add; may be repeated"
    option("--set", action="append", default=[], metavar="K=V", dest="settings", help=settings)


def _others(to: Commands) -> None:
    to.add("down", commands.down, "end and remove everything of a cluster")
    to.add("ls", commands.ls, "names of all clusters")
    status = to.add("status", commands.show_status, "power, link, faults, Slurm's state of nodes")
    env = to.add("env", commands.env, 'what a client here needs: eval "$(devcluster env)"')
    for shown in (status, env):
        shown.add_argument("--json", action="store_true", help="for programs")
    to.add("check", commands.check, "what this machine has and lacks")
    words = "a shell, or -- CMD..., on a node, on `head` or in `switch`"
    to.add("shell", commands.enter, words, "NODE")


def _node_faults(to: Commands) -> None:
    words = "cut a node's power: its processes and memory are gone"
    to.add("power-off", on_node(commands.power_off), words, "NODE")
    to.add("power-on", on_node(commands.power_on), "switch a node on again", "NODE")
    to.add("partition", on_node(commands.partition), "cut the cable; the node lives on", "NODE")
    words = "undo partition, slow, drop and throttle of a node"
    to.add("heal", on_node(commands.heal), words, "NODE")
    slow = to.add("slow", on_node(commands.slow), "limit a node's cable, both ways", "NODE")
    slow.add_argument("--rate", required=True, help="as 5mbit")
    slow.add_argument("--delay", help="of every packet each way, as 20ms (needs netem)")
    words = "lose packets of a node, both ways, unseen by both ends"
    drop = to.add("drop", on_node(commands.drop), words, "NODE")
    drop.add_argument("--port", type=int, help="only from or to this TCP or UDP port")
    drop.add_argument("--percent", type=int, default=100, help="how many are lost (default: 100)")
    throttle = to.add("throttle", on_node(commands.throttle), "slow a node's CPUs", "NODE")
    throttle.add_argument("--cpu", type=float, required=True, help="CPUs of the machine, as 0.25")


def _slurm_faults(to: Commands) -> None:
    words = "stop the controller; jobs go on"
    stop = to.add("stop-slurmctld", on_cluster(commands.stop_slurmctld), words)
    stop.add_argument("--hard", action="store_true", help="SIGKILL: it saves nothing")
    words = "start the controller again"
    to.add("start-slurmctld", on_cluster(commands.start_slurmctld), words)
    words = "let a node's jobs finish and take no new ones"
    drain = to.add("drain", on_node(commands.drain), words, "NODE")
    drain.add_argument("--reason", default="devcluster", help="shown by sinfo -R")
    to.add("undrain", on_node(commands.undrain), "take a drained or down node back", "NODE")
    preempt = to.add("preempt", commands.preempt, "have Slurm preempt a running job", "JOB")
    preempt.add_argument("--hold", type=int, default=10, help="seconds the nodes are then taken")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:cut])
    options.command = words[cut + 1 :]
    try:
        Spec(name=options.name)  # a name becomes part of paths that are removed
        options.action(options)
    except DevclusterError as error:
        sys.stderr.write(f"devcluster: {error}\n")
        return error.exit_code
    except OSError as error:  # a process or file that was there a moment ago
        sys.stderr.write(f"devcluster: {type(error).__name__}: {error}\n")
        return DevclusterError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("devcluster: interrupted\n")
        return INTERRUPTED
    return 0
