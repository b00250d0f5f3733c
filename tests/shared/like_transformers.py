"""Models of `transformers` as references in float64."""

import torch
from torch.overrides import TorchFunctionMode


class Widened(TorchFunctionMode):
    """Code that asks for float32 gets float64.

    transformers computes norms, rotations and softmax in float32 whatever the model is; that alone costs 1e-6
    in a float64 model. Its own code runs unchanged in here, in the number format of the model.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if one is torch.float32 else one for one in args]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def tensors_on_disk(model):
    """As `save_pretrained` names and cuts them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, model.state_dict())
