"""Token stores, and a sample order that is a pure function of one integer."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
