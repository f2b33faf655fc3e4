"""The report as one self-contained HTML file."""

import html
from functools import cache
from importlib.resources import files
from typing import Any

from orchestrator.views.incidents import PHASES, lost_cell, phase_cells
from orchestrator.views.palette import COLOR, INCIDENT, LABEL, REFERENCE
from orchestrator.views.parts import covers_words
from orchestrator.views.report import Report, agreement_words
from orchestrator.views.saves import cost_words, missed_words, retry_words
from orchestrator.views.svg import loss_svg, timeline_svg, used
from orchestrator.views.units import NOT_MEASURED, clock, count, date, number, percent, seconds


def render_html(report: Report) -> str:
    """Return the whole file; every value is escaped."""
    status = report.status
    progress, saves = status["progress"], status["checkpoints"]
    step = progress["step"]
    tiles = [
        ("Goodput", percent(report.goodput.ratio), f"of {seconds(report.goodput.wall_s)}"),
        ("Last step", f"{step:,}" if step is not None else NOT_MEASURED, _loss_words(progress)),
        ("Incidents", f"{len(status['incidents'])}", _lost_words(status["incidents"])),
        ("Checkpoints", f"{saves['committed']:,}", _saves_words(saves)),
    ]
    page = _template()
    for mark, text in {
        "TITLE": html.escape(f"{report.name} - everstep report"),
        "NAME": html.escape(report.name),
        "PILL": _pill(status),
        "HEADLINE": html.escape(_headline(status)),
        "STAMP": html.escape(date(report.timeline.start)),
        "TILES": "".join(_tile(*tile) for tile in tiles),
        "BAR": _bar(report),
        "LEGEND": _legend(report),
        "TIMELINE": timeline_svg(report.timeline),
        "LOSS": loss_svg(report),
        "LOSSLEGEND": _loss_legend(report),
        "INCIDENTS": _incidents(status["incidents"]),
        "INTERVAL": html.escape(_interval_words(saves)),
    }.items():
        page = page.replace(f"@@{mark}@@", text)
    return page


def _headline(status: dict[str, Any]) -> str:
    covers = covers_words(status)
    return f"{status['headline']}. This covers {covers}." if covers else str(status["headline"])


@cache
def _template() -> str:
    return files("orchestrator.views").joinpath("report.html").read_text(encoding="utf-8")


def _pill(status: dict[str, Any]) -> str:
    mood = {"finished": "good", "failed": "bad"}.get(status["outcome"], "info")
    word = html.escape(status["outcome"] or status["phase"])
    return f'<span class="pill {mood}">{word}</span>'


def _tile(title: str, value: str, below: str) -> str:
    return (
        f'<section class="card s3"><h2>{html.escape(title)}</h2>'
        f'<div class="big">{html.escape(value)}</div>'
        f'<div class="sub">{html.escape(below)}</div></section>'
    )


def _loss_words(progress: dict[str, Any]) -> str:
    return f"loss {number(progress['loss'])}, {seconds(progress['step_s'])} a step"


def _lost_words(rows: list[dict[str, Any]]) -> str:
    lost = sum(row["steps_lost"] or 0 for row in rows)
    return f"{count(lost, 'step')} run again" if rows else "nothing went wrong"


def _saves_words(saves: dict[str, Any]) -> str:
    if not saves["enabled"]:
        return "the run asked for none"
    return f"every {count(saves['interval_steps'], 'step')} at the end"


def _interval_words(saves: dict[str, Any]) -> str:
    if not saves["enabled"]:
        return "The run asked for no checkpoints."
    words = [f"Checkpoint interval at the end: {saves['interval_why']}."]
    if cost := cost_words(saves["last_save"]):
        words.append(f"Last save: {cost}.")
    if saves["retries"]:
        words.append(f"Store: {retry_words(saves['retries'])}.")
    if missed := missed_words(saves):
        words.append(f"In the last attempt {missed}.")
    return " ".join(words)


def _bar(report: Report) -> str:
    parts = []
    for use in used(report):
        share = report.goodput.seconds[use] / report.goodput.wall_s
        title = html.escape(f"{LABEL[use]}: {seconds(report.goodput.seconds[use])}")
        style = f"background:{COLOR[use]};flex:{share:.5f} 0 0"
        parts.append(f'<i title="{title}" style="{style}"></i>')
    return "".join(parts)


def _legend(report: Report) -> str:
    rows = []
    for use in used(report):
        value = report.goodput.seconds[use]
        rows.append(
            f'<div><i style="background:{COLOR[use]}"></i><span>{LABEL[use]}</span>'
            f"<b>{seconds(value)}</b><span>{percent(value / report.goodput.wall_s)}</span></div>"
        )
    return "".join(rows)


def _loss_legend(report: Report) -> str:
    items = [("var(--info)", report.name)]
    if report.lost:
        items.append((INCIDENT, "steps that were lost and run again"))
    if report.reference:
        items.append((REFERENCE, f"{report.reference.name} (reference)"))
    keys = [
        f'<span><i style="background:{color}"></i>{html.escape(name)}</span>'
        for color, name in items
    ]
    words = agreement_words(report)
    return "".join(keys) + (f"<em>{html.escape(words)}</em>" if words else "")


def _incidents(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return '<p class="empty">None.</p>'
    heads = [("#", ""), ("at", ""), ("cause", "w"), ("decision", "w")]
    heads += [(name, "n") for _, name in PHASES] + [("steps lost", "n")]
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_row, rows))}</tbody></table>"


def _row(row: dict[str, Any]) -> str:
    restore = row["restore"]
    origin = "from step 0"
    if restore is not None:
        where = "the nodes' memory" if restore["source"] == "memory" else "the store"
        origin = f"from step {restore['step']:,} in {where}"
    elif row["next_attempt"] is None:
        origin = ""
    blamed = " / ".join(str(part) for part in (row["fault"].replace("_", " "), row["node"]) if part)
    cells = [
        f"<td>{row['number']}</td><td>{clock(row['at'])}</td>",
        _two_lines(row["cause"], blamed),
        _two_lines(row["decision"], origin),
        *(f'<td class="n">{cell}</td>' for cell in phase_cells(row)),
        f'<td class="n">{lost_cell(row)}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _two_lines(first: str, second: str) -> str:
    below = f'<div class="soft">{html.escape(second)}</div>'
    return f'<td class="w"><div>{html.escape(first)}</div>{below}</td>'
