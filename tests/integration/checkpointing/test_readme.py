"""The snippets of checkpointing/README.md do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[3] / "checkpointing/README.md"
BLOCK = re.compile(r"```(python|sh)\n(.*?)```", re.DOTALL)
TRAINER = """
import os
os.makedirs("out/tmp-checkpoint-5")
open("out/tmp-checkpoint-5/model.bin", "w").write("weights")
os.rename("out/tmp-checkpoint-5", "out/checkpoint-5")
"""
HEAD = "import warnings; warnings.simplefilter('ignore')\nURL = {url!r}\n"


@pytest.mark.torch
@pytest.mark.slow
def test_every_snippet_runs(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "train.py").write_text(TRAINER)
    url = (tmp_path / "store").as_uri()
    blocks = BLOCK.findall(README.read_text(encoding="utf-8"))
    python = HEAD.format(url=url) + "\n".join(text for kind, text in blocks if kind == "python")
    shell = "set -e\n" + "\n".join(text for kind, text in blocks if kind == "sh")
    assert python.count("import torch\n") == 1
    environment = {
        **os.environ,
        "URL": url,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(README.parents[1]),
    }
    for words in ([sys.executable, "-c", python], ["sh", "-c", shell]):
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert "step-" in done.stdout or "checkpoint-5" in done.stdout
    assert (tmp_path / "back/step-7/model.bin").read_bytes() == b"weights"
