"""submitit's Slurm executor, able to show its batch script and built where no Slurm is.

A module of its own, imported when needed: submitit is slow to import.
"""

import os
import pkgutil
import shlex
import sys
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from orchestrator.launch.slurm_commands import SlurmRefused, SlurmUnavailable
from orchestrator.launch.slurm_text import complaint, is_no_answer


class Executor(SlurmExecutor):
    """Submits one job.

    Args:
        folder: Where the job's files lie.
        parameters: The request in submitit's words.
    """

    def __init__(self, folder: Path, parameters: dict[str, Any]) -> None:
        # -P: the folder that the job runs in must not hide modules.
        super().__init__(folder, python=f"{shlex.quote(sys.executable)} -P")
        self.update_parameters(**parameters)

    @classmethod
    def affinity(cls) -> int:
        """Say that Slurm is here: whoever submits has found that out, and a view needs none."""
        return 1

    def script(self) -> str:
        """Return what a submission would hand to sbatch."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))

    @property
    def _submitit_command_str(self) -> str:
        command = str(super()._submitit_command_str)
        # Without srun, Slurm's signals for the batch script are for what it becomes: no shell
        # is there that dies of them.
        return command if self.parameters.get("use_srun", True) else f"exec {command}"

    def hand_over(self, pickle: str, entry: str, argument: str) -> str:
        """Submit a call of `entry` with `argument`; returns the job's id.

        Args:
            pickle: Name of a file that the batch script links to the name which submitit expects,
                should Slurm take the job and not say so.
            entry: `module:function`.
            argument: What the function gets.

        Raises:
            SlurmUnavailable: It is not known whether there is a job now.
            SlurmRefused: There is none.
        """
        function, folder = pkgutil.resolve_name(entry), Path(self.folder)
        temporary = folder / f".{pickle}.{os.getpid()}"
        DelayedSubmission(function, argument).dump(temporary)
        temporary.replace(folder / pickle)
        try:
            return str(self.submit(function, argument).job_id)
        except FailedSubmissionError as error:  # sbatch is content, but named no job
            raise SlurmUnavailable(complaint(str(error))) from error
        except FailedJobError as error:
            said = str(error)
            kind = SlurmUnavailable if is_no_answer(said) else SlurmRefused
            raise kind(complaint(said)) from error
