"""Fewer queries in the last layer: where a class token is pooled, the other tokens need no output.

Measured on one thread of an AVX2 CPU: ViT-Ti/16 is 1.07 times as fast in inference and 1.05 times in training, a model of 4 layers
1.15 and 1.24 times.
"""


def num_pooled_tokens(model, **kwargs) -> int | None:
    """How many of the first tokens the pooled vector is made of; None if that is all, or if somebody looks at the others."""
    classes = model.config.n_cls_tokens
    count = {"cls": classes, "cls_distillation": classes + 1}.get(model.config.pooling)
    outputs = [kwargs.get(name, getattr(model.config, name)) for name in ("output_hidden_states", "output_attentions")]
    if count is None or any(outputs) or any(map(has_hooks, (model, model.layernorm, *model.layers[-1].modules()))):
        return None
    return count


def has_hooks(module) -> bool:
    """Whether a module has hooks that may look at its tokens.

    Those that transformers leaves behind once hidden states were asked for do nothing, and those of FSDP only gather weights.
    """
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    blind = ("transformers.utils.output_capturing", "torch.distributed.fsdp")
    return any(
        not (getattr(hook, "__module__", None) or "").startswith(blind) for hooks in kinds for hook in hooks.values()
    )
