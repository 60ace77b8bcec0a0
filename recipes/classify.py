"""Print what a saved model sees in images, or in a few images of a data set next to their true
labels.

    python recipes/classify.py runs/demo/model recipes/data/bag.png
    python recipes/classify.py runs/photos photos/cat/*.jpg
    python recipes/classify.py google/vit-base-patch16-224 photo.jpg
    python recipes/classify.py runs/demo/model fashion-mnist-mini

One line per image, with the three most likely classes; nothing is written. predict.py writes a
table of any number of images.
"""

import argparse
from pathlib import Path

from command_line import Parser


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__, "MODEL IMAGE [IMAGE ...]")
    parser.add_argument("model", metavar="MODEL", help="run, model folder or Hub id of an image classifier")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="image files, a folder of class folders, or `fashion-mnist-mini`"
    )
    return parser.parse_args()


if __name__ == "__main__":  # a wrong flag is answered before the imports, which take seconds
    ARGUMENTS = parse_args()

from hf_vit.data.sources import load_splits
from hf_vit.data.splits import default_split, prepare_splits
from hf_vit.data.unlabelled import named_files
from hf_vit.evaluation.classifiers import SavedClassifier
from hf_vit.evaluation.tables import label_texts
from hf_vit.system.errors import UserError, run_script
from hf_vit.system.recipes_folder import EMBEDDED
from hf_vit.system.text import printable
from hf_vit.training.setup import set_up_evaluation


NUM_SAMPLES = 6  # images shown of a data set


def main(args: argparse.Namespace):
    accelerator, (name, *others), labels = set_up_evaluation("no"), args.images, []
    if not others and (name in EMBEDDED or Path(name).is_dir()):
        splits = load_splits(name)
        splits, labels, _ = prepare_splits(splits, train_split=None, eval_split=default_split(splits))
        rows = splits["eval"].shuffle(seed=1).select(range(min(NUM_SAMPLES, len(splits["eval"]))))
    else:
        rows = named_files(Path(name), Path(), args.images).rows
    classifier = SavedClassifier(args.model, accelerator)
    images, logits, seen = classifier.predict(rows, "skip")
    known = [Path(file).name for file in args.images]
    if labels:
        known = [f"{text or 'no label'} (true)" for text in label_texts(images.labels, labels)]
    best = classifier.probabilities(logits).topk(min(3, logits.shape[1]), dim=1)
    for place, values, indices in zip(seen.tolist(), best.values, best.indices, strict=True):
        answers = [f"{classifier.names[index]} {value:.0%}" for value, index in zip(values, indices, strict=True)]
        print(printable(f"{known[place]}: {', '.join(answers)}"))
    if images.skipped:
        raise UserError("; ".join(images.skipped))


if __name__ == "__main__":
    run_script(lambda: main(ARGUMENTS))
