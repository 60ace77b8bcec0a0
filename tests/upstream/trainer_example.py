"""Train a tiny classifier with transformers' Trainer, save it, and load it in a new process: the logits must be the same.

    make upstream        (or python tests/upstream/trainer_example.py)

20 steps on the embedded images. The new process loads the folder by `from_pretrained` and by `pipeline`.
"""

import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import Trainer, TrainingArguments, ViTImageProcessorPil, pipeline

from hf_vit import HFViTConfig, HFViTForImageClassification


IMAGES = Path(__file__).parents[2] / "recipes" / "data" / "fashion-mnist-mini"


def train(folder: Path):
    """Train a model, save it with its processor, and beside them its logits for the first images."""
    torch.manual_seed(0)
    data = load_dataset(str(IMAGES), split="train[:640]")
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    names = dict(enumerate(data.features["label"].names))
    model = HFViTForImageClassification(HFViTConfig(image_size=28, patch_size=7, id2label=names, **sizes))
    processor = ViTImageProcessorPil(size={"height": 28, "width": 28})

    def prepare(rows):
        pixels = processor([image.convert("RGB") for image in rows["image"]], return_tensors="pt")
        return {**pixels, "labels": rows["label"]}

    arguments = TrainingArguments(
        folder / "run", max_steps=20, per_device_train_batch_size=32, learning_rate=1e-3, remove_unused_columns=False,
        report_to="none", use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data.with_transform(prepare), processing_class=processor)
    loss = trainer.train().training_loss
    assert loss < math.log(len(names)), f"the mean loss is {loss}, and it began at log({len(names)})"
    trainer.save_model(folder)
    with torch.no_grad():
        torch.save(model.eval()(prepare(data[:8])["pixel_values"]).logits, folder / "logits.pt")


def check(folder: Path):
    """Raise AssertionError unless the saved model gives the logits of the trained one."""
    images = [image.convert("RGB") for image in load_dataset(str(IMAGES), split="train[:8]")["image"]]
    expected = torch.load(folder / "logits.pt")
    model = HFViTForImageClassification.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**ViTImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt")).logits
    torch.testing.assert_close(logits, expected)
    classifier = pipeline("image-classification", model=str(folder), function_to_apply="none")
    for answers, row in zip(classifier(images, top_k=model.config.num_labels), expected, strict=True):
        scores = {answer["label"]: answer["score"] for answer in answers}
        torch.testing.assert_close(torch.tensor([scores[name] for name in model.config.id2label.values()]), row)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        check(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            train(Path(folder))
            subprocess.run([sys.executable, __file__, folder], check=True)
        print("trained with Trainer: from_pretrained and pipeline give the same logits in a new process")
