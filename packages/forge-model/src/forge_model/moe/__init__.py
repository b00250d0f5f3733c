"""Mixtures of experts: routers, experts, auxiliary losses."""
