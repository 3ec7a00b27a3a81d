"""Token sequences: immutable, opaque, with O(1) length and slices.

The pipeline handles sequences only through `Tokens`, so the simulator can pass `TokenCount`s (no ids at all) through the
very code that moves `TokenIds` in a real run.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt


class Tokens(Protocol):
    """What the pipeline may do with a token sequence."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> Self: ...
    def __add__(self, other: Self, /) -> Self: ...


class _Packed:
    """An immutable one-dimensional array; slices are views."""

    __slots__ = ("_values",)
    _dtype: ClassVar[npt.DTypeLike]
    _values: npt.NDArray[Any]

    def __init__(self, values: npt.ArrayLike = ()) -> None:
        array = np.array(values, dtype=self._dtype)
        if array.ndim != 1:
            raise ValueError(f"{type(self).__name__}: got {array.ndim} dimensions, want 1")
        array.flags.writeable = False
        self._values = array

    @classmethod
    def _wrap(cls, array: npt.NDArray[Any]) -> Self:
        packed = cls.__new__(cls)
        packed._values = array  # noqa: SLF001 - its own class
        return packed

    @property
    def array(self) -> npt.NDArray[Any]:
        """The values as a read-only array, shape `[len]`."""
        return self._values

    def tolist(self) -> list[Any]:
        """The values as plain Python numbers."""
        return list(self._values.tolist())

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: slice, /) -> Self:
        return self._wrap(self._values[key])

    def __add__(self, other: Self, /) -> Self:
        if not len(other):
            return self
        if not len(self):
            return other
        joined = np.concatenate((self.array, other.array))
        joined.flags.writeable = False
        return self._wrap(joined)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and np.array_equal(self._values, other._values)

    def __hash__(self) -> int:
        # Adding 0 makes -0.0 and 0.0, which are equal, hash alike.
        return hash((type(self).__name__, (self._values + 0).tobytes()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values.tolist()})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Only the slice itself travels, never the array it is a view of.
        return (type(self), (np.ascontiguousarray(self._values),))


class TokenIds(_Packed):
    """Token ids of a real model, int32."""

    __slots__ = ()
    _dtype = np.int32


class Floats(_Packed):
    """Per-token numbers such as log-probabilities (natural logarithm), float32."""

    __slots__ = ()
    _dtype = np.float32


class Zeros(Floats):
    """So many zeros, of which only their number is stored: log-probabilities of what is counted, not drawn.

    They are what they stand for: what a script prescribes is certain, and log 1 = 0.
    """

    __slots__ = ("_count",)

    def __init__(self, count: int = 0) -> None:
        if count < 0:
            raise ValueError(f"Zeros: got {count}, want >= 0")
        self._count = count

    @property
    def array(self) -> npt.NDArray[np.float32]:
        """The zeros, made when asked for, shape `[len]`."""
        return np.broadcast_to(np.float32(0), (self._count,))

    def tolist(self) -> list[float]:
        """The zeros as plain Python numbers."""
        return [0.0] * self._count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: slice, /) -> Zeros:
        return Zeros(len(range(*key.indices(self._count))))

    def __add__(self, other: Floats, /) -> Floats:  # type: ignore[override]
        if isinstance(other, Zeros):
            return Zeros(self._count + other._count)
        return Floats(self.array) + other if self._count else other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Zeros) and other._count == self._count

    def __hash__(self) -> int:
        return hash(("Zeros", self._count))

    def __repr__(self) -> str:
        return f"Zeros({self._count})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Zeros, (self._count,))


class TokenCount:
    """A sequence of which only the length is known: what a simulated engine generates."""

    __slots__ = ("_count",)

    def __init__(self, count: int = 0) -> None:
        if count < 0:
            raise ValueError(f"TokenCount: got {count}, want >= 0")
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: slice, /) -> TokenCount:
        return TokenCount(len(range(*key.indices(self._count))))

    def __add__(self, other: TokenCount, /) -> TokenCount:
        return TokenCount(self._count + other._count)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenCount) and other._count == self._count

    def __hash__(self) -> int:
        return hash(("TokenCount", self._count))

    def __repr__(self) -> str:
        return f"TokenCount({self._count})"
