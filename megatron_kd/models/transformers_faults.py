"""What the transformers library computes wrongly, corrected on a loaded model."""

import math

import torch


def mend(model: torch.nn.Module) -> int:
    """Correct the known faults of a loaded model, in place.

    DeepSeek-V2 with yarn: the authors' code multiplies the attention's scale by the square of
    `0.1 * mscale_all_dim * ln(factor) + 1`, as DeepSeek-V3 does; transformers' own class of V2
    leaves that out (seen in 4.57 and 5.12). A version that does not is left as it is.

    Returns:
        How many layers were corrected.
    """
    mended = 0
    for module in model.modules():
        if type(module).__name__ == "DeepseekV2Attention":
            mended += _scale_by_mscale(module)
    return mended


def _scale_by_mscale(attention: torch.nn.Module) -> int:
    config = attention.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    factor, mscale = rope.get("factor"), rope.get("mscale_all_dim")
    plain = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if not factor or factor <= 1 or not mscale or not math.isclose(attention.scaling, plain):
        return 0
    attention.scaling = plain * (0.1 * mscale * math.log(factor) + 1.0) ** 2
    return 1
