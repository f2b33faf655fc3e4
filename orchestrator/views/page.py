"""The supervisor's status page: one HTML file without outside parts, fed by `/api/status`.

The template carries styles and script; values reach it only as JSON data, and the script writes
them as text, never as markup.
"""

import html
import json
from functools import cache
from importlib.resources import files
from typing import Any

from orchestrator.views.palette import COLOR, LABEL

REFRESH_S = 2
# Served together with the page: nothing but its own inline parts and its own host is loaded.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'"
)


def render_page(status: dict[str, Any], refresh_s: float = REFRESH_S) -> str:
    """Return the page with a first status in it; `refresh_s` 0 never asks for another."""
    data = {
        "status": status,
        "refresh_s": refresh_s,
        "uses": [{"key": use.value, "label": LABEL[use], "color": COLOR[use]} for use in COLOR],
    }
    title = html.escape(f"{status.get('run') or 'no run'} - everstep")
    page = _template().replace("@@TITLE@@", title)
    return page.replace("@@DATA@@", script_json(data))


def script_json(value: Any) -> str:
    """Return JSON that cannot end the script element that it stands in."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _template() -> str:
    return files("orchestrator.views").joinpath("page.html").read_text(encoding="utf-8")
