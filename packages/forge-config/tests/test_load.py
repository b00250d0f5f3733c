from typing import Annotated

import pytest
from forge_config import Config, ConfigError, Meta, Registry, digest, load, to_toml


class Optimizer(Config):
    lr: float = 1.0


optimizers = Registry("optimizer", Optimizer, default="adam")


@optimizers.register("adam")
class Adam(Optimizer):
    eps: float = 1e-8


@optimizers.register("lion")
class Lion(Optimizer):
    beta: float = 0.9


class Source(Config):
    path: str
    weight: Annotated[float, Meta(gt=0)] = 1.0


class Data(Config):
    tokens: int = 8
    sources: list[Source] = []


class Model(Config):
    size: Annotated[int, Meta(ge=1)] = 1
    tokens: int = 8
    optimizer: Optimizer = Adam()


class Job(Config):
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Adam()
    parts: dict[str, Optimizer] = {}


def test_layers_win_in_order_defaults_extends_file_flags(load_text, tmp_path):
    loaded = load_text(
        Job,
        'extends = ["a.toml", "b.toml"]\n[model]\ntokens = 3',
        ["--optimizer.lr=4"],
        a="[model]\nsize = 1\ntokens = 1\noptimizer.lr = 1\n[optimizer]\nlr = 1\neps = 1",
        b="[model]\nsize = 2\ntokens = 2\n[optimizer]\nlr = 2",
    )
    assert loaded.value.model == Model(size=2, tokens=3, optimizer=Adam(lr=1.0))
    assert loaded.value.optimizer == Adam(lr=4.0, eps=1.0)
    assert {key: str(at).replace(f"{tmp_path}/", "") for key, at in loaded.origins.items()} == {
        "model.size": "b.toml:2",
        "model.tokens": "job.toml:3",
        "model.optimizer.type": "default",
        "model.optimizer.lr": "a.toml:4",
        "model.optimizer.eps": "default",
        "data.tokens": "default",
        "data.sources": "default",
        "optimizer.type": "default",
        "optimizer.lr": "--optimizer.lr=4",
        "optimizer.eps": "a.toml:7",
        "parts": "default",
    }
    assert [file.name for file in loaded.files] == ["a.toml", "b.toml", "job.toml"]


def test_extends_is_relative_to_the_file_that_names_it(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "parts/deep").mkdir(parents=True)
    (tmp_path / "runs/job.toml").write_text('extends = "../parts/a.toml"')
    (tmp_path / "parts/a.toml").write_text('extends = "deep/b.toml"')
    (tmp_path / "parts/deep/b.toml").write_text("model.size = 7")
    loaded = load(Job, tmp_path / "runs/job.toml")
    assert loaded.value.model.size == 7
    assert loaded.origins["model.size"] == f"{tmp_path}/parts/deep/b.toml:1"


def test_extends_may_reach_one_file_by_two_ways(load_text):
    job = load_text(
        Job,
        'extends = ["a.toml", "b.toml"]',
        a='extends = "c.toml"',
        b='extends = "c.toml"',
        c="model.size = 5",
    )
    assert job.value.model.size == 5


def test_arrays_replace(load_text):
    base = "[[data.sources]]\npath = 'a'\nweight = 2\n[[data.sources]]\npath = 'b'"
    loaded = load_text(Job, 'extends = "base.toml"\n[[data.sources]]\npath = "c"', base=base)
    assert loaded.value.data.sources == [Source(path="c")]
    assert loaded.origins["data.sources[0].weight"] == "default"


@pytest.mark.parametrize("prefix", ["optimizer", "model.optimizer", "parts.x"])
def test_another_type_drops_the_keys_of_the_lower_type(load_text, prefix):
    base = f"[{prefix}]\nlr = 3\neps = 1"
    loaded = load_text(Job, f'extends = "base.toml"\n[{prefix}]\ntype = "lion"', base=base)
    section, _, last = prefix.rpartition(".")
    holder = getattr(loaded.value, section) if section else loaded.value
    found = holder[last] if isinstance(holder, dict) else getattr(holder, last)
    assert found == Lion()
    assert loaded.origins[f"{prefix}.lr"] == "default"


class Open(Config):
    n: int = 0


opens = Registry("open", Open)


@opens.register("only")
class Only(Open):
    pass


class Holder(Config):
    part: Open


def test_type_given_above_completes_a_section_that_has_no_default_type(load_text):
    job = load_text(Holder, 'extends = "base.toml"\npart.type = "only"', base="part.n = 3")
    assert job.value.part == Only(n=3)


def test_same_type_keeps_the_keys_of_the_lower_layer(load_text):
    base = "[optimizer]\neps = 1"
    assert (
        load_text(Job, 'extends = "base.toml"\noptimizer.type = "adam"', base=base).value.optimizer.eps == 1
    )


@pytest.mark.parametrize("flip", [False, True])
def test_type_and_keys_of_flags_belong_together_in_any_order(load_text, flip):
    flags = ["--optimizer.beta=0.5", "--optimizer.type=lion"]
    job = load_text(Job, "[optimizer]\neps = 1", flags[::-1] if flip else flags)
    assert job.value.optimizer == Lion(beta=0.5)


def test_key_given_below_and_wrong_is_reported_where_it_was_written(mistakes):
    found = mistakes(Job, 'extends = "base.toml"', base="\n\n[model]\nsize = 0")
    assert found == ["  base.toml:4: model.size: given 0; expected integer >= 1"]


def test_circle_of_extends_is_a_problem(mistakes):
    found = mistakes(Job, 'extends = "a.toml"', a='\nextends = "job.toml"')
    assert found == [
        "  a.toml:2: extends: the files extend each other in a circle: job.toml -> a.toml -> job.toml"
    ]


def test_missing_base_is_reported_together_with_other_mistakes_but_not_with_its_own_keys(mistakes, tmp_path):
    found = mistakes(Job, 'extends = ["no.toml", 3]\n[model]\nsize = 0\n[[data.sources]]')
    assert found == [
        "  job.toml:1: extends: no.toml: cannot be read: No such file or directory; names count from the "
        f"folder of the file that extends, {tmp_path.resolve()}",
        "  job.toml:1: extends: given 3; expected the name of a file, or an array of names",
        "  job.toml:3: model.size: given 0; expected integer >= 1",
    ]


def test_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.toml: cannot be read: No such file"):
        load(Job, tmp_path / "no.toml")


def test_toml_mistake_has_line_and_column(mistakes):
    assert mistakes(Job, "[model]\nsize = = 3\n") == ["  job.toml:2:8: not valid TOML: Invalid value"]


def test_toml_mistake_in_a_base_has_its_place(mistakes):
    found = mistakes(Job, 'extends = "base.toml"', base="[model\n")
    assert len(found) == 1 and "job.toml:1: extends: base.toml:1:7: not valid TOML" in found[0]


def fits(model, data):
    if data.tokens > model.tokens:
        raise ValueError(f"data.tokens = {data.tokens} is more than model.tokens = {model.tokens}")


def yields(data):
    yield from (f"data.tokens = {data.tokens} is bad" for _ in range(2) if data.tokens > 8)


def test_checks_over_sections_name_the_places_of_the_keys(mistakes):
    found = mistakes(Job, "[data]\ntokens = 9", ["--model.tokens=2"], [fits, yields])
    assert found == [
        "  job.toml:2: data.tokens = 9 is more than model.tokens = 2 "
        "(data.tokens from job.toml:2, model.tokens from --model.tokens=2)",
        "  job.toml:2: data.tokens = 9 is bad",
        "  job.toml:2: data.tokens = 9 is bad",
    ]


def test_checks_run_when_other_sections_are_wrong(mistakes):
    found = mistakes(Job, "[data]\ntokens = 9\n[optimizer]\nlr = 'x'", (), [fits, yields])
    assert len(found) == 4


def test_checks_of_wrong_sections_do_not_run(mistakes):
    assert len(mistakes(Job, "[data]\ntokens = 9\n[model]\nsize = 0", (), [fits])) == 1


@pytest.mark.parametrize("text", ["parts.x.lr = 'x'", "parts.x.nope = 1", "parts.x.type = 'nope'"])
def test_checks_of_sections_with_a_wrong_entry_do_not_run(mistakes, text):
    def never(parts):
        raise ValueError("this check must not run")

    assert len(mistakes(Job, text, (), [never])) == 1


def test_check_of_no_section_is_a_bug_of_the_check(load_text):
    def wrong(modelx):
        return None

    with pytest.raises(TypeError, match="check wrong names modelx; expected among model, data"):
        load_text(Job, "", checks=[wrong])


def test_good_checks_let_the_value_pass(load_text):
    assert load_text(Job, "data.tokens = 7", checks=[fits, yields]).value.data.tokens == 7


class Whole(Config):
    data: Data = Data()

    def __post_init__(self):
        if self.data.tokens == 5:
            raise ValueError("data.tokens = 5 is refused")


def test_check_of_the_whole_struct_is_reported(mistakes):
    assert mistakes(Whole, "\ndata.tokens = 5") == ["  job.toml:2: data.tokens = 5 is refused"]


def test_resolved_config_loads_to_the_same_digest(load_text, tmp_path):
    text = "[model]\nsize = 2\n[[data.sources]]\npath = 'a'\nweight = 2\n[parts.'odd name']\ntype = 'lion'"
    loaded = load_text(Job, text, ["--optimizer.lr=4"])
    written = tmp_path / "resolved.toml"
    written.write_text(to_toml(loaded.value, loaded.origins))
    again = load(Job, written)
    assert again.value == loaded.value
    assert digest(again.value) == digest(loaded.value)
    assert loaded.tree == again.tree


def test_seven_mistakes_are_seven_problems(mistakes):
    text = (
        "[model]\nsizee = 3\nsize = 'wide'\n[data]\ntokens = 1.5\n[[data.sources]]\nweight = 0\n"
        "[optimizer]\ntype = 'adamm'\n[modelx]\nx = 1\n"
    )
    assert len(mistakes(Job, text)) == 7


@pytest.mark.parametrize(
    "text",
    [
        f"data.tokens = {'9' * 5000}",
        f"x = {'[' * 400}{']' * 400}",
        f"[{'.'.join('x' * 400)}]",
        f"x = {'[' * 60}{']' * 60}",
    ],
    ids=["digits", "arrays", "tables", "less_deep"],
)
def test_monstrous_text_is_refused_in_a_sentence(mistakes, text):
    (line,) = mistakes(Job, text)
    assert "job.toml: " in line and ("digits" in line or "nest" in line)


@pytest.mark.parametrize(
    "flag", [f"--data.tokens={'9' * 5000}", f"--data={'[' * 400}{']' * 400}", f"--{'.'.join('x' * 400)}=1"]
)
def test_monstrous_flag_is_refused_in_a_sentence(mistakes, flag):
    (line,) = mistakes(Job, "", [flag])
    assert "digits" in line or "nest" in line


def test_very_long_chain_of_files_is_refused(mistakes):
    files = {f"f{n}": f'extends = "f{n + 1}.toml"' for n in range(1200)}
    (line,) = mistakes(Job, 'extends = "f0.toml"', f1200="", **files)
    assert "more than 100 files extend one another" in line


def test_diamonds_of_files_are_read_once_each(load_text):
    """2**40 ways lead to the lowest file; what stands last wins, as if each way were walked."""
    both = 'extends = ["a{0}.toml", "b{0}.toml"]\ndata.tokens = {1}'
    files = {f"{side}{n}": both.format(n + 1, n) for n in range(40) for side in "ab"}
    files |= {"a40": "data.tokens = 8", "b40": "model.tokens = 9"}
    loaded = load_text(Job, 'extends = ["b0.toml", "a0.toml"]', **files)
    assert loaded.value.data.tokens == 0 and loaded.value.model.tokens == 9
    assert len(loaded.files) == 83


def test_flag_that_replaces_the_type_of_a_section_is_blamed_for_what_is_missing(mistakes):
    class Thing(Config):
        pass

    things = Registry("thing", Thing)

    @things.register("one")
    class One(Thing):
        n: int

    @things.register("two")
    class Two(Thing):
        m: int

    class Whole(Config):
        thing: Thing

    lines = mistakes(Whole, '[thing]\ntype = "one"\nn = 1', ["--thing.type=two"])
    assert lines == ["  --thing.type=two: thing.m: missing; expected integer"]


def test_pattern_reaches_to_the_very_end(mistakes):
    class Named(Config):
        name: Annotated[str, Meta(pattern="^[a-z]+$")]

    assert "name: given" in mistakes(Named, 'name = "ab\\n"')[0]


def test_what_a_change_of_type_leaves_behind_is_told_where_the_new_type_has_it_too(load_text, tmp_path):
    loaded = load_text(
        Job,
        'extends = "base.toml"',
        ["--optimizer.type=lion", "--model.optimizer.type=lion", "--model.optimizer.lr=2"],
        base="[optimizer]\nlr = 0.5\neps = 1e-3\n[model.optimizer]\nlr = 3",
    )
    assert loaded.value.optimizer == Lion() and loaded.value.model.optimizer == Lion(lr=2.0)
    told = [said.replace(f"{tmp_path}/", "") for said in loaded.unused]
    assert told == ["optimizer.lr = 0.5 (base.toml:2)"], "not eps, which lion has not, and not what is given"
    assert not load_text(Job, 'extends = "base.toml"', base="[optimizer]\nlr = 0.5").unused


def test_unknown_section_of_a_flag_is_told_at_the_flag(load_text):
    with pytest.raises(ConfigError, match=r"  --optimixer\.lr=1: optimixer: unknown key"):
        load_text(Job, "", ["--optimixer.lr=1"])


def test_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf[data]\ntokens = 3\n")
    assert load(Job, path).value.data.tokens == 3


def test_name_that_is_far_from_all_is_given_no_guess():
    from forge_config.problem import unknown

    assert "num_layers'?" not in unknown("key", "num_experts", ["num_layers", "dim"])
    assert "did you mean 'num_layers'?" in unknown("key", "num_layer", ["num_layers", "dim"])
