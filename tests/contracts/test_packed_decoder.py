"""A batch of packed documents, through the decoder, against each document alone."""

import numpy as np
import torch
from forge_data.packing.packed import Packed
from forge_data.packing.row_index import open_row_index
from forge_data.store.tokens import TokenStore, Writer
from forge_model import DecoderConfig, initialize

T = 32


def test_packed_batch_gives_the_logits_of_each_document_alone(tmp_path) -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 60, 40)
    with Writer(tmp_path / "s", 61, "bytes-256") as writer:
        writer.add(draw.integers(0, 61, lengths.sum()), lengths.tolist())
    store = TokenStore(tmp_path / "s")
    packed = Packed(store, open_row_index(store, "bestfit", T, tmp_path), "bestfit", T, mask_documents=True)
    with torch.device("meta"):
        model = DecoderConfig(vocab_size=61, dim=32, num_layers=2, max_tokens=T).build()
    model.to_empty(device="cpu")
    initialize(model, 0)
    samples = np.arange(len(packed))
    read, layout = packed.read(samples), packed.index.pieces(samples)
    batch = {"tokens": read.tokens[:, :-1].astype(np.int64), **read.extra}
    with torch.no_grad():
        together = model(**{name: torch.from_numpy(array.copy()) for name, array in batch.items()})
        row = column = piece = 0
        for start, length in zip(layout.starts, layout.lengths, strict=True):
            if piece == layout.ends[row]:
                row, column = row + 1, 0
            here = min(int(length), T - column)
            ids = store.read(np.asarray([start]), int(length))[:, :here].astype(np.int64)
            if here:
                alone = model(torch.from_numpy(ids))
                torch.testing.assert_close(together[row, column : column + here], alone[0], rtol=0, atol=1e-5)
            column, piece = column + int(length), piece + 1
