import pytest
import torch
from forge_resilience.copies import Copy, digests, name_the_odd

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_changes_with_any_bit(dtype):
    tensor = torch.randn(3, 5).t().to(dtype)
    before = digests([tensor])
    assert torch.equal(before, digests([tensor.clone()]))
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for byte in range(0, len(flat), 3):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            changed = flat.view(dtype).reshape(5, 3)
            assert digests([changed]) != before, (byte, bit)
            flat[byte] ^= 1 << bit


def test_digests_of_nothing_and_of_nan():
    nan = torch.tensor([float("nan")])
    assert digests([torch.empty(0, 3), nan, nan.clone()]).tolist()[0] == 0
    assert digests([nan]) == digests([nan.clone()])


def copy(rank, copies, digest, name="w"):
    return Copy(rank, f"host{rank}", copies, name, digest)


def test_odd_one_of_three_is_named_and_of_two_both():
    three = [copy(0, (0, 1, 2), 7), copy(1, (0, 1, 2), 9), copy(2, (0, 1, 2), 7)]
    found = name_the_odd(three)
    assert found.why == "rank 1 on host1 has another w than its copies: its hardware is suspect"
    assert found.hosts == ("host1",)
    two = [copy(0, (0, 2), 7), copy(2, (0, 2), 9)]
    found = name_the_odd(two)
    assert found.why == "copies of w differ between rank 0 on host0, rank 2 on host2: one of them is faulty"
    assert found.hosts == (), "nobody knows which"
