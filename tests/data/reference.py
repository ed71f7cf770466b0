"""The frozen order once more, in plain Python integers, one sample at a time: what order.py must agree with.

Written from the contract, not from the code; slow, and obvious.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction

MASK = 2**64 - 1


def word(purpose: str, seed: int, digest: str, epoch: int, number: int) -> int:
    text = f"feistel6/v1 {purpose} {seed} {digest} {epoch} {number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def mix(value: int, key: int) -> int:
    value = (value ^ key) * 0xFF51AFD7ED558CCD & MASK
    value ^= value >> 32
    return value * 0xC4CEB9FE1A85EC53 & MASK


def permute(position: int, n: int, seed: int, digest: str, epoch: int, purpose: str = "permutation") -> int:
    if n < 2**16:
        keys = [word(purpose, seed, digest, epoch, number) for number in range(2)]
        return sorted(range(n), key=lambda value: mix(mix(value, keys[0]), keys[1]))[position]
    keys = [word(purpose, seed, digest, epoch, number) for number in range(6)]
    bits = len(bin(n - 1)) - 2
    low_bits = (bits + 1) // 2
    high_bits = bits - low_bits
    while True:
        high, low = divmod(position, 2**low_bits)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                high ^= mix(low, key) >> (64 - high_bits)
            else:
                low ^= mix(high, key) >> (64 - low_bits)
        position = high * 2**low_bits + low
        if position < n:
            return position


def window_permute(position: int, n: int, seed: int, digest: str, epoch: int, chunk: int, chunks: int) -> int:
    full = n // chunk
    cuts = [*range(0, full, chunks), full] if full else [0, 0]  # where windows begin, in chunks
    window = next(w for w, end in enumerate(cuts[1:]) if end == full or position < end * chunk)
    begin, end = cuts[window : window + 2]
    size = n - begin * chunk if end == full else chunks * chunk
    place = position - begin * chunk
    if chunks > 1:
        place = permute(place, size, seed, digest, epoch, f"window/v1 {window}")
    slot, inside = divmod(begin * chunk + place, chunk)
    if slot < full:
        slot = permute(slot, full, seed, digest, epoch, "window/v1 chunks")
    return slot * chunk + inside


def counts(weights: dict[str, int], taken: int) -> dict[str, int]:
    """How often each source is among the first `taken` samples of a stage."""
    ranked = sorted(weights, key=lambda digest: (-weights[digest], digest))
    if len(ranked) == 1:
        return {ranked[0]: taken}
    total = sum(weights.values())
    sums = [sum(weights[digest] for digest in ranked[:cut]) for cut in range(1, len(ranked))]
    cut = min(range(len(sums)), key=lambda place: (abs(2 * sums[place] - total), place)) + 1
    left = int(Fraction(taken * sums[cut - 1], total) + Fraction(1, 2))  # rounds halves up
    return counts({d: weights[d] for d in ranked[:cut]}, left) | counts(
        {d: weights[d] for d in ranked[cut:]}, taken - left
    )


def sample(
    g: int, seed: int, tokens: dict[str, int], seq_len: int, stages: list[tuple[int, dict[str, int]]]
) -> tuple[str, int, int, int]:
    """(digest, epoch, index, first token) of sample `g`; `tokens` gives the size of each source."""
    given = dict.fromkeys(tokens, 0)
    for (start, weights), end in zip(stages, [start for start, _ in stages[1:]] + [g + 1], strict=True):
        if g < end:
            break
        for digest, count in counts(weights, end - start).items():
            given[digest] += count
    before, after = counts(weights, g - start), counts(weights, g - start + 1)
    (digest,) = (digest for digest in weights if after[digest] == before[digest] + 1)
    epoch, position = divmod(given[digest] + before[digest], tokens[digest] // seq_len)
    index = permute(position, tokens[digest] // seq_len, seed, digest, epoch)
    begin = word("rotation", seed, digest, epoch, 0) % tokens[digest] if epoch else 0
    return digest, epoch, index, (begin + index * seq_len) % tokens[digest]
