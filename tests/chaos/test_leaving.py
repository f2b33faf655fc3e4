"""Nodes and allocations that the site, or a person, wants back."""

import pytest

from deploy.devcluster.client import Devcluster
from orchestrator.core import events as ev
from orchestrator.core.actions import Outcome
from orchestrator.exit_codes import ExitCode
from tests.chaos.conftest import MakeStory
from tests.chaos.story import Story


@pytest.mark.brief
def test_a_drained_node_is_left_and_no_step_is_lost(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell()
    story.begin()
    first, drained = story.nodes
    spare = story.spare
    cluster.do("drain", drained)
    story.goes_on(2)
    assert story.nodes == (first, spare)
    (incident,) = story.finish(lost_steps=0)
    assert incident.fault_class == "free"
    assert story.sums() == undisturbed


def test_before_its_time_limit_a_run_saves_and_goes_on_in_another_job(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(nodes="")
    story.begin()
    # What Slurm does `warn_s` before the limit, which it looks at twice a minute only.
    cluster.slurm("scancel", "--signal=USR2", job_of(story))
    story.goes_on(2)
    (incident,) = story.finish(jobs=2, lost_steps=0)
    assert (incident.fault, incident.fault_class) == ("time_limit", "free")
    assert story.sums() == undisturbed


def test_a_preempted_run_saves_and_goes_on_in_another_job(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(nodes="")
    story.begin()
    cluster.do("preempt", job_of(story), "--hold", "3")
    story.goes_on(2)
    (incident,) = story.finish(jobs=2, lost_steps=0)
    assert incident.fault_class == "free"
    assert [e.ending for _, e in story.events(ev.JobObserved) if e.state == "gone"] == ["preempted"]
    assert story.sums() == undisturbed


def test_a_person_s_scancel_stops_a_run_for_good_and_keeps_its_last_step(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(nodes="")
    story.begin()
    cluster.slurm("scancel", job_of(story))
    assert story.ends_with() is ExitCode.STOPPED
    story.check()
    attempt = story.state.attempt
    assert story.state.outcome is Outcome.STOPPED
    assert attempt is not None
    assert story.state.commits[0][0] >= attempt.max_step
    story.start_again()
    story.wait("it is told to go on", lambda state: state.last_attempt == 2)
    assert not story.finish(jobs=2)
    assert story.sums() == undisturbed


def job_of(story: Story) -> str:
    """Return the number of the run's only job that is there."""
    (job,) = story.cluster.slurm("squeue", "-h", "-t", "R", "-o", "%i").split()
    return job
