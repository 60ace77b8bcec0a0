"""The network. `save_pretrained` copies the files of this folder, and nothing else, beside the weights.

So they import only torch, transformers, huggingface_hub and each other, flat, as `from .name import x`.
"""
