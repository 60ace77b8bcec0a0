"""The task of pretrain.py: a masked autoencoder of images without labels, or a student of a teacher's features."""

from pathlib import Path

import torch
from datasets import DatasetDict

from hf_vit import figures
from hf_vit.data.columns import has_several_labels
from hf_vit.data.image_dataset import ImageDataset
from hf_vit.data.image_spec import image_spec_of
from hf_vit.data.normalization import denormalize
from hf_vit.data.sampling import uniform
from hf_vit.data.sources import Source
from hf_vit.data.splits import prepare_splits
from hf_vit.data.summary import summary
from hf_vit.data.unlabelled import as_one_class, load_unlabelled
from hf_vit.evaluation.probes import knn_accuracy
from hf_vit.evaluation.results import Results
from hf_vit.model.configuration_hf_vit import as_pair
from hf_vit.model.masked_autoencoder import HFViTForPreTraining
from hf_vit.model.modeling_hf_vit import HFViTModel
from hf_vit.run_figures import save_figures
from hf_vit.system.command_line import shell_line
from hf_vit.system.errors import UserError
from hf_vit.system.recipes_folder import RECIPES
from hf_vit.training.classification import draw_samples
from hf_vit.training.feature_distillation import FeatureDistillation, FeatureTeacher
from hf_vit.training.inputs import Batch, RunData
from hf_vit.training.model import build_encoder
from hf_vit.training.predictor import SplitPredictor
from hf_vit.training.task import Evaluation, Task


AUTOENCODER = (  # flags that are fields of the config
    "mask_ratio", "norm_pix_loss", "decoder_hidden_size", "decoder_num_hidden_layers", "decoder_num_attention_heads",
    "decoder_intermediate_size",
)  # fmt: skip
OF_LABELS = ("label_column", "label_names", "class_level", "eval_split")
SHOWN = 6  # images of the reconstructions
MOST_VOTERS = 2000  # training images that vote for the nearest class
MASKING_STREAM = 1024  # of the first patch; above all that `augment` draws


class PreTraining(Task):
    """The pixels of masked patches (`HFViTForPreTraining`); with a teacher, its features (`FeatureDistillation`).

    Labels teach nothing. Where each image has one, they say how good the encoder's pooled features are, by k nearest neighbours.
    """

    card = "pretraining_card.md"
    is_labelled = False
    voters = None  # training images whose features vote

    def load_rows(self, print_main):
        """Images with their labels; what cannot be read so is read without, unless a flag names labels or a split to evaluate."""
        args = self.args
        try:
            read = super().load_rows(print_main)
            self.is_labelled = not args.streaming and not has_several_labels(read[0]["eval"])
            return read
        except UserError as error:
            named = args.train_split != "train" or any(getattr(args, flag) is not None for flag in OF_LABELS)
            if args.streaming or named:
                raise
            print_main(f"ignoring labels, and k-NN accuracy with them: {str(error).splitlines()[0]}")
        rows = load_unlabelled(
            args.dataset_name, args.dataset_config, None, args.image_column, default_split=args.train_split
        ).rows
        splits, _, part = prepare_splits(
            DatasetDict(train=as_one_class(rows)), eval_fraction=args.eval_fraction, seed=args.seed, min_classes=1
        )
        source = Source(DatasetDict(), args.dataset_name)
        print_main("\n".join(summary(splits, {"train": args.train_split, "eval": part}, [], source)))
        return splits, None, [], part

    def build_model(self, _labels: list[str], _eval_rows):
        """(model, image processor), and the teacher.

        Raises:
            ValueError: for a mask ratio that leaves no patch visible or none masked, an image size that the patch does not
                divide, or a teacher that sees images of another shape.
        """
        args, no_dropout = self.args, {"patch_dropout_rate": 0.0}  # a checkpoint may have another
        if "patch_dropout_rate" in (args.config_overrides or ""):
            raise UserError(
                "--config_overrides patch_dropout_rate must be left out: pre-training itself chooses the patches"
            )
        if args.teacher_name_or_path is None:
            decoder = {name: getattr(args, name) for name in AUTOENCODER if getattr(args, name) is not None}
            return build_encoder(HFViTForPreTraining, *self.source(**no_dropout, **decoder))
        student, processor = build_encoder(HFViTModel, *self.source(**no_dropout))
        spec = image_spec_of(processor, student.config)
        self.teacher = FeatureTeacher(args.teacher_name_or_path, spec)
        of_teacher, grid = self.teacher.model.config, student.config.grid_size
        if of_teacher.grid_size[0] * grid[1] != of_teacher.grid_size[1] * grid[0]:
            as_text = lambda sides: f"{sides[0]} x {sides[1]} patches"
            raise UserError(
                f"--teacher_name_or_path {args.teacher_name_or_path} has {as_text(of_teacher.grid_size)} and the student "
                f"{as_text(grid)}, of another shape: take another teacher, or another image_size with --config_overrides"
            )
        return FeatureDistillation(student, (of_teacher.pooled_size, of_teacher.hidden_size)), processor

    def set_up(self, data: RunData, backbone, accelerator):
        """The training images whose features vote in the k-NN accuracy."""
        super().set_up(data, backbone, accelerator)
        self.patch_size = as_pair(backbone.config.patch_size)
        if self.is_labelled:
            rows = data.train_images.rows
            generator = torch.Generator().manual_seed(self.args.seed)
            drawn = torch.randperm(len(rows), generator=generator)[:MOST_VOTERS].sort().values
            self.voters = ImageDataset(rows.select(drawn.tolist()), data.spec, self.args.on_bad_image)

    def evaluation_images(self, scored: int) -> int:
        return 2 * scored + MOST_VOTERS if self.is_labelled else scored

    def noise(self, pixel_values, index, epoch: int) -> torch.Tensor:
        """Which patches of these images (B, C, H, W) are masked, (B, N). The ids of a stream's images differ in each epoch."""
        grid = [side // patch for side, patch in zip(pixel_values.shape[2:], self.patch_size, strict=True)]
        epoch = 0 if self.data.is_stream else epoch
        return masking_noise(index, self.args.seed, epoch, grid[0] * grid[1])

    def loss(self, model, batch: Batch) -> tuple[torch.Tensor, None]:
        """The loss ()."""
        if self.teacher is None:
            noise = self.noise(batch.inputs, batch.rows["index"], batch.epoch)
            return model(batch.inputs, noise=noise).loss, None
        with self.autocast():
            features = self.teacher(batch.inputs)
        return model(batch.inputs, *features), None

    def evaluate(self, model, predictor: SplitPredictor) -> Evaluation | None:
        """The mean loss of the evaluated images, each with the same mask every time, and the k-NN accuracy of their features."""
        model.eval()
        data, voters = self.data, self.voters

        def mean_loss(pixel_values, batch):  # (b, 1), the same for all
            return self.loss(model, Batch(0, pixel_values, None, batch))[0].expand(len(pixel_values), 1)

        def pooled(pixel_values, _batch):  # (b, D)
            return model.vit(pixel_values).pooler_output

        def ask(question, images):
            def answer(batch):
                pixel_values = data.spec.normalize(batch["images"].to(self.device, non_blocking=True))
                with self.autocast():
                    return question(pixel_values, batch).float()

            return predictor.gather(answer, images, data.scored)

        answers = [ask(mean_loss, data.eval_images)]
        if voters is not None:
            answers += [ask(pooled, data.eval_images), ask(pooled, voters)]
        if None in answers:
            return None
        (losses, rows), *of_labelled = answers  # (n, 1), (n,)
        metrics = {"loss": losses.double().mean().item()}
        if of_labelled:
            (features, _), (train, of_train) = of_labelled
            labels = data.eval_images.labels[rows]
            metrics["knn_accuracy"] = knn_accuracy(train, voters.labels[of_train], features, labels)
        return Evaluation(metrics, rows)

    def selection_score(self, metrics: dict) -> float:
        return -metrics["loss"]

    def describe(self, metrics: dict, split: str) -> str:
        knn = f", k-NN accuracy {metrics['knn_accuracy']:.2%}" if "knn_accuracy" in metrics else ""
        return f"loss on {split} {metrics['loss']:.4f}{knn}"

    def artifacts(self, _model, evaluation: Evaluation) -> tuple[dict, dict, dict]:
        """Scores, and samples of the images."""
        rows = evaluation.rows
        drawn = rows[draw_samples(len(rows), self.args.seed)]
        return {"images": len(rows)}, {"images": self.data.eval_images.__getitems__(drawn.tolist())["images"]}, {}

    def faults(self, results: Results, log: list[dict]) -> list[str]:
        """A sentence for each reason not to go on from the model."""
        loss = results.metrics["loss"]
        if not (self.args.norm_pix_loss or self.teacher) or loss < 1:
            return []
        return [
            f"Nothing was learned: the loss is {loss:.3g}, and 1 for an answer that is always 0. Train for longer, or with another "
            "--learning_rate."
        ]

    def draw(self, folder: Path, log: list[dict], scores: dict, samples: dict):
        """The curves and, of a masked autoencoder as it was saved, a few reconstructions."""
        save_figures(folder, {"curves": figures.curves(log, "mean squared error")})
        spec = self.data.spec
        if self.teacher is not None or spec.channels not in (1, 3):
            return
        pixel_values = spec.normalize(samples["images"][:SHOWN])
        noise = self.noise(pixel_values, torch.arange(len(pixel_values)), 0)
        model = HFViTForPreTraining.from_pretrained(folder.parent)
        rows = zip(*reconstruction_pictures(model, pixel_values, noise, spec), strict=True)
        pictures, titles = [figures.as_picture(cell) for row in rows for cell in row], ["image", "seen", "answer"]
        save_figures(folder, {"reconstructions": figures.grid(pictures, titles * len(pixel_values), len(titles))})

    def next_command(self, run_folder: Path) -> str:
        """Fine-tune the model."""
        words = ["--dataset_name", self.args.dataset_name, "--model_name_or_path", run_folder / "model"]
        return shell_line(RECIPES / "train.py", *words, "--output_dir", f"{run_folder}-finetuned")


def masking_noise(index: torch.Tensor, seed: int, epoch: int, num_patches: int) -> torch.Tensor:
    """Numbers in [0, 1), (B, N), that say which patches of each image are masked in an epoch, see `random_masking`.

    A function of (seed, epoch, image id, patch) alone, the same in every process and on every device.

    Args:
        index: (B,) ids of the images.
        num_patches: N.
    """
    patches = torch.arange(num_patches, device=index.device).unsqueeze(1)  # (N, 1)
    return uniform(index, seed, epoch, MASKING_STREAM + patches).T  # (N, B) -> (B, N)


@torch.no_grad()
def reconstruction_pictures(model, pixel_values: torch.Tensor, noise: torch.Tensor, spec) -> list[torch.Tensor]:
    """Images, the same without their masked patches, and with the model's answer there: uint8 (B, C, H, W) on the CPU, each.

    Args:
        model: an `HFViTForPreTraining` in eval mode.
        pixel_values: (B, C, H, W) as the model takes them.
        noise: (B, N).
        spec: the `ImageSpec` of the model's images.
    """
    outputs = model(pixel_values, noise=noise)
    masked, answers = model.reconstruct(pixel_values, outputs)
    return [denormalize(pictures, spec).cpu() for pictures in (pixel_values.float(), masked, answers)]
