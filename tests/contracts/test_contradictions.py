"""Every section of a configuration reports all keys that do not go together, not only the first."""

import ast
import importlib
import inspect
import pkgutil
import textwrap

import pytest
from forge_config import Config, ConfigError, load
from forge_model.config import ModelConfig
from forge_trainer.config.job import Job
from forge_trainer.slurm.config import ClusterConfig

PACKAGES = ("forge_model", "forge_parallel", "forge_data", "forge_ckpt", "forge_resilience", "forge_vlm")
NORMALIZE = {"Job"}
"""Structs whose `__post_init__` fills in a field; they look at nothing."""


def structs_of_forge() -> list[type[Config]]:
    for name in (*PACKAGES, "forge_trainer"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found: list[type[Config]] = []
    todo: list[type[Config]] = [Config]
    while todo:
        found.append(todo.pop())
        todo += found[-1].__subclasses__()
    return [one for one in found if one.__module__.startswith("forge_") and one is not Config]


def raises_in(function: object) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # pyright: ignore[reportArgumentType]
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def test_no_config_struct_raises_its_first_contradiction():
    structs = structs_of_forge()
    assert len(structs) > 100
    own = {one.__name__ for one in structs if "__post_init__" in vars(one)}
    assert own == NORMALIZE, "say it in `contradictions`, which reports all of them"
    checked = [one for one in structs if "contradictions" in vars(one)]
    assert len(checked) >= 40
    assert not [one.__name__ for one in checked if raises_in(vars(one)["contradictions"])]
    assert not raises_in(Job.__post_init__)


CASES = {
    "decoder": (
        "vocab_size = 64\ndim = 30\nnum_layers = 2\nmax_tokens = 8\nffn.dim = 8\n"
        'attention.num_heads = 4\nmtp.num_modules = 9\noverrides = [{layers = "7"}]\n',
        ["mtp.num_modules = 9", "overrides[0].layers = '7'", "dim = 30 is no even multiple"],
    ),
    "attention": (
        "vocab_size = 64\ndim = 32\nnum_layers = 2\nmax_tokens = 8\nffn.dim = 8\n"
        "attention = {num_heads = 4, num_kv_heads = 3, head_dim = 7, rope_dim = 5}\n",
        ["num_kv_heads = 3", "head_dim = 7 is odd", "rope_dim = 5 is odd"],
    ),
    "vision-language": (
        'type = "vision-language"\npositions = "grid"\nimage_token_id = 64\ndecoder.max_tokens = 8\n'
        "decoder.vocab_size = 64\ndecoder.dim = 32\ndecoder.num_layers = 1\n"
        "decoder.attention.num_heads = 4\ndecoder.ffn.dim = 8\n"
        "encoder = {image_size = 16, patch_size = 4, dim = 8, num_layers = 1, num_heads = 2}\n",
        ["leaves no room for text", "model.image_token_id = 64", 'positions = "grid" has 3 axes'],
    ),
    "side inputs and axes": (
        "vocab_size = 64\ndim = 32\nnum_layers = 2\nmax_tokens = 8\nffn.dim = 8\n"
        'attention.num_heads = 4\nmtp.num_modules = 8\nrope = {type = "mrope", sections = [1, 1]}\n',
        ["mtp.num_modules = 8", "rope.sections = [1, 1] add up to 2"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_reports_all_contradictions(case, tmp_path):
    text, expected = CASES[case]

    class Holder(Config):
        model: ModelConfig

    file = tmp_path / "a.toml"
    file.write_text(f"[model]\n{text}")
    with pytest.raises(ConfigError) as raised:
        load(Holder, file)
    assert [part for part in expected if part not in str(raised.value)] == [], str(raised.value)


SECTIONS = {
    "hf": (
        '[[data.sources]]\ntype = "hf"\npath = ""\ntext = "a"\nmessages = "b"\ntemplate = "x"\ntools = "t"\n',
        ["given path = ''", "expected one of text, messages", "has no {content}", "given tools = 't'"],
    ),
    "groups": (
        "[[optimizer.groups]]\nfreeze_from = 5\nfreeze_until = 3\n"
        "stages = [{from_step = 4}, {from_step = 2}]\n",
        ["names nothing", "stages begin at 4, 2", "beside stages", "freeze_until = 3 is not after"],
    ),
    "phases": (
        "[[data.phases]]\nweights = {a = -1.0}\nstart_step = 1\nstart_tokens = 2\n",
        ["expected exactly one of start_step", "given weights"],
    ),
    "dense": (
        "[[checkpoint.dense]]\nto_step = 5\nfrom_step = 7\n",
        ["is before from_step = 7", "there is no power of two"],
    ),
    "cluster": (
        'memory = "1 G"\nqos = "a b"\ntime = "0:01"\noptions = ["x"]\nstep_options = ["y"]\n',
        ["memory = '1 G'", "qos = 'a b'", "time = '0:01'", "'x' is no option", "'y' is no option"],
    ),
    "sets": (
        "[eval.sets.train]\nsources = []\n[eval.tasks]\nnames = []\n",
        ["the sources are named not at all", "names is empty"],
    ),
}


@pytest.mark.parametrize("case", SECTIONS)
def test_a_section_of_a_job_reports_all_contradictions(case, tmp_path):
    text, expected = SECTIONS[case]
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(ClusterConfig if case == "cluster" else Job, file)
    assert [part for part in expected if part not in str(raised.value)] == [], str(raised.value)
