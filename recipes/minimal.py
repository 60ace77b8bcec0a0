# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_vit[recipes]"]
# tool.uv.sources.hf_vit = { path = "..", editable = true }
# ///
"""How a Vision Transformer is trained: one plain Accelerate loop, with nothing of hf_vit but the
model and a metric.

    python recipes/minimal.py
    python recipes/minimal.py --dataset_name AI-Lab-Makerere/beans --label_column labels \\
        --checkpoint google/vit-base-patch16-224-in21k
    accelerate launch --config_file recipes/accelerate/ddp.yaml \\
        --num_processes 2 recipes/minimal.py

Without flags, a small ViT learns the Fashion-MNIST images of this repository from scratch. Read
it, copy it, change it. recipes/train.py is for results: it resumes, augments, averages weights,
and reads folders and tables.
"""

import argparse
from functools import partial
from pathlib import Path

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor, ViTImageProcessorPil, get_cosine_schedule_with_warmup

import hf_vit
from hf_vit import HFViTConfig, HFViTForImageClassification


ACCURACY = str(Path(hf_vit.__file__).parent / "evaluation" / "metrics.py")  # `evaluate.load("accuracy")` needs the Hub
FASHION_MNIST = str(Path(__file__).parent / "data" / "fashion-mnist-mini")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_name", default=FASHION_MNIST, help="Hub id, or a folder that `datasets` reads")
    parser.add_argument("--image_column", default="image")
    parser.add_argument("--label_column", default="label")
    parser.add_argument("--checkpoint", help="to fine-tune (default: a small ViT from scratch)")
    parser.add_argument("--output_dir", default="runs/minimal")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=64, help="of one process")
    parser.add_argument("--learning_rate", type=float, help="(default: 2e-3 from scratch, 5e-5 for a checkpoint)")
    parser.add_argument("--push_to_hub", metavar="USER/NAME", help="repository that gets the model")
    return parser.parse_args()


def build_model(checkpoint: str | None, names: list[str]):
    """The model, with an output for each of these classes, and the processor of its images."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    if checkpoint:
        model = HFViTForImageClassification.from_pretrained(checkpoint, **labels)
        return model, AutoImageProcessor.from_pretrained(checkpoint)
    sizes = dict(image_size=28, patch_size=7, hidden_size=96, intermediate_size=384, num_hidden_layers=4)
    without_class_token = dict(position_embedding="sincos2d", pooling="mean", use_class_token=False)
    config = HFViTConfig(num_attention_heads=4, **sizes, **without_class_token, **labels)
    return HFViTForImageClassification(config), ViTImageProcessorPil(size={"height": 28, "width": 28})


def to_batch(rows: list[dict], processor, image_column: str, label_column: str) -> dict[str, torch.Tensor]:
    """What the model takes of some rows; it runs in the workers of a loader."""
    images = [row[image_column].convert("RGB") for row in rows]
    return processor(images, return_tensors="pt") | {"labels": torch.tensor([row[label_column] for row in rows])}


def main():
    args = parse_args()
    accelerator = Accelerator()
    set_seed(0)

    splits = load_dataset(args.dataset_name)
    if "test" not in splits:
        splits = splits["train"].train_test_split(0.1, seed=0, stratify_by_column=args.label_column)
    model, processor = build_model(args.checkpoint, splits["train"].features[args.label_column].names)

    collate = partial(to_batch, processor=processor, image_column=args.image_column, label_column=args.label_column)
    loading = dict(batch_size=args.batch_size, collate_fn=collate, num_workers=2)
    train_loader = DataLoader(splits["train"], shuffle=True, drop_last=True, **loading)
    test_loader = DataLoader(splits["test"], **loading)

    # Weight decay is for matrices: not for biases, norms, tokens and positions.
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if weight.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate or (5e-5 if args.checkpoint else 2e-3))
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    steps = args.epochs * len(train_loader)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)  # `prepare` would step it once a process

    metric = evaluate.load(ACCURACY)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in train_loader:
            pixels = batch["pixel_values"]  # (B, C, H, W)
            mirrored = torch.rand(len(pixels), 1, 1, 1, device=pixels.device) < 0.5
            loss = model(torch.where(mirrored, pixels.flip(3), pixels), labels=batch["labels"]).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        model.eval()
        for batch in test_loader:
            with torch.inference_mode():
                predictions = model(batch["pixel_values"]).logits.argmax(dim=1)  # (B,)
            predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metric.add_batch(predictions=predictions, references=labels)
        accuracy = metric.compute()["accuracy"]
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {accuracy:.2%}")

    if accelerator.is_main_process:
        trained = accelerator.unwrap_model(model)
        for part in (trained, processor):
            part.save_pretrained(args.output_dir)
            if args.push_to_hub:
                part.push_to_hub(args.push_to_hub)
    accelerator.end_training()


if __name__ == "__main__":
    main()
