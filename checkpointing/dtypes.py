"""Element types by name: their sizes, and their values as floats, without torch.

numpy has neither bfloat16 nor the 8-bit floats; those are decoded here.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_SIZES: Final = {
    "bool": 1,
    "bfloat16": 2,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "complex256": 32,
    **{f"float{bits}": bits // 8 for bits in (16, 32, 64, 128)},
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_NAME: Final = re.compile(r"(b?float|complex|u?int|bits)\d{1,3}(_[a-z0-9]{1,12}){0,2}|bool")
_WIDEST: Final = 32

# Exponent bits, mantissa bits, bias, and whether the highest exponent is used for numbers too
# ("fn": finite; "uz": no negative zero, whose pattern is NaN).
# OCP 8-bit Floating Point Specification 1.0, and arXiv:2206.02915 for the "fnuz" ones.
_EIGHT_BITS: Final = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}


def is_name(dtype: str) -> bool:
    """Tell whether this can be an element type; later versions of torch may have more of them."""
    return dtype in _SIZES or _NAME.fullmatch(dtype) is not None


def fits(dtype: str, elements: int, nbytes: int) -> bool:
    """Tell whether so many elements of a type can have so many bytes."""
    size = _SIZES.get(dtype)
    if size is not None:
        return nbytes == elements * size
    if not elements:
        return nbytes == 0
    return nbytes % elements == 0 and 1 <= nbytes // elements <= _WIDEST


def itemsize(dtype: str) -> int:
    """Return the bytes of one element, 1 for types that are not known by their size."""
    return _SIZES.get(dtype, 1)


def is_floating(dtype: str) -> bool:
    """Tell whether values of this type are real numbers that can be averaged here."""
    return dtype in ("float16", "float32", "float64", "bfloat16") or dtype in _EIGHT_BITS


def is_number(dtype: str) -> bool:
    """Tell whether `values` can decode this type."""
    return is_floating(dtype) or (dtype in _SIZES and dtype not in ("complex32", "complex256"))


def values(raw: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Decode raw bytes: float32 or wider for floats, complex128 for complex, else the type itself.

    Raises:
        ValueError: A type that this cannot decode.
    """
    if dtype == "bfloat16":
        wide = raw.view("<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    if dtype in _EIGHT_BITS:
        return _table(dtype)[raw]
    if not is_number(dtype):
        raise ValueError(f"values of type {dtype} cannot be decoded")
    plain = raw.view(np.dtype(dtype))
    with np.errstate(invalid="ignore"):  # NaNs that signal
        if dtype == "float16":
            return plain.astype(np.float32)
        return plain.astype(np.complex128) if dtype == "complex64" else plain


def encoder(dtype: str) -> Callable[[NDArray[np.float64]], NDArray[np.uint8]]:
    """Return what rounds float64 to a floating type, to nearest and ties to even, as raw bytes.

    Raises:
        ValueError: Not a floating type that this can encode.
    """
    if dtype == "bfloat16":
        return _to_bfloat16
    if dtype in _EIGHT_BITS:
        return lambda wide: _to_eight_bits(wide, dtype)
    if not is_floating(dtype):
        raise ValueError(f"cannot write floats as {dtype}")
    with_type = np.dtype(dtype)

    def cast(wide: NDArray[np.float64]) -> NDArray[np.uint8]:
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(wide.astype(with_type)).view(np.uint8)

    return cast


def _to_bfloat16(wide: NDArray[np.float64]) -> NDArray[np.uint8]:
    with np.errstate(over="ignore"):
        single = wide.astype(np.float32)
    bits = single.view(np.uint32)
    # Rounding twice is wrong where the first step lands on a tie; there the sign of what it lost
    # decides. The error of the cast is exact in float64.
    is_tie = (bits & np.uint32(0xFFFF)) == 0x8000
    with np.errstate(invalid="ignore"):
        lost = np.where(np.isfinite(single), np.abs(wide) - np.abs(single.astype(np.float64)), 0.0)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    up = np.where(is_tie & (lost > 0), 1, np.where(is_tie & (lost < 0), 0, odd)).astype(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + up) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    found = np.where(np.isnan(single), quiet, rounded).astype("<u2")
    return found.view(np.uint8)


def _to_eight_bits(wide: NDArray[np.float64], dtype: str) -> NDArray[np.uint8]:
    table = _table(dtype).astype(np.float64)
    codes = np.array([c for c in range(128) if np.isfinite(table[c])], dtype=np.uint8)
    grid = table[codes]
    size = np.abs(wide)
    above = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    middle = (low + high) / 2
    is_up = (size > middle) | ((size == middle) & (codes[above] % 2 == 0))
    found = np.where(is_up, codes[above], codes[above - 1])
    negative = np.signbit(wide) & ~((found == 0) & (table[128] != 0))
    found = np.where(negative, found | 0x80, found)
    odd = np.array([c for c in range(256) if np.isnan(table[c])], dtype=np.uint8)[0]
    return np.where(np.isnan(wide), odd, found).astype(np.uint8)


@cache
def _table(dtype: str) -> NDArray[np.float32]:
    """Return the value of each of the 256 patterns of an 8-bit float."""
    exponent_bits, mantissa_bits, bias, kind = _EIGHT_BITS[dtype]
    found = np.empty(256, np.float32)
    top = (1 << exponent_bits) - 1
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code >> mantissa_bits) & top
        mantissa = code & ((1 << mantissa_bits) - 1)
        if exponent == 0:
            size = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            size = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        if kind == "ieee" and exponent == top:
            size = float("nan") if mantissa else float("inf")
        elif (kind == "fn" and code & 0x7F == 0x7F) or (kind == "fnuz" and code == 0x80):
            size = float("nan")
        found[code] = sign * size
    return found
