import json
import re
from dataclasses import replace
from html.parser import HTMLParser

from orchestrator.core import events as ev
from orchestrator.views.history import History
from orchestrator.views.page import render_page
from orchestrator.views.status import status
from tests.unit.views.story import Story, whole_story

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def page_of(story: Story) -> str:
    state, history = History.of(story.records)
    return render_page(status(state, history, story.at))


def data_of(page: str):
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found.group(1))


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_carries_its_first_status() -> None:
    data = data_of(page_of(whole_story()))
    assert data["status"]["run"] == "moe-demo"
    assert data["status"]["progress"]["step"] == 300
    assert len(data["status"]["incidents"]) == 2


def test_the_page_loads_nothing_from_outside() -> None:
    parser = Tags()
    parser.feed(page_of(whole_story()))
    for _, attrs in parser.tags:
        for name in ("src", "href"):
            target = attrs.get(name) or ""
            assert not target.startswith(("http", "//")), target
    assert "@import" not in page_of(whole_story())


def test_text_of_a_run_never_becomes_markup() -> None:
    story = Story().launch().train(5)
    exited = ev.RankExited(attempt=1, node="node-1", rank=0, code=1, ours=False, last_line=EVIL)
    story.add(exited)
    first = story.records[0]
    story.records[0] = replace(first, event=replace(first.event, run=EVIL))
    page = page_of(story)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert data_of(page)["status"]["run"] == EVIL


def test_no_placeholder_is_left() -> None:
    assert "@@" not in page_of(Story())
