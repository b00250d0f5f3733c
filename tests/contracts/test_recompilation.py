"""How often blocks are compiled in a run that trains, evaluates and answers tasks; and what is too often."""

import json
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from forge_config import ConfigError
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.attention import mask
from forge_model.attention.config import GroupedQueryConfig
from forge_model.attention.mask import Mask, attend_flex, flex_blocks
from forge_model.decoder.config import LayerOverride
from forge_model.error import ModelError
from forge_model.loss import cross_entropy
from forge_parallel import Env, MeshConfig, ParallelConfig, Plan, build_mesh, local_shard, parallelize
from forge_parallel.apply import materialize
from forge_parallel.compile_config import COMPILATIONS_OF_A_KIND, CompileConfig
from forge_trainer.config.job import load_job
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
CPU = torch.device("cpu")
WINDOWS = DecoderConfig(
    vocab_size=64,
    dim=32,
    num_layers=4,
    max_tokens=256,
    attention=GroupedQueryConfig(num_heads=2),
    overrides=[LayerOverride(layers="1::2", attention=GroupedQueryConfig(num_heads=2, sliding_window=8))],
)


@pytest.fixture(autouse=True)
def _forgotten():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(config: DecoderConfig, **options) -> nn.Module:
    mesh = build_mesh(MeshConfig(), Env(0, 0, 1, CPU, "none"))
    with torch.device("meta"):
        model = config.build()
    compile = CompileConfig(enabled=True, backend="aot_eager", **options)
    parallelize(model, mesh, Plan.of(model), ParallelConfig(compile=compile))
    initialize(materialize(model, CPU), 0, local_shard)
    return model


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def train(model: nn.Module, rows: int, tokens: int, documents: bool = False) -> Tensor:
    x = torch.randint(64, (rows, tokens + 1), generator=torch.Generator().manual_seed(rows * tokens))
    side = {"doc_ids": torch.arange(tokens).expand(rows, -1) // 5} if documents else {}
    terms = model.train()(x[:, :-1].contiguous(), labels=x[:, 1:], loss_fn=LossConfig().build(), **side)
    terms.total.backward()
    return terms.total.detach()


@torch.no_grad()
def answer(model: nn.Module, rows: int, tokens: int) -> Tensor:
    return model.eval()(torch.arange(rows * tokens).view(rows, tokens) % 64)


@pytest.mark.slow
def test_windows_evaluation_tasks_batch_shapes_and_documents_are_compiled_a_bounded_number_of_times():
    model, found = compiled(WINDOWS), {}
    train(model, 2, 64)
    found["training"] = graphs()
    answer(model, 2, 64)
    found["evaluation"] = graphs()
    for rows, tokens in ((1, 9), (3, 33), (4, 100), (1, 1), (7, 250), (2, 17)):
        answer(model, rows, tokens)
    found["tasks"] = graphs()
    for rows, tokens in ((3, 64), (5, 64), (1, 64), (3, 96)):
        train(model, rows, tokens)
    found["batch shapes"] = graphs()
    train(model, 2, 64, documents=True)
    train(model, 3, 64, documents=True)
    found["documents"] = graphs()
    kinds = WINDOWS.block_kinds()
    assert kinds == 2 and found["documents"] <= kinds * COMPILATIONS_OF_A_KIND, found
    before = graphs()
    for rows, tokens in ((1, 12), (9, 77), (6, 128)):
        answer(model, rows, tokens)
    train(model, 7, 80)
    assert graphs() == before, "further shapes are compiled no more"


@pytest.mark.slow
def test_compiled_blocks_compute_what_they_do_uncompiled_through_all_of_it():
    model = compiled(WINDOWS)
    with torch.device("meta"):
        plain = WINDOWS.build()
    mesh = build_mesh(MeshConfig(), Env(0, 0, 1, CPU, "none"))
    parallelize(plain, mesh, Plan.of(plain), ParallelConfig())
    initialize(materialize(plain, CPU), 0, local_shard)
    for rows, tokens in ((2, 64), (3, 33), (1, 9), (4, 100)):
        torch.testing.assert_close(answer(model, rows, tokens), answer(plain, rows, tokens))
        torch.testing.assert_close(train(model, rows, tokens, True), train(plain, rows, tokens, True))


def test_blocks_of_too_many_kinds_are_named_before_the_run():
    flags = ["--model.num_layers=22", "--compile.enabled=true"]
    windows = [
        {"layers": str(index), "attention": {"type": "gqa", "num_heads": 2, "sliding_window": index + 1}}
        for index in range(22)
    ]
    text = json.dumps(windows).replace('": ', '" = ')
    with pytest.raises(ConfigError, match="22 kinds of blocks"):
        load_job("configs/runs/debug.toml", [*flags, f"--model.overrides={text}"])
    flags[-1] = "--compile.enabled=false"
    load_job("configs/runs/debug.toml", [*flags, f"--model.overrides={text}"])


def flex(heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Mask, Tensor]:
    seen = Mask(128, CPU, (torch.arange(128) // 40)[None])
    x = torch.randn(3, 1, heads, 128, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    return attend_flex(*x.unbind(), flex_blocks(seen, None), None), seen, x


@pytest.fixture
def without_backend(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    monkeypatch.setattr(mask, "_compiled_flex", lambda: compiled)


def test_flex_attention_is_compiled_for_more_formats_and_widths_than_torch_allows(without_backend):
    sizes = [(heads, width) for heads in (1, 2, 3) for width in (8, 16, 32, 64)]
    for heads, width in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            out, seen, x = flex(heads, width, dtype)
            exact = F.scaled_dot_product_attention(*x.unbind(), attn_mask=seen.dense(None))
            assert (out - exact).float().norm() < 2e-2 * exact.float().norm()
    assert graphs() > 8


def test_flex_attention_is_never_computed_uncompiled_in_silence(without_backend, monkeypatch):
    monkeypatch.setattr(mask, "FLEX_COMPILATIONS", 10)
    with pytest.raises(ModelError, match="compiled 10 times"):
        for width in range(8, 200, 8):
            for heads in (1, 2):
                flex(heads, width, torch.float32)
    assert graphs() <= 10


def test_chunks_of_the_loss_are_compiled_for_more_formats_and_vocabularies_than_torch_allows():
    """Several models of one process share the code: training and evaluation, chunks cut short, formats."""
    drawn = torch.Generator().manual_seed(0)
    for vocabulary in (48, 64):
        for dtype in (torch.float32, torch.bfloat16):
            fused, plain = LossConfig(chunk_tokens=16).build(), LossConfig(chunk_tokens=16).build()
            fused.compile_chunks("aot_eager")
            for tokens in (16, 21, 17, 3):
                hidden = torch.randn(tokens, 8, generator=drawn).to(dtype).requires_grad_()
                weight = torch.randn(vocabulary, 8, generator=drawn).to(dtype).requires_grad_()
                labels = torch.randint(vocabulary, (tokens,), generator=drawn)
                made, exact = (loss(hidden, weight, labels).total for loss in (fused, plain))
                torch.testing.assert_close(made, exact)
                both = (torch.autograd.grad(total, (hidden, weight)) for total in (made, exact))
                for new, old in zip(*both, strict=True):
                    torch.testing.assert_close(new, old)
                with torch.no_grad():
                    torch.testing.assert_close(fused(hidden, weight, labels).total, exact.detach())
    assert graphs() > 8


def test_chunks_of_the_loss_that_are_compiled_too_often_are_named(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_COMPILATIONS", 10)
    loss = LossConfig().build()
    loss.compile_chunks("eager")
    formats = (torch.float32, torch.bfloat16, torch.float64)
    with pytest.raises(ModelError, match="compiled 10 times"):
        for dtype, softcap, rows, needed in product(formats, (None, 30.0), (1, 4), (True, False)):
            hidden = torch.randn(rows, 8, dtype=dtype, requires_grad=needed)
            loss(hidden, torch.randn(16, 8, dtype=dtype), torch.arange(rows), softcap=softcap)
    assert graphs() <= 10
