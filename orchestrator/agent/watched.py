"""The node's process that keeps the folders of a trainer which writes its own checkpoints."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from checkpointing.store import ration
from checkpointing.watched import attempts
from orchestrator.agent.kept import KeptProcess
from orchestrator.config import RunConfig
from orchestrator.core.events import FolderStep, FolderWatched
from orchestrator.wire import StartNode

log = logging.getLogger(__name__)

STEPS: Final = frozenset(step.value for step in FolderStep)
_LONGEST_NAME: Final = 255
_LONGEST_WHY: Final = 500


class Watched(KeptProcess):
    """Owns the process; what becomes of the folders becomes facts.

    Args:
        config: The run.
        node: Name of this node.
        node_dir: Its memory.
        store_json: The store, without secrets.
        fact: Takes the facts.
    """

    def __init__(
        self,
        config: RunConfig,
        node: str,
        node_dir: Path,
        store_json: str,
        fact: Callable[[FolderWatched], None],
    ) -> None:
        self._node = node
        self._fact = fact
        # In the run directory: the next agent of this node has to know of all attempts too.
        self._attempts = config.run_dir / "nodes" / node / "attempts"
        words = command(config, node, store_json, self._attempts)
        super().__init__("watch", [*words, "--budget", str(node_dir / ration.FILE)])
        self.grace_s = config.timeouts.final_upload_s

    def attempt(self, start: StartNode) -> None:
        """Note that an attempt begins, before its ranks do; raises OSError."""
        attempts.note(self._attempts, start.attempt, start.num_nodes)

    def heard(self, value: Any) -> None:
        """Log what it says, and pass on what became of a folder."""
        match value:
            case {"event": "said", "entry": str(entry), "why": str(why)}:
                log.warning("watch: %s: %s", entry[:_LONGEST_NAME], why[:_LONGEST_WHY])
            case {"event": str(event), "entry": str(entry)} if event in STEPS:
                self._fact(fact_of(value, self._node))
                why = str(value.get("why", ""))[:_LONGEST_WHY]
                level = logging.WARNING if why else logging.INFO
                log.log(level, "watch: %s %s %s", event, entry[:_LONGEST_NAME], why)
            case _:
                raise KeyError(str(value)[:100])


def fact_of(value: dict[str, Any], node: str) -> FolderWatched:
    """Return what the process says of a folder as a fact.

    Raises:
        ValueError, TypeError: It says something else.
    """
    age = value.get("age_s", 0.0)
    return FolderWatched(
        node=node,
        entry=str(value["entry"])[:_LONGEST_NAME],
        step=FolderStep(value["event"]),
        version=int(value.get("version", 0)),
        nbytes=int(value.get("nbytes", 0)),
        upload_s=float(value.get("upload_s", "nan")),
        age_s=float("nan") if age is None else float(age),
        why=str(value.get("why", ""))[:_LONGEST_WHY],
    )


def command(config: RunConfig, node: str, store_json: str, log_of_attempts: Path) -> list[str]:
    """Return the command line of the process. Pure."""
    watch = config.checkpoint.watch
    assert watch is not None
    words = [
        sys.executable,
        "-m",
        "checkpointing.watched",
        *("--dir", str(watch.dir)),
        *("--pattern", watch.pattern),
        *("--store", store_json),
        *("--name", config.run.name),
        *("--finished", watch.finished),
        *("--marker", watch.marker),
        *("--quiet-s", f"{watch.quiet_s:g}"),
        *("--keep", str(watch.keep)),
        *("--node", node),
        *("--nodes", str(config.nodes.count)),
        *("--attempts", str(log_of_attempts)),
        *("--drain-s", f"{config.timeouts.final_upload_s:g}"),
        "--until-eof",
    ]
    return [*words, *["--delete"] * watch.delete, *["--shared"] * bool(watch.shared)]
