"""Training of sparse autoencoders: `forge sae train`."""
