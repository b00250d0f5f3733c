"""Look inside any nn.Module: capture, edit, extract, compare."""

from forge_interp.analysis.accumulate import Moments
from forge_interp.analysis.probe import ProbeCurve, control_task, probe_layers
from forge_interp.analysis.similarity import (
    LayerSimilarity,
    canonical_correlations,
    compare_layers,
    linear_cka,
    mean_cca,
    procrustes,
    svcca,
)  # fmt: skip
from forge_interp.attention.call import AttentionCall
from forge_interp.attention.statistics import attention_statistics
from forge_interp.canonical import CanonicalSites, canonical_sites
from forge_interp.causal.attribution import attribution_patching
from forge_interp.causal.patching import activation_patching, site_means
from forge_interp.causal.path_patching import path_patching
from forge_interp.causal.steering import contrastive_vectors, strength_sweep
from forge_interp.causal.table import PatchingTable
from forge_interp.dynamics import TrainingDynamics, head_scores, training_dynamics
from forge_interp.errors import InterpError
from forge_interp.extraction.examples import Examples, top_examples
from forge_interp.extraction.extract import extract_representations, finish_extraction
from forge_interp.extraction.store import ActivationStore
from forge_interp.hooks.capture import Activations, capture, each_attention
from forge_interp.hooks.edit import ablate, edit, patch, steer
from forge_interp.hooks.sites import resolve
from forge_interp.lenses.lens import LensResult, logit_lens, read_lens
from forge_interp.lenses.unembedding import Unembedding
from forge_interp.record import Recording, record

__all__ = [
    "ActivationStore", "Activations", "AttentionCall", "CanonicalSites", "Examples", "InterpError",
    "LayerSimilarity", "LensResult", "Moments", "PatchingTable", "ProbeCurve", "Recording",
    "TrainingDynamics", "Unembedding", "ablate", "activation_patching", "attention_statistics",
    "attribution_patching", "canonical_correlations", "canonical_sites", "capture", "compare_layers",
    "contrastive_vectors", "control_task", "each_attention", "edit", "extract_representations",
    "finish_extraction", "head_scores", "linear_cka", "logit_lens", "mean_cca", "patch", "path_patching",
    "probe_layers", "procrustes", "read_lens", "record", "resolve", "site_means", "steer",
    "strength_sweep", "svcca", "top_examples", "training_dynamics",
]  # fmt: skip
