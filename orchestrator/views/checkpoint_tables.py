"""`everstep checkpoints` as terminal text; takes the JSON objects that it prints."""

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.views.tables import grid
from orchestrator.views.units import NOT_MEASURED, count, date, seconds, size

MOOD = {"committed": "green", "quarantined": "yellow", "unreadable": "red"}
SHOWN = 40


def listing_view(body: dict[str, Any]) -> RenderableType:
    """Render `ls`."""
    if not body["checkpoints"] and not body["averages"] and not body["unreadable"]:
        return Text(f"{body['run']}: nothing is committed in {body['store']}", style="dim")
    table = _table(("step", 1), ("attempt", 1), ("age", 1), ("size", 1), ("ranks", 1), ("state", 0))
    for row in body["checkpoints"]:
        state = Text(row["state"], style=MOOD[row["state"]])
        if row["why"]:
            state.append(f": {row['why']}", style="default")
        table.add_row(
            f"{row['step']}",
            f"{row['attempt']}",
            _age(row["committed_at"]),
            _size(row["nbytes"]),
            NOT_MEASURED if row["ranks"] is None else f"{row['ranks']}",
            state,
        )
    parts: list[RenderableType] = [table]
    if body["older"]:
        parts.append(Text(f"and {body['older']} older", style="dim"))
    parts += [Text(f"cannot be read: {key}", style="red") for key in body["unreadable"]]
    for made in body["averages"]:
        of = ", ".join(str(step) for step in made["of"])
        words = f"average {made['label']} at step {made['step']}: {_size(made['nbytes'])}, of {of}"
        parts.append(Text(words, style="dim"))
    return Group(*parts)


def description_view(body: dict[str, Any]) -> RenderableType:
    """Render `show`."""
    title = f"step {body['step']} of attempt {body['attempt']}"
    at = body["committed_at"]
    rows: list[tuple[str, RenderableType]] = [
        ("checkpoint", Text(title, style="bold")),
        ("run", Text(body["run"])),
        ("committed", NOT_MEASURED if at is None else f"{date(at)}, {_age(at)} ago"),
        ("size", f"{size(body['nbytes'])} from {count(body['ranks'], 'rank')}"),
        ("key", Text(body["key"])),
    ]
    if body["average_of"]:
        of = ", ".join(str(step) for step, _ in body["average_of"])
        rows.insert(1, ("average of", Text(f"{of}; nothing to resume from", style="yellow")))
    groups = _table(("group", 0), ("tensors", 1), ("elements", 1), ("size", 1), ("types", 0))
    for group in body["groups"]:
        groups.add_row(
            group["name"],
            f"{group['tensors']:,}",
            f"{group['elements']:,}",
            size(group["nbytes"]),
            ", ".join(group["dtypes"]),
        )
    tensors = _table(("tensor", 0), ("type", 0), ("shape", 0), ("size", 1), ("pieces", 1))
    for tensor in body["tensors"][:SHOWN]:
        tensors.add_row(
            tensor["name"],
            tensor["dtype"],
            str(tensor["shape"]),
            size(tensor["nbytes"]),
            f"{tensor['pieces']}",
        )
    values = [f"{path} = {text:.60}" for path, text in list(body["values"].items())[:SHOWN]]
    more = len(body["tensors"]) - SHOWN
    tail = [Text(f"and {more} more; --json has all of them", style="dim")] if more > 0 else []
    shown: list[RenderableType] = [Text(value, style="dim") for value in values]
    return Group(grid(rows), "", groups, "", tensors, *tail, *([""] if shown else []), *shown)


def verified_view(body: dict[str, Any]) -> RenderableType:
    """Render `verify`."""
    parts: list[RenderableType] = []
    for row in body["checkpoints"]:
        read = f"{size(row['nbytes'])} read, {count(row['tensors'], 'piece')} checked"
        of = "" if row["attempt"] is None else f" of attempt {row['attempt']}"
        head = f"step {row['step']}{of}: "
        if not row["problems"]:
            parts.append(Text.assemble(head, ("sound", "green"), f", {read}"))
            continue
        parts.append(Text.assemble(head, ("damaged", "bold red"), f", {read}"))
        parts += [Text(f"  {problem}") for problem in row["problems"][:SHOWN]]
        if len(row["problems"]) > SHOWN:
            parts.append(Text(f"  and {len(row['problems']) - SHOWN} more", style="dim"))
        if row["quarantined"]:
            parts.append(Text("  in quarantine from now on", style="yellow"))
    return Group(*parts)


def differences_view(body: dict[str, Any]) -> RenderableType:
    """Render `diff`."""
    first, second = body["first"], body["second"]
    head = (
        f"step {first['step']} of attempt {first['attempt']} against step {second['step']} of "
        f"attempt {second['attempt']}: {count(body['equal'], 'tensor')} equal, "
        f"{len(body['tensors'])} not"
    )
    table = _table(("tensor", 0), ("how", 0), ("elements", 1), ("largest", 1), ("", 0))
    for row in body["tensors"][:SHOWN]:
        changed = row["kind"] == "changed"
        odd = f"{row['non_finite']} not finite" if row["non_finite"] else row["detail"]
        table.add_row(
            row["name"],
            row["kind"].replace("_", " "),
            f"{row['different_elements']:,} of {row['elements']:,}" if changed else "",
            NOT_MEASURED if row["max_abs"] is None else f"{row['max_abs']:.4g}",
            odd,
        )
    parts: list[RenderableType] = [Text(head)]
    if body["tensors"]:
        parts += ["", table]
    if len(body["tensors"]) > SHOWN:
        parts.append(Text(f"and {len(body['tensors']) - SHOWN} more; --json has all", style="dim"))
    for row in body["values"][:SHOWN]:
        parts.append(Text(f"{row['path']}: {row['first']:.60} against {row['second']:.60}"))
    return Group(*parts)


def pruning_view(body: dict[str, Any]) -> RenderableType:
    """Render `prune`."""
    table = _table(("step", 1), ("attempt", 1), ("", 0), ("why", 0))
    rows = [(row, "keep", "green") for row in body["keep"]]
    rows += [(row, "delete", "red") for row in body["delete"]]
    for row, what, style in sorted(
        rows, key=lambda item: (item[0]["step"], item[0]["attempt"]), reverse=True
    ):
        table.add_row(f"{row['step']}", f"{row['attempt']}", Text(what, style=style), row["why"])
    for row in body["orphans"]:
        why = f"{row['why']}: {count(row['objects'], 'object')}, {size(row['nbytes'])}"
        table.add_row(f"{row['step']}", f"{row['attempt']}", Text("sweep", style="red"), why)
    parts: list[RenderableType] = [table]
    parts += [
        Text(f"abort the upload of {upload['key']}, {seconds(upload['age_s'])} old")
        for upload in body["uploads"]
    ]
    for step, attempt in body["unfinished"]:
        parts.append(Text(f"finish the deletion of step {step} of attempt {attempt}"))
    if body["deleted"]:
        parts.append(Text(f"done, {size(body['freed_bytes'])} freed", style="bold"))
    elif body["delete"] or body["orphans"] or body["uploads"] or body["unfinished"]:
        parts.append(Text("nothing was deleted; --yes does it", style="bold"))
    else:
        parts.append(Text("nothing to delete", style="dim"))
    return Group(*parts)


def exported_view(body: dict[str, Any]) -> RenderableType:
    """Render `export`."""
    words = f"{count(body['tensors'], 'tensor')}, {size(body['nbytes'])}"
    files = count(len(body["files"]), "file")
    return Text(f"step {body['step']}: {words} in {files} in {body['folder']}")


def averaged_view(body: dict[str, Any]) -> RenderableType:
    """Render `average`."""
    of = ", ".join(str(step) for step, _ in body["of"])
    words = f"{count(body['tensors'], 'tensor')} averaged, {body['copied']} copied"
    before = " (it was there before)" if body["already"] else ""
    return Text(
        f"average {body['label']} of steps {of}: {words}, {size(body['nbytes'])}{before}; "
        f"`--average {body['label']}` shows, verifies and exports it"
    )


def _table(*columns: tuple[str, int]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name, right in columns:
        table.add_column(name, overflow="fold", justify="right" if right else "left")
    return table


def _age(at: float | None) -> str:
    return NOT_MEASURED if at is None else seconds(max(time.time() - at, 0.0))


def _size(nbytes: int | None) -> str:
    return NOT_MEASURED if nbytes is None else size(nbytes)
