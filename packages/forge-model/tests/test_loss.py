import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from forge_model import Loss, ModelError
from torch.utils._python_dispatch import TorchDispatchMode


def reference(hidden, weight, labels, z_weight, softcap=None):
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    cross_entropy = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    z_loss = logits.logsumexp(-1).square()[labels >= 0].sum()
    return cross_entropy + z_weight * z_loss, cross_entropy, z_loss


@pytest.mark.parametrize("chunk", [0, 1, 4, 1000])
@pytest.mark.parametrize(("z_weight", "softcap"), [(0.0, None), (0.3, None), (0.3, 1.7)])
def test_loss_and_gradients_equal_full_logits_in_float64(chunk, z_weight, softcap):
    hidden = torch.randn(3, 7, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(33, (3, 7))
    labels[1, 2:5] = -100
    terms = Loss(chunk, z_weight)(hidden, weight, labels, softcap=softcap)
    expected = reference(hidden, weight, labels, z_weight, softcap)
    given = [terms.total, terms.sums["loss"].value, terms.sums["z_loss"].value]
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    ours = torch.autograd.grad(0.3 * terms.total, [hidden, weight])
    for a, b in zip(ours, torch.autograd.grad(0.3 * expected[0], [hidden, weight]), strict=True):
        torch.testing.assert_close(a, b)


class Parts:
    """A part of the vocabulary among parts in threads: what collectives would do, with barriers."""

    def __init__(self, first, rank, shared):
        self.first, self.rank, self.shared = first, rank, shared

    def _swap(self, tensor, reduce):
        self.shared["given"][self.rank] = tensor.clone()
        self.shared["barrier"].wait()
        made = reduce(torch.stack(self.shared["given"]))
        self.shared["barrier"].wait()
        return tensor.copy_(made)

    def sum_(self, tensor):
        return self._swap(tensor, lambda all_: all_.sum(0))

    def max_(self, tensor):
        return self._swap(tensor, lambda all_: all_.amax(0))


def smoothed(hidden, weight, labels, weights, z_weight, smoothing):
    """The sum over targets of weight times smoothed cross entropy plus z-loss, from all logits."""
    logits = (hidden @ weight.t()).flatten(0, -2)
    each = F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=smoothing)
    z_loss = logits.logsumexp(-1).square() * (labels.flatten() >= 0)
    return ((each + z_weight * z_loss) * weights.flatten()).sum()


def case():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 16, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(32, 16, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(32, (3, 7), generator=generator)
    labels[1, 2:5] = -100
    return hidden, weight, labels, torch.rand(3, 7, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("z_weight", [0.0, 0.3])
def test_smoothed_and_weighted_loss_equals_full_logits_in_float64(smoothing, weighted, z_weight):
    hidden, weight, labels, weights = case()
    given = weights if weighted else None
    terms = Loss(4, z_weight, smoothing)(hidden, weight, labels, weights=given)
    counted = weights if weighted else torch.ones_like(weights)
    expected = smoothed(hidden, weight, labels, counted, z_weight, smoothing)
    torch.testing.assert_close(terms.total, expected)
    plain = smoothed(hidden, weight, labels, counted, 0.0, 0.0)
    torch.testing.assert_close(terms.sums["loss"].value, plain.detach())
    torch.testing.assert_close(terms.sums["loss"].count, counted[labels >= 0].sum())
    ours = torch.autograd.grad(0.3 * terms.total, [hidden, weight])
    for a, b in zip(ours, torch.autograd.grad(0.3 * expected, [hidden, weight]), strict=True):
        torch.testing.assert_close(a, b)


def test_smoothed_loss_of_parts_of_the_vocabulary_equals_that_of_all():
    hidden, weight, labels, weights = case()
    expected = smoothed(hidden, weight, labels, weights, 0.3, 0.2)
    d_hidden, d_weight = torch.autograd.grad(expected, [hidden, weight])
    shared = {"given": [None, None], "barrier": threading.Barrier(2)}

    def part(rank):
        rows = weight.detach().chunk(2)[rank].clone().requires_grad_()
        own = hidden.detach().clone().requires_grad_()
        total = Loss(5, 0.3, 0.2)(own, rows, labels, Parts(16 * rank, rank, shared), weights).total
        return total.detach(), *torch.autograd.grad(total, [own, rows])

    with ThreadPoolExecutor(2) as pool:
        (total, hidden0, rows0), (other, hidden1, rows1) = pool.map(part, range(2))
    torch.testing.assert_close((total, other), (expected.detach(), expected.detach()))
    torch.testing.assert_close(hidden0 + hidden1, d_hidden)
    torch.testing.assert_close(torch.cat([rows0, rows1]), d_weight)


def test_weights_of_another_shape_are_refused():
    with pytest.raises(ModelError, match="one weight a label"):
        Loss()(torch.ones(2, 3, 4), torch.ones(5, 4), torch.zeros(2, 3).long(), weights=torch.ones(3))


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


@pytest.mark.parametrize("softcap", [None, 1.7])
@pytest.mark.parametrize("chunk", [1, 16, 0])
def test_loss_and_gradients_in_bf16_are_those_of_float64_but_for_rounding(chunk, softcap):
    """Chunks share their buffers: what one leaves must not reach the next, of which the last is shorter."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(41, 32, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(501, 32, generator=generator) * 0.1).bfloat16().requires_grad_()
    labels = torch.randint(501, (41,), generator=generator)
    labels[3:7] = -100
    total = Loss(chunk, 0.01)(hidden, weight, labels, softcap=softcap).total
    wide = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    exact = reference(*wide, labels, 0.01, softcap)[0]
    assert total.item() == pytest.approx(exact.item(), rel=2e-3)
    theirs = torch.autograd.grad(exact, wide)
    for a, b in zip(torch.autograd.grad(total, [hidden, weight]), theirs, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() < 2**-7 * b.norm()


def test_gradient_of_the_head_is_summed_in_float32_over_chunks():
    """What one chunk adds the next takes away, but for a little: what is rounded to bfloat16 is lost."""
    torch.manual_seed(0)
    half = torch.randn(64, 32).bfloat16()
    hidden = torch.cat([half, -(half * 1.0625)]).requires_grad_()
    weight = (torch.randn(50, 32) * 1e-3).bfloat16().requires_grad_()
    labels = torch.randint(50, (64,)).repeat(2)
    whole, *parts = (
        torch.autograd.grad(Loss(chunk)(hidden, weight, labels).total, [weight])[0] for chunk in (0, 64, 16)
    )
    assert all((part - whole).norm() < 2**-9 * whole.norm() for part in parts)


@pytest.mark.parametrize(
    "options", [{}, {"z_loss_weight": 0.1, "label_smoothing": 0.1}], ids=["plain", "all"]
)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_chunks_compute_the_same_in_one_graph(backend, dtype, softcap, options):
    torch._dynamo.reset()
    hidden, weight = (torch.randn(n, 16).to(dtype).requires_grad_() for n in (40, 33))
    labels = torch.randint(33, (40,))
    labels[3:6] = -100
    plain, compiled = Loss(12, **options), Loss(12, **options)
    compiled.compile_chunks(backend)
    found = []
    for loss in (plain, compiled):
        terms = loss(hidden, weight, labels, softcap=softcap)
        gradients = torch.autograd.grad(terms.total, [hidden, weight])
        with torch.no_grad():
            found.append([terms.total, *gradients, loss(hidden, weight, labels, softcap=softcap).total])
    for one, other in zip(*found, strict=True):
        if backend == "aot_eager":
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other)


def test_compiled_chunks_are_compiled_for_the_last_and_for_evaluation_and_no_more():
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    loss, weight = Loss(16), torch.randn(33, 8, requires_grad=True)
    loss.compile_chunks("aot_eager")
    for tokens in (64, 40, 35, 16, 7, 90):
        hidden = torch.randn(tokens, 8, requires_grad=True)
        loss(hidden, weight, torch.randint(33, (tokens,))).total.backward()
        with torch.no_grad():
            loss(hidden, weight, torch.randint(33, (tokens,)))
    assert counters["stats"]["unique_graphs"] <= 4


def test_chunks_in_bf16_share_their_memory():
    made = []
    for tokens in (32, 128):
        hidden = torch.randn(tokens, 8).bfloat16().requires_grad_()
        weight = torch.randn(1000, 8).bfloat16().requires_grad_()
        with Operations() as operations:
            Loss(16)(hidden, weight, torch.randint(1000, (tokens,))).total.backward()
        made.append(operations.copies)
    assert made == [0, 0], "logits are converted in place"


@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_loss_of_one_token_equals_full_logits_in_float64(chunk):
    hidden = torch.randn(1, 1, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, 16, dtype=torch.float64, requires_grad=True)
    total = Loss(chunk, 0.1)(hidden, weight, torch.tensor([[32]])).total
    expected = reference(hidden, weight, torch.tensor([[32]]), 0.1)[0]
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(one, [hidden, weight]) for one in (total, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


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
    """Their names, elements of the largest tensor that any makes, and how many convert large tensors."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.largest = 0
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if isinstance(made, torch.Tensor):
            self.largest = max(self.largest, made.numel())
            self.copies += self.names[-1] == "_to_copy" and made.numel() >= 16_000
        return made


def test_example_of_the_docs_page_runs():
    page = Path(__file__).parents[3] / "docs" / "losses.md"
    if not page.exists():
        pytest.skip("tested without the repository around it")
    exec(page.read_text().split("```python\n")[1].partition("```")[0], made := {})
    assert torch.isfinite(made["mean"])


def test_likeliest_targets_are_told_without_gradients_only():
    """In training they would take four kernels more for each chunk."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 7, 16), torch.randn(32, 16, requires_grad=True)
    labels = (hidden @ weight.t()).argmax(-1)
    labels[0, ::2], labels[1, 3] = (labels[0, ::2] + 1) % 32, -100
    assert Loss(4)(hidden, weight, labels).hits is None
    with torch.no_grad():
        hits = Loss(4)(hidden, weight, labels).hits
    assert hits is not None and hits.shape == labels.shape
    assert torch.equal(hits, (hidden @ weight.t()).argmax(-1) == labels)
