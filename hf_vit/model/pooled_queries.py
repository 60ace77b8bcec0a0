"""Fewer queries in the last layer: where class tokens are pooled, the other tokens need no output.

Measured on one thread of an AVX2 CPU: ViT-Ti/16 is 1.07 times as fast in inference and 1.05 times in training, a model of 4 layers
1.15 and 1.24 times.
"""

# What these hooks do needs no other token: capture hidden states that nobody asks for, gather weights, merge patches.
BLIND = (
    "transformers.utils.output_capturing",
    "torch.distributed.fsdp",
    __name__.replace("pooled_queries", "token_merging"),
)


def num_pooled_tokens(model, **kwargs) -> int | None:
    """How many of the first tokens the pooled vector is made of; None if that is all, or if somebody looks at the others."""
    config = model.config
    extra = {"cls": 0, "cls_distillation": 1}.get(config.pooling)
    outputs = [kwargs.get(name, getattr(config, name)) for name in ("output_hidden_states", "output_attentions")]
    modules = [model, *model.layers[-1].modules(), *([] if model.layernorm is None else [model.layernorm])]
    if extra is None or any(outputs) or any(map(has_hooks, modules)):
        return None
    return config.n_cls_tokens + extra


def has_hooks(module) -> bool:
    """Whether a module has hooks that may look at its tokens."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = [hook for kind in kinds for hook in kind.values()]
    return not all((getattr(hook, "__module__", None) or "").startswith(BLIND) for hook in hooks)
