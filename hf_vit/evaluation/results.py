"""What a finished run says of itself: results.json holds it, and card, tables and figures are made of it."""

import json
from dataclasses import asdict, dataclass, fields


@dataclass(kw_only=True)
class Results:
    """The results of a run, or of one that was trained without labels; what such a run lacks is None and not in the file.

    Args:
        metrics: by name, of the weights in model/.
        metrics_of: the split that was evaluated, and which weights.
        temperature: that the head's weights were divided by, fitted on validation images.
        intervals: 95% interval [low, high] of a metric, by its name.
        calibration: bins of confidence, see `metrics.calibration_bins`.
        per_class: a row a class: its label, images and scores.
        thresholds: probability above which an image has the label, one a label; of several labels an image.
        labels_without_images: how many labels no evaluated image has; of several labels an image.
        seconds: of reading, input, model, scoring and report.
        skipped_steps, resumed_at_steps: numbers of steps.
        image_size: [height, width] in pixels.
        attention_query: the token or vector whose attention the figures show.
        answer: the prediction for model/example.png.
        saved_logits_apart: largest difference of the saved model's logits, relative to the largest.
        preset: the architecture, or the checkpoint that training started from.
        base_model_hub_id: that checkpoint, if it is one of the Hub.
        data: name, labels, numbers of images, licence and fingerprints of the data set.
        warnings: reasons not to trust the model.
    """

    metrics: dict[str, float]
    metrics_of: str
    temperature: float | None = None
    intervals: dict[str, list[float]] | None = None
    calibration: list[dict] | None = None
    per_class: list[dict] | None = None
    thresholds: list[float] | None = None
    labels_without_images: int | None = None
    train_seconds: float
    total_seconds: float
    seconds: dict[str, float]
    images_per_second: float
    steps: int
    images_per_step: int
    skipped_steps: list[int]
    resumed_at_steps: list[int]
    image_size: list[int]
    parameters: int
    trained_parameters: int
    attention_query: str | None = None
    answer: str | None = None
    saved_logits_apart: float | None = None
    weights_sha256: str
    seed: int
    preset: str
    base_model_hub_id: str | None
    command: str
    commit: str | None
    hardware: str
    mixed_precision: str
    versions: dict[str, str]
    data: dict
    warnings: list[str] | None = None

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2) + "\n"

    def as_dict(self) -> dict:
        """What results.json holds."""
        absent = {field.name for field in fields(self) if field.default is None and getattr(self, field.name) is None}
        return {name: value for name, value in asdict(self).items() if name not in absent}

    @classmethod
    def from_json(cls, text: str) -> "Results":
        """Results as `to_json` wrote them. Keys of other versions are left out.

        Raises:
            TypeError: if a key is missing.
        """
        values = json.loads(text)
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})
