"""Which features does a site have? Sparse autoencoders and transcoders: load, train, splice, measure."""

from forge_interp.sae.autoencoder import SAEConfig, SparseAutoencoder
from forge_interp.sae.formats import load_sae, save_sae
from forge_interp.sae.rows import ModelRows, StoreRows
from forge_interp.sae.splice import FeatureReport, Spliced, evaluate_sae, spliced
from forge_interp.sae.training import SAETraining, train_sae

__all__ = [
    "FeatureReport", "ModelRows", "SAEConfig", "SAETraining", "SparseAutoencoder", "Spliced", "StoreRows",
    "evaluate_sae", "load_sae", "save_sae", "spliced", "train_sae",
]  # fmt: skip
