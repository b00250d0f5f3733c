import pytest
from forge_config import ALL_KEYS, Config, MayChange, Registry, changeable, judge, reference_markdown


class Hook(Config):
    """Observes."""

    free_keys = (ALL_KEYS,)
    every: int = 1


hooks = Registry("change-hook", Hook)


@hooks.register("note")
class Note(Hook):
    """Of a user, who says nothing about changes."""

    path: str = "x"


class Optimizer(Config):
    """An interface."""

    recorded_keys = ("lr",)
    lr: float = 1.0


optimizers = Registry("change-optimizer", Optimizer, default="sgd")


@optimizers.register("sgd")
class Sgd(Optimizer):
    """Adds a key of its own."""

    recorded_keys = ("momentum",)
    momentum: float = 0.0
    nesterov: bool = False


@optimizers.register("adam")
class Adam(Optimizer):
    """Another."""


class Source(Config):
    """An item of an array."""

    free_keys = ("cache",)
    path: str
    cache: str = "a"


class Track(Config):
    """Says nothing itself; the struct around it does."""

    folder: str | None = None
    project: str = "p"


class Train(Config):
    """All recorded, but for one key."""

    recorded_keys = (ALL_KEYS,)
    free_keys = ("log_every",)
    steps: int = 10
    log_every: int = 1


class Whole(Config):
    """A file."""

    free_keys = ("track", "hooks")
    train: Train = Train()
    optimizer: Optimizer = Sgd()
    sources: list[Source] = []
    track: Track = Track()
    hooks: dict[str, Hook] = {}
    seed: int = 0


def judged(a, b):
    return {one.change.key: one.may for one in judge(a, b)}


def test_each_key_follows_its_struct():
    whole = Whole(sources=[Source(path="p")], hooks={"mine": Note()})
    assert {key: may.value for key, may in changeable(whole).items()} == {
        "train.steps": "recorded",
        "train.log_every": "freely",
        "optimizer.type": "never",
        "optimizer.lr": "recorded",
        "optimizer.momentum": "recorded",
        "optimizer.nesterov": "never",
        "sources[0].path": "never",
        "sources[0].cache": "freely",
        "track.project": "freely",
        "hooks.mine.type": "freely",
        "hooks.mine.every": "freely",
        "hooks.mine.path": "freely",
        "seed": "never",
    }


def test_judge_tells_what_changed_and_whether_it_may():
    a = Whole(sources=[Source(path="p")])
    b = Whole(
        train=Train(steps=20, log_every=2),
        optimizer=Sgd(lr=2.0, nesterov=True),
        sources=[Source(path="q", cache="b")],
        seed=1,
    )
    assert {key: may.value for key, may in judged(a, b).items()} == {
        "train.steps": "recorded",
        "train.log_every": "freely",
        "optimizer.lr": "recorded",
        "optimizer.nesterov": "never",
        "sources[0].path": "never",
        "sources[0].cache": "freely",
        "seed": "never",
    }


def test_hook_that_comes_or_goes_is_free_and_another_type_is_not():
    assert set(judged(Whole(), Whole(hooks={"mine": Note()})).values()) == {MayChange.FREELY}
    assert set(judged(Whole(hooks={"mine": Note()}), Whole()).values()) == {MayChange.FREELY}
    assert set(judged(Whole(), Whole(track=Track(folder="x"))).values()) == {MayChange.FREELY}
    assert judged(Whole(), Whole(optimizer=Adam()))["optimizer.type"] == MayChange.NEVER


def test_key_that_does_not_exist_is_a_mistake_of_the_struct():
    with pytest.raises(TypeError, match=r"Wrong\.free_keys names \['stesp'\]"):

        class Wrong(Config):
            free_keys = ("stesp",)
            steps: int = 1


def test_reference_says_what_may_change():
    page = reference_markdown(Whole)
    assert "| `steps` | integer | `10` | *May change, recorded.* |" in page
    assert "| `log_every` | integer | `1` | *May change.* |" in page
    assert "| `nesterov` | true or false | `false` |  |" in page
