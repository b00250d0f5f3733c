"""Capture in models of plain torch, spread over gloo ranks by each of torch's own ways, against one process.

B sequences, T tokens, N heads, D model dim.
"""

import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, ablate, capture, edit
from forge_parallel.testing import run_ranks
from torch import Tensor, nn

pytestmark = pytest.mark.dist

B, T, D, HEADS, KV_HEADS, VOCAB = 4, 6, 16, 4, 2, 20
HEAD_DIM = D // HEADS
STATISTICS = ("entropy", "sink", "previous", "lag.2")
ATTENTION = tuple(f"attn.{part}" for part in ("q", "k", "v", "raw", "scores", "pattern", "z", *STATISTICS))
INSIDE = ["layers.*.att.q", "layers.*.att.k:in", "layers.*.att.o:in", "layers.*.up", "layers.*.down:in"]
NORMS = ["layers.*.norm1", "layers.*.norm2", "norm"]
STREAM = ["emb", "layers.*:in", "layers.*", "layers.*.att", "layers.*.down"]
HEAD = ["head", ":out"]
SITES = STREAM + NORMS + INSIDE + HEAD + [f"layers.*.att:{part}" for part in ATTENTION]


class Attention(nn.Module):
    """Grouped queries; causal, but for DTensors, of which torch can do no more on a CPU."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, D), nn.Linear(D, D)
        self.k, self.v = nn.Linear(D, KV_HEADS * HEAD_DIM), nn.Linear(D, KV_HEADS * HEAD_DIM)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.q, self.k, self.v))
        if not self.is_causal:
            k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=self.is_causal)
        return self.o(z.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.att = nn.LayerNorm(D), nn.LayerNorm(D), Attention(is_causal)
        self.up, self.down = nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.emb, self.norm, self.head = (
            nn.Embedding(VOCAB, D),
            nn.LayerNorm(D),
            nn.Linear(D, VOCAB, bias=False),
        )
        self.layers = nn.ModuleList(Block(is_causal) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(dtype: torch.dtype = torch.float64, is_causal: bool = True) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(is_causal).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    return model


def tokens() -> Tensor:
    return torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(1))


def rank() -> int:
    return torch.distributed.get_rank()


def seen(model: nn.Module, x: Tensor, sites=SITES, prefix: str = "") -> dict[str, Tensor]:
    with (
        torch.no_grad(),
        capture(model, [site if site[0] == ":" else prefix + site for site in sites]) as acts,
    ):
        model(x)
    return {key.removeprefix(prefix): value.detach() for key, value in acts.items()}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> dict[str, str]:
    """What is not as expected, by site; on the ranks, since all of them must come to the end."""
    wrong = {key: "missing or too many" for key in found.keys() ^ expected.keys()}
    for key in found.keys() & expected.keys():
        if found[key].shape != expected[key].shape:
            wrong[key] = f"{list(found[key].shape)}, expected {list(expected[key].shape)}"
        elif not torch.allclose(found[key], expected[key], rtol=0, atol=atol, equal_nan=True):
            wrong[key] = f"differs by {(found[key] - expected[key]).abs().max()}"
    return wrong


def gradients(model: nn.Module, x: Tensor, sites: list[str]) -> dict[str, Tensor]:
    with capture(model, sites, grad=True) as acts:
        logits = model(x)
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        logits.float().square().mean().backward()
    return dict(acts.gradients)


def replicated() -> tuple[dict, dict, bool, bool]:
    from torch.nn.parallel import DistributedDataParallel

    x = tokens().chunk(2)[rank()]
    model = DistributedDataParallel(build())
    wrong = differences(seen(model, x, prefix="module."), seen(build(), x), 0)
    sites = ["module.layers.*", "module.layers.0.att:attn.z"]
    found = {key.removeprefix("module."): value for key, value in gradients(model, x, sites).items()}
    expected = gradients(build(), x, ["layers.*", "layers.0.att:attn.z"])
    watched = model.module.head.weight.grad.clone()
    model.zero_grad()
    model(x).float().square().mean().backward()
    with capture(model, "module.layers.0", stop=True):
        ended = model(x) is None
    return wrong, differences(found, expected, 0), torch.equal(watched, model.module.head.weight.grad), ended


def test_data_parallel_is_seen_rank_by_rank_with_the_gradients_of_its_own_rows():
    for wrong, wrong_gradients, is_same_step, ended in run_ranks(replicated, 2):
        assert wrong == {} and wrong_gradients == {} and is_same_step and ended


def fully_sharded(reshard: bool, in_bfloat16: bool) -> tuple[dict, dict, dict]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, x = build(torch.float32), tokens().chunk(2)[rank()]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if in_bfloat16 else None)
    for part in (*model.layers, model):
        fully_shard(part, reshard_after_forward=reshard, mp_policy=policy)
    hooked: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            handles.append(
                module.register_forward_hook(
                    lambda _, args, output, n=name: hooked.update(
                        {f"{n}:in": args[0].clone(), f"{n}:out": output.clone()}
                    )
                )
            )
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    found = seen(model, x)
    like_hooks = {key: hooked[key] for key in found if key in hooked}
    wrong = differences({key: found[key] for key in like_hooks}, like_hooks, 0)
    plain = build(torch.bfloat16 if in_bfloat16 else torch.float32)
    wrong |= differences(found, seen(plain, x), 0)
    sites = ["layers.*", "layers.0.att:attn.z"]
    wrong_gradients = differences(gradients(model, x, sites), gradients(plain, x, sites), 0)
    return wrong, wrong_gradients, {key: str(value.dtype) for key, value in found.items()}


@pytest.mark.parametrize("in_bfloat16", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_fully_sharded_is_seen_as_the_module_computes(reshard, in_bfloat16):
    for wrong, wrong_gradients, dtypes in run_ranks(fully_sharded, 2, reshard, in_bfloat16):
        assert wrong == {} and wrong_gradients == {}
        computed = "torch.bfloat16" if in_bfloat16 else "torch.float32"
        assert {
            dtypes[key] for key in ("layers.0:out", ":out", "layers.1.att.q:out", "layers.0.att:attn.q")
        } == {computed}
        assert dtypes["layers.0.att:attn.pattern"] == "torch.float32"


def units_around_others() -> dict:
    from torch.distributed.fsdp import fully_shard

    model, x = build(torch.float32), tokens().chunk(2)[rank()]
    for layer in model.layers:
        for part in (layer.att, layer.up, layer.down, layer):
            fully_shard(part)
    fully_shard(model)
    wrong = {}
    for owner in ("", "layers.*", "layers.*.att"):
        sites = [f"{owner}:{part}" for part in ATTENTION]
        wrong |= differences(seen(model, x, sites), seen(build(torch.float32), x, sites), 0)
    return wrong


def test_attention_of_units_around_others_is_that_of_the_own_rows():
    assert run_ranks(units_around_others, 2) == [{}, {}]


def tensor_parallel(kind: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    is_local = kind != "dtensors"
    columns, rows = ColwiseParallel(use_local_output=is_local), RowwiseParallel()
    plan = {
        "layers.*.att.[qkv]": columns,
        "layers.*.up": columns,
        "layers.*.att.o": rows,
        "layers.*.down": rows,
    }
    if kind == "sequence":
        scattered = RowwiseParallel(output_layouts=Shard(1))
        gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
        plan |= dict.fromkeys(["layers.*.norm1", "layers.*.norm2", "norm"], SequenceParallel())
        plan |= {"layers.*.att": gathered, "layers.*.att.o": scattered, "layers.*.down": scattered}
        plan |= {"layers.*.up": ColwiseParallel(input_layouts=Shard(1))}
        plan |= {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    if kind == "vocabulary":
        plan |= {"emb": RowwiseParallel(input_layouts=Replicate())}
        plan |= {"head": ColwiseParallel(output_layouts=Shard(-1))}
    model = build(is_causal=kind != "dtensors")
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


PARTS = {  # sites of which a rank holds only a part, and torch says nowhere which
    "local": [],
    "dtensors": [],
    "sequence": ["emb", "layers.*:in", "layers.*", "layers.*.att", "layers.*.down"],
    "vocabulary": [":out"],
}


def split(kind: str) -> tuple[dict, dict]:
    model, plain = tensor_parallel(kind), build(is_causal=kind != "dtensors")
    sites = [site for site in SITES if site not in PARTS[kind]]
    with math_kernel():
        wrong = differences(seen(model, tokens(), sites), seen(plain, tokens(), sites), 1e-9)
        watched = ["layers.*.att.q", "layers.0.att:attn.z", "layers.1.down:in"]
        expected = gradients(plain, tokens(), watched)
        wrong_gradients = {}
        if kind != "vocabulary":  # whose loss would be that of a part of the logits
            wrong_gradients = differences(gradients(model, tokens(), watched), expected, 1e-9)
    return wrong, wrong_gradients


def math_kernel():
    """The one in which torch can do attention of DTensors on a CPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


@pytest.mark.parametrize("kind", PARTS)
def test_tensor_parallel_is_seen_in_full(kind):
    for wrong, wrong_gradients in run_ranks(split, 2, kind):
        assert wrong == {} and wrong_gradients == {}


def of_parts(kind: str) -> dict[str, str]:
    model, said = tensor_parallel(kind), {}
    for site in PARTS[kind]:
        try:
            seen(model, tokens(), [site])
        except InterpError as error:
            said[site] = str(error)
    return said


@pytest.mark.parametrize("kind", ["sequence", "vocabulary"])
def test_what_is_spread_without_a_trace_is_an_error(kind):
    for said in run_ranks(of_parts, 2, kind):
        assert sorted(said) == sorted(PARTS[kind])


def edited_in_part(kind: str) -> dict[str, str]:
    said = {}
    for part in ("q", "v", "raw", "pattern", "z"):
        try:
            with (
                math_kernel(),
                torch.no_grad(),
                edit(model := tensor_parallel(kind), {f"layers.0.att:attn.{part}": ablate()}),
            ):
                model(tokens())
        except InterpError as error:
            said[part] = str(error)
    return said


@pytest.mark.parametrize("kind", ["local", "dtensors"])
def test_edits_of_heads_that_are_spread_are_refused(kind):
    for said in run_ranks(edited_in_part, 2, kind):
        assert list(said) == ["q", "v", "raw", "pattern", "z"]
        assert all("only a part of it on this rank" in text for text in said.values())


class OwnSoftmax(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


def softmax_of_dtensors() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, model, said = init_device_mesh("cpu", (2,)), OwnSoftmax(), []
    for placement in (Replicate(), Shard(1)):
        x = distribute_tensor(torch.randn(2, 4, 5, 3), mesh, [placement])
        with torch.no_grad(), capture(model, [":attn.v", ":attn.z"]) as acts:
            z = model(x).full_tensor()
        assert z.equal(acts[":attn.z"]) and acts[":attn.v"].equal(x.full_tensor())
        for look in (*(capture(model, f":attn.{name}") for name in ("scores", "pattern", "entropy")),
                     edit(model, {":attn.pattern": ablate()})):  # fmt: skip
            try:
                with torch.no_grad(), look:
                    model(x)
            except InterpError as error:
                said.append(str(error))
    return said


def test_softmax_of_dtensors_says_what_can_be_captured():
    for said in run_ranks(softmax_of_dtensors, 2):
        assert len(said) == 8 and all("capture attn.v or attn.z, which are gathered" in text for text in said)


def split_both_ways() -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, columns, rows = build(), ColwiseParallel(), RowwiseParallel()
    plan = {
        "layers.*.att.[qkv]": columns,
        "layers.*.up": columns,
        "layers.*.att.o": rows,
        "layers.*.down": rows,
    }
    parallelize_module(model, mesh["tensor"], plan)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh["data"])
    x = tokens().chunk(2)[mesh["data"].get_local_rank()]
    return differences(seen(model, x), seen(build(), x), 1e-9)


def test_tensor_parallel_of_fully_sharded_is_seen_in_full():
    assert run_ranks(split_both_ways, 4) == [{}] * 4


def wrapped() -> dict:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        build(torch.float32), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    x = tokens().chunk(2)[rank()]
    return differences(seen(model, x), seen(build(torch.float32), x), 0)


def test_torch_s_first_fully_sharded_wrapper_is_seen_under_the_plain_names():
    assert run_ranks(wrapped, 2) == [{}, {}]


HF_SITES = [
    "model.layers.*",
    "model.layers.*:in",
    "model.layers.*.self_attn.q_proj",
    "model.layers.*.mlp.down_proj:in",
    ":out.logits",
    *(f"model.layers.*.self_attn:{part}" for part in ATTENTION),
]


def by_transformers(path: str) -> dict:
    import transformers

    config = transformers.DistributedConfig(tp_size=2, tp_plan="auto")
    model = transformers.LlamaForCausalLM.from_pretrained(path, distributed_config=config)
    plain = transformers.LlamaForCausalLM.from_pretrained(path)
    assert hasattr(model.model.layers[0].self_attn.q_proj.weight, "placements")
    return differences(seen(model, tokens(), HF_SITES), seen(plain, tokens(), HF_SITES), 1e-5)


def test_the_tensor_parallelism_of_transformers_is_seen_in_full(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert run_ranks(by_transformers, 2, str(tmp_path)) == [{}, {}]


def mesh_of_both(kind: str, monkeypatch: pytest.MonkeyPatch):
    """A tensor parallel model on one dim of a mesh of 2 x 2, and the mesh."""
    from torch.distributed import device_mesh

    mesh = device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with monkeypatch.context() as patched:
        patched.setattr(device_mesh, "init_device_mesh", lambda *args, **kwargs: mesh["tensor"])
        return tensor_parallel(kind), mesh["data"]


def sequence_parallel_units() -> dict[str, str]:
    """The root has no matrix of its own, and units are at rest again at their outputs."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = mesh_of_both("sequence", pytest.MonkeyPatch())
    for part in (model.emb, *model.layers, [model.norm, model.head], model):
        fully_shard(part, mesh=mesh)
    x, said = tokens().chunk(2)[mesh.get_local_rank()], {}
    for site in PARTS["sequence"]:
        try:
            seen(model, x, [site])
        except InterpError as error:
            said[site] = str(error)
    return said


def test_parts_of_a_sequence_are_an_error_under_fully_sharded_too():
    for said in run_ranks(sequence_parallel_units, 4):
        assert sorted(said) == sorted(PARTS["sequence"])


def a_unit_for_each_linear() -> dict:
    from torch.distributed.fsdp import fully_shard

    model, mesh = mesh_of_both("local", pytest.MonkeyPatch())
    for module in [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.head]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = tokens().chunk(2)[mesh.get_local_rank()]
    return differences(seen(model, x), seen(build(), x), 1e-9)


def test_heads_are_gathered_where_each_linear_layer_is_a_unit():
    assert run_ranks(a_unit_for_each_linear, 4) == [{}] * 4


def resharded_to_pairs() -> dict:
    from torch.distributed.fsdp import fully_shard

    model, x = build(torch.float32), tokens()[rank() : rank() + 1]
    for part in (*model.layers, model):
        fully_shard(part, reshard_after_forward=2)
    return differences(seen(model, x), seen(build(torch.float32), x), 0)


def test_fully_sharded_that_reshards_to_fewer_ranks_is_no_tensor_parallelism():
    assert run_ranks(resharded_to_pairs, 4) == [{}] * 4


def without_content(number: float) -> tuple[dict, bool]:
    """Queries and values that are equal on all ranks tell nothing."""
    model, plain = tensor_parallel("local"), build()
    with torch.no_grad():
        for one in (*model.layers, *plain.layers):
            for linear in (one.att.q, one.att.v):
                weights = [getattr(w, "to_local", lambda w=w: w)() for w in linear.parameters()]
                for weight in weights:
                    weight.fill_(number)
    sites = ["layers.0.att:attn.q", "layers.0.att:attn.v", "layers.0.att:attn.z"]
    shapes = [{key: value.shape for key, value in seen(m, tokens(), sites).items()} for m in (model, plain)]
    try:
        with torch.no_grad(), edit(model, {"layers.0.att:attn.z": lambda z: z + 1}):
            model(tokens())
    except InterpError:
        return shapes[0] == shapes[1], True
    return shapes[0] == shapes[1], False


@pytest.mark.parametrize("number", [0.0, float("nan")])
def test_heads_are_gathered_where_their_values_tell_nothing(number):
    assert run_ranks(without_content, 2, number) == [(True, True)] * 2


class OneKey(nn.Module):
    """Queries of 4 heads; one head of keys and values, whole on all ranks; batched, or one [T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, width) for width in (16, 4, 4, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 4)).transpose(-3, -2) for w in (self.q, self.k, self.v))
        k, v = k.expand(q.shape) if x.ndim == 2 else k, v.expand(q.shape) if x.ndim == 2 else v
        z = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(z.transpose(-3, -2).flatten(-2))


def one_key(shape: tuple[int, ...]) -> tuple[dict, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model, x = nn.Sequential(OneKey()), torch.randn(shape)
    parts = ("q", "pattern", "entropy") if len(shape) == 2 else ("q", "k", "v", "pattern", "z", "entropy")
    sites = [f"0:attn.{part}" for part in parts]
    expected = seen(model, x, sites)
    plan = {"0.q": ColwiseParallel(), "0.o": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    wrong, said = differences(seen(model, x, sites), expected, 1e-5), ""
    try:
        with torch.no_grad(), edit(model, {"0:attn.k": lambda k: k * 1.0, "0:attn.z": lambda z: z * 2}):
            model(x)
    except InterpError as error:
        said = str(error)
    return wrong, said


@pytest.mark.parametrize("shape", [(2, 5, 16), (5, 16)])
def test_keys_that_all_ranks_hold_are_not_gathered_as_queries_are(shape):
    for wrong, said in run_ranks(one_key, 2, shape):
        assert wrong == {} and "attn." in said


def uneven() -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), torch.arange(6).reshape(2, 3)
    expected = seen(model, x, ["1"])
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"1": ColwiseParallel()})
    return differences(seen(model, x, ["1"]), expected, 1e-6)


def test_features_that_are_split_unevenly_are_seen_in_full():
    assert run_ranks(uneven, 2) == [{}, {}]


def with_nan_on_one_rank() -> str:
    model = tensor_parallel("local")
    with torch.no_grad():
        if rank() == 0:
            model.layers[0].att.q.weight.to_local()[0, 0] = float("nan")
    try:
        seen(model, tokens(), ["layers.0.att:attn.pattern"])
    except InterpError as error:
        return str(error)
    return ""


def test_attention_that_fails_the_check_on_one_rank_is_an_error_on_all():
    first, second = run_ranks(with_nan_on_one_rank, 2)
    assert "softmax(scores) V differs" in first and "another rank" in second
