"""Random numbers of many generators, computed together.

Each crop has its own generator, `np.random.default_rng([seed, update, image])`, so that it does not
depend on the other crops. Creating thousands of generators takes longer than the crops themselves
take on a GPU. The functions here compute the same numbers for all crops of a batch with NumPy's
published algorithms: `SeedSequence`, then PCG64.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Doubles = npt.NDArray[np.float64]
_Wide = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""The high and low halves of numbers of 128 bits."""

_POOL = 4
_START, _FACTOR = 0x43B0D7E5, 0x931E8875  # of the hash that mixes the seed into the pool
_START_OUT, _FACTOR_OUT = 0x8B51F9DD, 0x58F38DED  # of the hash that reads the pool
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_MULTIPLIER = (0x2360ED051FC65DA4, 0x4385DF649FCCF645)  # of PCG64, high and low
_LOW = np.uint64(0xFFFFFFFF)


def uniform_draws(prefix: Sequence[int], keys: npt.NDArray[np.int64], count: int) -> Doubles:
    """Return the first `count` uniform numbers of one generator per key: [n] -> [n, count].

    Row i equals `np.random.default_rng([*prefix, keys[i]]).random(count)`. Keys are below 2³².
    """
    entropy: list[Words] = [np.full(1, word, dtype=np.uint32) for word in _words(prefix)]
    entropy.append(keys.astype(np.uint32))
    return _pcg64(_seed_states(entropy, len(keys)), count)


def _words(numbers: Sequence[int]) -> list[int]:
    """Return the 32-bit words of numbers, lowest first; zero has one word."""
    words = []
    for number in numbers:
        rest = int(number)
        words.append(rest & 0xFFFFFFFF)
        while rest := rest >> 32:
            words.append(rest & 0xFFFFFFFF)
    return words


class _Hash:
    """A hash of words whose constant changes with every call."""

    def __init__(self, start: int, factor: int) -> None:
        self._constant, self._factor = start, factor

    def __call__(self, words: Words) -> Words:
        mixed = words ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor & 0xFFFFFFFF
        mixed = mixed * np.uint32(self._constant)
        return mixed ^ (mixed >> np.uint32(16))


def _seed_states(entropy: list[Words], count: int) -> list[npt.NDArray[np.uint64]]:
    """Return the four 64-bit words that `SeedSequence` computes for each of `count` seeds."""
    hashed = _Hash(_START, _FACTOR)
    zero = np.zeros(1, dtype=np.uint32)
    pool = [hashed(entropy[i] if i < len(entropy) else zero) for i in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mix(pool[target], hashed(pool[source]))
    for words in entropy[_POOL:]:
        for target in range(_POOL):
            pool[target] = _mix(pool[target], hashed(words))
    hashed = _Hash(_START_OUT, _FACTOR_OUT)
    halves = [
        np.broadcast_to(hashed(pool[i % _POOL]), count).astype(np.uint64) for i in range(2 * _POOL)
    ]
    return [
        low | (high << np.uint64(32)) for low, high in zip(halves[::2], halves[1::2], strict=True)
    ]


def _mix(left: Words, right: Words) -> Words:
    mixed: Words = _MIX_LEFT * left - _MIX_RIGHT * right
    return mixed ^ (mixed >> np.uint32(16))


def _pcg64(seeds: list[npt.NDArray[np.uint64]], count: int) -> Doubles:
    """Return the first `count` uniform numbers of PCG64 for n seeds: [n, count]."""
    one = np.uint64(1)
    increment = (seeds[2] << one) | (seeds[3] >> np.uint64(63)), (seeds[3] << one) | one
    # The first step of a state of zero gives the increment.
    state = _step(_add(increment, (seeds[0], seeds[1])), increment)
    draws = np.empty((len(seeds[0]), count))
    for column in range(count):
        state = high, low = _step(state, increment)
        turn = high >> np.uint64(58)
        mixed = high ^ low
        word = (mixed >> turn) | (mixed << ((np.uint64(64) - turn) & np.uint64(63)))
        draws[:, column] = (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return draws


def _step(state: _Wide, increment: _Wide) -> _Wide:
    """Return state × multiplier + increment, modulo 2¹²⁸."""
    high, low = state
    factor_high, factor_low = map(np.uint64, _MULTIPLIER)
    product = _high_half(low, factor_low) + low * factor_high + high * factor_low
    return _add((product, low * factor_low), increment)


def _add(a: _Wide, b: _Wide) -> _Wide:
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]), low


def _high_half(a: npt.NDArray[np.uint64], b: np.uint64) -> npt.NDArray[np.uint64]:
    """Return the upper 64 bits of the products a × b."""
    shift = np.uint64(32)
    a_high, a_low, b_high, b_low = a >> shift, a & _LOW, b >> shift, b & _LOW
    first = a_low * b_low
    middle = a_high * b_low + (first >> shift)
    other = a_low * b_high + (middle & _LOW)
    upper: npt.NDArray[np.uint64] = a_high * b_high + (middle >> shift) + (other >> shift)
    return upper
