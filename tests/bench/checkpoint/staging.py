"""What a save costs the training: plain, beside it, and back again from the own arena."""

from collections.abc import Set as AbstractSet

from tests.bench.checkpoint import rows
from tests.bench.checkpoint.children import World
from tests.bench.checkpoint.node import Node, Setup, node
from tests.bench.checkpoint.rows import Row, Target

FIGURES = ("stall", "arena", "overlap")
_STEPS = 3
_PRIVATE_UP_TO = 1024  # MiB: another copy of a larger state may be too much
_COPY = "plain copy by the same threads, shared memory"


def targets(setup: Setup) -> dict[str, list[Target]]:
    """Return what is measured here, by figure."""
    what = setup.what
    return {
        "stall": [
            Target(figure=f"stall of a save, {what}", peer=_COPY, limit=1.25),
            Target(figure=f"stall of a save, {what}", peer="the same copy, private memory"),
        ],
        "arena": [
            Target(figure=f"restore from own arena, {what}", peer=_COPY, limit=1.5),
            Target(figure=f"the same with a mapping of its own, {what}", peer=_COPY),
        ],
        "overlap": [
            Target(figure=f"blocked by an overlapped save, {what}", peer=_COPY, limit=0.3),
            Target(
                figure=f"an overlapped save with what it slows down, {_STEPS} steps",
                peer="the same steps without it",
            ),
            Target(figure="blocked by an overlapped save, copied by a GPU", peer=_COPY, limit=0.05),
        ],
    }


def measure(setup: Setup, wanted: AbstractSet[str]) -> list[Row]:
    """Save, copy and restore in turn, all ranks at once; the slowest rank counts."""
    found: list[Row] = []
    with node(setup) as place:
        if wanted & {"stall", "arena"}:
            with place.ranks() as world:
                found += _plain(setup, place, world, wanted)
        if "overlap" in wanted:
            with place.ranks() as world:
                found += _overlapped(setup, place, world)
    return found


def _plain(setup: Setup, place: Node, world: World, wanted: AbstractSet[str]) -> list[Row]:
    took = max(world.ask("prepare", overlap=False))
    saves, shared, private, restores, unmapped = [], [], [], [], []
    for turn in range(1 + setup.repeats):
        copied_first = turn % 2
        if copied_first:
            shared.append(max(world.ask("copy", shared=True)))
        saves.append(max(world.ask("save")))
        if not copied_first:
            shared.append(max(world.ask("copy", shared=True)))
        if "stall" in wanted and setup.mib <= _PRIVATE_UP_TO:
            private.append(max(world.ask("copy", shared=False)))
        if "arena" in wanted:
            step = place.newest_step()
            restores.append(max(world.ask("restore_memory", step=step, mapped=True)))
            unmapped.append(max(world.ask("restore_memory", step=step, mapped=False)))
        place.mark_uploaded()
        setup.say(f"  save {saves[-1]:.3f} s, copy {shared[-1]:.3f} s")
    aims, found = targets(setup), []
    if "stall" in wanted:
        note = {"before_step_1_s": round(took, 3)}
        why = "" if private else f"only up to {_PRIVATE_UP_TO} MiB"
        found.append(rows.compared(aims["stall"][0], saves[1:], shared[1:], **note))
        found.append(rows.compared(aims["stall"][1], saves[1:], private[1:], why))
    if "arena" in wanted:
        found.append(rows.compared(aims["arena"][0], restores[1:], shared[1:]))
        found.append(rows.compared(aims["arena"][1], unmapped[1:], shared[1:]))
    return found


def _overlapped(setup: Setup, place: Node, world: World) -> list[Row]:
    world.ask("prepare", overlap=True)
    blocked, copies, with_save, without = [], [], [], []
    for _ in range(1 + setup.repeats):
        alone = world.ask("overlapped", save=False, steps=_STEPS)
        both = world.ask("overlapped", save=True, steps=_STEPS)
        copies.append(max(world.ask("copy", shared=True)))
        place.mark_uploaded()
        blocked.append(max(answer["blocked_s"] for answer in both))
        with_save.append(max(answer["took_s"] for answer in both))
        without.append(max(answer["took_s"] for answer in alone))
        setup.say(f"  blocked {blocked[-1]:.3f} s, copy {copies[-1]:.3f} s")
    aims = targets(setup)["overlap"]
    return [
        rows.compared(aims[0], blocked[1:], copies[1:]),
        rows.compared(aims[1], with_save[1:], without[1:]),
        rows.missing(aims[2], "ranks of this bench train on the CPU"),
    ]
