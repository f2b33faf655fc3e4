"""One name and one color for each use of time, the same on the page, in reports and in pictures."""

from orchestrator.views.goodput import Use

LABEL: dict[Use, str] = {
    Use.STEP: "training",
    Use.CHECKPOINT: "checkpoint stall",
    Use.LOST: "lost work",
    Use.DETECT: "detect",
    Use.STOP: "stop",
    Use.START: "start",
    Use.RESTORE: "restore",
    Use.FIRST_STEP: "first step",
    Use.INIT: "init",
    Use.QUEUE: "wait for nodes",
    Use.FINISH: "finish",
    Use.UNMEASURED: "running, not measured",
}

COLOR: dict[Use, str] = {
    Use.STEP: "#2a9d78",
    Use.CHECKPOINT: "#3f83c9",
    Use.LOST: "#d8504d",
    Use.DETECT: "#ee7f2d",
    Use.STOP: "#f3a64b",
    Use.START: "#e5c04f",
    Use.RESTORE: "#8e6cc0",
    Use.FIRST_STEP: "#b9a3dd",
    Use.INIT: "#8492a6",
    Use.QUEUE: "#bcc6d2",
    Use.FINISH: "#a3aebb",
    Use.UNMEASURED: "#7d9cc0",
}

CURVE = "#2f6fb5"
REFERENCE = "#e0893a"
INCIDENT = "#c2302e"
