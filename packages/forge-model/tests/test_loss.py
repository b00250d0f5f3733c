import pytest
import torch
import torch.nn.functional as F
from forge_model import Loss
from torch.utils._python_dispatch import TorchDispatchMode


def reference(hidden, weight, labels, z_weight):
    logits = hidden @ weight.t()
    cross_entropy = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    z_loss = logits.logsumexp(-1).square()[labels >= 0].sum()
    return cross_entropy + z_weight * z_loss, cross_entropy, z_loss


@pytest.mark.parametrize("chunk", [0, 1, 4, 1000])
@pytest.mark.parametrize("z_weight", [0.0, 0.3])
def test_loss_and_gradients_equal_full_logits_in_float64(chunk, z_weight):
    hidden = torch.randn(3, 7, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(33, (3, 7))
    labels[1, 2:5] = -100
    terms = Loss(chunk, z_weight)(hidden, weight, labels)
    expected = reference(hidden, weight, labels, z_weight)
    given = [terms.total, terms.sums["loss"].value, terms.sums["z_loss"].value]
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    ours = torch.autograd.grad(0.3 * terms.total, [hidden, weight])
    for a, b in zip(ours, torch.autograd.grad(0.3 * expected[0], [hidden, weight]), strict=True):
        torch.testing.assert_close(a, b)


def test_loss_of_huge_logits_is_finite():
    hidden = torch.full((1, 2, 4), 1e4, requires_grad=True)
    weight = torch.randn(9, 4)
    labels = torch.tensor([[1, 2]])
    terms = Loss(1)(hidden, weight, labels)
    torch.testing.assert_close(terms.total, reference(hidden, weight, labels, 0)[0])
    assert torch.isfinite(torch.autograd.grad(terms.total, hidden)[0]).all()


def test_loss_without_valid_target_is_zero_with_a_graph():
    hidden = torch.randn(2, 3, 8, requires_grad=True)
    terms = Loss(2, 0.1)(hidden, torch.randn(5, 8), torch.full((2, 3), -100))
    terms.total.backward()
    assert terms.total == 0 and terms.sums["loss"].count == 0
    assert hidden.grad.eq(0).all()


def test_loss_in_bf16_is_near_float32():
    hidden, weight, labels = torch.randn(64, 32), torch.randn(500, 32) * 0.1, torch.randint(500, (64,))
    exact = Loss(16)(hidden, weight, labels)
    rough = Loss(16)(hidden.bfloat16(), weight.bfloat16(), labels)
    assert rough.total.dtype == torch.float32
    assert rough.total == pytest.approx(exact.total.item(), rel=5e-3)


@pytest.mark.parametrize(("training", "products"), [(True, 3), (False, 1)])
def test_loss_makes_gradients_only_when_they_are_needed(training, products):
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    with torch.set_grad_enabled(training), Operations() as operations:
        terms = Loss(4)(hidden, weight, torch.tensor([1, 2, 3, -1]))
    assert terms.total.requires_grad == training
    assert all(one.count == 3 and not one.value.requires_grad for one in terms.sums.values())
    assert sum(name in ("mm", "addmm_") for name in operations.names) == products


def test_loss_differentiated_twice_gives_twice_the_gradients():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    total = Loss(3)(hidden, weight, torch.tensor([1, 2, -1, 8])).total * 0.3
    once = [g.clone() for g in torch.autograd.grad(total, [hidden, weight], retain_graph=True)]
    twice = torch.autograd.grad(total, [hidden, weight])
    assert all(a.equal(b) for a, b in zip(once, twice, strict=True))


def test_loss_never_holds_more_logits_than_a_chunk():
    tokens, vocabulary, dim, chunk = 64, 1000, 8, 16
    hidden, weight = torch.randn(tokens, dim, requires_grad=True), torch.randn(vocabulary, dim)
    labels = torch.randint(vocabulary, (tokens,))
    with Operations() as operations:
        Loss(chunk)(hidden, weight, labels).total.backward()
    assert operations.largest == chunk * vocabulary


class Operations(TorchDispatchMode):
    """Their names, and the number of elements of the largest tensor that any of them makes."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if isinstance(made, torch.Tensor):
            self.largest = max(self.largest, made.numel())
        return made
