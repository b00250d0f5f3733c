"""Spreads any nn.Module over ranks, by a plan that is plain data."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
