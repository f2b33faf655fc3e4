"""Files that other processes read, and that outlive a crash: whole or not at all."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Put a JSON value in the place of a file; a reader sees all of the old or of the new one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)
