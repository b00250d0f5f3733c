from forge_config import Config
from forge_config.describe import descriptions, summary


class Base(Config):
    """Interface.

    Attributes:
        lr: the rate.
        other: from the base.
    """

    lr: float = 1.0
    other: int = 1


class Child(Base):
    """What it is,
    on two lines.

    More text.

    Attributes:
        lr: its own rate: a number
            that goes on here.
        size (int): how big.

    Source: somebody: 2020.
    """

    size: int = 1


class Bare(Base):
    pass


def test_descriptions_come_from_the_struct_and_its_bases():
    assert descriptions(Child) == {
        "lr": "its own rate: a number that goes on here.",
        "size": "how big.",
        "other": "from the base.",
    }


def test_summary_is_the_first_paragraph():
    assert summary(Child) == "What it is, on two lines."


def test_struct_without_docstring_has_the_texts_of_its_base():
    assert descriptions(Bare)["lr"] == "the rate."
