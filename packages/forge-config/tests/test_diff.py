from forge_config import Change, Config, diff


class Leaf(Config):
    n: int = 0
    rate: float = float("nan")


class Job(Config):
    leaf: Leaf = Leaf()
    leaves: list[Leaf] = []
    names: list[str] = []
    maybe: int | None = None


def test_diff_of_equal_configs_is_empty():
    assert diff(Job(leaves=[Leaf()]), Job(leaves=[Leaf()])) == []


def test_diff_lists_changed_keys_with_both_values():
    a = Job(leaf=Leaf(n=1), leaves=[Leaf(rate=1.0), Leaf(n=2)], names=["a"])
    b = Job(leaf=Leaf(n=2), leaves=[Leaf(rate=1.0), Leaf(n=3)], names=["a", "b"], maybe=0)
    assert diff(a, b) == [
        Change("leaf.n", 1, 2),
        Change("leaves[1].n", 2, 3),
        Change("maybe", None, 0),
        Change("names", ["a"], ["a", "b"]),
    ]


def test_change_is_shown_as_toml():
    assert str(Change("a.b", None, True)) == "a.b: (absent) -> true"
    assert str(Change("a.b", "x", 1.5)) == 'a.b: "x" -> 1.5'
