"""A save under way and what the last one cost: as JSON, in words, and as a bar."""

import math
from typing import Any

from rich.text import Text

from orchestrator.core.saves import SaveCost
from orchestrator.core.state import State
from orchestrator.views.units import count, plain, seconds, size, speed

BAR_CELLS = 24
STAGED, SENT, DONE, EMPTY = "blue", "cyan", "green", "bright_black"


def saving(state: State) -> dict[str, Any] | None:
    """Describe the newest save of the attempt that is not committed yet, None for none."""
    attempt = state.attempt
    if attempt is None or state.run is None or not state.run.checkpoints:
        return None
    staged: dict[int, set[int]] = {}
    for name in attempt.nodes:
        node = state.nodes.get(name)
        for shard in node.staged if node is not None else ():
            if shard.attempt == attempt.number and shard.for_store:
                staged.setdefault(shard.step, set()).add(shard.rank)
    for step, number in state.uploads:
        if number == attempt.number:
            staged.setdefault(step, set())
    committed = {step for step, number in state.commits if number == attempt.number}
    done = max(committed, default=-1)
    open_steps = [
        step for step in staged if step > done and (step, attempt.number) not in state.refused
    ]
    if not open_steps:
        return None
    step = max(open_steps)
    uploads = state.uploads.get((step, attempt.number), {})
    return {
        "step": step,
        "world": attempt.world,
        "staged_ranks": max(len(staged[step] | set(uploads)), len(uploads)),
        "uploaded_ranks": len(uploads),
        "uploaded_bytes": sum(shard.nbytes for shard in uploads.values()),
    }


def cost_json(cost: SaveCost | None) -> dict[str, Any] | None:
    """Return what a save cost; None stands for what was not measured."""
    if cost is None:
        return None
    return {
        "ranks": cost.ranks,
        "stall_s": plain(cost.stall_s),
        "stage_s": plain(cost.stage_s),
        "stage_bytes_per_s": cost.stage_bytes_per_s,
        "upload_s": plain(cost.upload_s),
        "upload_bytes_per_s": cost.upload_bytes_per_s,
        "uploaded_bytes": cost.sent_nbytes,
        "retries": dict(cost.retries),
        "hedges": cost.hedges,
        "planes": list(cost.planes),
        "age_before_s": plain(cost.age_s),
    }


def cost_words(cost: dict[str, Any] | None) -> str:
    """Say what a save cost, "" when nothing of it was measured."""
    if cost is None:
        return ""
    words = []
    if cost["stall_s"] is not None:
        words.append(f"stall {seconds(cost['stall_s'])}")
    if cost["stage_bytes_per_s"] is not None:
        words.append(f"staged at {speed(cost['stage_bytes_per_s'])}")
    if cost["upload_bytes_per_s"] is not None:
        words.append(f"uploaded at {speed(cost['upload_bytes_per_s'])}")
    if cost["upload_s"] is not None:
        words.append(f"in the store after {seconds(cost['upload_s'])}")
    if cost["retries"]:
        words.append(retry_words(cost["retries"]))
    return ", ".join(words)


def retry_words(retries: dict[str, int]) -> str:
    """Say how often requests were made again, and why."""
    by_code = ", ".join(f"{code} {n}" for code, n in sorted(retries.items()))
    times = count(sum(retries.values()), "request made again", "requests made again")
    return f"{times} ({by_code})"


def missed_words(saves: dict[str, Any]) -> str:
    """Say how many saves of the attempt came to nothing, "" for none."""
    words = []
    if saves["skipped_saves"]:
        words.append(f"{count(saves['skipped_saves'], 'save')} skipped, uploads are too slow")
    if saves["dropped_saves"]:
        words.append(f"{count(saves['dropped_saves'], 'save')} dropped")
    return ", ".join(words)


def saving_bar(saves: dict[str, Any], cells: int = BAR_CELLS) -> Text:
    """Draw how far the newest save is: staged, uploaded, committed."""
    now, last = saves["saving"], saves["last_save"]
    if now is None:
        if saves["newest_step"] is None:
            return Text("none yet", style="dim")
        bar = Text("\u2588" * cells, style=DONE)
        bar.append(f"  step {saves['newest_step']:,} committed{_age(saves)}", style="")
        return bar.append(_speed(last), style="dim")
    sent = _cells(now["uploaded_ranks"], now["world"], cells)
    staged = max(_cells(now["staged_ranks"], now["world"], cells), sent)
    bar = Text("\u2588" * sent, style=SENT)
    bar.append("\u2588" * (staged - sent), style=STAGED)
    bar.append("\u2591" * (cells - staged), style=EMPTY)
    world = now["world"]
    if now["uploaded_ranks"] == world:
        words = f"{size(now['uploaded_bytes'])} in the store, committing"
    elif now["uploaded_ranks"]:
        sent_words = f"{now['uploaded_ranks']} of {count(world, 'rank')}"
        words = f"uploaded {sent_words}, {size(now['uploaded_bytes'])}"
    else:
        words = f"staged {now['staged_ranks']} of {count(world, 'rank')}"
    bar.append(f"  step {now['step']:,}: {words}", style="")
    if saves["newest_step"] is not None:
        bar.append(f"; committed step {saves['newest_step']:,}{_age(saves)}", style="dim")
    return bar.append(_speed(last), style="dim")


def _cells(part: int, whole: int, cells: int) -> int:
    return min(cells, math.floor(cells * part / whole)) if whole else 0


def _age(saves: dict[str, Any]) -> str:
    return f" {seconds(saves['age_s'])} ago" if saves["age_s"] is not None else ""


def _speed(cost: dict[str, Any] | None) -> str:
    per_s = cost["upload_bytes_per_s"] if cost is not None else None
    return f", {speed(per_s)}" if per_s is not None else ""
