"""How a node is left when its allocation ends: told by signals, in a given time.

Slurm sends SIGUSR2 a while before the time limit where a job asks for it, and SIGTERM with the end
itself: time limit, preemption, scancel. SIGKILL follows KillWait, or the partition's GraceTime,
later (https://slurm.schedmd.com/slurm.conf.html).
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable

from orchestrator.agent.connection import Connection
from orchestrator.core.events import AgentWarned

log = logging.getLogger(__name__)

RANKS_SHARE = 0.7
END_SHARE = 0.1


class Leaving:
    """Tells the supervisor what the signals mean, and keeps the time.

    Args:
        node: Name of the node.
        leave_s: Seconds from SIGTERM on after which nothing may be left on the node.
        kill_grace_s: The last of them, for ending the ranks without the supervisor.
        connection: Takes the facts.
        shut_down: Ends the agent.
    """

    def __init__(
        self,
        node: str,
        leave_s: float,
        kill_grace_s: float,
        connection: Connection,
        shut_down: Callable[[], None],
    ) -> None:
        self._node = node
        self._leave_s = leave_s
        self._kill_grace_s = kill_grace_s
        self._connection = connection
        self._shut_down = shut_down
        self._warned = False
        self._by = math.inf

    @property
    def begun(self) -> bool:
        """Whether SIGTERM has come."""
        return self._by < math.inf

    @property
    def left_s(self) -> float:
        """Seconds until nothing may be left, inf without a limit."""
        return max(0.0, self._by - time.monotonic())

    @property
    def ranks_s(self) -> float:
        """Seconds that ranks may take to end now; the uploader needs some behind them."""
        return min(self._kill_grace_s, RANKS_SHARE * self.left_s)

    @property
    def uploads_s(self) -> float:
        """Seconds that uploads may take now, inf without a limit; to clear up takes some too."""
        return max(0.0, self.left_s - END_SHARE * self._kill_grace_s)

    def warned(self) -> None:
        """Handle SIGUSR2: the end is near, and nothing changes here yet."""
        if not self._warned:
            self._warned = True
            log.warning("warned by SIGUSR2: the allocation will end")
            self._tell("USR2", math.inf)

    def terminated(self) -> None:
        """Handle SIGTERM: the supervisor may stop the ranks in order, while there is time."""
        if self.begun:
            return
        self._by = time.monotonic() + self._leave_s
        self._tell("TERM", self._leave_s)
        if self._connection.alone_s > 0.0:
            log.warning("the allocation ends, and no supervisor is there; leaving")
            self._shut_down()
            return
        serve_s = self._leave_s - self._kill_grace_s
        log.warning("the allocation ends; the ranks have %.0f s to be stopped in order", serve_s)
        asyncio.get_running_loop().call_later(serve_s, self._shut_down)

    def _tell(self, signal: str, left_s: float) -> None:
        self._connection.fact(AgentWarned(node=self._node, signal=signal, left_s=left_s))
