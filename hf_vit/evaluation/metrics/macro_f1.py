"""Macro F1 as an `evaluate` module: `evaluate.load("path/to/macro_f1.py")` works offline."""

import datasets
import evaluate

from hf_vit.evaluation.metrics import macro_f1


class MacroF1(evaluate.Metric):
    __doc__ = macro_f1.__doc__

    def _info(self):
        return evaluate.MetricInfo(
            description=macro_f1.__doc__,
            citation="",
            inputs_description="predictions and references: class indices, as many of the one as of the other",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        return {"macro_f1": macro_f1(predictions, references)}
