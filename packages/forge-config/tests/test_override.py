import pytest
from forge_config import Config
from forge_config.override import value_of


class Section(Config):
    number: int = 0
    rate: float = 0.5
    name: str = "x"
    flags: list[bool] = []
    limit: int | None = 3


class Job(Config):
    section: Section = Section()
    parts: dict[str, Section] = {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ('"a b"', "a b"),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ("word", "word"),
        ("/data/a b,c=d.toml", "/data/a b,c=d.toml"),
        ("", ""),
        ("1, 2", "1, 2"),
        ("1,", "1,"),
        ("a#b", "a#b"),
        ("1#b", "1#b"),
        ("True", "True"),
    ],
)
def test_value_of_reads_toml_or_a_bare_word(text, value):
    found = value_of(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["[1", "{a", '"open', "'open"])
def test_value_of_refuses_what_only_begins_as_toml(text):
    with pytest.raises(ValueError, match=r"\w"):
        value_of(text)


def test_flags_win_over_the_file_and_later_ones_over_earlier(load_text):
    job = load_text(
        Job, "[section]\nnumber = 1\nrate = 2", ["--section.number=3", "--section.number=4"]
    ).value
    assert (job.section.number, job.section.rate) == (4, 2.0)


def test_flag_reaches_a_quoted_key(load_text):
    job = load_text(Job, "", ['--parts."a.b".number=3']).value
    assert job.parts["a.b"].number == 3


def test_flag_number_stands_for_its_text_where_a_string_is_expected(load_text):
    assert load_text(Job, "", ["--section.name=007"]).value.section.name == "007"
    assert load_text(Job, "", ["--section.name=20e1"]).value.section.name == "20e1"


def test_flag_none_clears_an_optional_key_that_has_a_default(load_text):
    assert load_text(Job, "", ["--section.limit=none"]).value.section.limit is None


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("section.number=3", "two dashes are missing"),
        ("-section.number=3", "two dashes are missing"),
        ("/tmp/x", "two dashes are missing"),
        ("--section.number", "'=' is missing"),
        ("--=3", "is no key"),
        ("--section..number=3", "is no key"),
        (
            "--section.numberx=3",
            "--section.numberx=3: section.numberx: unknown key 'numberx'; did you mean 'number'?",
        ),
        ("--section.number=10.9", "given 10.9; expected integer"),
        ("--section.number=10.0", "given 10.0; expected integer"),
        ("--section.number=ten", 'given "ten"; expected integer'),
        ("--section.number=true", "given true; expected integer"),
        ("--section.flags=[true", "not valid TOML"),
        ("--section=/x", 'section: given "/x"; expected table'),
        ("--section.name={a=1}", "expected string"),
    ],
)
def test_flag_mistakes_are_never_dropped(mistakes, flag, message):
    found = mistakes(Job, "", [flag])
    assert len(found) == 1 and message in found[0]


def test_flag_below_a_value_of_an_earlier_flag_is_refused(mistakes):
    found = mistakes(Job, "", ["--section.name=a", "--section.name.b=c"])
    assert found == [
        "  --section.name.b=c: section.name.b: an earlier flag gave a value to a part of this key"
    ]


def test_all_flag_mistakes_are_reported_together(mistakes):
    assert len(mistakes(Job, "", ["a=1", "--b", "--section.nope=1", "--section.number=x"])) == 4
