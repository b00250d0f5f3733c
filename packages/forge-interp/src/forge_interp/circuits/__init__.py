"""Which parts write a logit, and how are parts connected?"""

from forge_interp.circuits.edges import EdgeScores, edge_attribution, faithfulness
from forge_interp.circuits.logits import LogitAttribution, attribute_logits
from forge_interp.circuits.weights import HeadWeights, composition_scores, head_weights

__all__ = [
    "EdgeScores", "HeadWeights", "LogitAttribution", "attribute_logits", "composition_scores",
    "edge_attribution", "faithfulness", "head_weights",
]  # fmt: skip
