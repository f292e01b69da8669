"""What Megatron-Core's PyTorch attention and norm lack, added for the CPU backend.

On GPUs context parallelism, packed sequences and norms under sequence parallelism are Transformer
Engine's. Core's own PyTorch modules (its "local" layers) refuse all three. `install` extends them:

- the norm marks its parameters, so that the host sums their gradients over the ranks that share a
  sequence, and takes zero-centered weights (w stands for a scale of 1 + w: Nemotron, Gemma);
- the sum over one tensor-parallel rank is a tensor of its own, not its argument again, to which
  experts with biases add in place, which autograd refuses for a view;
- linear layers find the product that accumulates into `main_grad` (gradient accumulation fusion);
- heads for multi-token prediction are built of the same local layers;
- the attention gathers keys and values over the context-parallel ranks (backward: reduce-scatter)
  and masks by position and by document. It keeps the whole [sq, sk] mask, so it is exact and slow.

Without context parallelism and without packed sequences the host's own code runs, untouched.

t: positions of a packed sequence, s: positions on this rank, b: micro-batch, n: heads, d: channels
of a head.
"""

from types import SimpleNamespace

import torch

from megatron_kd.data.document_layout import context_parallel_places

_NORM_FIELDS = (
    "persist_layer_norm",
    "memory_efficient_layer_norm",
    "normalization",
)


def install() -> None:
    """Extend Core's classes in place; calling it again does nothing."""
    import megatron.core.models.gpt.gpt_layer_specs as layer_specs
    import megatron.core.tensor_parallel.layers as linear_layers
    import megatron.core.tensor_parallel.mappings as mappings
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if getattr(DotProductAttention, "takes_context_parallelism", False):
        return
    DotProductAttention.takes_context_parallelism = True
    layer_specs.get_gpt_mtp_block_spec = _with_local_layers(layer_specs.get_gpt_mtp_block_spec)
    linear_layers._grad_accum_fusion_available = True
    linear_layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=_accumulate_weight_gradient,
        wgrad_gemm_accum_fp16=_accumulate_weight_gradient,
    )
    mappings._reduce = _sum_of_its_own(mappings._reduce)
    _extend_norm(WrappedTorchNorm)
    _extend_attention(DotProductAttention)


def _with_local_layers(build_heads):
    """Megatron-Bridge asks for Transformer Engine's layers in heads for multi-token prediction,
    whatever the layers of the model are.
    """

    def build(config, spec, use_transformer_engine, **kwargs):
        return build_heads(config, spec, use_transformer_engine=False, **kwargs)

    return build


def _accumulate_weight_gradient(layer_input, upstream, main_grad) -> None:
    """layer_input [rows, in], upstream [rows, out], main_grad [out, in], in place."""
    main_grad.add_((upstream.T @ layer_input).to(main_grad.dtype))


def _sum_of_its_own(reduce):
    def reduce_to_a_new_tensor(tensor, group):
        return tensor.clone() if group.size() == 1 else reduce(tensor, group)

    return reduce_to_a_new_tensor


class LayerNorm(torch.nn.LayerNorm):
    """A layer norm that scales by 1 + weight. Its name is how the host's converter knows it."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., h] → the same shape and dtype."""
        return torch.nn.functional.layer_norm(
            hidden_states, self.normalized_shape, 1 + self.weight, self.bias, self.eps
        )


class RMSNorm(torch.nn.RMSNorm):
    """An RMS norm that scales by 1 + weight. Its name is how the host's converter knows it."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., h] → the same shape and dtype."""
        return torch.nn.functional.rms_norm(
            hidden_states, self.normalized_shape, 1 + self.weight, self.eps
        )


_ZERO_CENTERED = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def _extend_norm(norm_class) -> None:
    build = norm_class.__new__

    def build_marked(cls, config, hidden_size, eps=1e-5, *args, **kwargs):
        if config.layernorm_zero_centered_gamma and config.normalization in _ZERO_CENTERED:
            norm = _ZERO_CENTERED[config.normalization](hidden_size, eps=eps)
        else:
            plain = SimpleNamespace(**{name: getattr(config, name) for name in _NORM_FIELDS})
            plain.sequence_parallel = plain.layernorm_zero_centered_gamma = False
            norm = build(cls, plain, hidden_size, eps, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    norm_class.__new__ = build_marked


def _extend_attention(attention_class) -> None:
    set_up, attend = attention_class.__init__, attention_class.forward

    def __init__(self, config, *args, **kwargs):
        set_up(self, _OneContextRank(config), *args, **kwargs)
        self.config = config

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        if packed_seq_params is None and self.config.context_parallel_size == 1:
            return attend(self, query, key, value, attention_mask, attn_mask_type, attention_bias)
        return _attend_by_position(self, query, key, value, packed_seq_params)

    attention_class.__init__ = __init__
    attention_class.forward = forward


class _OneContextRank:
    """A configuration as the host's constructor accepts it. Not a copy with a field changed:
    writing to a distillation provider also writes to its teacher.
    """

    context_parallel_size = 1

    def __init__(self, config):
        self._config = config

    def __getattr__(self, name):
        return getattr(self._config, name)


def _attend_by_position(module, query, key, value, packed):
    """query [s, b, n, d], key and value [s, b, groups, d] ([t, n, d] where packed) → context of the
    same layout, [s, b, n · d] or [t, n · d].
    """
    from megatron.core import tensor_parallel
    from megatron.core.fusions.fused_softmax import SoftmaxOne

    if packed is not None:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    ranks, rank, group = 1, 0, None
    if module.config.context_parallel_size > 1:
        group = module.pg_collection.cp
        ranks, rank = group.size(), group.rank()
    if packed is None:
        bounds = [0, query.shape[0] * ranks]
    elif packed.cu_seqlens_q_padded is not None:
        bounds = packed.cu_seqlens_q_padded.tolist()
    else:
        bounds = packed.cu_seqlens_q.tolist()
    hidden = _hidden_keys(bounds, rank, ranks, module.scale_mask_softmax.window_size)
    if group is not None:
        key, value = (
            tensor_parallel.gather_from_sequence_parallel_region(
                x, tensor_parallel_output_grad=True, group=group
            )
            for x in (key, value)
        )
    repeats = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
    scale = module.softmax_scale * (module.scale_mask_softmax.scale or 1.0)
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key).float() * scale
    scores = scores.masked_fill(hidden, float("-inf"))
    offset = module.softmax_offset
    softmax = torch.nn.Softmax(dim=-1) if offset is None else SoftmaxOne(-1, offset)
    probabilities = softmax(scores).to(value.dtype)  # [b, n, sq, sk]
    if module.config.sequence_parallel:
        probabilities = module.attention_dropout(probabilities)
    else:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            probabilities = module.attention_dropout(probabilities)
    context = torch.einsum("bnqk,kbnd->qbnd", probabilities, value).flatten(2)
    return context.squeeze(1) if packed is not None else context


def _hidden_keys(bounds, rank, ranks, window) -> torch.Tensor:
    """[sq, sk] bool: the keys, in the order of the gathered ranks, that a query must not see."""
    held = [context_parallel_places(bounds, other, ranks) for other in range(ranks)]
    key_position, key_document = (torch.cat(parts) for parts in zip(*held, strict=True))
    position, document = (part.unsqueeze(-1) for part in held[rank])
    hidden = (key_position > position) | (key_document != document)
    if window is not None:
        hidden |= position - key_position > window[0]
    return hidden
