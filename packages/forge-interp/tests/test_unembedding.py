import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.lenses.lens import logit_lens
from forge_interp.lenses.unembedding import Unembedding
from torch import Tensor, nn


class TinyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def test_unembedding_finds_the_end_by_name_outside_of_the_blocks():
    model = nn.ModuleDict({"transformer": TinyLM()})
    found = Unembedding(model)
    assert (found.norm_name, found.head_name) == ("transformer.norm", "transformer.head")
    assert Unembedding(torch.compile(TinyLM(), backend="eager")).norm_name == "norm"
    asked = TinyLM()
    asked.vocabulary, asked.head = asked.head, nn.Identity()
    asked.get_output_embeddings = lambda: asked.vocabulary
    assert Unembedding(asked).head_name == "vocabulary"


@pytest.mark.parametrize(
    ("norm", "head"),
    [("norm", "lm_head"), ("norm_f", "embed_out"), ("ln_f", "unembed"), ("final_layernorm", "head")],
)
def test_unembedding_takes_the_usual_names_nearest_to_the_root_and_outside_of_blocks(norm, head):
    block = nn.ModuleDict({"norm": nn.LayerNorm(8), "ln_f": nn.LayerNorm(8), "head": nn.Linear(8, 8)})
    pool = nn.ModuleDict({"head": nn.Linear(8, 2)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block]), "vision": pool})
    model["trunk"] = nn.ModuleDict({norm: nn.LayerNorm(8)})
    model[head] = nn.Linear(8, 9)
    found = Unembedding(model)
    assert (found.norm_name, found.head_name) == (f"trunk.{norm}", head)


def test_unembedding_says_what_is_missing():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    with pytest.raises(InterpError, match=r'no module called lm_head, head.*pass head="name"'):
        Unembedding(model)
    with pytest.raises(InterpError, match=r"no module called norm, .*Identity\(\) if there is none"):
        Unembedding(model, head="1")
    with pytest.raises(InterpError, match="norm is 'ln', which is no submodule"):
        Unembedding(model, norm="ln", head="1")
    result = logit_lens(model, ["0", "1:in"], torch.arange(5), norm=nn.Identity(), head="1", keep_logits=True)
    assert torch.equal(result.logits["0:out"], model(torch.arange(5)))
    two = nn.ModuleDict({"a": TinyLM(), "b": TinyLM()})
    with pytest.raises(InterpError, match=r"head of ModuleDict is ambiguous: a\.head, b\.head"):
        Unembedding(two)
    with pytest.raises(InterpError, match=r"near: a\.ln_post"):
        two = nn.ModuleDict({"a": nn.ModuleDict({"ln_post": nn.LayerNorm(4), "lm_head": nn.Linear(4, 5)})})
        Unembedding(two)


def test_unembedding_refuses_sharded_weights(tmp_path):
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    model = TinyLM()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.data, mesh, [Shard(0)]))
        with pytest.raises(
            InterpError, match=r"'weight' of the head head is sharded.*outside of the model's"
        ):
            Unembedding(model)
    finally:
        distributed.destroy_process_group()
