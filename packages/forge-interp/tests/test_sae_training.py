"""Training of autoencoders: planted features are found, killed runs go on with the same bits, ranks agree."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forge_interp import ActivationStore, InterpError, extract_representations
from forge_interp.sae import (
    ModelRows,
    SAEConfig,
    SAETraining,
    SparseAutoencoder,
    StoreRows,
    load_sae,
    train_sae,
)
from forge_interp.sae.activations import Penalty
from forge_interp.sae.rows import generator
from forks import Forks
from safetensors.torch import load_file
from torch import Tensor, nn

WIDTH, FEATURES = 8, 24
KINDS = {
    "relu": (SAEConfig(WIDTH, FEATURES), {}),
    "topk": (SAEConfig(WIDTH, FEATURES, "topk", k=3, rescale_acts_by_decoder_norm=True), {}),
    "batch_topk": (SAEConfig(WIDTH, FEATURES, "batch_topk", k=2.5), {"unit_decoder": True}),
    "jumprelu": (SAEConfig(WIDTH, FEATURES, "jumprelu"), {"scale_input": True}),
    "gated": (SAEConfig(WIDTH, FEATURES, "gated"), {}),
}


def make_store(rows: int = 1000) -> ActivationStore:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, WIDTH, generator=random) * torch.randn(rows, 1, generator=random)
    return ActivationStore.of({"a:out": x, "b:out": x.tanh()[:, :5] + 1, "sample_id": torch.arange(rows)})


def make_training(**changes) -> SAETraining:
    plain = {"steps": 23, "batch_rows": 40, "lr": 3e-3, "lr_warmup_steps": 3, "lr_decay_steps": 5}
    plain |= {"sparsity_warmup_steps": 7, "dead_after_steps": 2, "save_every": 6, "log_every": 4}
    return SAETraining(**(plain | {"penalty": Penalty(0.05)} | changes))


def rows_of(store: ActivationStore, target: str | None = None) -> StoreRows:
    return StoreRows(store, "a:out", target, window_rows=300, block_rows=20)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Killed(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_with_the_same_bits(kind, tmp_path, monkeypatch):
    config, options = KINDS[kind]
    training, rows = make_training(**options), rows_of(make_store())
    train_sae(config, rows, training, tmp_path / "whole")
    assert train_sae(config, rows, training, tmp_path / "whole").W_enc.isfinite().all()  # all there: no step
    for stop in (1, 2, 3, 4):
        with monkeypatch.context() as patched:
            plain, count = StoreRows.share, []

            def share(self, *args, plain=plain, count=count, stop=stop):
                count.append(1)
                if len(count) == stop:
                    raise Killed
                return plain(self, *args)

            patched.setattr(StoreRows, "share", share)
            with pytest.raises(Killed):
                train_sae(config, rows, training, tmp_path / "again")
        train_sae(config, rows, training, tmp_path / "again")
        assert contents(tmp_path / "again") == contents(tmp_path / "whole")
        for path in (tmp_path / "again").iterdir():
            path.unlink()


def killed_in_a_write(folder: Path, number: int) -> None:
    """Train, and be killed at the number-th rename."""
    plain, count = os.replace, []

    def replace(*args) -> None:
        count.append(1)
        if len(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(*args)

    os.replace = replace
    config, options = KINDS["batch_topk"]
    train_sae(config, rows_of(make_store()), make_training(**options), folder, progress=False)


def test_a_process_that_is_killed_goes_on_with_the_same_bytes(forks: Forks, tmp_path):
    config, options = KINDS["batch_topk"]
    train_sae(config, rows_of(make_store()), make_training(**options), tmp_path / "whole")
    for number in (1, 4):
        assert forks.wait(forks.start(killed_in_a_write, tmp_path / "again", number)) == -signal.SIGKILL
    train_sae(config, rows_of(make_store()), make_training(**options), tmp_path / "again")
    left = {name: data for name, data in contents(tmp_path / "again").items() if not name.endswith(".tmp")}
    assert left == contents(tmp_path / "whole")


def test_a_training_is_that_of_torch_adam():
    config, training = SAEConfig(WIDTH, FEATURES), make_training(steps=5, sparsity_warmup_steps=0)
    found = train_sae(config, rows_of(make_store()), training)
    sae, window = SparseAutoencoder(config), rows_of(make_store()).share(0, 0, 1)[0]
    window = window[torch.randperm(len(window), generator=generator(0, 0, 1))]
    optimizer = torch.optim.Adam(sae.parameters())
    for x, factor in zip(window.split(40), (1 / 3, 2 / 3, 3 / 6, 2 / 6, 1 / 6), strict=False):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(factor, (5 - 0) / 6)
        acts = sae.encode(x)
        loss = (sae(x) - x).square().sum(-1) + 0.05 * (acts * sae.W_dec.norm(dim=1)).sum(-1)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    for name, value in sae.named_parameters():
        torch.testing.assert_close(getattr(found, name), value, rtol=1e-5, atol=1e-6)


def test_another_training_in_the_same_folder_is_refused(tmp_path):
    config, _ = KINDS["relu"]
    rows = rows_of(make_store())
    train_sae(config, rows, make_training(), tmp_path)
    with pytest.raises(InterpError, match=r"another training \(training lr: 0.003 there, 0.1 asked\)"):
        train_sae(config, rows, make_training(lr=0.1), tmp_path)
    with pytest.raises(InterpError, match="rows rows: 1000 there, 900 asked"):
        train_sae(config, rows_of(make_store(900)), make_training(), tmp_path)


def run_rank(rank: int, world: int, folder: Path, kind: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    config, options = KINDS[kind]
    sae = train_sae(config, rows_of(make_store()), make_training(**options), folder / "out", progress=False)
    torch.save(sae.state_dict(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.dist
@pytest.mark.parametrize(
    "kind", ["topk", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("batch_topk", "jumprelu"))]
)
def test_two_ranks_train_what_one_process_trains(kind, forks: Forks, tmp_path):
    config, options = KINDS[kind]
    ranks = [forks.start(run_rank, rank, 2, tmp_path, kind) for rank in range(2)]
    assert [forks.wait(rank) for rank in ranks] == [0, 0]
    alone = train_sae(
        config, rows_of(make_store()), make_training(**options), tmp_path / "alone"
    ).state_dict()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, value in alone.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("out", "alone")]
    assert len(lines[0]) == len(lines[1]) == 6
    for one, other in zip(*(map(json.loads, part) for part in lines), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def planted(atoms: int, width: int, rows: int, active: int) -> tuple[Tensor, Tensor]:
    """Sums of a few of many random directions, [rows, width] and the directions [atoms, width]."""
    random = torch.Generator().manual_seed(0)
    directions = nn.functional.normalize(torch.randn(atoms, width, generator=random), dim=-1)
    chosen = torch.rand(rows, atoms, generator=random).topk(active, dim=-1).indices
    size = 0.5 + torch.rand(rows, active, generator=random)
    weights = torch.zeros(rows, atoms).scatter(1, chosen, size)
    return weights @ directions, directions


def found_part(sae: SparseAutoencoder, directions: Tensor) -> float:
    """The part of directions that some decoder row has, to a cosine of 0.9."""
    rows = nn.functional.normalize(sae.W_dec.detach(), dim=-1)
    return ((directions @ rows.T).amax(1) > 0.9).float().mean().item()


def test_a_planted_dictionary_is_found():
    x, directions = planted(atoms=32, width=24, rows=6000, active=2)
    store = ActivationStore.of({"x:out": x, "sample_id": torch.arange(len(x))})
    config = SAEConfig(24, 64, "topk", k=2, rescale_acts_by_decoder_norm=True)
    training = SAETraining(400, 200, lr=3e-3, lr_decay_steps=100, dead_after_steps=30)
    sae = train_sae(config, StoreRows(store, "x:out"), training)
    assert found_part(SparseAutoencoder(config), directions) < 0.05
    assert found_part(sae, directions) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "penalty"),
    [
        (SAEConfig(128, 1024, "topk", k=5, rescale_acts_by_decoder_norm=True), Penalty()),
        (SAEConfig(128, 1024, "batch_topk", k=5, rescale_acts_by_decoder_norm=True), Penalty()),
    ],
    ids=lambda value: getattr(value, "activation", ""),
)
def test_a_planted_dictionary_of_512_is_found(config, penalty):
    x, directions = planted(atoms=512, width=128, rows=60_000, active=5)
    store = ActivationStore.of({"x:out": x, "sample_id": torch.arange(len(x))})
    training = SAETraining(1000, 256, lr=2e-3, penalty=penalty, lr_decay_steps=300, dead_after_steps=50)
    sae = train_sae(config, StoreRows(store, "x:out"), training)
    assert found_part(sae, directions) >= 0.9


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weights = torch.tril(torch.ones(x.shape[1], x.shape[1])) * attention_mask[:, None]
        return self.mix(weights @ x / weights.sum(-1, keepdim=True).clamp_min(1)).tanh()


def texts() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(1, 30, (3 + i % 5,), generator=random) for i in range(61)]


def test_rows_of_a_model_are_those_of_an_extraction_each_once_in_an_epoch():
    model, dataset = Model().eval(), texts()
    rows = ModelRows(model, dataset, "mix:out", samples_per_window=16, batch_size=4)
    windows = [rows.share(number, 0, 1)[0] for number in range(8)]
    epochs = torch.cat(windows[:4]), torch.cat(windows[4:])
    store = extract_representations(model, dataset, "mix", batch_size=1)
    for epoch in epochs:
        torch.testing.assert_close(epoch.sort(0).values, store["mix"].sort(0).values, atol=1e-6, rtol=1e-6)
    assert not epochs[0].equal(epochs[1])
    shares = [rows.share(1, rank, 3)[0] for rank in range(3)]
    torch.testing.assert_close(torch.cat(shares), windows[1])


def test_training_from_a_model_equals_training_from_its_rows(tmp_path):
    model, dataset = Model().eval(), texts()
    rows = ModelRows(model, dataset, "mix:out", samples_per_window=16, batch_size=4)
    config, training = SAEConfig(WIDTH, FEATURES), make_training(batch_rows=16)

    class Kept:
        windows = rows.windows

        def share(self, number: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
            return rows.share(number, rank, size)

        def identity(self) -> dict[str, object]:
            return {}

    assert train_sae(config, rows, training, tmp_path).W_enc.equal(train_sae(config, Kept(), training).W_enc)
    model.mix.weight.data[0, 0] += 1
    with pytest.raises(InterpError, match="another training"):
        train_sae(config, rows, training, tmp_path)


def test_a_transcoder_is_trained_from_one_site_to_another(tmp_path):
    config = SAEConfig(WIDTH, 64, "topk", 5, k=8, apply_b_dec_to_input=False, skip=True)
    store = make_store(4000)
    train_sae(config, rows_of(store, "b:out"), make_training(), None)
    relu = SAEConfig(WIDTH, 64, "relu", 5, apply_b_dec_to_input=False)
    rows, training = (
        rows_of(store, "b:out"),
        make_training(steps=600, lr=1e-2, batch_rows=100, penalty=Penalty(0.0)),
    )
    sae = train_sae(relu, rows, training, tmp_path)
    x, y = store["a:out"], store["b:out"]
    error = (sae(x) - y).square().sum() / (y - y.mean(0)).square().sum()
    assert error < 0.05
    assert load_sae(tmp_path)(x).equal(sae(x))
    with pytest.raises(InterpError, match="scale_input=True"):
        train_sae(relu, rows, make_training(scale_input=True))


def test_scaled_input_gives_weights_for_plain_input():
    store = make_store()
    large = ActivationStore.of({"a:out": 1000 * store["a:out"], "sample_id": store.sample_id})
    small, big = (
        train_sae(SAEConfig(WIDTH, FEATURES, "topk", k=3), rows_of(s), make_training(scale_input=True))
        for s in (store, large)
    )
    x = store["a:out"][:9]
    torch.testing.assert_close(big(1000 * x) / 1000, small(x), rtol=1e-4, atol=1e-5)


def test_metrics_are_those_of_the_definitions(tmp_path):
    config, store = KINDS["topk"][0], make_store(40)
    train_sae(config, rows_of(store), make_training(steps=1, log_every=1), tmp_path)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    sae, x = SparseAutoencoder(config), store["a:out"]
    error = (sae(x) - x).square().sum(-1)
    assert line["mse"] == pytest.approx(error.mean().item(), rel=1e-5)
    assert line["l0"] == pytest.approx((sae.encode(x) > 0).float().sum(-1).mean().item())
    spread = (x - x.mean(0)).square().sum().item()
    assert line["explained_variance"] == pytest.approx(1 - error.sum().item() / spread, rel=1e-4)
    idle = load_file(tmp_path / "state.safetensors")["idle"]
    assert idle.equal((sae.encode(x) == 0).all(0).long())


def test_a_loss_that_is_no_number_ends_the_training():
    with pytest.raises(InterpError, match="the loss of step 8 is nan"):
        train_sae(KINDS["relu"][0], rows_of(make_store()), make_training(log_every=8, lr=1e20))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: SAETraining(0, lr=-1.0), "steps is 0; expected 1 or more; lr is -1.0"),
        (
            lambda s: train_sae(KINDS["relu"][0], rows_of(s), make_training(batch_rows=400)),
            "window has 300 rows",
        ),
        (lambda s: train_sae(SAEConfig(7, 9), rows_of(s), make_training()), "expected d_in=7"),
        (lambda s: StoreRows(s, "a:out", window_rows=1), "windows of at least one unit"),
        (lambda s: StoreRows({}, "a:out"), "store is {}; expected an ActivationStore"),
        (lambda s: ModelRows(Model(), {"x": 1}, "mix"), "the dataset is a dict"),
        (
            lambda s: train_sae(
                SAEConfig(8, 9, normalize_activations="layer_norm"), rows_of(s), make_training()
            ),
            "give scale_input=True",
        ),
    ],
)
def test_what_cannot_be_is_refused(act: Callable[[ActivationStore], object], message):
    with pytest.raises(InterpError, match=message):
        act(make_store())


def test_a_last_window_without_a_batch_is_passed_over(tmp_path):
    config, training = SAEConfig(WIDTH, FEATURES), make_training(batch_rows=150)
    rows = rows_of(make_store())  # windows of 300, 300, 300 and 100
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StoreRows, "share", stopping(StoreRows.share, 6))
        with pytest.raises(Killed):
            train_sae(config, rows, training, tmp_path)
    assert train_sae(config, rows, training, tmp_path).W_enc.equal(train_sae(config, rows, training).W_enc)


def stopping(plain: Callable[..., object], count: int) -> Callable[..., object]:
    left = iter(range(count))

    def share(*args: object) -> object:
        if next(left, None) is None:
            raise Killed
        return plain(*args)

    return share


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_are_refused_and_what_was_saved_stays(tmp_path, value):
    x = torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(0))
    x[generator_order_last(), 2] = value
    store = ActivationStore.of({"a:out": x, "sample_id": torch.arange(1000)})
    with pytest.raises(InterpError, match=r"1 of 300 rows of window \d are not finite"):
        train_sae(KINDS["topk"][0], rows_of(store), make_training(save_every=1), tmp_path)
    assert not (tmp_path / "sae_weights.safetensors").exists()


def generator_order_last() -> int:
    """A row of the third window of `rows_of`."""
    return 20 * torch.randperm(50, generator=generator(0, 0)).tolist()[30]


def test_weights_that_are_no_numbers_are_never_saved(tmp_path):
    config, rows = SAEConfig(WIDTH, FEATURES), rows_of(make_store())
    with pytest.raises(InterpError, match="are not finite"):
        train_sae(
            config, rows, make_training(lr=1e20, save_every=1, log_every=20, lr_warmup_steps=0), tmp_path
        )
    state = load_file(tmp_path / "state.safetensors") if (tmp_path / "state.safetensors").exists() else {}
    assert all(bool(value.isfinite().all()) for name, value in state.items() if name.startswith("sae."))


def test_a_transcoder_that_cannot_be_saved_is_refused_before_the_work(tmp_path):
    config = SAEConfig(WIDTH, FEATURES, "topk", 5, k=3, apply_b_dec_to_input=False)
    with pytest.raises(InterpError, match="no format for a topk transcoder"):
        train_sae(config, rows_of(make_store(), "b:out"), make_training(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_trainings_at_once_do_not_share_a_folder(tmp_path):
    config, plain = SAEConfig(WIDTH, FEATURES), StoreRows.share

    def share(*args: object) -> object:
        with pytest.raises(InterpError, match="another training writes to"):
            train_sae(config, rows_of(make_store()), make_training(seed=1), tmp_path)
        return plain(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StoreRows, "share", share)
        train_sae(config, rows_of(make_store()), make_training(steps=2), tmp_path)
