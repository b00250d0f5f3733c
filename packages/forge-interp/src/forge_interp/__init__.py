"""Look inside any nn.Module: capture, edit, extract, compare."""

from forge_interp.analysis.accumulate import Moments as Moments
from forge_interp.analysis.cca import canonical_correlations as canonical_correlations
from forge_interp.analysis.cca import mean_cca as mean_cca
from forge_interp.analysis.cca import procrustes as procrustes
from forge_interp.analysis.cca import pwcca as pwcca
from forge_interp.analysis.cca import svcca as svcca
from forge_interp.analysis.cka import LayerSimilarity as LayerSimilarity
from forge_interp.analysis.cka import MinibatchCKA as MinibatchCKA
from forge_interp.analysis.cka import linear_cka as linear_cka
from forge_interp.analysis.probe import LogisticFit as LogisticFit
from forge_interp.analysis.probe import ProbeCurve as ProbeCurve
from forge_interp.analysis.probe import control_task as control_task
from forge_interp.analysis.probe import fit_logistic as fit_logistic
from forge_interp.analysis.probe import group_folds as group_folds
from forge_interp.analysis.probe import probe_layers as probe_layers
from forge_interp.analysis.profile import EffectiveRank as EffectiveRank
from forge_interp.analysis.profile import NormProfile as NormProfile
from forge_interp.analysis.profile import Profile as Profile
from forge_interp.analysis.profile import effective_rank as effective_rank
from forge_interp.analysis.rdm import compute_rdm as compute_rdm
from forge_interp.analysis.rdm import crossnobis as crossnobis
from forge_interp.analysis.rdm import noise_precision as noise_precision
from forge_interp.analysis.ridge import RidgeFit as RidgeFit
from forge_interp.analysis.ridge import fit_ridge as fit_ridge
from forge_interp.analysis.ridge import ridge_from_moments as ridge_from_moments
from forge_interp.analysis.rsa import RSAResult as RSAResult
from forge_interp.analysis.rsa import bootstrap_rsa as bootstrap_rsa
from forge_interp.analysis.rsa import compare_rdms as compare_rdms
from forge_interp.analysis.rsa import evaluate_models as evaluate_models
from forge_interp.analysis.rsa import noise_ceiling as noise_ceiling
from forge_interp.analysis.similarity import compare_layers as compare_layers
from forge_interp.analysis.similarity import mutual_knn as mutual_knn
from forge_interp.attention.call import AttentionCall as AttentionCall
from forge_interp.attention.statistics import AttentionSummary as AttentionSummary
from forge_interp.attention.statistics import attention_statistics as attention_statistics
from forge_interp.canonical import CanonicalSites as CanonicalSites
from forge_interp.canonical import canonical_sites as canonical_sites
from forge_interp.causal.attribution import attribution_patching as attribution_patching
from forge_interp.causal.means import site_means as site_means
from forge_interp.causal.patching import activation_patching as activation_patching
from forge_interp.causal.path_patching import path_patching as path_patching
from forge_interp.causal.table import PatchingTable as PatchingTable
from forge_interp.encoding_models.ceiling import Ceiling as Ceiling
from forge_interp.encoding_models.ceiling import repeat_ceiling as repeat_ceiling
from forge_interp.encoding_models.ceiling import split_half_ceiling as split_half_ceiling
from forge_interp.encoding_models.encode import EncodingResult as EncodingResult
from forge_interp.encoding_models.encode import encode as encode
from forge_interp.encoding_models.encode import encode_layers as encode_layers
from forge_interp.encoding_models.timing import fir_delays as fir_delays
from forge_interp.encoding_models.timing import resample as resample
from forge_interp.errors import InterpError as InterpError
from forge_interp.extraction.extract import extract_representations as extract_representations
from forge_interp.extraction.extract import finish_extraction as finish_extraction
from forge_interp.extraction.store import ActivationStore as ActivationStore
from forge_interp.hooks.capture import Activations as Activations
from forge_interp.hooks.capture import capture as capture
from forge_interp.hooks.edit import ablate as ablate
from forge_interp.hooks.edit import edit as edit
from forge_interp.hooks.edit import patch as patch
from forge_interp.hooks.edit import steer as steer
from forge_interp.hooks.observe import each_attention as each_attention
from forge_interp.hooks.report import Report as Report
from forge_interp.hooks.report import resolve as resolve
from forge_interp.lenses.lens import LensResult as LensResult
from forge_interp.lenses.lens import logit_lens as logit_lens
from forge_interp.lenses.lens import read_lens as read_lens
from forge_interp.lenses.tuned_lens import TunedLens as TunedLens
from forge_interp.lenses.unembedding import Unembedding as Unembedding
from forge_interp.plot import plot_attention as plot_attention
from forge_interp.plot import plot_encoding as plot_encoding
from forge_interp.plot import plot_probe as plot_probe
from forge_interp.plot import plot_similarity as plot_similarity
from forge_interp.record import Recording as Recording
from forge_interp.record import record as record

__all__ = [
    "ActivationStore", "Activations", "AttentionCall", "AttentionSummary", "CanonicalSites", "Ceiling",
    "EffectiveRank", "EncodingResult", "InterpError", "LayerSimilarity", "LensResult", "LogisticFit",
    "MinibatchCKA", "Moments", "NormProfile", "PatchingTable", "ProbeCurve", "Profile", "RSAResult",
    "Recording", "Report", "RidgeFit", "TunedLens", "Unembedding", "ablate", "activation_patching",
    "attention_statistics", "attribution_patching", "bootstrap_rsa", "canonical_correlations",
    "canonical_sites", "capture", "compare_layers", "compare_rdms", "compute_rdm", "control_task",
    "crossnobis", "each_attention", "edit", "effective_rank", "encode", "encode_layers",
    "evaluate_models", "extract_representations", "finish_extraction", "fir_delays", "fit_logistic",
    "fit_ridge", "group_folds", "linear_cka", "logit_lens", "mean_cca", "mutual_knn", "noise_ceiling",
    "noise_precision", "patch", "path_patching", "plot_attention", "plot_encoding", "plot_probe",
    "plot_similarity", "probe_layers", "procrustes", "pwcca", "read_lens", "record", "repeat_ceiling",
    "resample", "resolve", "ridge_from_moments", "site_means", "split_half_ceiling", "steer", "svcca",
]  # fmt: skip
