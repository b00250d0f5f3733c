"""Trains sparse autoencoders: `forge sae train`."""
