"""Products with sign matrices on the matrix units of a GPU, in Triton."""

from hf_quant.kernels.gpu.launch import tl, triton


@triton.jit
def sign_matrix(
    SIZE: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, MASK: tl.constexpr
):
    """fp32 [SIZE, SIZE]: the Hadamard matrix of N in each diagonal block of BLOCK, else 0; see `paley_matrix`."""
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    a, b = i % BLOCK, j % BLOCK
    TWOS: tl.constexpr = N // M
    parity = (a % TWOS) & (b % TWOS)
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    if M > 1:
        u, s, v, t = a // TWOS // 2, a // TWOS % 2, b // TWOS // 2, b // TWOS % 2
        e, f = tl.maximum(u, 1) - 1, tl.maximum(v, 1) - 1
        difference = (e // P - f // P + P) % P * P + (e % P - f % P + P) % P
        is_other = (u > 0) & (v > 0) & (((MASK >> (difference % 32)) & 1) == 0)
        parity ^= tl.where(u == v, s | t, (s & t) ^ is_other.to(tl.int32))
    inside = (i // BLOCK == j // BLOCK) & (a < N) & (b < N)
    return tl.where(inside, tl.where((parity & 1) == 1, -1.0, 1.0), 0.0)


@triton.jit
def dot_right(y, right):
    """y @ right, y in fp32, of whose mantissa 16 bits count: its first 8, and the rest rounded to 8."""
    high = (y.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    z = tl.dot(high.to(tl.bfloat16), right)
    return tl.dot((y - high).to(tl.bfloat16), right, z)
