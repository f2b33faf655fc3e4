"""Python imports this at the start of every process of a run whose PYTHONPATH has this folder."""

import tests.integration.dying_processes as _dying

_dying.prepare()
