from prometheus_client.parser import text_string_to_metric_families

from orchestrator.core import events as ev
from orchestrator.core.saves import SaveCost
from orchestrator.views.history import KEPT_CODES, History, Sums
from orchestrator.views.metrics import render
from tests.unit.views.story import Story, whole_story


def scraped(story: Story) -> dict[str, list]:
    text = render(lambda: History.of(story.records), now=lambda: story.at).decode()
    families = text_string_to_metric_families(text)
    return {family.name: family.samples for family in families}


def value(samples: list, **labels: str) -> float:
    (found,) = [s.value for s in samples if labels.items() <= s.labels.items()]
    return found


def test_names_have_the_prefix_and_every_sample_names_its_run() -> None:
    for name, samples in scraped(whole_story()).items():
        assert name.startswith("everstep_")
        assert all(sample.labels["run"] == "moe-demo" for sample in samples)


def test_steps_checkpoints_and_restarts_are_counted() -> None:
    found = scraped(whole_story())
    assert value(found["everstep_step"]) == 300
    assert value(found["everstep_checkpoint_last_success_step"]) == 300
    assert value(found["everstep_restarts"], reason_class="process") == 1
    assert value(found["everstep_restarts"], reason_class="node") == 1
    assert value(found["everstep_run_phase"], phase="over") == 1


def test_uses_of_time_sum_to_the_wall_time() -> None:
    story = whole_story()
    total = sum(s.value for s in scraped(story)["everstep_wall_seconds"])
    assert abs(total - (story.at - story.records[0].at)) < 1e-6


def test_recovery_times_are_a_histogram_by_phase() -> None:
    samples = scraped(whole_story())["everstep_restart_seconds"]
    counts = [s for s in samples if s.name.endswith("_count")]
    assert {s.labels["phase"] for s in counts} >= {"detect", "stop", "start", "restore", "total"}
    assert all(s.value == 2 for s in counts)


def test_what_is_not_known_is_absent() -> None:
    found = scraped(Story())
    assert "everstep_step" not in found
    assert "everstep_loss" not in found
    assert "everstep_checkpoint_last_success_step" not in found
    assert "everstep_goodput_ratio" not in found


def test_no_run_gives_an_empty_scrape() -> None:
    assert render(lambda: History.of(())) == b""


def test_a_lost_node_is_down_and_its_incident_open() -> None:
    found = scraped(Story().launch().train(30).lose_node())
    assert value(found["everstep_node_up"], node="node-2") == 0
    assert value(found["everstep_incident_open"], node="node-2") == 1


def test_the_cost_of_the_last_save_is_told_in_base_units() -> None:
    story = Story().launch().train(45)
    story.at += 3.0
    found = scraped(story)
    assert value(found["everstep_checkpoint_stage_seconds"]) == 0.02
    assert value(found["everstep_checkpoint_stage_bytes_per_second"]) == 2e9
    assert value(found["everstep_checkpoint_upload_bytes_per_second"]) == 7e7
    assert value(found["everstep_checkpoint_upload_seconds"]) == 0.21
    assert value(found["everstep_checkpoint_stall_seconds"]) == 0.03
    assert 3.0 <= value(found["everstep_checkpoint_age_seconds"]) < 6.0


def test_sums_over_saves_are_counters_with_the_codes_of_the_store() -> None:
    found = scraped(Story().launch().train(45))
    assert value(found["everstep_checkpoint_commits"]) == 2
    assert value(found["everstep_checkpoint_upload_retries"], code="SlowDown") == 4
    assert value(found["everstep_checkpoint_uploaded_bytes"]) == 28_000_000
    assert value(found["everstep_checkpoint_hedged_parts"]) == 2
    names = {s.name for s in found["everstep_checkpoint_upload_retries"]}
    assert names == {"everstep_checkpoint_upload_retries_total"}


def test_a_save_that_nobody_measured_gives_no_speed() -> None:
    story = Story().launch().train(19)
    story.add(ev.CheckpointCommitted(step=19, attempt=1, manifest_key="m", nbytes=1))
    found = scraped(story)
    assert "everstep_checkpoint_upload_bytes_per_second" not in found
    assert "everstep_checkpoint_stage_seconds" not in found
    assert value(found["everstep_checkpoint_commits"]) == 1


def test_a_store_that_makes_up_codes_makes_no_series_without_end() -> None:
    sums = Sums()
    for n in range(1000):
        sums.add(SaveCost(retries={f"code-{n}": 1}))
    assert len(sums.retries) <= KEPT_CODES + 1
    assert sum(sums.retries.values()) == 1000
