import tracemalloc

import numpy as np
import pytest

from jobs.data.corpus import STDLIB_BYTES, load_corpus
from jobs.data.order import SampleOrder, permute, plan_batches
from jobs.errors import DataError


def text_file(folder, size, name="text.txt"):
    path = folder / name
    path.write_bytes(bytes(i * 7 % 251 for i in range(size)))
    return path


def batches(path, *, rank=0, world=1, batch=2, seq=8, seed=1):
    corpus = load_corpus(path, vocabulary=256)
    return plan_batches(
        corpus, seed=seed, batch=batch, seq=seq, rank=rank, world=world, vocabulary=256
    )


def test_default_corpus_is_the_same_each_time_and_bounded():
    first, second = (load_corpus(None, vocabulary=256) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert 10**6 < first.tokens.size <= STDLIB_BYTES
    assert b"import" in first.tokens[:100_000].tobytes()


def test_folder_is_read_in_sorted_order_without_binaries_and_caches(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "b" / "one.txt").write_text("BBBB")
    (tmp_path / "z.txt").write_text("ZZZZ")
    (tmp_path / "a.txt").write_text("AAAA")
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "__pycache__" / "x.txt").write_text("no")
    assert load_corpus(tmp_path, vocabulary=256).tokens.tobytes() == b"AAAAZZZZBBBB"


def test_token_files_are_mapped_and_equal(tmp_path):
    tokens = np.arange(200, dtype=np.uint16) % 256
    np.save(tmp_path / "t.npy", tokens)
    tokens.tofile(tmp_path / "t.bin")
    for name in ("t.npy", "t.bin"):
        corpus = load_corpus(tmp_path / name, vocabulary=256)
        assert isinstance(corpus.tokens, np.memmap)
        assert np.array_equal(corpus.tokens, tokens)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "is empty"),
        ("odd.bin", b"abc", "uint16"),
        ("broken.npy", b"abc", ".npy"),
        ("archive.npy", b"PK\x03\x04 no archive either", ".npy"),
        ("wide.bin", b"\x00\x10" * 64, "token 4096"),
    ],
)
def test_wrong_files_are_named_in_one_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_corpus(tmp_path / name, vocabulary=256)
    assert said in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_npy_of_floats_or_objects_is_refused(tmp_path):
    np.save(tmp_path / "f.npy", np.zeros(100))
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name in ("f.npy", "o.npy"):
        with pytest.raises(DataError, match=name):
            load_corpus(tmp_path / name, vocabulary=256)


def test_of_a_huge_file_in_a_folder_only_what_is_kept_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("jobs.data.corpus.FOLDER_BYTES", 2000)
    with (tmp_path / "text.txt").open("wb") as file:
        file.write(b"text" * 1000)
        file.truncate(64 << 20)
    tracemalloc.start()
    corpus = load_corpus(tmp_path, vocabulary=256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert corpus.tokens.size == 2000
    assert peak < 8 << 20


def test_missing_path_and_empty_folder_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_corpus(tmp_path / "nowhere", vocabulary=256)
    with pytest.raises(DataError, match="is empty"):
        load_corpus(tmp_path, vocabulary=256)


def test_data_shorter_than_one_step_of_all_ranks_is_refused(tmp_path):
    path = text_file(tmp_path, 64)
    assert batches(path, world=3).order.num_windows == 7
    with pytest.raises(DataError, match="one step reads 65"):
        batches(path, world=4)


def test_token_beyond_the_scanned_part_is_found_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("jobs.data.corpus._SCANNED_TOKENS", 4)
    path = tmp_path / "t.bin"
    np.array([1] * 16 + [999], dtype="<u2").tofile(path)
    with pytest.raises(DataError, match="token 999"):
        batches(path).read(0)


def test_fingerprint_notices_another_length_and_another_byte(tmp_path):
    path = text_file(tmp_path, 10_000)
    content = bytearray(path.read_bytes())
    fingerprints = {load_corpus(path, vocabulary=256).fingerprint}
    content[5000] ^= 1
    path.write_bytes(content)
    fingerprints.add(load_corpus(path, vocabulary=256).fingerprint)
    path.write_bytes(content[:-1])
    fingerprints.add(load_corpus(path, vocabulary=256).fingerprint)
    assert len(fingerprints) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 1000])
def test_permutation_hits_every_index_once(size):
    assert sorted(permute(i, size, key=7) for i in range(size)) == list(range(size))


def test_permutations_of_different_keys_differ():
    assert len({tuple(permute(i, 100, key) for i in range(100)) for key in range(20)}) == 20


def test_ranks_read_disjoint_windows_and_an_epoch_reads_each_once():
    order = SampleOrder(seed=3, num_windows=64, batch=2, world=4)
    seen = [w for step in range(8) for rank in range(4) for w in order.windows(step, rank)]
    assert sorted(seen) == list(range(64))
    again = [w for step in range(8, 16) for rank in range(4) for w in order.windows(step, rank)]
    assert sorted(again) == list(range(64))
    assert again != seen


def test_order_depends_only_on_seed_step_and_rank():
    order = SampleOrder(seed=3, num_windows=1000, batch=3, world=2)
    late_first = [order.windows(step, 1) for step in (900, 5, 10**12)]
    fresh = SampleOrder(seed=3, num_windows=1000, batch=3, world=2)
    assert [fresh.windows(step, 1) for step in (900, 5, 10**12)] == late_first
    assert SampleOrder(seed=4, num_windows=1000, batch=3, world=2).windows(5, 1) != late_first[1]


def test_same_samples_in_a_step_when_fewer_ranks_take_larger_batches():
    four = SampleOrder(seed=3, num_windows=1000, batch=2, world=4)
    two = SampleOrder(seed=3, num_windows=1000, batch=4, world=2)
    for step in (0, 7, 400):
        of_four = [w for rank in range(4) for w in four.windows(step, rank)]
        assert of_four == [w for rank in range(2) for w in two.windows(step, rank)]


def test_nothing_grows_with_the_number_of_steps(tmp_path):
    data = batches(text_file(tmp_path, 4096))
    data.read(0)
    tracemalloc.start()
    try:
        for step in range(4000):  # fills the interpreter's own free lists
            data.read(step)
        early = tracemalloc.get_traced_memory()[0]
        for step in range(10**9, 10**9 + 4000):
            data.read(step)
        assert tracemalloc.get_traced_memory()[0] - early < 16_000
    finally:
        tracemalloc.stop()


def test_targets_are_the_inputs_shifted_by_one(tmp_path):
    path = text_file(tmp_path, 4096)
    inputs, targets = batches(path, seq=16).read(12)
    assert inputs.shape == targets.shape == (2, 16)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    assert bytes([*inputs[0].tolist(), int(targets[0, -1])]) in path.read_bytes()
