"""Weights as differences: what comes out is what went in, to the bit, whatever changed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dvla.planes import delta
from dvla.planes.delta import decode, encode


def parts(data, sizes):
    """Views of one buffer, with bytes between them that belong to nobody."""
    views, at = [], 0
    for size in sizes:
        views.append(data[at : at + size])
        at += size + 64
    return views


@given(
    words=st.lists(st.integers(0, 40), max_size=4),
    itemsize=st.sampled_from([2, 4]),
    share=st.sampled_from([0.0, 0.1, 1.0]),
    block=st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_what_is_decoded_is_what_was_encoded(words, itemsize, share, block, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "BLOCK", block)
        generator = torch.Generator().manual_seed(seed)
        sizes = [count * itemsize for count in words]
        old, new, out = (torch.randint(256, (sum(sizes) + 64 * 4,), generator=generator).byte() for _ in range(3))
        keep = torch.rand(len(old) // itemsize, generator=generator) >= share
        keep = keep.repeat_interleave(itemsize)
        new[: len(keep)][keep] = old[: len(keep)][keep]
        outside, gap = out.clone(), torch.ones(len(out), dtype=torch.bool)
        for view in parts(gap, sizes):
            view.fill_(False)
        message = encode(parts(new, sizes), parts(old, sizes), itemsize)
        decode(message, parts(out, sizes), parts(old, sizes), itemsize)
        for got, want in zip(parts(out, sizes), parts(new, sizes), strict=True):
            assert torch.equal(got, want)
        assert torch.equal(out[gap], outside[gap])
        if share == 0:
            assert len(message) <= sum(words) / 8 + sum(count // block + 1 for count in words)  # bits only


def test_a_nan_that_stays_is_no_difference_and_a_sign_of_zero_is_one():
    old = torch.tensor([float("nan"), 0.0, 1.0, 2.0]).view(torch.uint8)
    new = torch.tensor([float("nan"), -0.0, 1.0, 3.0]).view(torch.uint8)
    message = encode([new], [old], 4)
    assert message.tolist() == [0b01010000, 0, 0, 0, 128, 0, 0, 64, 64]
    out = torch.zeros_like(old)
    decode(message, [out], [old], 4)
    assert torch.equal(out, new)


@pytest.mark.parametrize("change", [lambda m: m[:-1], lambda m: torch.cat([m, m[:1]])], ids=["cut", "longer"])
def test_a_difference_of_other_parts_is_refused(change):
    old, new = torch.zeros(64, dtype=torch.uint8), torch.arange(64, dtype=torch.uint8)
    message = change(encode([new], [old], 2))
    with pytest.raises(ValueError, match=f"a difference of {len(message)} bytes was sent where"):
        decode(message, [torch.empty_like(old)], [old], 2)
