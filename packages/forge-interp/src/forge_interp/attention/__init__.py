"""Attention patterns and scores."""
