"""submitit's Slurm executor, able to show its batch script and built where no Slurm is.

A module of its own, imported when needed: submitit is slow to import.
"""

from submitit.slurm.slurm import SlurmExecutor


class Executor(SlurmExecutor):
    """Submits one allocation."""

    @classmethod
    def affinity(cls) -> int:
        """Say that Slurm is here: whoever submits has found that out, and a view needs none."""
        return 1

    def script(self) -> str:
        """Return what a submission would hand to sbatch."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))
