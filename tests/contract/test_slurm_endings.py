"""How allocations fail to start and end, on a real Slurm with a prolog and with accounting."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.devcluster import packages
from deploy.devcluster.client import Devcluster
from monitors.observations import Ok
from orchestrator.core.events import Ending
from orchestrator.launch.launcher import LaunchRefusedError
from orchestrator.launch.slurm_options import SlurmOptions
from tests.contract.test_launcher import SlurmBench, has_ended, seen, spec
from tests.integration.devclusters import MARKS, cluster_of_three, eventually, jobs_of, make_whole
from tests.integration.traces import traces

MISSING = packages.missing(accounting=True)
pytestmark = [
    *MARKS,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(MISSING), reason=f"NO ACCOUNTING IS TESTED: apt-get install {' '.join(MISSING)}"
    ),
]
FORGETS_S = 150.0  # Slurm looks for old jobs once a minute, and for time limits twice


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the names of nodes whose prolog fails."""
    return tmp_path_factory.mktemp("broken")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, broken: Path) -> Iterator[Devcluster]:
    prolog = broken.parent / "prolog"
    prolog.write_text(f'#!/bin/sh\n[ ! -e {broken}/"$SLURMD_NODENAME" ]\n')
    prolog.chmod(0o755)
    options = ("--accounting", "--set", f"Prolog={prolog}", "--set", "MinJobAge=5")
    with cluster_of_three("e", tmp_path_factory.getbasetemp(), *options) as running:
        yield running


@pytest.fixture
def bench(
    tmp_path: Path, cluster: Devcluster, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmBench]:
    monkeypatch.setenv("SLURM_CONF", cluster.env()["SLURM_CONF"])
    made = SlurmBench(tmp_path, cluster)
    yield made
    for path in broken.iterdir():
        path.unlink()
        cluster.do("undrain", path.name)
    make_whole(cluster)
    assert not traces(made.config)


@pytest.mark.parametrize("node", ["node1", "node2"], ids=["batch host", "another node"])
def test_a_failed_prolog_is_a_failure_that_names_the_node_and_no_scancel(
    bench: SlurmBench, broken: Path, node: str
) -> None:
    """Slurm cancels a job that must not be requeued, which looks like a person's scancel."""
    (broken / node).touch()
    job = bench.launcher.submit(spec(bench))
    ended = seen(bench, job, has_ended)
    assert ended.ending is Ending.FAILED
    assert ended.why == f"could not start on {node}: Prolog error"
    again = bench.launcher.submit(spec(bench, 2, exclude=(node,)))
    seen(bench, again, bench.all_there)


def test_a_job_held_after_a_failed_launch_goes_on_elsewhere_once_released(
    bench: SlurmBench, broken: Path
) -> None:
    """Only a site that forces jobs to be requeued has ours held; here an admin does."""
    launcher = bench.launcher_for(SlurmOptions(exclude="node3", options={"begin": "now+1hour"}))
    job = launcher.submit(spec(bench, nodes=1))
    with pytest.raises(LaunchRefusedError, match="is not held"):
        launcher.unhold(job, ())
    (broken / "node1").touch()
    update = ("scontrol", "update", f"JobId={job}")
    bench.cluster.slurm(*update, "Requeue=1", "StartTime=now")
    held = seen(bench, job, lambda allocation: allocation.held)
    assert held.running
    assert held.queued == "pending, launch failed requeued held"
    bench.cluster.do("undrain", "node1")
    launcher.unhold(job, ("node1",))
    seen(bench, job, bench.all_there)
    assert bench.nodes_of(job) == ("node2",)


def test_endings_are_in_the_books_when_slurm_has_forgotten_the_jobs(bench: SlurmBench) -> None:
    limited = bench.launcher_for(SlurmOptions(time_min=1)).submit(spec(bench, 1, nodes=1))
    seen(bench, limited, bench.all_there)
    elsewhere = bench.nodes_of(limited)
    cancelled = bench.launcher.submit(spec(bench, 2, nodes=1, exclude=elsewhere))
    seen(bench, cancelled, bench.all_there)
    bench.cluster.slurm("scancel", cancelled)
    assert seen(bench, limited, has_ended, FORGETS_S).ending is Ending.TIME_LIMIT
    eventually(
        "Slurm has forgotten the jobs",
        lambda: not jobs_of(bench.cluster, "everstep-launched"),
        FORGETS_S,
    )
    later = bench.launcher_for(SlurmOptions())
    for job, how in ((limited, Ending.TIME_LIMIT), (cancelled, Ending.CANCELLED)):
        observation = later.observe(job)
        assert isinstance(observation, Ok)
        assert not observation.value.running
        assert observation.value.ending is how
