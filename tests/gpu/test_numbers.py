"""Numbers that a device makes in its own way, beside those of the CPU."""

import pytest
import torch
from forge_model import Loss
from forge_trainer.optim.local_parameters import _copy_if
from forge_trainer.optim.rounding import Place, stochastic_bfloat16
from gpu_device import BACKEND, DEVICE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_chunked_loss_in_bf16_equals_that_of_the_cpu(compiled):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 128, generator=generator).bfloat16() for n in (96, 512))
    labels = torch.randint(512, (96,), generator=generator)
    found = []
    for device in (torch.device("cpu"), DEVICE):
        loss = Loss(32, 0.1)
        if compiled and device == DEVICE:
            loss.compile_chunks(BACKEND)
        inputs = [x.to(device).requires_grad_() for x in (hidden, weight)]
        total = loss(*inputs, labels.to(device)).total
        found.append([x.cpu().float() for x in (total, *torch.autograd.grad(total, inputs))])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 2**-8 * one.norm()


def test_stochastic_rounding_has_the_bits_of_the_cpu():
    value = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    place = Place((10, 8), (64, 48), (100, 60))
    key = torch.tensor(0x5851F42D4C957F2D)
    on_cpu = stochastic_bfloat16(value, key, place)
    assert torch.equal(stochastic_bfloat16(value.to(DEVICE), key.to(DEVICE), place).cpu(), on_cpu)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_values_are_kept_or_replaced_bit_for_bit_also_where_they_are_no_numbers(dtype, wanted):
    new = torch.tensor([1.5, torch.nan, -torch.inf, 0.0], dtype=dtype, device=DEVICE)
    old = torch.tensor([-0.0, 3.0, torch.nan, 1e-30], dtype=dtype, device=DEVICE)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[old.element_size()]
    expected = (new if wanted else old).clone().view(integer)
    targets = [old, torch.zeros(0, dtype=dtype, device=DEVICE)]
    _copy_if(torch.tensor(wanted, device=DEVICE), targets, [new.clone(), targets[1].clone()])
    assert torch.equal(old.view(integer), expected)
