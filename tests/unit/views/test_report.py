import json
from pathlib import Path

import pytest

from orchestrator.core import events as ev
from orchestrator.views import report as reporting
from orchestrator.views.goodput import Use
from orchestrator.views.losses import Loss, kept_curve, read_losses
from orchestrator.views.report_html import render_html
from orchestrator.views.timeline import number_ticks, tick_label, time_ticks
from tests.unit.views.story import Story, whole_story


def losses_of(story: Story) -> tuple[Loss, ...]:
    return tuple(
        Loss(attempt=r.event.attempt, step=r.event.min_step, loss=r.event.loss, at=r.at)
        for r in story.records
        if isinstance(r.event, ev.Progress)
    )


def made(reference: reporting.Reference | None = None) -> reporting.Report:
    story = whole_story()
    return reporting.build(story.records, losses_of(story), reference)


def test_the_html_is_whole_and_self_contained() -> None:
    page = render_html(made())
    assert page.startswith("<!doctype html>")
    assert "@@" not in page
    assert "src=" not in page
    assert "https://" not in page
    assert page.count("<svg") == page.count("</svg>") == 3
    assert "rank 3 on node-2 was killed by SIGKILL" in page


def test_text_of_a_run_never_becomes_markup() -> None:
    story = Story().launch().train(30)
    story.add(ev.AgentLost(node="node-2", incarnation="i2", why="<b>bad</b> & worse", silent_s=1.0))
    page = render_html(reporting.build(story.records, ()))
    assert "<b>bad</b>" not in page


def test_every_lane_lies_inside_the_run_and_shows_its_node() -> None:
    line = made().timeline
    assert [lane.name for lane in line.lanes] == ["node-1", "node-2", "node-3"]
    for lane in line.lanes:
        for span in lane.spans:
            assert line.start <= span.start < span.end <= line.end
    last_of_lost = line.lanes[1].spans[-1]
    assert last_of_lost.use in (Use.LOST, Use.STEP)


def test_a_lost_supervisor_leaves_a_gap_in_its_lane() -> None:
    assert len(made().timeline.supervised) == 2


def test_lost_pieces_are_the_steps_that_ran_twice() -> None:
    first, second = made().lost
    assert first[-1][0] == 75
    assert second[-1][0] == 150


def test_an_equal_reference_is_said_to_be_equal() -> None:
    story = whole_story()
    curve = kept_curve(losses_of(story))
    report = made(reporting.Reference(name="quiet", curve=curve))
    assert reporting.agreement_words(report).endswith("with quiet: equal at every step")
    assert reporting.as_json(report)["compared"]["largest_loss_difference"] == 0
    assert "quiet (reference)" in render_html(report)


def test_a_differing_reference_is_measured() -> None:
    curve = [(step, loss + 0.25) for step, loss in kept_curve(losses_of(whole_story()))]
    report = made(reporting.Reference(name="other", curve=curve))
    assert reporting.as_json(report)["compared"]["largest_loss_difference"] == pytest.approx(0.25)


def test_a_reference_without_common_steps_is_not_called_equal() -> None:
    report = made(reporting.Reference(name="other", curve=[(9999, 1.0)]))
    assert reporting.agreement_words(report) == "no step in common with other"


def test_a_run_that_never_trained_can_be_reported() -> None:
    report = reporting.build(Story().records, ())
    page = render_html(report)
    assert "No loss was reported." in page
    json.dumps(reporting.as_json(report), allow_nan=False)


def test_without_the_jobs_own_losses_the_journal_has_some() -> None:
    report = reporting.build(whole_story().records, ())
    assert report.curve[-1][0] == 300


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from orchestrator.views.report_png import render_png

    for number, report in enumerate((made(), reporting.build(Story().records, ()))):
        path = tmp_path / f"{number}.png"
        render_png(report, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_torn_or_foreign_line_of_losses_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = {"attempt": 1, "step": 3, "loss": 4.5, "step_s": 0.1, "tokens": 5, "at": 1.0}
    lines = [json.dumps(good), "[]", "nonsense", '{"attempt": 1, "step": 4, "loss": NaN}']
    path.write_text("\n".join(lines) + '\n{"attempt": 1, "st')
    (loss,) = read_losses(path)
    assert (loss.step, loss.loss) == (3, 4.5)


def test_a_missing_file_has_no_losses(tmp_path: Path) -> None:
    assert read_losses(tmp_path / "none.jsonl") == ()


@pytest.mark.parametrize("length", [0.0, 0.4, 59, 61, 3599, 7300, 90_000, 2e7])
def test_time_axes_have_few_ticks_inside_the_run(length: float) -> None:
    ticks = time_ticks(length)
    assert 1 <= len(ticks) <= 12 or length > 1e7
    assert ticks[-1] <= max(length, 0)
    assert all(tick_label(tick, length) for tick in ticks)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.31, 2.34), (0, 300), (1e-6, 2e-6), (5, 5)])
def test_number_axes_have_round_ticks_inside_the_range(low: float, high: float) -> None:
    ticks = number_ticks(low, high)
    assert 1 <= len(ticks) <= 8
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


def test_the_html_says_what_the_last_save_cost_and_how_the_store_answered() -> None:
    page = render_html(made())
    assert "Last save: stall 30 ms, staged at 2.00 GB/s, uploaded at 70 MB/s" in page
    assert "requests made again (SlowDown" in page
