"""Towers that make features of images."""
