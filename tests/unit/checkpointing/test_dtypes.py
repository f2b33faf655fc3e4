import numpy as np
import pytest

from checkpointing import dtypes
from checkpointing.safetensors import TYPES

EIGHT = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def test_names_of_types_and_nothing_else() -> None:
    for name in (*TYPES, "complex128", "float128", "float4_e2m1fn_x2", "uint1", "bits8"):
        assert dtypes.is_name(name)
    for name in ("", "float", "load", "float_power", "float32 ", "Float32", "int64\n", "os.system"):
        assert not dtypes.is_name(name)


def test_bytes_have_to_fit() -> None:
    assert dtypes.fits("float32", 3, 12)
    assert not dtypes.fits("float32", 3, 13)
    assert dtypes.fits("float7_new", 3, 3)
    assert not dtypes.fits("float7_new", 3, 4)
    assert not dtypes.fits("float7_new", 0, 1)
    assert not dtypes.fits("float7_new", 1, 1 << 40)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["bfloat16", *EIGHT])
def test_all_patterns_decode_as_torch_does(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    raw = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    kind = getattr(torch, dtype)
    theirs = torch.from_numpy(raw.copy()).view(kind).float().numpy()
    assert np.array_equal(dtypes.values(raw, dtype), theirs, equal_nan=True)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", *EIGHT])
def test_rounding_is_to_nearest_and_ties_to_even(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    kind = getattr(torch, dtype)
    raw = rng.integers(0, 256, 1 << 15, dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        exact = dtypes.values(raw, dtype).astype(np.float64)
    exact = exact[np.isfinite(exact) & (np.abs(exact) < 1e30)]
    middles = (exact[:-1] + exact[1:]) / 2
    near = exact * (1 + rng.normal(0, 0.02, exact.shape))
    values = np.concatenate([exact, near, middles, [0.0, 1e-30, 1.0, 240.0]])
    top = float(torch.finfo(kind).max)
    values = values[np.abs(values) <= top].astype(np.float32).astype(np.float64)
    ours = dtypes.values(dtypes.encoder(dtype)(values), dtype)
    theirs = torch.from_numpy(values).float().to(kind).float().numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_bfloat16_is_not_rounded_twice() -> None:
    # Just above and just below the middle of 1 and the next bfloat16, by less than float32 tells.
    middle = 1 + 2.0**-8
    values = np.array([middle, middle + 2.0**-40, middle - 2.0**-40, -middle - 2.0**-40])
    found = dtypes.values(dtypes.encoder("bfloat16")(values), "bfloat16")
    assert found.tolist() == [1.0, 1 + 2.0**-7, 1.0, -1 - 2.0**-7]
    odd = 1 + 3 * 2.0**-8
    values = np.array([odd, odd + 2.0**-40, odd - 2.0**-40, np.inf, np.nan, 1e300])
    found = dtypes.values(dtypes.encoder("bfloat16")(values), "bfloat16")
    assert found[:3].tolist() == [1 + 2.0**-6, 1 + 2.0**-6, 1 + 2.0**-7]
    assert found[3] == np.inf
    assert np.isnan(found[4])
    assert found[5] == np.inf


def test_what_cannot_be_decoded_says_so() -> None:
    for dtype in ("complex32", "float4_e2m1fn_x2"):
        with pytest.raises(ValueError, match="cannot"):
            dtypes.values(np.zeros(4, np.uint8), dtype)
    with pytest.raises(ValueError, match="cannot"):
        dtypes.encoder("int8")
