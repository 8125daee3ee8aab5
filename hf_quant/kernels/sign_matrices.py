"""Sign matrices of Hadamard transforms, and the transform by them in plain torch.

The matrix of n = m * 2**k is H_m (x) H_2 (x) ... (x) H_2 / sqrt(n), where (x) is the Kronecker product, m one of 1,
12, 20, 28, H_2 = [[1, 1], [1, -1]] and H_m the matrix of `paley_matrix`. Every factor is symmetric, so every transform
is: it is its own inverse, and its own gradient.
"""

import math
from functools import cache

import torch
from torch import Tensor


LARGEST = 2**15
# Order m = 2 * (q + 1) of a factor that is no power of two: the size q of the field that `paley_matrix` makes it from.
PALEY_FIELDS = {12: 5, 20: 9, 28: 13}


def odd_factor(n: int) -> int:
    """The m of n = m * 2**k: 1, 12, 20 or 28.

    Raises ValueError for a size that has none, or above 2**15.
    """
    if 0 < n <= LARGEST:
        odd = n // (n & -n)
        m = 1 if odd == 1 else 4 * odd
        if n % m == 0 and (m == 1 or m in PALEY_FIELDS):
            return m
    raise ValueError(
        f"no Hadamard transform of size {n}; allowed: 2**k, 12 * 2**k, 20 * 2**k and 28 * 2**k up to {LARGEST}; "
        "another size can be transformed in blocks of `block_size`"
    )


def squares(q: int) -> tuple[int, int]:
    """The field of q = p or p**2 elements -> (p, bit mask of the elements that are squares of others but 0).

    Element number p * a + b is a * i + b with i * i = -1; q is a prime, or 9.
    """
    p = 3 if q == 9 else q
    found = {(2 * a * b % p) * p + (b * b - a * a) % p for a in range(q // p) for b in range(p)} - {0}
    return p, sum(1 << element for element in found)


@cache
def paley_matrix(m: int) -> Tensor:
    """The symmetric Hadamard matrix of order m = 2 * (q + 1), entries 1 and -1 -> fp64 [m, m].

    R. Paley, "On orthogonal matrices" (1933), second construction: with C the symmetric matrix whose entry (u, v), for
    elements u - 1 and v - 1 of the field of q, is 1 if their difference is a square and else -1, 0 on the diagonal and
    1 in the other entries of its first row and column, it is C (x) [[1, 1], [1, -1]] + I (x) [[1, -1], [-1, -1]].
    """
    q = PALEY_FIELDS[m]
    p, mask = squares(q)
    character = torch.ones(q + 1, q + 1, dtype=torch.float64)
    for u in range(q):
        for v in range(q):
            difference = (u // p - v // p) % p * p + (u - v) % p
            character[u + 1, v + 1] = 1 if mask >> difference & 1 else -1
    character.fill_diagonal_(0)
    outer = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    inner = torch.tensor([[1, -1], [-1, -1]], dtype=torch.float64)
    return torch.kron(character, outer) + torch.kron(torch.eye(q + 1, dtype=torch.float64), inner)


@cache
def sign_matrix(n: int) -> Tensor:
    """The Hadamard matrix of size n, entries 1 and -1 -> fp64 [n, n]; n * n * 8 bytes, and kept."""
    m = odd_factor(n)
    matrix = torch.ones(1, 1, dtype=torch.float64) if m == 1 else paley_matrix(m)
    butterfly = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    for _ in range((n // m).bit_length() - 1):
        matrix = torch.kron(matrix, butterfly)
    return matrix


def hadamard_matrix(n: int) -> Tensor:
    """The orthonormal symmetric matrix of `hadamard` for size n -> fp64 [n, n]."""
    return sign_matrix(n) / math.sqrt(n)


@cache
def factors(n: int) -> tuple[int, ...]:
    """Factor n into up to three sizes: the Kronecker product of their sign matrices is the sign matrix of n."""
    m = odd_factor(n)
    bits = (n // m).bit_length() - 1
    first = bits // 2 if bits > 7 else 0
    return tuple(size for size in (m, 2**first, 2 ** (bits - first)) if size > 1) or (1,)


@cache
def _matrix(n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return sign_matrix(n).to(device, dtype)


def mix(x: Tensor, size: int, inner: int) -> Tensor:
    """The unscaled transform of each `size * inner` values across their `size` parts; x's dtype and shape."""
    parts = x.reshape(-1, size, inner)
    matrix = _matrix(size, x.device, x.dtype)
    return (parts.squeeze(-1) @ matrix if inner == 1 else matrix @ parts).reshape(x.shape)


def transform(x: Tensor, n: int, diagonal: Tensor | None = None) -> Tensor:
    """x [..., K] floating -> x * diagonal, times the matrix of n in each block of n columns, in x's dtype."""
    inner = 1
    x = x if diagonal is None else x * diagonal.view(-1)
    for size in reversed(factors(n)):
        x = mix(x, size, inner)
        inner *= size
    return x * (1 / math.sqrt(n))
