"""Recovery: rollbacks after NaN, spikes and differing replicas."""
