"""The network. `save_pretrained` copies the files of this folder, and nothing else, beside the weights.

So they import only torch, transformers, huggingface_hub and each other, flat, as `from .name import x`.
"""

import transformers.models.auto.configuration_auto  # noqa: F401 - hf_vit registers its config when this is loaded
