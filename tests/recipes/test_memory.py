"""Claims about recipes/benchmarks/memory.py: computed memory is what real steps allocate, and work is that of the products."""

import pytest
from benchmarks import memory

from hf_vit import HFViTConfig


pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # PEFT asks for it
SIZES = dict(
    image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128
)


@pytest.mark.parametrize("way", memory.WAYS)
def test_computed_memory_is_what_real_steps_allocate(way):
    config = HFViTConfig(**SIZES, num_labels=10)
    assert memory.allocated_peak(config, 16, way) == pytest.approx(memory.computed_peak(config, 16, way), rel=0.05)


def test_checkpointing_saves_activations_and_a_head_alone_saves_more():
    peaks = {way: memory.computed_peak(HFViTConfig(**SIZES, num_labels=10), 16, way) for way in memory.WAYS}
    assert peaks["full"] > peaks["checkpointing"] > max(peaks["head"], peaks["inference"])


def test_work_is_that_of_the_matrix_products():
    config = HFViTConfig(**SIZES, num_labels=10, pooling="mean", use_class_token=False)
    tokens, hidden, mlp = 16, 64, 128
    layer = 2 * tokens * (4 * hidden**2 + 2 * hidden * mlp) + 4 * tokens**2 * hidden
    patches = 2 * tokens * 3 * 8 * 8 * hidden
    forward = patches + 3 * layer + 2 * hidden * 10
    assert memory.flops_per_image(config, training=False) == forward
    assert memory.flops_per_image(config, training=True) == 3 * forward - patches  # no gradient of the pixels
