"""Is a tensor spread over ranks?"""

import sys
from typing import Any


def is_dtensor(x: Any) -> bool:
    """Whether it is a DTensor; imports nothing that is not imported yet."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
