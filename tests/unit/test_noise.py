"""The noise is a pure function of its key, and looks random."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dvla.rl.noise import decision_keys, normal, uniform

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def reference_mix(x: int) -> int:
    """The finaliser of splitmix64 in plain integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def reference_key(seed: int, ticket: int, decision: int) -> int:
    key = reference_mix((seed * _GOLDEN + 0xBF58476D1CE4E5B9) & _WORD)
    key = reference_mix((key + ticket * _GOLDEN) & _WORD)
    return reference_mix((key + decision * _GOLDEN) & _WORD)


def reference_uniform(key: int, count: int, stream: int) -> list[float]:
    first = 1 + (stream << 32)
    bits = [reference_mix((key + i * _GOLDEN) & _WORD) >> 41 for i in range(first, first + count)]
    return [(b + 0.5) / 2**23 for b in bits]


def keys_of(seed: int, num_tickets: int, num_decisions: int) -> torch.Tensor:
    tickets = torch.arange(num_tickets).repeat_interleave(num_decisions)
    decisions = torch.arange(num_decisions).repeat(num_tickets)
    return decision_keys(seed, tickets, decisions)


def test_reference_is_splitmix64() -> None:
    # The first outputs of splitmix64 seeded with 0, as published with its C source.
    assert [reference_mix((i * _GOLDEN) & _WORD) for i in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(seed=_INT64, ticket=_INT64, decision=st.integers(0, 1000))
def test_keys_match_plain_integers(seed: int, ticket: int, decision: int) -> None:
    key = decision_keys(seed, torch.tensor([ticket]), torch.tensor([decision]))
    assert key.item() & _WORD == reference_key(seed, ticket, decision)


@given(key=_INT64, count=st.integers(1, 9), stream=st.integers(0, 5))
def test_uniform_matches_plain_integers(key: int, count: int, stream: int) -> None:
    noise = uniform(torch.tensor([key]), count, stream=stream)
    assert noise.dtype == torch.float32
    assert noise[0].tolist() == reference_uniform(key & _WORD, count, stream)


def test_known_values_stay() -> None:
    keys = decision_keys(7, torch.tensor([0, 41]), torch.tensor([0, 3]))
    assert keys.tolist() == [5506737779415733218, -2467552654379755526]
    assert uniform(keys, 2).flatten().tolist() == pytest.approx(
        [0.37838321924209595, 0.3553019165992737, 0.13449078798294067, 0.31353646516799927], abs=0.0
    )
    assert normal(keys, 2).flatten().tolist() == pytest.approx(
        [-1.3581461414841125, -0.6126700596405377, 0.051429300654369764, 0.5266741552916818], rel=1e-5
    )


def test_extreme_bits_stay_inside_the_open_interval() -> None:
    smallest, largest = (torch.tensor(b).float() for b in (0, 2**23 - 1))
    for bits in (smallest, largest):
        value = ((bits + 0.5) * 2.0**-23).item()
        assert 0.0 < value < 1.0
        assert math.isfinite(math.log(value))


def test_uniform_moments() -> None:
    noise = uniform(keys_of(0, 500, 8), 5, 7).double()
    assert noise.shape == (4000, 5, 7)
    assert 0.0 < noise.min() < 1e-4
    assert 1.0 - 1e-4 < noise.max() < 1.0
    standard_error = math.sqrt(1 / 12 / noise.numel())
    assert abs(noise.mean() - 0.5) < 5 * standard_error
    assert noise.var().item() == pytest.approx(1 / 12, rel=0.01)
    counts = torch.histc(noise.float(), bins=64, min=0, max=1).double()
    expected = noise.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * math.sqrt(2 * 63)


def test_normal_moments() -> None:
    noise = normal(keys_of(0, 500, 8), 35).double().flatten()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean()) < 5 / math.sqrt(noise.numel())
    assert noise.std().item() == pytest.approx(1.0, rel=0.01)
    assert (noise**3).mean().abs() < 0.05
    assert (noise**4).mean().item() == pytest.approx(3.0, rel=0.05)


def test_neighbours_are_uncorrelated() -> None:
    noise = uniform(keys_of(3, 200, 20), 6).view(200, 20, 6).double() - 0.5
    tickets = noise[1:], noise[:-1]
    decisions = noise[:, 1:], noise[:, :-1]
    elements = noise[..., 1:], noise[..., :-1]
    for left, right in (tickets, decisions, elements):
        correlation = (left * right).mean() / noise.var()
        assert abs(correlation) < 5 / math.sqrt(left.numel())


@given(data=st.data(), size=st.integers(1, 12))
def test_independent_of_the_batch(data: st.DataObject, size: int) -> None:
    keys = keys_of(1, 4, 3)
    chosen = data.draw(st.lists(st.integers(0, 11), min_size=size, max_size=size))
    for draw in (uniform, normal):
        assert torch.equal(draw(keys[chosen], 3, 2), draw(keys, 3, 2)[chosen])


def test_distinct_across_every_part_of_the_key() -> None:
    keys = torch.cat([keys_of(seed, 30, 30) for seed in range(20)])
    assert keys.unique().numel() == keys.numel()
    numbers = torch.cat([uniform(keys[:300], 4, stream=stream).flatten() for stream in range(4)])
    # 4800 draws of 2^23 values: by chance alone about 1.4 pairs fall together
    assert numbers.numel() - numbers.unique().numel() < 10
