"""Train the demo's network by the loop that most examples have, and write its accuracy after every epoch.

    python recipes/benchmarks/reference.py --output_file model_cards/reference.jsonl

The images and the sizes are those of the demo: a native ViTForImageClassification, PIL images through `with_transform`, AdamW,
a linear schedule, batches of 64, 20 epochs. 1e-3 was the best of three learning rates (3e-4, 1e-3, 3e-3) at commit e68e8b7.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import yaml
from datasets import load_dataset
from model import native_vit
from torch.utils.data import DataLoader
from transformers import ViTImageProcessorPil, get_scheduler

from hf_vit import HFViTConfig
from hf_vit.training.arguments import parse_overrides


RECIPES = Path(__file__).parents[1]
EPOCHS, BATCH, RATE = 20, 64, 1e-3


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    pixels = torch.stack([row["pixel_values"] for row in rows])
    return {"pixel_values": pixels, "labels": torch.tensor([row["label"] for row in rows])}


@torch.no_grad()
def accuracy(model, loader: DataLoader) -> float:
    model.eval()
    correct = [model(batch["pixel_values"]).logits.argmax(1) == batch["labels"] for batch in loader]
    return torch.cat(correct).float().mean().item()


def main(output_file: Path):
    preset = yaml.safe_load((RECIPES / "configs" / "demo.yaml").read_text())
    config = HFViTConfig(**parse_overrides(preset["config_overrides"]), num_labels=10)
    processor = ViTImageProcessorPil(size={"height": config.image_size, "width": config.image_size})

    def transform(rows):
        images = [image.convert("RGB") for image in rows["image"]]
        return {"pixel_values": processor(images, return_tensors="pt")["pixel_values"], "label": rows["label"]}

    torch.manual_seed(0)
    splits = load_dataset(str(RECIPES / "data" / "fashion-mnist-mini")).with_transform(transform)
    loader = DataLoader(splits["train"], BATCH, shuffle=True, collate_fn=collate)
    test = DataLoader(splits["test"], BATCH, collate_fn=collate)
    model = native_vit(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = get_scheduler("linear", optimizer, 0, EPOCHS * len(loader))
    seconds = 0.0
    with output_file.open("w") as file:
        for epoch in range(1, EPOCHS + 1):
            began = time.perf_counter()
            model.train()
            for batch in loader:
                model(**batch).loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seconds += time.perf_counter() - began
            line = {"epoch": epoch, "eval_accuracy": round(accuracy(model, test), 4), "seconds": round(seconds, 1)}
            file.write(json.dumps(line) + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_file", type=Path, required=True, help=".jsonl file with a line for each epoch")
    main(parser.parse_args().output_file)
