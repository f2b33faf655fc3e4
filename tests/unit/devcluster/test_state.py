import threading
from pathlib import Path

from deploy.devcluster import state
from deploy.devcluster.plan import Plan, Spec


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    plan = Plan(spec=Spec(name="a", nodes=2), index=5, machine="box", root=tmp_path)
    state.write(plan)
    assert state.read("a", tmp_path) == plan
    assert state.names(tmp_path) == ("a",)


def test_a_damaged_or_missing_file_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert state.read("a", tmp_path) is None
    for text in ("", "{", "[]", '{"spec": {"name": "UPPER"}, "index": 0, "machine": "m"}'):
        (tmp_path / "a" / state.FILE).write_text(text, encoding="utf-8")
        assert state.read("a", tmp_path) is None


def test_a_lock_lets_one_in_at_a_time_and_leaves_nothing(tmp_path: Path) -> None:
    folder, order = tmp_path / "a", []
    inside = threading.Event()

    def second() -> None:
        inside.wait()
        with state.locked(folder):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with state.locked(folder):
        inside.set()
        thread.join(0.2)
        order.append("first")
        folder.rmdir()  # as `down` does while others wait
    thread.join()
    assert order == ["first", "second"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
