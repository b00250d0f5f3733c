import pytest
import torch
from forge_interp import InterpError
from forge_interp.hooks.sites import Site, canonical, find_sites, named_modules
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.ffn = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.head = nn.Linear(4, 4)


def names(pattern):
    return [str(site) for site in find_sites(Model(), [pattern])[pattern]]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("head", "head:out"),
        ("head:out", "head:out"),
        ("head#0", "head:out"),
        ("head:in.1#2", "head:in.1#2"),
        ("", ":out"),
        ("a.b:kw.mask", "a.b:kw.mask"),
        ("a:attn.pattern", "a:attn.pattern"),
        ("a:out.last_hidden_state", "a:out.last_hidden_state"),
        ("a:out[x.y].0[p:q#1]#2", "a:out[x.y].0[p:q#1]#2"),
        ("a:b:out", "a:b:out"),
        ("a#1:in#2", "a#1:in#2"),
    ],
)
def test_canonical_writes_out_the_part_and_drops_the_first_call(text, key):
    assert canonical(text) == key
    assert canonical(key) == key


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("head:output", "no part 'output'"),
        ("head:kw", "no part 'kw'"),
        ("head:attn", "no part 'attn'"),
        ("head:out..1", "no part"),
        ("head:attn.weights", "no 'weights', but q, k, v"),
        ("head#x", "'x' is no number"),
        ("head#-1", "'-1' is no number"),
        ("head#", "is no number"),
    ],
)
def test_parse_raises_with_the_grammar_when_it_is_broken(text, says):
    with pytest.raises(InterpError, match=says):
        Site.parse(text)


def test_find_sites_reads_a_star_as_part_of_one_component():
    assert names("layers.*") == [f"layers.{i}:out" for i in range(12)]
    assert names("layers.1*:in") == ["layers.1:in", "layers.10:in", "layers.11:in"]
    assert names("*") == ["layers:out", "head:out"]


def test_find_sites_reads_two_stars_as_any_number_of_components():
    assert names("**.attention") == [f"layers.{i}.attention:out" for i in range(12)]
    assert len(names("**")) == len(list(Model().modules()))
    assert names("**.head") == ["head:out"]
    assert names("layers.3.**") == [
        "layers.3:out",
        "layers.3.attention:out",
        "layers.3.ffn:out",
        "layers.3.ffn.0:out",
        "layers.3.ffn.1:out",
    ]


def test_find_sites_takes_an_exact_name_for_itself():
    model = nn.ModuleDict({"a[0]": nn.ReLU(), "a0": nn.ReLU(), "a?": nn.ReLU()})
    found = find_sites(model, ["a[0]", "a?", "a[0-9]", "a*"])
    assert {pattern: [site.module for site in sites] for pattern, sites in found.items()} == {
        "a[0]": ["a[0]"],
        "a?": ["a?"],
        "a[0-9]": ["a0"],
        "a*": ["a[0]", "a0", "a?"],
    }


def test_find_sites_names_the_model_itself_by_the_empty_name():
    assert names(":in") == [":in"]


def test_find_sites_lists_near_misses_when_nothing_fits():
    with pytest.raises(
        InterpError,
        match=r"'layer.\*.attn' names no module of Model; did you mean .*layers\.\*\.attention",
    ):
        names("layer.*.attn")


def test_find_sites_raises_when_none_are_given():
    with pytest.raises(InterpError, match="no sites"):
        find_sites(Model(), [])


def test_named_modules_leaves_wrappers_out():
    model = Model()
    plain = list(named_modules(model))
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    compiled = torch.compile(model)
    assert list(named_modules(compiled)) == plain
    assert named_modules(compiled)[""] is model
    assert named_modules(compiled)["layers.3"] is model.layers[3]


def test_named_modules_lists_a_shared_module_under_each_name():
    model = Model()
    model.tail = model.head
    assert named_modules(model)["tail"] is named_modules(model)["head"]
