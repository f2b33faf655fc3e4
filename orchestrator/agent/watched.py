"""The node's process that keeps the folders of a trainer which writes its own checkpoints."""

import logging
import sys
from pathlib import Path
from typing import Any

from checkpointing.store import ration
from checkpointing.watched import attempts
from orchestrator.agent.kept import KeptProcess
from orchestrator.config import RunConfig
from orchestrator.wire import StartNode

log = logging.getLogger(__name__)


class Watched(KeptProcess):
    """Owns the process; what it does is in the agent's log, what it kept in the store."""

    def __init__(self, config: RunConfig, node: str, node_dir: Path, store_json: str) -> None:
        # In the run directory: the next agent of this node has to know of all attempts too.
        self._attempts = config.run_dir / "nodes" / node / "attempts"
        words = command(config, node, store_json, self._attempts)
        super().__init__("watch", [*words, "--budget", str(node_dir / ration.FILE)])
        self.grace_s = config.timeouts.final_upload_s

    def attempt(self, start: StartNode) -> None:
        """Note that an attempt begins, before its ranks do; raises OSError."""
        attempts.note(self._attempts, start.attempt, start.num_nodes)

    def heard(self, value: Any) -> None:
        """Log what it says."""
        match value:
            case {"event": "said", "why": str(why)}:
                log.warning("watch: %s: %s", str(value.get("entry"))[:255], why[:500])
            case {"event": str(event), "entry": str(entry)}:
                log.info("watch: %s %s", event[:20], entry[:255])
            case _:
                raise KeyError(str(value)[:100])


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
